"""For trainers: control of engines, weight syncs, and leases for turns that bypass the proxy."""
