"""A model of one vLLM engine: blocks, batching, preemption, and how long an iteration takes."""
