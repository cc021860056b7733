"""Rollouts: for each program a record of its turns, exact to the token. Pure, except for the files of `segments.py`."""
