"""A gateway: it carries the bytes of turns, of which it is the truth, under leases of a scheduler elsewhere."""
