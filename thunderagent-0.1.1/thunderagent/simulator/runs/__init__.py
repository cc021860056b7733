"""One run: clients, tools, engines and the scheduler in virtual time."""
