"""Baselines for comparison: policies that use little or no knowledge of programs."""
