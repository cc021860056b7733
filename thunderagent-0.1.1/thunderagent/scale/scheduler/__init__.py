"""A scheduler's side of its links: its gateways, their requests, and its messages to them."""
