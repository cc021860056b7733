"""Policies of papers, and their parts."""
