"""Where the turns of a branch go, in each of the forms that clients take."""

from __future__ import annotations

import asyncio
import importlib
import os
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, urlsplit

from thunderagent.client.exchange import exchange, in_thread, proxy_key

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

MAX_ID_BYTES = 256

TURN_TIMEOUT_S = 3600.0
"""How long the helpers' clients wait for an answer: a turn that is held sends no byte until it runs."""

CONNECT_TIMEOUT_S = 5.0

HINT_TIMEOUT_S = 5.0
"""What a hint says is soon old."""

Keep = Literal["retain", "offload", "drop"]

_ANTHROPIC_KEYS = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")


class Branch:
    """One chain of turns of a program: its main one, or that of a sub-agent.

    Do not make one yourself: a `Program` is its main branch, and `Program.branch` returns the others. All forms name
    the program, but only the headers name the branch: use `headers` or a helper that sends them.
    """

    def __init__(
        self, proxy: str, program_id: str, *, branch_id: str = "", group: str = "", program_class: str = ""
    ) -> None:
        """Check what goes over the wire. Raises `ValueError`."""
        self.proxy = _check_url(proxy)
        self.program_id = _check_program_id(program_id)
        self.branch_id = _check_header(branch_id, "branch")
        self.group = _check_header(group, "group")
        self.program_class = _check_header(program_class, "program class")

    @property
    def base_url(self) -> str:
        """The base URL for a client of the OpenAI API; it names the program."""
        return f"{self.anthropic_base_url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """The same for a client of the Anthropic API, which appends `/v1/messages` by itself."""
        return f"{self.proxy}/p/{quote(self.program_id, safe='')}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers that name program, branch, group and class, for a base URL that all programs share.

        Raises `ValueError` if a header cannot contain the program's id; the base URL and `extra_body` can.
        """
        if not _fits_a_header(self.program_id):
            raise ValueError(
                f"the program id {self.program_id!r} cannot be sent in a header: use base_url or extra_body"
            )
        return {"X-Program-ID": self.program_id, **self._turn_headers}

    def hint(self, next_turn_in_s: float | None = None, *, confidence: float = 1.0, keep: Keep | None = None) -> bool:
        """Say in how many seconds the next turn comes, or what to do with the memory; return if the program is known.

        `confidence` is how sure you are, 0 to 1. `keep="drop"` says that a sub-agent's branch has ended; everything
        else applies to the whole program. Raises `ClientError`.
        """
        body = {"next_turn_in_s": next_turn_in_s, "confidence": confidence, "keep": keep, "branch": self.branch_id}
        path = f"/programs/{quote(self.program_id, safe='')}/hints"
        answer = exchange(self.proxy, "POST", path, body, timeout_s=HINT_TIMEOUT_S)
        return bool(answer.get("known"))

    async def async_hint(
        self, next_turn_in_s: float | None = None, *, confidence: float = 1.0, keep: Keep | None = None
    ) -> bool:
        """Do as `hint`."""
        say = partial(self.hint, next_turn_in_s, confidence=confidence, keep=keep)
        return await asyncio.wrap_future(in_thread(say))

    @property
    def _turn_headers(self) -> dict[str, str]:
        """What the base URL does not say."""
        said = (
            ("X-Program-Branch", self.branch_id),
            ("X-Program-Group", self.group),
            ("X-Program-Class", self.program_class),
        )
        return {name: value for name, value in said if value}

    @property
    def litellm(self) -> dict[str, Any]:
        """Keyword arguments for `litellm.completion` with a model that is served as `hosted_vllm/` or `openai/`.

        They contain `THUNDERAGENT_KEY` as the API key if that is set, and neither library's own variable is.
        """
        has_own = any(os.environ.get(name) for name in ("HOSTED_VLLM_API_KEY", "OPENAI_API_KEY"))
        key = {"api_key": proxy_key()} if proxy_key() and not has_own else {}
        return {"api_base": self.base_url, "extra_headers": self._turn_headers, "timeout": TURN_TIMEOUT_S, **key}

    def openai(self, **options: Any) -> OpenAI:
        """Return an `openai.OpenAI` whose requests are turns of this branch. Close it yourself.

        The options are those of that class. The API key is that of the options, then the library's own
        variable, then `THUNDERAGENT_KEY`, then "none". Its timeout is an hour, because a turn may be held.
        Raises `ImportError` if the package is missing.
        """
        library = _library("openai")
        client: OpenAI = library.OpenAI(**self._options(library, self.base_url, options, "OPENAI_API_KEY"))
        return client

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        """Return an `openai.AsyncOpenAI`, otherwise as `openai`."""
        library = _library("openai")
        client: AsyncOpenAI = library.AsyncOpenAI(
            **self._options(library, self.base_url, options, "OPENAI_API_KEY", is_async=True)
        )
        return client

    def anthropic(self, **options: Any) -> Any:
        """Return an `anthropic.Anthropic`, otherwise as `openai`. Engines must serve `/v1/messages`."""
        library = _library("anthropic")
        return library.Anthropic(**self._options(library, self.anthropic_base_url, options, *_ANTHROPIC_KEYS))

    def async_anthropic(self, **options: Any) -> Any:
        """Return an `anthropic.AsyncAnthropic`, otherwise as `anthropic`."""
        library = _library("anthropic")
        return library.AsyncAnthropic(
            **self._options(library, self.anthropic_base_url, options, *_ANTHROPIC_KEYS, is_async=True)
        )

    def _options(
        self, library: ModuleType, base_url: str, given: dict[str, Any], *key_names: str, is_async: bool = False
    ) -> dict[str, Any]:
        kind = library.DefaultAsyncHttpxClient if is_async else library.DefaultHttpxClient
        defaults: dict[str, Any] = {
            "base_url": base_url,
            "timeout": library.Timeout(TURN_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        }
        if not any(os.environ.get(name) for name in key_names):
            defaults["api_key"] = proxy_key() or "none"  # the libraries refuse to work without one
        if "http_client" not in given:  # not by the environment's HTTP proxies, as releases
            defaults["http_client"] = kind(mounts=dict.fromkeys(("all://", "http://", "https://")))
        headers = {**self._turn_headers, **(given.get("default_headers") or {})}
        return {**defaults, **given, "default_headers": headers}


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise  # it is there, and lacks something itself
        raise ImportError(f"this helper needs the package {name}: pip install {name}", name=name) from error


def _check_program_id(program_id: object) -> str:
    """Return a program id that the proxy takes, and that a URL can hold. Raises `ValueError`."""
    if not isinstance(program_id, str) or not program_id:
        raise ValueError("a program id must be text that is not empty")
    if len(program_id.encode()) > MAX_ID_BYTES:  # halves of surrogate pairs raise a ValueError here
        raise ValueError(f"a program id may have at most {MAX_ID_BYTES} bytes")
    if any(ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0 for character in program_id):
        raise ValueError("a program id must not contain control characters")
    if program_id in {".", ".."}:
        raise ValueError(f"the program id {program_id!r} would disappear from every URL")
    return program_id


def _check_header(text: str, what: str) -> str:
    if text and not (_fits_a_header(text) and len(text) <= MAX_ID_BYTES):
        raise ValueError(
            f"a {what} goes into a header: at most {MAX_ID_BYTES} printable ASCII characters, not {text!r}"
        )
    return text


def _fits_a_header(text: str) -> bool:
    return text.isascii() and text.isprintable() and text == text.strip()


def _check_url(proxy: str) -> str:
    """Return the proxy's URL without what a base URL has beyond it."""
    try:
        parts = urlsplit(proxy)
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is none
        is_url = False
    if not is_url or parts.query or parts.fragment:
        raise ValueError(f"the proxy is a URL such as http://127.0.0.1:8300, not {proxy!r}")
    return proxy.rstrip("/").removesuffix("/v1")
