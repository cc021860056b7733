"""The core's vocabulary: events, decisions, programs and their places, and the protocols of policies."""
