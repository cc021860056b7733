"""Sandboxes: the environments of programs' tools, made ready before they are needed, gone when they are not."""
