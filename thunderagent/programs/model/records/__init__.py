"""What others read: what is kept of programs and of what was learned, and the information stream."""
