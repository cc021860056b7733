"""The targets of turns in every form; refusals of what no form can hold; the libraries' clients."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from thunderagent.client import Program, program
from thunderagent.client.branch import TURN_TIMEOUT_S, Branch

if TYPE_CHECKING:
    from pathlib import Path

PROXY = "http://proxy:8300"


def test_every_form_names_the_program() -> None:
    p = program("team/7", proxy=PROXY, group="prompt-3", program_class="coder")
    assert p.base_url == "http://proxy:8300/p/team%2F7/v1"
    assert p.anthropic_base_url == "http://proxy:8300/p/team%2F7"
    said = {"X-Program-Group": "prompt-3", "X-Program-Class": "coder"}
    assert p.headers == {"X-Program-ID": "team/7", **said}
    assert p.extra_body == {"program_id": "team/7"}
    assert p.docker_labels == {"thunderagent.program-id": "team/7"}
    assert p.litellm == {"api_base": p.base_url, "extra_headers": said, "timeout": TURN_TIMEOUT_S}
    assert p.environment == {
        "OPENAI_BASE_URL": p.base_url,
        "OPENAI_API_BASE": p.base_url,
        "ANTHROPIC_BASE_URL": p.anthropic_base_url,
        "THUNDERAGENT_PROXY": PROXY,
        "THUNDERAGENT_PROGRAM_ID": "team/7",
    }


def test_a_branch_is_the_same_program_with_a_name_more() -> None:
    p = program("task", proxy=PROXY, group="g")
    helper = p.branch("helper")
    assert helper.base_url == p.base_url
    assert helper.headers == {**p.headers, "X-Program-Branch": "helper"}
    assert helper.litellm["extra_headers"]["X-Program-Branch"] == "helper"
    with pytest.raises(ValueError, match="a branch needs a name"):
        p.branch("")


@pytest.mark.parametrize(
    ("program_id", "quoted"),
    [
        ("a/b", "a%2Fb"),
        ("a b", "a%20b"),
        ("é", "%C3%A9"),
        ("a%2Fb", "a%252Fb"),
        ("a?b#c", "a%3Fb%23c"),
        ("v1", "v1"),
        ("a/v1", "a%2Fv1"),
        ("../x", "..%2Fx"),
        ("x" * 256, "x" * 256),
    ],
)
def test_any_id_stands_in_the_base_url(program_id: str, quoted: str) -> None:
    assert program(program_id, proxy=PROXY).base_url == f"{PROXY}/p/{quoted}/v1"


@pytest.mark.parametrize("program_id", ["é", " a", "a "])
def test_an_id_that_no_header_can_hold_is_not_sent_in_one(program_id: str) -> None:
    """Clients would refuse it, or the proxy would read another id."""
    with pytest.raises(ValueError, match="cannot be sent in a header: use base_url"):
        _ = program(program_id, proxy=PROXY).headers


@pytest.mark.parametrize("program_id", ["", "x" * 257, "é" * 129, "a\nb", "a\x7f", "\x85", ".", "..", "\ud800", 7])
def test_an_id_that_the_proxy_would_not_take_is_refused_at_once(program_id: Any) -> None:
    with pytest.raises(ValueError, match=r"program id|surrogates"):
        program(program_id, proxy=PROXY)


@pytest.mark.parametrize("text", ["é", "a\nb", " a", "x" * 257])
@pytest.mark.parametrize("name", ["branch_id", "group", "program_class"])
def test_values_for_headers_alone_must_fit_there(name: str, text: str) -> None:
    with pytest.raises(ValueError, match="goes into a header"):
        Branch(PROXY, "task", **{name: text})


@pytest.mark.parametrize("given", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_proxy_s_url_is_taken_as_people_write_it(given: str) -> None:
    assert program(proxy=given).proxy == "http://h:1"


@pytest.mark.parametrize("given", ["", "h:1", "ftp://h", "http://", "http://h:x", "http://h?x", "http://h#x"])
def test_a_url_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="the proxy is a URL such as"):
        program(proxy=given)


def test_the_proxy_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert program().proxy == "http://127.0.0.1:8300"
    monkeypatch.setenv("THUNDERAGENT_PROXY", "http://elsewhere:1/")
    assert program().proxy == "http://elsewhere:1"
    assert program(proxy=PROXY).proxy == PROXY


def test_an_id_is_made_up_for_each() -> None:
    assert program().program_id != program().program_id


# --- libraries


def test_a_client_of_openai_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key is that of the options, of the environment, or a placeholder; its other options are the caller's."""
    p = program("a b", proxy=PROXY, group="g")
    with p.openai(max_retries=5, default_headers={"X-Mine": "1"}) as client:
        assert (str(client.base_url), client.api_key, client.max_retries) == (f"{PROXY}/p/a%20b/v1/", "none", 5)
        assert isinstance(client.timeout, openai.Timeout)
        assert (client.timeout.read, client.timeout.connect) == (TURN_TIMEOUT_S, 5.0)
        assert {"X-Program-Group": "g", "X-Mine": "1"}.items() <= client.default_headers.items()
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    with p.openai(timeout=3) as client:
        assert (client.api_key, client.timeout) == ("from-environment", 3)
    with p.branch("helper").openai(api_key="given") as client:
        assert (client.api_key, client.default_headers["X-Program-Branch"]) == ("given", "helper")


