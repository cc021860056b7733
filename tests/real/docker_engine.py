"""A private Docker engine for tests: a `dockerd` with its own socket, data, bridge and containerd namespace.

It shares nothing with an engine that already runs on the machine, and leaves nothing: no firewall rule, no process, no
mount, also if whoever started it is killed (`docker_guard.py`). It needs root, and Debian's packages, which
`ensure_docker` installs.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

import docker
from aiohttp import web

from tests.debian import install
from tests.loopback import on_loopback
from tests.real.docker_guard import REAPER, STOP_S, SYSTEM_PATH, processes, remove_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

READY_S = 60.0
IMAGE = "thunderagent-test:latest"
BRIDGE_LOCK = Path(tempfile.gettempdir(), "thunderagent-tests-bridge.lock")


class DockerEngineError(RuntimeError):
    """No engine can run here; the text gives the reason."""


def ensure_docker(further: Mapping[str, str] | None = None) -> None:
    """Install missing programs; `further` are other programs that a test needs, with their Debian packages.

    Raises DockerEngineError.
    """
    packages = {**PACKAGES, **(further or {})}
    missing = [package for package, program in packages.items() if shutil.which(program, path=SYSTEM_PATH) is None]
    if os.geteuid() != 0:
        raise DockerEngineError("a Docker engine of the tests' own needs root")
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise DockerEngineError(f"no {', '.join(missing)}, and no apt-get to install it")
    if why := install(*missing):
        raise DockerEngineError(why)


PACKAGES = {"docker.io": "dockerd", "busybox-static": "busybox", "iproute2": "ip"}
ROOT = Path(__file__).parents[2]


class DockerEngine:
    """One engine, from `start` to `stop`; its containers end with it, its images and data go with `stop`."""

    def __init__(self, *, disk_bytes: int = 512 * 1024 * 1024) -> None:
        """Keep its data on a separate file system of `disk_bytes`, in memory."""
        self.root = Path(tempfile.mkdtemp(prefix="thunderagent-docker-"))
        self.url = f"unix://{self.root / 'docker.sock'}"
        self.data_root = self.root / "data"
        self.log_path = self.root / "dockerd.log"
        self.address = ""
        """This machine's address on the engine's bridge, by which containers reach it; known once started."""
        self._disk_bytes = disk_bytes
        self._name = f"ta{os.getpid() % 100_000}{os.urandom(2).hex()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Return the process id of `dockerd`."""
        assert self._process is not None
        return self._process.pid

    def client(self) -> docker.APIClient:
        """Return a client for tests; the caller closes it."""
        return docker.APIClient(base_url=self.url, timeout=30)

    def start(self) -> None:
        """Start the engine and wait until it answers. Raises DockerEngineError with the end of its log."""
        if self._guard is None:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "tests.real.docker_guard", str(self.root), self._name],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # nobody who reads ours waits for it
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C is not for it
            )
        if not self.data_root.exists():
            self.data_root.mkdir()
            _run("mount", "-t", "tmpfs", "-o", f"size={self._disk_bytes}", "thunderagent-test", str(self.data_root))
        with BRIDGE_LOCK.open("w") as lock:  # two engines that start at a time would choose the same network
            fcntl.flock(lock, fcntl.LOCK_EX)
            subnet = self._make_bridge()
        self.address = f"{subnet}.0.1"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("dockerd", f"--host={self.url}", f"--data-root={self.data_root}"),
                    *(f"--exec-root={self.root / 'exec'}", f"--pidfile={self.root / 'docker.pid'}"),
                    *(f"--bridge={self._name}", f"--default-address-pool=base={subnet}.128.0/17,size=24"),
                    *("--iptables=false", "--ip6tables=false", "--ip-masq=false", "--ip-forward=false"),
                    *(f"--containerd-namespace={self._name}", f"--containerd-plugins-namespace={self._name}p"),
                    *("--shutdown-timeout=1", "--log-level=warn"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": SYSTEM_PATH},
                start_new_session=True,
            )
        give_up_s = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                raise DockerEngineError(f"dockerd did not start:\n{self.log_path.read_text()[-2000:]}")
            time.sleep(0.05)

    def end(self) -> None:
        """End its process, and with it the containers; its data remain."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def restart(self) -> None:
        """Restart the engine with its data."""
        self.end()
        self.start()

    def stop(self) -> None:
        """Stop the engine and remove all its traces, and the reapers that would keep polling it."""
        self.end()
        remove_engine(self.root, self._name)
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.communicate()

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        """Fill its file system completely during the block."""
        filling = self.data_root / "filling"
        try:
            with filling.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1024 * 1024))
            with filling.open("ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            yield
        finally:
            filling.unlink()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.settimeout(5)
                probe.connect(self.url.removeprefix("unix://"))
                probe.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                return b" 200 OK" in probe.recv(100)
            except OSError:
                return False

    def _make_bridge(self) -> str:
        """Make a bridge with an unused network; return the network's first half."""
        environment = {**os.environ, "PATH": SYSTEM_PATH}
        subprocess.run(["ip", "link", "delete", self._name], capture_output=True, env=environment, check=False)
        used = _run("ip", "-4", "route")
        subnet = next((f"10.{n}" for n in range(213, 255) if f"10.{n}." not in used), None)
        if subnet is None:
            raise DockerEngineError("no network is free for a bridge")
        _run("ip", "link", "add", self._name, "type", "bridge")
        _run("ip", "address", "add", f"{subnet}.0.1/24", "dev", self._name)
        _run("ip", "link", "set", self._name, "up")
        return subnet


