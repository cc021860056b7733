"""What `core.py` is put together from: places, leases, ends of turns, hints, signals."""
