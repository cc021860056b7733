"""Policies, one a file: each a function `step(view, act)` that reads the view and asks for what it wants.

The first three are the default; one's own is named as `package.module:function`.
"""

DEFAULTS = ("balance", "head_of_line", "reassign")
NAMES = (*DEFAULTS, "srtf", "lpt", "priority")
