"""The replicas: which exist, their state, and what each is told beside the turns."""
