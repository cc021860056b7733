"""Rules that apply under every policy: one file and one index each."""
