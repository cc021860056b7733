"""Figures of one run, its bounds, and intervals over several runs."""
