"""Simulates agent programs on modelled engines, in virtual time; and serves the engine model: the embedded engine."""
