"""Others' advice on programs: hints of clients, routes of operators, verdicts of judges."""
