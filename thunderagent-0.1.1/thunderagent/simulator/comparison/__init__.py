"""Many runs: which policies at which load, on all cores."""
