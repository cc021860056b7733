"""What came of one run, what bounds it, and intervals over several."""
