"""What a turn says, read from its bytes: its target, its program, its prompt, its answer. Pure."""
