"""An endpoint picker for Envoy's external processing: Envoy carries the bytes, and goes where a lease says."""
