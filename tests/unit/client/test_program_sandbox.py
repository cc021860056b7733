"""The sandbox of a program: asked for at once, waited for at first use, run in, copied into and out of.

`docker` and `kubectl` are scripts here that record how they were called, and run the command on this machine.
"""

from __future__ import annotations

import io
import os
import tarfile
import threading
from typing import TYPE_CHECKING, Any

import pytest

from thunderagent.client.errors import ClientError, SandboxFailedError
from thunderagent.client.program_sandbox import ProgramSandbox

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.client.support import FakeProxy

PATH = "/programs/p-1/sandboxes"
ASKED = {"sandboxes": [{"sandbox_id": "s-1"}]}
# Both take flags, one of which has a value, then the name, and then the command.
DOCKER = """#!/bin/sh
echo "$0" "$@" >> "$CALLS"
[ -z "$REFUSES" ] || { echo "no such sandbox" >&2; exit 1; }
shift
while :; do
  case $1 in
    --workdir) cd "$2" || exit; shift 2 ;;
    --user | --namespace) shift 2 ;;
    -*) shift ;;
    *) break ;;
  esac
done
shift
[ "$1" != -- ] || shift
"$@" || { code=$?; case $0 in *kubectl) echo "command terminated with exit code $code" >&2 ;; esac; exit $code; }
"""


def sandbox(stage: str = "ready", **fields: Any) -> dict[str, Any]:
    made = {"sandbox_id": "s-1", "template": "coder", "driver": "docker", "stage": stage, "handle": "c-1", "why": "why"}
    return {"program_ids": ["p-1"], "ports": {}, "details": {}, **made, **fields}


def has(*found: dict[str, Any]) -> tuple[int, object]:
    return 200, {"program_id": "p-1", "sandboxes": list(found)}


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the scripts before the real commands; return the file of their calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("docker", "kubectl"):
        (folder / name).write_text(DOCKER)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("REFUSES", "")
    return tmp_path / "calls"


def ready(proxy: FakeProxy, **fields: Any) -> ProgramSandbox:
    proxy.answer(PATH, has(sandbox(**fields)))
    return ProgramSandbox(program_id="p-1", proxy=proxy.url)


def test_sandbox_is_requested_at_once_and_awaited_at_first_use(proxy: FakeProxy, calls: Path) -> None:
    """The request returns while the sandbox is prepared; the first command waits, and the second asks nobody."""
    proxy.answer(PATH, (200, ASKED), has(sandbox("preparing")), has(sandbox("other", sandbox_id="s-2"), sandbox()))
    its = ProgramSandbox(program_id="p-1", proxy=proxy.url, template="coder")
    assert proxy.requests == []
    its.request()
    its.request()
    assert proxy.requests == [("POST", PATH, {"template": "coder"})]
    assert its.run(["echo", "a  b"]).stdout == b"a  b\n"
    assert its.wait_s > 0
    asked_count = len(proxy.requests)
    assert its.run(["false"]).exit_code == 1
    assert len(proxy.requests) == asked_count == 3
    assert len(calls.read_text().splitlines()) == 2


def test_one_of_two_threads_waits(proxy: FakeProxy) -> None:
    """Both get the sandbox, and the proxy is asked once."""
    its = ready(proxy)
    proxy.gate.clear()
    found: list[str | None] = []
    threads = [threading.Thread(target=lambda: found.append(its.wait()["handle"])) for _ in range(2)]
    for thread in threads:
        thread.start()
    proxy.gate.set()
    for thread in threads:
        thread.join()
    assert found == ["c-1", "c-1"]
    assert len(proxy.requests) == 1


def test_nothing_is_asked_for_without_a_template_or_with_an_id(proxy: FakeProxy) -> None:
    """The program has a sandbox already."""
    ProgramSandbox(program_id="p-1", proxy=proxy.url).request()
    ProgramSandbox(program_id="p-1", proxy=proxy.url, template="coder", sandbox_id="s-1").request()
    assert proxy.requests == []


