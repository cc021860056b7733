"""A scheduler for vLLM that knows agent programs: order, chunks and memory by program.

`scheduler.Scheduler` is for `--scheduler-cls`, `route.Route` for `--middleware`. Only `scheduler.py` and `surface.py`
import vLLM; the rest decides, and runs without it.
"""

__version__ = "0.1.0"

PROTOCOL = 1
"""The version of what the two halves say to each other."""
