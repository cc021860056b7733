"""`thunderagent simulate` and `thunderagent compare`: their options, and what they print."""
