"""An endpoint picker for Envoy's external processing: Envoy carries the bytes, and a lease decides where to."""
