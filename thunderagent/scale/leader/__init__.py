"""Which of several schedulers leads: a lock with an epoch, the log of the one that leads, and the taking over."""
