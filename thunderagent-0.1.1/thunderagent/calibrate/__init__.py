"""Measures a running engine, and writes its timing profile for the engine model."""
