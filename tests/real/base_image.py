"""Make base images without a registry: Debian's Python from the machine's package sources, and pip's packages.

The first has what a Dockerfile expects of `python:3.11-slim`: a shell, coreutils, Python and its venv module. The one
for agents is a whole small Debian with these, and with tmux. The one for builds also has a C compiler, Python's headers
and a folder of wheels. pip uses only that folder, because containers here have no network.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import tarfile
import tomllib
from typing import TYPE_CHECKING

from benchmarks.environments import made_once
from tests.debian import apt_get
from tests.real.docker_engine import DockerEngine, DockerEngineError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BASE_IMAGE = "thunderagent-test-base:latest"
AGENT_IMAGE = "thunderagent-test-agent:latest"
BUILD_IMAGE = "thunderagent-test-build:latest"
PACKAGES = {"mmdebstrap": "mmdebstrap"}
REDIS_IMAGE = "thunderagent-test-redis:latest"
_TOOLS_IMAGE = "thunderagent-test-tools:latest"
_CONTENT = "base-files,coreutils,dash,python3,python3-venv"
_TOOLS = f"{_CONTENT},gcc,libc6-dev,python3-dev"
_AGENT = "python3,python3-venv,tmux"
_REDIS = "base-files,coreutils,dash,redis-server"
_PATH_LINE = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PIP_CONF = "[global]\nno-index = true\nfind-links = /wheels\n"
_BUILD_IMAGE_DOCKERFILE = f"FROM {_TOOLS_IMAGE}\nCOPY wheels /wheels\nCOPY pip.conf /etc/pip.conf\n"


def make_base_images(engine: DockerEngine, pyproject: Path, extras: Sequence[str] = ()) -> None:
    """Make both images at an engine, for a build with `extras`. The downloads happen once and take half a minute.

    Raises DockerEngineError if something is not available.
    """
    sources = _sources()
    root, tools = _root("base-image", _CONTENT, sources), _root("tools-image", _TOOLS, sources)
    wheels = _wheels(pyproject, _python_version_in(root), extras)
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        tar.add(wheels, "wheels", filter=lambda entry: entry if entry.isdir() or entry.name.endswith(".whl") else None)
        for name, text in (("Dockerfile", _BUILD_IMAGE_DOCKERFILE), ("pip.conf", _PIP_CONF)):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    with contextlib.closing(engine.client()) as client:
        for archive, image in ((root, BASE_IMAGE), (tools, _TOOLS_IMAGE)):
            repository, _, tag = image.partition(":")
            client.import_image_from_file(str(archive), repository=repository, tag=tag, changes=[_PATH_LINE])
        context.seek(0)
        log = list(client.build(fileobj=context, custom_context=True, tag=BUILD_IMAGE, rm=True, decode=True))
        if "error" in log[-1]:
            raise DockerEngineError(log[-1]["error"])


def make_python_image(engine: DockerEngine) -> None:
    """Make the first of these images alone. Raises DockerEngineError if something is not available."""
    _import(engine, _root("base-image", _CONTENT, _sources()), BASE_IMAGE)


def make_agent_image(engine: DockerEngine) -> None:
    """Make the image for agents that run inside of it. Raises DockerEngineError if something is not available."""
    _import(engine, _root("agent-image", _AGENT, _sources(), variant="minbase"), AGENT_IMAGE)


def make_redis_image(engine: DockerEngine) -> None:
    """Make an image with Debian's Redis at an engine. Raises DockerEngineError if it is not available."""
    _import(engine, _root("redis-image", _REDIS, _sources()), REDIS_IMAGE)


def _import(engine: DockerEngine, root: Path, image: str) -> None:
    repository, _, tag = image.partition(":")
    with contextlib.closing(engine.client()) as client:
        client.import_image_from_file(str(root), repository=repository, tag=tag, changes=[_PATH_LINE])


def _root(name: str, content: str, sources: str, *, variant: str = "extract") -> Path:
    """Return an archive of a file system with these packages, and those of a variant of mmdebstrap."""
    command = ["mmdebstrap", "--mode=root", f"--variant={variant}", f"--include={content}", ""]
    made_of = [*command, sources, _run("apt-cache", "policy", *content.split(","))]
    made = made_once(name, made_of, lambda at: _run(*command, str(at / "root.tar"), "-", stdin=sources))
    return made / "root.tar"


def _sources() -> str:
    """Return the distribution's own package sources, without added ones."""
    line = "deb $(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)"
    for _ in range(2):
        found = _run("apt-get", "indextargets", "--format", line, "Created-By: Packages").splitlines()
        lines = [line.rpartition(" ")[0] for line in found if line.endswith((" Debian", " Ubuntu"))]
        if lines:
            return "\n".join(lines) + "\n"
        apt_get("update")  # origins are known only after an update
    raise DockerEngineError("apt knows no packages of Debian or Ubuntu")


def _python_version_in(root: Path) -> str:
    with tarfile.open(root) as tar:
        found = [match[1] for name in tar.getnames() if (match := re.search(r"/usr/bin/python(3\.\d+)$", name))]
    if not found:
        raise DockerEngineError("there is no Python in what mmdebstrap made")
    return found[0]


def _wheels(pyproject: Path, python_version: str, extras: Sequence[str]) -> Path:
    """Return a folder with the wheels that an installation needs."""
    project = tomllib.loads(pyproject.read_text())
    dev = project["project"]["optional-dependencies"]["dev"]
    compiles = [each for each in dev if each.startswith("mypy==")]
    requirements = [*project["build-system"]["requires"], *compiles, *project["project"]["dependencies"]]
    requirements += [each for extra in extras for each in project["project"]["optional-dependencies"][extra]]
    if "scale" in extras:  # redis needs it on Python before 3.11.3; pip checks this for the Python that runs it
        requirements.append("async-timeout>=4.0.3")
    options = ["--quiet", "--only-binary=:all:", f"--python-version={python_version}"]

    def download(folder: Path) -> None:
        _run(sys.executable, "-m", "pip", "download", *options, f"--dest={folder}", *requirements)

    return made_once("wheels", [*options, *requirements], download)


def _run(*command: str, stdin: str = "") -> str:
    try:
        return subprocess.run(command, input=stdin, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = str(getattr(error, "stderr", "") or error)
        raise DockerEngineError(f"{' '.join(command[:4])}: {why[-500:]}") from error
