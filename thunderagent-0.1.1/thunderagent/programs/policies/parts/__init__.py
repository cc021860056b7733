"""Orders, victims and admissions for any policy."""
