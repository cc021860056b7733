"""Simulate agent programs on modelled engines, in virtual time; and serve the engine model: the embedded engine."""
