"""The life of a turn, from its arrival until its lease ends; and requests to engines that are not turns."""
