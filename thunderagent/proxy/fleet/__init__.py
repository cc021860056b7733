"""The replicas: which there are, how each does, and what each is told beside the turns."""
