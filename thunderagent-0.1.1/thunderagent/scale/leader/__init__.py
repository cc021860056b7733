"""Which of several schedulers leads: a lock with an epoch, the leader's log, and the takeover."""
