"""A scheduler's side of its links: its gateways, what they ask for, and what they are told."""
