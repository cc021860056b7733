"""The embedded engine: the engine model in real time, behind the HTTP dialect of vLLM."""
