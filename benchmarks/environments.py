"""Real parts of tests and benchmarks, created once in a cache outside the checkout: environments, files, models."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.processes import tail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MARKER_NAME = ".complete"

COMPILES_ONCE: Final = {"PYTHONDONTWRITEBYTECODE": ""}
"""Variables under which Python keeps what it compiles: an engine imports thousands of modules at each start."""


class RealEngineError(RuntimeError):
    """The environment, the model or the engine could not be made ready; the text says where to look."""


def cache_dir() -> Path:
    """Return the folder outside the checkout that keeps environments and models."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "thunderagent"


def ensure_environment(
    name: str,
    requirements: Sequence[str],
    cost: str,
    *commands: Sequence[str],
    base: str | None = None,
    **environment: str,
) -> Path:
    """Return the Python interpreter of a virtual environment in the cache; create it at the first call.

    `requirements` are installed by pip; then its interpreter runs with each of `commands` and the variables of
    `environment`, and must succeed. `base` is the interpreter that it is made with; None is this one. Raises
    RealEngineError if something fails.
    """

    def make(root: Path) -> None:
        print(f"installing what {name} needs ({cost}) ...", file=sys.stderr)
        log = root.with_name(root.name + ".log")
        log.unlink(missing_ok=True)
        if base is None:
            venv.create(root, with_pip=True)
        else:
            run_logged([base, "-m", "venv", str(root)], log)
        python = str(root / "bin" / "python")
        # Imported modules are compiled then: compiling everything takes half of an installation's time.
        run_logged([python, "-m", "pip", "install", "--no-cache-dir", "--no-compile", *requirements], log)
        for command in commands:
            run_logged([python, *command], log, **environment)

    made_of = [
        sys.version if base is None else base,
        *requirements,
        *(" ".join(command) for command in commands),
        str(sorted(environment.items())),
    ]
    return made_once(name, made_of, make) / "bin" / "python"


def made_once(name: str, made_of: Sequence[str], make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, named by a digest of its ingredients; `make` fills it at the first call.

    It is made in place, since environments cannot be moved. An interrupted one has no marker and is made again; a lock
    keeps two processes apart. Raises what `make` raises.
    """
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:12]
    folder = cache_dir() / f"{name}-{digest}"
    marker = folder / _MARKER_NAME
    if marker.exists():
        return folder
    with file_lock(folder.with_name(folder.name + ".lock")):
        if not marker.exists():
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            make(folder)
            marker.write_text("\n".join(made_of) + "\n")
    return folder


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, waiting for whoever has it; it ends with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run_logged(command: list[str], log: Path, **environment: str) -> None:
    """Run a command with its output appended to `log`; raise RealEngineError if it fails."""
    variables = {**os.environ, **COMPILES_ONCE, **environment}
    with log.open("a") as output:
        result = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False, env=variables)
    if result.returncode != 0:
        text = f"`{' '.join(command[1:4])[:80]} ...` failed with status {result.returncode}"
        raise RealEngineError(f"{text}; end of {log}:\n{tail(log)}")
