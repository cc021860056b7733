"""`thunderagent doctor`: finds what is wrong with engines, a proxy and their connections, and says what to do."""
