"""Policies that are asked once in a period, for all replicas at once."""
