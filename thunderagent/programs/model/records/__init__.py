"""Records for others to read: stored programs, stored knowledge, and the information stream."""
