"""Build thunderagent; with THUNDERAGENT_COMPILE=1 in the environment what is hot is compiled ahead of time, by mypyc.

All else is in pyproject.toml, except the description on an index: the README without pictures and links to files,
which an index does not have. A compiled build needs a C compiler and Python's headers, and takes two minutes. What is
compiled, `thunderagent/compilation.py` says; the version of mypy is the one that pyproject.toml pins for development.
With THUNDERAGENT_COMPILE=parts each module is a C file of its own, and as many are compiled at once as there are
processors: sooner done, for tests. In one file the compiler can write the code of one module into another's.
"""

import importlib.util
import os
import re
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
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
disable_error_code = call-arg

[mypy-aiohttp.*,httptools.*,msgspec.*,multidict.*,prometheus_client.*,pydantic.*,structlog.*,uvloop.*,yarl.*]
follow_imports = skip
"""
"""Nothing is known of what others' packages hold: so a build is the same whether they are there or not.

Nor, therefore, which arguments their classes take: mypy looks for those of `Struct` in `object` if it is missing."""


JOBS_COUNT = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class BuildCompiled(build_ext):
    """Compiles, and leaves the digest of what was compiled in the package."""

    def build_extension(self, ext: Any) -> None:
        """Compile C files side by side, the largest first, and link them."""

        def compile_one(source: str) -> list[str]:
            made: list[str] = self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                include_dirs=ext.include_dirs,
                extra_postargs=ext.extra_compile_args,
            )
            return made

        with ThreadPoolExecutor(JOBS_COUNT) as pool:
            for made in pool.map(compile_one, sorted(ext.sources, key=os.path.getsize, reverse=True)):
                ext.extra_objects += made
        ext.sources = []
        super().build_extension(ext)

    def run(self) -> None:
        """Do it."""
        super().run()
        (Path(self.build_lib) / PACKAGE / compilation.DIGEST_FILE).write_text(
            compilation.sources_digest(PACKAGE) + "\n"
        )


def _description(readme: str) -> str:
    """Return the README without pictures and links that point into the repository."""
    without_pictures = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", readme)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", without_pictures)


def _compiled(how: str, made_in: str) -> dict[str, Any]:
    """Return the arguments of a compiled build, whose C files and objects lie in that folder."""
    if {"editable_wheel", "develop"} & set(sys.argv):
        sys.exit("THUNDERAGENT_COMPILE=1: an editable installation cannot be compiled, as its sources change")
    dev = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]["dev"]
    arguments: dict[str, Any] = {"setup_requires": [each for each in dev if each.startswith("mypy==")]}
    if {"bdist_wheel", "build", "build_ext", "install"} & set(sys.argv):  # else only asked what the build needs
        from mypyc.build import mypycify  # noqa: PLC0415 - only here is it sure to be there

        types = Path(made_in, "mypy.ini")
        types.write_text(TYPES)
        files = [str(path) for path in compilation.compiled_sources(PACKAGE)]
        arguments |= {
            "ext_modules": mypycify(
                [f"--config-file={types}", *files],
                group_name="thunderagent",
                target_dir=made_in,
                multi_file=how == "parts",
            ),
            "cmdclass": {"build_ext": BuildCompiled},
            "options": {"build": {"build_base": made_in}, "build_ext": {"parallel": JOBS_COUNT}},
        }
    return arguments


with TemporaryDirectory(prefix="thunderagent-build-") as folder:
    how = os.environ.get("THUNDERAGENT_COMPILE", "")
    setup(
        long_description=_description(Path("README.md").read_text("utf-8")),
        long_description_content_type="text/markdown",
        **(_compiled(how, folder) if how in ("1", "parts") else {}),
    )
