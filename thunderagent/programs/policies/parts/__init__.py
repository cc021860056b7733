"""Orders, victims and admissions that go with any policy."""