def test_the_environment_names_the_program(proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the process of an agent that the SDK started; without a name nothing is asked."""
    with pytest.raises(ValueError, match="no program"):
        ProgramSandbox(proxy=proxy.url).wait()
    monkeypatch.setenv("THUNDERAGENT_PROGRAM_ID", "p-1")
    monkeypatch.setenv("THUNDERAGENT_PROXY", proxy.url)
    proxy.answer(PATH, has(sandbox()))
    assert ProgramSandbox().wait()["handle"] == "c-1"


def test_a_failed_one_says_why(proxy: FakeProxy) -> None:
    """The first use raises, with the proxy's reason."""
    with pytest.raises(SandboxFailedError, match="why"):
        ready(proxy, stage="failed").run(["true"])


def test_a_command_has_a_folder_variables_and_a_user(proxy: FakeProxy, calls: Path, tmp_path: Path) -> None:
    """Folder and user are Docker's own flags; output and errors are apart, unless they are merged."""
    its = ready(proxy)
    done = its.run(["sh", "-c", 'pwd; echo "$A" >&2'], cwd=str(tmp_path), env={"A": "b c"}, user="me")
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{tmp_path}\n".encode(), b"b c\n")
    assert done.text == f"{tmp_path}\nb c\n"
    assert " exec -i --workdir " in calls.read_text()
    assert " --user me c-1 sh -c " in calls.read_text()
    assert its.run(["sh", "-c", "echo a; echo b >&2"], merges_output=True).stdout == b"a\nb\n"
    assert its.command(["bash"], has_terminal=True) == ["docker", "exec", "-i", "-t", "c-1", "bash"]


@pytest.mark.parametrize("driver", ["docker", "kubernetes"])
def test_variables_are_never_words_of_a_process(proxy: FakeProxy, calls: Path, driver: str) -> None:
    """Whatever is in them arrives, and after it what the command is to read; nothing else is in its environment."""
    its = ready(proxy, driver=driver, details={"pod": "x-1", "namespace": "ns"})
    env = {"TOKEN": "secret", "TEXT": 'it\'s $HOME\n`a` \\ "b"\n', "LAST": ""}
    script = 'printf "%s|%s|%s|" "$TOKEN" "$TEXT" "$LAST"; cat; echo "$script$line"'
    done = its.run(["sh", "-c", script], env=env, stdin=io.BytesIO(b"first\nrest"))
    assert done.stdout.decode() == f"secret|{env['TEXT']}||first\nrest\n"
    assert its.run(["sh", "-c", 'cat; echo "$TOKEN"'], env=env).stdout == b"secret\n"
    assert "secret" not in calls.read_text()
    with pytest.raises(ClientError, match="'A B' is no name"):
        its.run(["true"], env={"A B": "c"})


def test_a_pod_is_reached_by_kubectl(proxy: FakeProxy, calls: Path, tmp_path: Path) -> None:
    """Folder and variables are set inside; another user is refused, since a pod has one."""
    its = ready(proxy, driver="kubernetes", handle="job/ns/x", details={"pod": "x-1", "namespace": "ns"})
    done = its.run(["sh", "-c", 'pwd; echo "$A"'], cwd=str(tmp_path), env={"A": "b c"})
    assert done.stdout == f"{tmp_path}\nb c\n".encode()
    assert "kubectl exec -i --namespace ns x-1 -- sh -c " in calls.read_text()
    for merges_output in (False, True):
        done = its.run(["sh", "-c", "echo out; echo err >&2; exit 3"], merges_output=merges_output)
        assert (done.exit_code, done.text) == (3, "out\nerr\n"), "what kubectl says is none of the command's"
    with pytest.raises(ClientError, match="not as me"):
        its.run(["true"], user="me")


def test_no_command_runs_elsewhere(proxy: FakeProxy) -> None:
    """A callback's sandbox has no commands."""
    with pytest.raises(ClientError, match="no command runs in the sandbox s-1 of the driver callback"):
        ready(proxy, driver="callback").run(["true"])


def test_a_command_that_takes_too_long_raises(proxy: FakeProxy, calls: Path) -> None:
    """The error names the command and the time."""
    with pytest.raises(TimeoutError, match=r"sleep.*within 0.2 s"):
        ready(proxy).run(["sleep", "5"], timeout_s=0.2)


def test_files_and_folders_go_in_and_out(proxy: FakeProxy, calls: Path, tmp_path: Path) -> None:
    """A file keeps its content and mode, a folder its links; missing folders are made."""
    its, source = ready(proxy), tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "run me").write_bytes(b"\x00\xff")
    (source / "deep" / "run me").chmod(0o750)
    (source / "link").symlink_to("deep/run me")
    its.copy_in(source, f"{tmp_path}/inside/a b")
    its.copy_in(source / "deep" / "run me", f"{tmp_path}/inside/new/name")
    inside = tmp_path / "inside"
    assert (inside / "a b" / "link").readlink().as_posix() == "deep/run me"
    assert (inside / "new" / "name").read_bytes() == b"\x00\xff"
    assert (inside / "new" / "name").stat().st_mode & 0o777 == 0o750
    its.copy_out(f"{tmp_path}/inside/a b", tmp_path / "out" / "folder")
    its.copy_out(f"{tmp_path}/inside/new/name", tmp_path / "out" / "file")
    assert (tmp_path / "out" / "folder" / "deep" / "run me").read_bytes() == b"\x00\xff"
    assert (tmp_path / "out" / "file").read_bytes() == b"\x00\xff"
    its.write("ä $x".encode(), f"{tmp_path}/inside/more/text")
    assert its.read(f"{tmp_path}/inside/more/text").decode() == "ä $x"


