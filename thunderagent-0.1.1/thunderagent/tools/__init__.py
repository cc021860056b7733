"""Sandboxes: the environments of programs' tools, ready before they are needed, gone when they are not."""
