"""The parts of `core.py`: places, leases, ends of turns, hints, signals."""
