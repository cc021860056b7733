"""What is learned from ended turns, returned tools and ended programs."""
