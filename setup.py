"""Build thunderagent; with THUNDERAGENT_COMPILE=1 in the environment what is hot is compiled ahead of time, by mypyc.

All else is in pyproject.toml. A compiled build needs a C compiler and Python's headers, and takes a minute. What is
compiled, `thunderagent/compilation.py` says; the version of mypy is the one that pyproject.toml pins for development.
"""

import importlib.util
import os
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext

PACKAGE = Path("thunderagent")


def _load_compilation() -> Any:
    """Load that module without the package, whose dependencies are not there while it is built."""
    spec = importlib.util.spec_from_file_location("compilation", PACKAGE / "compilation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compilation = _load_compilation()


TYPES = """
[mypy]
ignore_missing_imports = True

[mypy-aiohttp.*,httptools.*,msgspec.*,multidict.*,prometheus_client.*,pydantic.*,structlog.*,uvloop.*,yarl.*]
follow_imports = skip
"""
"""Nothing is known of what others' packages hold: so a build is the same whether they are there or not."""


class BuildCompiled(build_ext):
    """Compiles, and leaves the digest of what was compiled in the package."""

    def run(self) -> None:
        """Do it."""
        super().run()
        (Path(self.build_lib) / PACKAGE / compilation.DIGEST_FILE).write_text(
            compilation.sources_digest(PACKAGE) + "\n"
        )


def _compiled() -> dict[str, Any]:
    """Return the arguments of a compiled build."""
    if {"editable_wheel", "develop"} & set(sys.argv):
        sys.exit("THUNDERAGENT_COMPILE=1: an editable installation cannot be compiled, as its sources change")
    dev = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]["dev"]
    arguments: dict[str, Any] = {"setup_requires": [each for each in dev if each.startswith("mypy==")]}
    if {"bdist_wheel", "build", "build_ext", "install"} & set(sys.argv):  # else only asked what the build needs
        from mypyc.build import mypycify  # noqa: PLC0415 - only here is it sure to be there

        made_in = tempfile.mkdtemp(prefix="thunderagent-build-")
        types = Path(made_in, "mypy.ini")
        types.write_text(TYPES)
        files = [str(path) for path in compilation.compiled_sources(PACKAGE)]
        arguments |= {
            "ext_modules": mypycify([f"--config-file={types}", *files], group_name="thunderagent", target_dir=made_in),
            "cmdclass": {"build_ext": BuildCompiled},
            "options": {"build": {"build_base": made_in}},
        }
    return arguments


setup(**(_compiled() if os.environ.get("THUNDERAGENT_COMPILE") == "1" else {}))
