"""Gateways, each a process that carries bytes, and the scheduler that they take leases from, over a batched link."""