def reapers(argument: str) -> list[int]:
    """Return the process ids of reapers with an argument: an engine's URL, or a run."""
    return processes(REAPER, argument)


def import_busybox_image(engine: DockerEngine, name: str = IMAGE, config: tuple[str, ...] = ()) -> str:
    """Make an image of about 2 MB with a shell and busybox's applets; `config` are lines of a Dockerfile."""
    repository, _, tag = name.partition(":")
    with contextlib.closing(engine.client()) as client:
        client.import_image_from_data(busybox_root(), repository=repository, tag=tag, changes=list(config))
    return name


@contextlib.asynccontextmanager
async def registry(label: str = "") -> AsyncIterator[tuple[str, list[str]]]:
    """Serve one image, `tools:1`; yield its name and a list that grows with each request for its manifest.

    For each label it is another image.
    """
    root = busybox_root()
    layer = gzip.compress(root, 1)
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Labels": {"label": label}},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(root).hexdigest()}"]},
        }
    ).encode()
    blobs = {f"sha256:{hashlib.sha256(blob).hexdigest()}": blob for blob in (config, layer)}
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    media = ("application/vnd.docker.container.image.v1+json", "application/vnd.docker.image.rootfs.diff.tar.gzip")
    about = [
        {"mediaType": each, "size": len(blob), "digest": digest}
        for each, (digest, blob) in zip(media, blobs.items(), strict=True)
    ]
    manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "config": about[0], "layers": about[1:]}).encode()
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    served: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        path = request.path.removeprefix("/v2/")
        if not path:
            return web.Response()
        name, what, reference = path.split("/")
        if name != "tools":
            code = {"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}
            return web.json_response(code, status=404)
        if what == "manifests":
            if request.method == "GET":
                served.append(reference)
            headers = {"Docker-Content-Digest": digest, "Content-Type": kind}
            return web.Response(body=manifest, headers=headers)
        return web.Response(body=blobs[reference], headers={"Docker-Content-Digest": reference})

    app = web.Application()
    app.router.add_route("*", "/v2/{path:.*}", cast("Callable[[web.Request], Awaitable[web.Response]]", answer))
    async with on_loopback(app) as url:
        yield f"{url.removeprefix('http://')}/tools:1", served


def busybox_root() -> bytes:
    """Return the root folder of that image, as a tar file."""
    busybox = Path(shutil.which("busybox", path=SYSTEM_PATH) or "busybox").read_bytes()
    applets = subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout.split()
    root = io.BytesIO()
    with tarfile.open(fileobj=root, mode="w") as tar:
        for folder in ("bin", "etc", "tmp", "proc", "dev", "root"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        _add(tar, "bin/busybox", busybox, 0o755)
        _add(tar, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/tmp:/bin/sh\n", 0o644)
        for applet in applets:
            if applet != "busybox":
                entry = tarfile.TarInfo(f"bin/{applet}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(entry)
    return root.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))


def _run(*command: str) -> str:
    environment = {**os.environ, "PATH": SYSTEM_PATH}
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise DockerEngineError(f"{' '.join(command)}: {getattr(error, 'stderr', '') or error}") from error
