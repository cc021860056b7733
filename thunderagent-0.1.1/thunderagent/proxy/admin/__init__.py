"""The admin API: programs, replicas and the queue, their history, and what an operator may do."""
