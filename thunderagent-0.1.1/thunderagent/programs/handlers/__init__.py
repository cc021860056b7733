"""One handler for each kind of event: it books the facts, and asks at most for a place."""
