"""What pydantic finds wrong with what came from outside, said in the same way wherever it came from."""

from __future__ import annotations

from pydantic import ValidationError


def faults_of(error: ValidationError, whole: str = "body") -> list[str]:
    """Return a line for each fault, with its place and without what stands there; `whole` is the place of them all."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [f"{'.'.join(map(str, each['loc'])) or whole}: {each['msg']}" for each in found]