def test_the_proxy_s_key_of_the_environment_is_sent_with_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's own variable and an option precede it: it may be an admin's, which no agent should have."""
    p = program("a", proxy=PROXY)
    monkeypatch.setenv("THUNDERAGENT_KEY", "tak_mine")
    with p.openai() as client, p.branch("helper").openai(api_key="given") as other:
        assert (client.api_key, other.api_key) == ("tak_mine", "given")
    assert p.litellm["api_key"] == "tak_mine"
    keys = {"OPENAI_API_KEY": "tak_mine", "ANTHROPIC_API_KEY": "tak_mine"}
    assert keys.items() <= p.environment.items()
    assert "THUNDERAGENT_KEY" not in p.environment
    monkeypatch.setenv("OPENAI_API_KEY", "tak_data")
    with p.openai() as client:
        assert client.api_key == "tak_data"
    assert "api_key" not in p.litellm
    assert "OPENAI_API_KEY" not in p.environment


async def test_an_async_client_of_openai_is_set_up() -> None:
    async with program("a", proxy=PROXY).async_openai() as client:
        assert isinstance(client, openai.AsyncOpenAI)
        assert str(client.base_url) == f"{PROXY}/p/a/v1/"


def test_clients_of_anthropic_are_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real classes are called; a login by token needs no key."""

    def timeout(read_s: float, *, connect: float) -> tuple[float, float]:
        return read_s, connect

    fake = ModuleType("anthropic")
    vars(fake).update(Timeout=timeout, Anthropic=SimpleNamespace, AsyncAnthropic=SimpleNamespace)
    vars(fake).update(DefaultHttpxClient=SimpleNamespace, DefaultAsyncHttpxClient=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "anthropic", fake)
    p = program("a", proxy=PROXY)
    for client in (p.anthropic(max_retries=1), p.async_anthropic(max_retries=1)):
        assert vars(client) == {
            "base_url": f"{PROXY}/p/a",
            "timeout": (TURN_TIMEOUT_S, 5.0),
            "api_key": "none",
            "max_retries": 1,
            "default_headers": {},
            "http_client": SimpleNamespace(mounts=dict.fromkeys(("all://", "http://", "https://"))),
        }
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "token")
    assert not hasattr(p.anthropic(), "api_key")
    monkeypatch.delenv("ANTHROPIC_AUTH_TOKEN")
    monkeypatch.setenv("THUNDERAGENT_KEY", "tak_mine")
    assert vars(p.anthropic())["api_key"] == "tak_mine"


@pytest.mark.parametrize(("helper", "package"), [("openai", "openai"), ("async_anthropic", "anthropic")])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, helper: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"needs the package {package}: pip install {package}"):
        getattr(Program(PROXY, "a"), helper)()


def test_a_library_that_lacks_something_itself_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such an error must not tell people to install what they have."""
    (tmp_path / "anthropic.py").write_text("import a_part_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "anthropic", raising=False)
    with pytest.raises(ModuleNotFoundError, match="a_part_that_is_missing"):
        Program(PROXY, "a").anthropic()


def test_importing_the_client_needs_nothing_but_python() -> None:
    """Afterwards no third-party package is loaded, and nothing of ours but the client."""
    code = """
import sys
before = set(sys.modules)
import thunderagent.client
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - sys.stdlib_module_names - {"thunderagent"}))
print(sorted(name for name in sys.modules if name.startswith("thunderagent.") and ".client" not in name))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert run.stdout.split("\n")[:2] == ["[]", "[]"]


def test_clients_heed_the_environments_http_proxies_as_little_as_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters have such a proxy for the outside world; it cannot reach a proxy of programs, and nobody asks it to."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with program("a", proxy=PROXY, release_limit_s=0.0).openai() as client:
        route = client._client._transport_for_url(httpx2.URL("http://10.0.0.1/v1"))
        assert route is client._client._transport
