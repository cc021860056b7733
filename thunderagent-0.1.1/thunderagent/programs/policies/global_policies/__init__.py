"""Policies that are asked periodically, for all replicas at once."""
