"""`thunderagent simulate` and `thunderagent compare`: their options and output."""
