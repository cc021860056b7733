"""Where each program is and what it holds: the one mutable table and its sums."""
