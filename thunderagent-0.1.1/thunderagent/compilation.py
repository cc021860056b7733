"""Tells whether the hot modules were compiled ahead of time, and from which sources.

Theory of operation
-------------------
`THUNDERAGENT_COMPILE=1` makes `setup.py` compile the hot modules by mypyc. The sources stay beside the compiled
modules, but Python prefers the latter, so an edited source would be silently ignored. So the build stores a digest of
what it compiled, and every start of the program first calls `build_kind`.

The core is compiled: all of `programs/` except the policies, and except modules that must be interpreted: these have a
line that begins with `# interpreted:` and gives the reason. Policies, and modules of the shell (`proxy/`, `leases/`,
`rollouts/`, `runtime/`, and those beside them), are compiled if they have a line `# compiled:` with the reason. The
settings of policies are dataclasses whose types are read: these are interpreted. This file imports nothing of the
package: `setup.py` loads it on its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final, Literal

DIGEST_FILE: Final = "compiled.sha256"
"""In the package of a compiled build: the digest of the compiled sources."""

STALE: Final = (
    "what is compiled is not of the sources beside it, so they would not run: install thunderagent again, or delete "
    "its compiled modules"
)

_CORE: Final = "programs"
_POLICIES: Final = "policies"
_SHELL: Final = ("*.py", "proxy/**/*.py", "leases/*.py", "rollouts/*.py", "runtime/*.py")
_INTERPRETED: Final = "\n# interpreted: "
_COMPILED: Final = "\n# compiled: "


def compiled_sources(package: Path) -> tuple[Path, ...]:
    """Return the modules to compile, for the package in that folder."""
    return tuple(sorted(_of_the_core(package))) + tuple(sorted(_of_the_shell(package)))


def _of_the_core(package: Path) -> Iterator[Path]:
    for path in (package / _CORE).rglob("*.py"):
        text = f"\n{path.read_text('utf-8')}"
        of_policy = _POLICIES in path.relative_to(package).parts
        if _COMPILED in text if of_policy else _INTERPRETED not in text:
            yield path


def _of_the_shell(package: Path) -> Iterator[Path]:
    for pattern in _SHELL:
        for path in package.glob(pattern):
            if _COMPILED in path.read_text("utf-8"):
                yield path


def sources_digest(package: Path) -> str:
    """Return a digest of the compiled sources and their names."""
    digest = sha256()
    for path in compiled_sources(package):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def kind_of(package: Path) -> Literal["compiled", "interpreted", "stale"]:
    """Return how the package in that folder runs; `stale` is compiled from other sources than are there.

    One module more or less than should be compiled is stale, too.
    """
    endings = tuple(EXTENSION_SUFFIXES)
    found = {path for path in package.rglob("*") if path.name.endswith(endings)}
    if not found:
        return "interpreted"
    try:
        built_of = (package / DIGEST_FILE).read_text("ascii").strip()
    except FileNotFoundError:
        return "stale"
    sources = compiled_sources(package)
    compiled = {path.with_name(path.name.partition(".")[0]) for path in found}
    is_whole = compiled == {source.with_suffix("") for source in sources}
    return "compiled" if is_whole and built_of == sources_digest(package) else "stale"


@cache
def build_kind() -> Literal["compiled", "interpreted", "stale"]:
    """Return how this package runs. Costs reading its sources, once."""
    return kind_of(Path(__file__).parent)
