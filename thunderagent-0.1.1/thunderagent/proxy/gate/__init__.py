"""Checks before a request's handler: its key, its rate, how much may wait, what it may touch."""
