"""A gateway: it carries the bytes of turns, and is their source of truth, under leases of a scheduler elsewhere."""