def test_missing_sandbox_is_reported(proxy: FakeProxy, calls: Path, tmp_path: Path) -> None:
    """A missing file is Python's own error; what the sandbox refuses is ours, with its words."""
    its = ready(proxy)
    for call in (its.read, lambda path: its.copy_out(path, tmp_path / "out")):
        with pytest.raises(FileNotFoundError, match="no file /not/there in the sandbox"):
            call("/not/there")
    (tmp_path / "file").touch()
    with pytest.raises(ClientError, match=r"writing .*file/x failed"):
        its.write(b"", f"{tmp_path}/file/x")


def test_a_sandbox_that_has_ended_is_no_missing_file(
    proxy: FakeProxy, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has Docker's words."""
    monkeypatch.setenv("REFUSES", "yes")
    with pytest.raises(ClientError, match="no such sandbox"):
        ready(proxy).read("/etc/hostname")


def test_path_that_leads_out_of_a_folder_is_not_copied(proxy: FakeProxy, calls: Path, tmp_path: Path) -> None:
    """What a sandbox packs is not trusted."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../escaped"))
    (tmp_path / "packed").write_bytes(packed.getvalue())
    tar = tmp_path / "bin" / "tar"
    tar.write_text(f"#!/bin/sh\ncat {tmp_path}/packed\n")
    tar.chmod(0o755)
    with pytest.raises(tarfile.OutsideDestinationError):
        ready(proxy).copy_out(str(tmp_path), tmp_path / "out")
    assert not (tmp_path / "escaped").exists()


def test_a_missing_file_in_a_pod_is_told_from_a_pod_without_commands(
    proxy: FakeProxy, calls: Path, tmp_path: Path
) -> None:
    """`kubectl` says of each command that fails that it did."""
    its = ready(proxy, driver="kubernetes", details={"namespace": "ours", "pod": "pod-1"})
    with pytest.raises(FileNotFoundError):
        its.read(str(tmp_path / "none"))
    (tmp_path / "file").write_text("a")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    its.copy_in(tmp_path / "link", str(tmp_path / "sandbox" / "copy"))
    its.copy_out(str(tmp_path / "sandbox" / "copy"), tmp_path / "back")
    assert (tmp_path / "back").read_text() == "a"
