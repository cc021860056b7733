"""The life of a turn, from its arrival until its lease ends; and non-turn requests to engines."""
