"""`thunderagent doctor`: find what is wrong with engines, a proxy and the way in between, and say what to do."""
