"""Bytes in and out: connections, headers, and writes to clients that may read slowly."""
