"""Program-aware reverse proxy for LLM agents."""

__version__ = "0.1.1"
