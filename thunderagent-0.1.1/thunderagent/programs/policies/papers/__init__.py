"""Policies from papers, and their parts."""
