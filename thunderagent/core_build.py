"""Say whether the scheduler's core was compiled ahead of time, and from which sources.

Theory of operation
-------------------
`THUNDERAGENT_COMPILE=1` has `setup.py` compile the core by mypyc. The sources stay beside what was made of them, but
Python prefers that, so an edited source would be ignored without a word. So the build leaves a digest of what it
compiled, and whoever starts the program asks `core_kind` first.

The core is all of `programs/` but the policies, and but what says that it must be interpreted: a line that begins with
`# interpreted:` and gives the reason. What of a policy is to be compiled, too, has a line `# compiled:`. The settings
of policies are dataclasses whose types are read: these are interpreted. Nothing of the package is imported here:
`setup.py` loads this file by itself.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final, Literal

DIGEST_FILE: Final = "core.sha256"
"""In the package of a compiled build: the digest of the sources that were compiled."""

STALE: Final = (
    "the compiled core is not of the sources beside it, so they would not run: install thunderagent again, or delete "
    "its compiled modules in thunderagent/programs"
)

_CORE: Final = "programs"
_POLICIES: Final = "policies"
_INTERPRETED: Final = "# interpreted: "
_COMPILED: Final = "# compiled: "


def core_sources(package: Path) -> tuple[Path, ...]:
    """Return the modules of the core that can be compiled, of the package in that folder."""
    return tuple(
        path
        for path in sorted((package / _CORE).rglob("*.py"))
        if _is_compiled(f"\n{path.read_text('utf-8')}", of_policy=_POLICIES in path.relative_to(package).parts)
    )


def _is_compiled(text: str, *, of_policy: bool) -> bool:
    return f"\n{_COMPILED}" in text if of_policy else f"\n{_INTERPRETED}" not in text


def sources_digest(package: Path) -> str:
    """Return a digest of the core's sources and their names."""
    digest = sha256()
    for path in core_sources(package):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def kind_of(package: Path) -> Literal["compiled", "interpreted", "stale"]:
    """Say how the core of the package in that folder runs; `stale` is compiled from other sources than are there."""
    folders = (package / _CORE).rglob("*")
    if not any(path.name.endswith(tuple(EXTENSION_SUFFIXES)) for path in folders):
        return "interpreted"
    try:
        built_of = (package / DIGEST_FILE).read_text("ascii").strip()
    except FileNotFoundError:
        return "stale"
    is_whole = all(
        any(path.with_name(path.stem + suffix).exists() for suffix in EXTENSION_SUFFIXES)
        for path in core_sources(package)
    )
    return "compiled" if is_whole and built_of == sources_digest(package) else "stale"


@cache
def core_kind() -> Literal["compiled", "interpreted", "stale"]:
    """Say how the core of this package runs. Costs the reading of its sources, once."""
    return kind_of(Path(__file__).parent)
