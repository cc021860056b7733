"""What happens, told to whoever looks: metrics, history, the feed of events, spans."""
