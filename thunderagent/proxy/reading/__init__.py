"""What a turn says, read from its bytes: its target, whose it is, its prompt, its answer. Pure."""
