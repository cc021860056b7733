"""Loads and comparisons behind the published figures; run as modules from the project's root."""
