"""Gateways, separate processes that carry bytes, and the scheduler that grants their leases over a batched link."""
