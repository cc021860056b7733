"""The admin API: programs, replicas and the queue, how each came to be so, and what an operator may do."""
