"""A real Kubernetes of one node: API server, controllers, scheduler, kubelet, containerd and kube-proxy.

It must be started in separate network, mount and process namespaces, as `lab.py` makes them: it changes routes and
mounts there, and ends with them. One folder and some groups of processes would outlive them; `stop` removes those.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

ADDRESS = "10.10.0.1"
API = f"https://{ADDRESS}:6443"
NODE = "node"
READY_S = 300.0
GATES = "--feature-gates=TTLAfterFinished=true"
"""Removes finished Jobs after their time: on by default from 1.21."""
USERS = {
    "admin": ("admin", "system:masters"),
    "controllers": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "kubelet": (f"system:node:{NODE}", "system:nodes"),
    "proxy": ("system:kube-proxy", ""),
}
CONTROLLERS_OF_CGROUPS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd")
# The kubelet would set these for the whole machine: it gets private files with the values that it wants.
KERNEL = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


class ClusterError(RuntimeError):
    """The cluster failed to start; the text ends with a log."""


class Cluster:
    """One cluster in a folder, with the programs of `parts.programs`."""

    def __init__(self, folder: Path, programs: Path, *, cgroup: str) -> None:
        """Start nothing yet; `cgroup` is the name of its group of processes."""
        self._at = folder
        self._programs = programs
        self._cgroup = cgroup
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._path = os.pathsep.join(
            (str(folder / "sbin"), str(programs / "bin"), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin")
        )

    @property
    def kubeconfig(self) -> Path:
        """Return the administrator's kubeconfig."""
        return self._at / "admin.kubeconfig"

    def start(self, archives: Sequence[Path], pause_image: str) -> None:
        """Start all parts, and import images. Raises ClusterError."""
        self._set_up_network()
        self._write_accounts()
        self._start("etcd", *self._etcd())
        self.start_api()
        for name in USERS:
            self._write_kubeconfig(name)
        self._start("kube-controller-manager", *self._controllers())
        self._start(
            "kube-scheduler",
            *("--leader-elect=false", "--bind-address=127.0.0.1", f"--kubeconfig={self._at / 'scheduler.kubeconfig'}"),
        )
        self._start_containerd(archives, pause_image)
        self._start_kubelet()
        self._start(
            "kube-proxy",
            *(f"--kubeconfig={self._at / 'proxy.kubeconfig'}", f"--hostname-override={NODE}", "--proxy-mode=iptables"),
            *("--cluster-cidr=10.244.0.0/16", "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"),
            "--conntrack-tcp-timeout-close-wait=0",
        )
        self._until(self._node_is_ready, "kubelet")

    def start_api(self) -> None:
        """Start the API server, and wait until it reports ready."""
        self._start(
            "kube-apiserver",
            *("--etcd-servers=http://127.0.0.1:2379", "--bind-address=0.0.0.0", f"--advertise-address={ADDRESS}"),
            *("--secure-port=6443", f"--cert-dir={self._at / 'apiserver'}"),
            *(f"--token-auth-file={self._at / 'tokens.csv'}", "--authorization-mode=Node,RBAC"),
            *("--service-cluster-ip-range=10.96.0.0/16", f"--service-account-key-file={self._at / 'sa.pub'}"),
            *(f"--service-account-signing-key-file={self._at / 'sa.key'}", "--allow-privileged=true"),
            "--service-account-issuer=https://kubernetes.default.svc",
            *("--enable-admission-plugins=PodSecurityPolicy", "--kubelet-preferred-address-types=InternalIP", GATES),
        )
        self._until(lambda: self._asked("/readyz") == "ok", "kube-apiserver")

    def end_api(self) -> None:
        """Kill the API server without notice."""
        self._end("kube-apiserver", signal.SIGKILL)

    def stop(self) -> None:
        """Stop all parts, and remove what would outlive the namespaces."""
        for name in reversed(list(self._running)):
            self._end(name, signal.SIGTERM)
        for path in Path("/proc").glob("[0-9]*"):  # the shims of containers, and these
            with contextlib.suppress(OSError, ProcessLookupError):
                if str(self._at) in (path / "cmdline").read_text() or self._cgroup in (path / "cgroup").read_text():
                    os.kill(int(path.name), signal.SIGKILL)
        remove_cgroups(self._cgroup)

    # --- configuration ----------------------------------------------------------------------------------------------

    def _set_up_network(self) -> None:
        self._run("ip", "link", "set", "lo", "up")
        self._run("ip", "link", "add", "node0", "type", "bridge")
        self._run("ip", "address", "add", f"{ADDRESS}/24", "dev", "node0")
        self._run("ip", "link", "set", "node0", "up")
        self._run("ip", "route", "add", "default", "dev", "node0")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def _write_accounts(self) -> None:
        self._run("openssl", "genrsa", "-out", str(self._at / "sa.key"), "2048")
        self._run("openssl", "rsa", "-in", str(self._at / "sa.key"), "-pubout", "-out", str(self._at / "sa.pub"))
        lines = [
            f'{_token(name)},{user},{name},"{group}"' if group else f"{_token(name)},{user},{name}"
            for name, (user, group) in USERS.items()
        ]
        (self._at / "tokens.csv").write_text("\n".join(lines) + "\n")

    def _write_kubeconfig(self, name: str) -> None:
        made = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "clusters": [
                {
                    "name": "lab",
                    "cluster": {"server": API, "certificate-authority": str(self._at / "apiserver/apiserver.crt")},
                }
            ],
            "users": [{"name": name, "user": {"token": _token(name)}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": name}}],
        }
        (self._at / f"{name}.kubeconfig").write_text(yaml.safe_dump(made))

    def _etcd(self) -> tuple[str, ...]:
        client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        return (
            *(f"--data-dir={self._at / 'etcd'}", "--unsafe-no-fsync", f"--listen-peer-urls={peer}"),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
        )

    def _controllers(self) -> tuple[str, ...]:
        return (
            *(f"--kubeconfig={self._at / 'controllers.kubeconfig'}", "--leader-elect=false", GATES),
            *(f"--service-account-private-key-file={self._at / 'sa.key'}", "--use-service-account-credentials=true"),
            *(f"--root-ca-file={self._at / 'apiserver/apiserver.crt'}", "--bind-address=127.0.0.1"),
        )

    def _start_containerd(self, archives: Sequence[Path], pause_image: str) -> None:
        at = self._at
        network = {
            "cniVersion": "0.4.0",
            "name": "lab",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isDefaultGateway": True,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": str(at / "addresses"),
                        "ranges": [[{"subnet": "10.244.0.0/24"}]],
                    },
                }
            ],
        }
        (at / "cni").mkdir()
        (at / "cni/lab.conflist").write_text(json.dumps(network))
        (at / "containerd.toml").write_text(f"""
version = 2
root = "{at}/containerd"
state = "{at}/containerd-state"
[grpc]
address = "{at}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause_image}"
disable_apparmor = true
restrict_oom_score_adj = true
disable_tcp_service = true
stream_server_address = "127.0.0.1"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{self._programs}/cni"
conf_dir = "{at}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
""")
        self._start("containerd", "--config", str(at / "containerd.toml"))
        control = ("ctr", "--address", str(at / "containerd.sock"), "--namespace", "k8s.io")
        self._until(lambda: self._succeeds(*control, "version"), "containerd")
        for archive in archives:
            self._run(*control, "images", "import", str(archive))

    def _start_kubelet(self) -> None:
        at = self._at
        for name, value in KERNEL.items():
            own = at / "kernel" / name
            own.parent.mkdir(parents=True, exist_ok=True)
            own.write_text(value)
            self._run("mount", "--bind", str(own), f"/proc/sys/{name}")
        for folder in ("/var/log/pods", "/var/log/containers"):  # the kubelet knows no others
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._run("mount", "-t", "tmpfs", "lab", folder)
        for controller in CONTROLLERS_OF_CGROUPS:
            if (group := Path("/sys/fs/cgroup", controller)).is_dir():
                (group / self._cgroup).mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            whole = Path("/sys/fs/cgroup/cpuset", name)
            if whole.exists():
                Path("/sys/fs/cgroup/cpuset", self._cgroup, name).write_text(whole.read_text())
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": ADDRESS,
            "readOnlyPort": 0,
            "healthzBindAddress": "127.0.0.1",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._cgroup}",
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "100Mi"},
            "resolvConf": "",
            "syncFrequency": "10s",
            "nodeStatusUpdateFrequency": "5s",
        }
        (at / "kubelet.yaml").write_text(yaml.safe_dump(settings))
        self._start(
            "kubelet",
            *(f"--config={at / 'kubelet.yaml'}", f"--kubeconfig={at / 'kubelet.kubeconfig'}", f"--node-ip={ADDRESS}"),
            *(f"--hostname-override={NODE}", f"--root-dir={at / 'kubelet'}", f"--cert-dir={at / 'kubelet/pki'}"),
            *("--container-runtime=remote", f"--container-runtime-endpoint=unix://{at / 'containerd.sock'}"),
        )

    # --- processes --------------------------------------------------------------------------------------------------

    def _start(self, name: str, *arguments: str) -> None:
        program = shutil.which(name, path=self._path)
        if program is None:
            raise ClusterError(f"there is no {name}")
        with (self._at / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [program, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment()
            )

    def _end(self, name: str, how: signal.Signals) -> None:
        process = self._running.pop(name)
        process.send_signal(how)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": self._path}

    def _until(self, holds: Any, name: str) -> None:
        give_up_s = time.monotonic() + READY_S
        while not holds():
            if self._running[name].poll() is not None or time.monotonic() > give_up_s:
                log = (self._at / f"{name}.log").read_text(errors="replace")
                raise ClusterError(f"{name} did not become ready:\n{log[-3000:]}")
            time.sleep(0.1)

    def _asked(self, path: str) -> str:
        with contextlib.suppress(OSError):
            context = ssl._create_unverified_context()
            request = urllib.request.Request(f"{API}{path}", headers={"Authorization": f"Bearer {_token('admin')}"})
            with urllib.request.urlopen(request, context=context, timeout=5) as answer:
                text: str = answer.read().decode()
                return text
        return ""

    def _node_is_ready(self) -> bool:
        node = json.loads(self._asked(f"/api/v1/nodes/{NODE}") or "{}")
        conditions = node.get("status", {}).get("conditions", ())
        return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)

    def _succeeds(self, *command: str) -> bool:
        return subprocess.run(command, capture_output=True, env=self._environment(), check=False).returncode == 0

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment(), check=False)
        if done.returncode:
            raise ClusterError(f"{' '.join(command)}: {done.stderr[-1000:]}")


def remove_cgroups(name: str, within_s: float = 5.0) -> list[str]:
    """Remove a group of processes with its subgroups; return the groups that still have processes."""
    left = []
    for group in Path("/sys/fs/cgroup").glob(f"*/{name}"):
        for folder in (*sorted((each for each in group.rglob("*") if each.is_dir()), reverse=True), group):
            give_up_s = time.monotonic() + within_s
            while folder.is_dir():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > give_up_s:
                        left.append(str(folder))
                        break
                    time.sleep(0.05)
    return left


def _token(name: str) -> str:
    return f"{name}-of-the-lab"
