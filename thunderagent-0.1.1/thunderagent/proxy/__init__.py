"""The HTTP side: turns, the admin API, metrics."""
