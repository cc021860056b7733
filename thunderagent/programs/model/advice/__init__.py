"""What others say of programs: hints of clients, routes of operators, verdicts of judges."""
