"""What a request passes before its handler: its key, its rate, how much may wait, what it may touch."""
