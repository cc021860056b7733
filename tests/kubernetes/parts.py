"""Make the parts of the tests' own Kubernetes, once: programs from Debian's packages, and images.

None of these is installed: packages are unpacked into the cache. containerd, runc and iptables are the machine's own,
installed by `ensure_docker`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.environments import made_once
from tests.debian import apt_get
from tests.real import base_image
from tests.real.agent_packages import ensure_openhands, environment_of
from tests.real.base_image import BASE_IMAGE, BUILD_IMAGE, make_base_images
from tests.real.docker_engine import DockerEngine, DockerEngineError, ensure_docker, import_busybox_image
from tests.real.mini_swe_agent import ensure_mini_swe_agent
from tests.unit.deploy.kubectl import PACKAGE as KUBECTL
from tests.unit.deploy.kubectl import fetch

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
SUITE = "bookworm"
PROGRAMS = ("etcd-server", "containernetworking-plugins")
TOOLS = ("golang-1.19-go", "golang-1.19-src", "golang-github-modern-go-reflect2-dev")
SOURCE = "kubernetes"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

SANDBOX_IMAGE = "localhost/thunderagent-test-sandbox:1"
PAUSE_IMAGE = "localhost/thunderagent-test-pause:1"
PROXY_IMAGES = ("localhost/thunderagent-test-proxy:1", "localhost/thunderagent-test-proxy:2")
"""One image under two names: the first is upgraded to the second."""
AGENTS: dict[str, Callable[[], Path]] = {
    "mini-swe-agent": ensure_mini_swe_agent,
    "swe-rex": partial(environment_of, "SWE-agent"),
    "openhands": ensure_openhands,
}
"""Agents of other makes: each returns the Python of its environment, which the first call installs."""
DISK_BYTES = 2048 * 1024 * 1024


class PartsError(RuntimeError):
    """A part is not available; the text names it."""


def programs() -> Path:
    """Return a folder with `bin` and `cni`; built at the first call, in ten minutes and 3 GB of disk.

    Raises PartsError.
    """
    build = Path(__file__).with_name("build.sh")
    return made_once("kubernetes", [SUITE, SOURCE, *PROGRAMS, *TOOLS, build.read_text()], lambda at: _make(at, build))


def kubectl() -> Path:
    """Return kubectl's path; Debian's package is too old for the kustomizations."""
    return made_once("kubectl", [KUBECTL], fetch) / "kubectl"


def write_images(folder: Path) -> None:
    """Write archives of the images that the tests need, the project's own from its Dockerfile. Raises PartsError."""
    try:
        ensure_docker(base_image.PACKAGES)
        with DockerEngine(disk_bytes=DISK_BYTES) as engine, contextlib.closing(engine.client()) as client:
            make_base_images(engine, ROOT / "pyproject.toml", extras=("kubernetes",))
            arguments = {"BASE_IMAGE": BASE_IMAGE, "BUILD_IMAGE": BUILD_IMAGE, "COMPILE": "0", "EXTRAS": "kubernetes"}
            log = list(client.build(path=str(ROOT), tag=PROXY_IMAGES[0], buildargs=arguments, rm=True, decode=True))
            if "error" in log[-1]:
                raise PartsError(f"no image: {log[-1]['error']}")
            repository, _, tag = PROXY_IMAGES[1].rpartition(":")
            client.tag(PROXY_IMAGES[0], repository, tag)
            import_busybox_image(engine, SANDBOX_IMAGE)
            import_busybox_image(engine, PAUSE_IMAGE, config=('ENTRYPOINT ["/bin/sleep", "2147483647"]',))
            for number, image in enumerate((*PROXY_IMAGES, SANDBOX_IMAGE, PAUSE_IMAGE)):
                with (folder / f"image-{number}.tar").open("wb") as file:
                    file.writelines(client.get_image(image))
    except DockerEngineError as error:
        raise PartsError(f"no images: {error}") from error


def _make(folder: Path, build: Path) -> None:
    print(f"building {SOURCE} from Debian's packages (ten minutes, 3 GB) ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        source, root = work / "source", work / "root"
        source.mkdir()
        _from_debian(work / "apt", source)
        for package in source.glob("*.deb"):
            _run("dpkg-deb", "-x", str(package), str(root))
        bin_folder = folder / "bin"
        _run("bash", str(build), str(root), str(source), str(bin_folder))
        (root / "usr/bin/etcd").rename(bin_folder / "etcd")
        (root / "usr/lib/cni").rename(folder / "cni")
        _run("chmod", "-R", "u+w", str(work))  # Go's cache must be neither written nor removed


def _from_debian(state: Path, into: Path) -> None:
    """Download packages and the source of one suite with a separate apt state, whatever suite the machine runs."""
    lines = _run("apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN)", "Created-By: Packages").splitlines()
    uris = [line.removesuffix(" Debian") for line in lines if line.endswith("/debian/ Debian")]
    if not uris:
        raise PartsError("apt knows no packages of Debian")
    for part in ("lists/partial", "archives/partial"):
        (state / part).mkdir(parents=True)
    trusted = f"[signed-by={KEYRING}] {uris[0]} {SUITE} main"
    (state / "sources.list").write_text(f"deb {trusted}\ndeb-src {trusted}\n")
    settings = {
        "Dir::State": state,
        "Dir::State::lists": state / "lists",
        "Dir::Cache": state,
        "Dir::Etc::sourcelist": state / "sources.list",
        "Dir::Etc::sourceparts": os.devnull,
        "Dir::Etc::preferencesparts": os.devnull,
        "APT::Sandbox::User": "root",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    for command in (["update"], ["download", *PROGRAMS, *TOOLS], ["source", "--download-only", SOURCE]):
        done = apt_get(*options, *command, folder=into)
        if done.returncode:
            raise PartsError(f"apt-get {' '.join(command)}: {done.stderr[-500:]}")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PartsError(f"{' '.join(command[:3])}: {(done.stderr or done.stdout)[-1000:]}")
    return done.stdout
