"""Observability: metrics, history, the feed of events, spans."""
