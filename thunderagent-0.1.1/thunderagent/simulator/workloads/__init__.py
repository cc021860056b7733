"""What programs do: drawn from distributions, or read from recordings."""
