"""The pure core: events in, decisions out. It uses no clock, no randomness, no I/O and no third-party package."""
