"""What happens on each kind of event: the facts are booked, and at most a place is asked for."""
