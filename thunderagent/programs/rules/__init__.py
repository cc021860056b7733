"""What holds under every policy: one file and one index each."""
