"""Measure a running engine, and write a timing profile of it for the engine model."""
