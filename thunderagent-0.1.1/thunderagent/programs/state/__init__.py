"""Programs and replicas, who holds what where, and the book of it all."""
