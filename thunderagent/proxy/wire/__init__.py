"""Bytes in and out: connections, the headers that travel, and writes to clients that may read slowly."""
