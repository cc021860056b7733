"""What trainers do: control of engines, weight syncs, and leases for turns that pass elsewhere."""
