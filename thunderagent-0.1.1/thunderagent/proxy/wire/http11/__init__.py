"""HTTP/1.1 as asyncio Protocols on a C parser: clients on one side, servers on the other. It knows nothing of turns."""
