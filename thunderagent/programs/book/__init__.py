"""Who is where, and holds what: the one mutable table and its sums."""
