"""What the core speaks of: events, decisions, programs and their places, and the seams for policies."""
