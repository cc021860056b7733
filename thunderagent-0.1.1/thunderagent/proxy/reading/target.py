"""What a request asks for: its target, parsed once from the bytes of the request line.

Theory of operation
===================
Every reader of a path has an opinion on it: where it ends, what its escapes mean, which program it names. Two opinions
are a security hole, so there is one. The server makes a `Target` of each request line before anything else sees it. It
routes by `path`; the guard and the access table judge `words`; identity takes `program_id`; an engine gets `sent`.

What is judged is what is sent. So a spelling that servers read differently is either normalised here, or refused: `#`
and control characters end a target for some, dot segments climb, another host is another server. Doubled slashes become
one, and escapes of letters, digits and `-._~` become the characters themselves (RFC 3986, 6.2.2.2). All other escapes
reach the engine unchanged.

`words` are the widest reading that an engine may make: decoded once more, in lower case, without `;parameters` and
trailing slashes. They are for judging alone. What only looks like a word of the table is judged as if it were one.
"""

# compiled: it is asked of each turn

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from thunderagent.errors import RequestError

CACHED_BYTES: Final = 256
CACHED_COUNT: Final = 4096
"""Most targets repeat. A longer one is parsed each time, so the cache stays small."""

_ASCII: Final = bytes(range(0x21, 0x7F)).decode()
_UNFIT: Final = re.compile(r"[\x00-\x20\x7f#]")
_ESCAPED_CONTROL: Final = re.compile(r"%(?:[01][0-9a-f]|7f)", re.IGNORECASE)
_ESCAPED_PLAIN: Final = re.compile(r"%(?:2[de]|3[0-9]|4[1-9a-f]|5[0-9af]|6[1-9a-f]|7[0-9ae])", re.IGNORECASE)
_ABSOLUTE: Final = re.compile(r"https?://(?P<host>[^/?]*)(?P<rest>.*)", re.IGNORECASE)
_SLASHES: Final = re.compile(r"//+")
_SEPARATORS: Final = re.compile(r"[/\\]")
_DOTS = (".", "..")

_NAMING = ("/p/", "/sessions/", "/v1/v1/")
"""Prefixes of a path that names a program, or needs fixing."""

_PROGRAM_PATHS = (
    re.compile(r"/(?:p|sessions)/(?P<program_id>.+)(?P<rest>/inference/v1/(?:generate|abort_requests)/*)"),
    re.compile(r"/(?:p|sessions)/(?P<program_id>.+)(?P<rest>/skyrl/v1/generate/*)"),
    re.compile(r"/(?:p|sessions)/(?P<program_id>.+)(?P<rest>/v1(?:/.*)?)"),
    re.compile(r"/(?:p|sessions)/(?P<program_id>.+)(?P<rest>/(?:generate|tokenize|detokenize)/*)"),
    re.compile(r"/p/(?P<program_id>[^/]+)(?P<rest>/.*)"),
)
"""Paths that name a program, and their engine part: of vLLM's token-in API and SkyRL's form of it, of versioned paths,
of the few unversioned paths that agents and trainers call, and of anything else: then the id ends at the next slash."""


@dataclass(frozen=True, slots=True)
class Target:
    """What one request asks for."""

    path: str
    """The path for routing: percent-encoded, from the first slash on, without the query."""
    query: str
    """With its `?`; empty if there is none."""
    program_id: str | None
    """The program that the path names, decoded; None if it names none. It is not validated."""
    prefix: str
    """The part of the path that is ours alone, and is not sent."""
    engine_path: str
    """The engine's part of the path."""
    words: tuple[str, ...]
    """The parts of `engine_path`, in the widest reading of an engine."""
    spelt: str
    """The engine's part, spelt as in the tables."""
    sent: str
    """The path and query that an engine gets."""

    def plainly(self) -> Target:
        """Return the target as the tables spell it: what was judged is what is sent."""
        return (
            self
            if self.engine_path == self.spelt
            else replace(self, engine_path=self.spelt, sent=self.spelt + self.query)
        )

    @property
    def climbs(self) -> bool:
        """Whether escapes hide dot segments that an engine may see."""
        return any(word in _DOTS for word in self.words)

    @staticmethod
    def parse(raw: str, host: str = "") -> Target:
        """Parse the target of a request line. Raises `RequestError` for one that servers read differently.

        A whole URL is accepted if it names `host`, which is the value of the header `Host` (RFC 9112, 3.2.2). Non-ASCII
        bytes are percent-encoded. Cost: linear in its length; a short one is parsed once.
        """
        if not raw.startswith("/"):
            raw = _path_of_url(raw, host)
        return _parsed(raw) if len(raw) <= CACHED_BYTES else _parse(raw)

    def below(self) -> tuple[str, Target]:
        """Split `/workers/{replica_id}/...` into the decoded second part, and the target below it."""
        _, first, second, *rest = self.path.split("/", 3)
        below = self.parse("/" + "/".join(rest) + self.query)
        return unquote(second), replace(below, prefix=f"/{first}/{second}{below.prefix}")


def _path_of_url(raw: str, host: str) -> str:
    match = _ABSOLUTE.fullmatch(raw)
    if match is None:
        raise RequestError("the target of a request must be a path that begins with /")
    if not host or match["host"].lower() != host.lower():
        raise RequestError("the target of a request is a path; this one is a URL of another host than the header Host")
    rest = match["rest"]
    return rest if rest.startswith("/") else "/" + rest


def _parse(raw: str) -> Target:
    if not raw.isascii():
        raw = quote(raw.encode("utf-8", "surrogateescape"), safe=_ASCII + "\x00\t\n\r ")
    if _UNFIT.search(raw):
        raise RequestError(
            "the target of a request must not contain #, space or control characters; write them as %23, %20, …"
        )
    path, mark, query = raw.partition("?")
    path = "/" + path.lstrip("/")
    if "%" in path:
        path = _ESCAPED_PLAIN.sub(lambda match: unquote(match[0]), path)
        if _ESCAPED_CONTROL.search(path):
            raise RequestError("the path of a request must not contain control characters, not even escaped ones")
    if any(part.partition(";")[0] in _DOTS for part in path.split("/")):
        raise RequestError("the path of a request must not contain . or .. segments")
    program_id, prefix, engine_path = _split(path)
    engine_path = _SLASHES.sub("/", engine_path)
    parts = _SEPARATORS.split(unquote(engine_path).lower())
    words = tuple(word for part in parts if (word := part.partition(";")[0]))
    query = mark + query
    return Target(path, query, program_id, prefix, engine_path, words, "/" + "/".join(words), engine_path + query)


_parsed = lru_cache(maxsize=CACHED_COUNT)(_parse)


def _split(path: str) -> tuple[str | None, str, str]:
    """Split `/p/{program_id}/v1/...` into the decoded program id, our part, and the engine's part.

    The id may hold `/`, `:` and percent-escapes, so it reaches up to the last `/v1`; a doubled `/v1/v1` is fixed.
    Without `/v1` or another known path, it holds no unescaped `/`.
    """
    if path.startswith(_NAMING):
        for pattern in _PROGRAM_PATHS:
            if (match := pattern.fullmatch(path)) is not None:
                named = match["program_id"].removesuffix("/v1").rstrip("/")
                program_id = unquote(named, errors="surrogateescape")  # so that what is not UTF-8 stays different
                return program_id, path[: match.start("rest")].removesuffix("/v1"), match["rest"]
        if path.startswith("/v1/v1/"):
            return None, "", path.removeprefix("/v1")
    return None, "", path
