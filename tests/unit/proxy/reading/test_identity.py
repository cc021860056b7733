"""The program of a request, and the parts of its body that are ours."""

from __future__ import annotations

import json
import re

import pytest
from msgspec import Raw
from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.errors import InvalidProgramIdError, RequestError
from thunderagent.proxy.reading import header_words
from thunderagent.proxy.reading.body_fields import OTHERS_FIELDS, SLOWLY_READ_BYTES, in_utf8, model_named, read_fields
from thunderagent.proxy.reading.header_words import (
    CLASS_HEADER,
    FINAL_HEADERS,
    LIMITS_HEADER,
    OUTCOME_HEADER,
    PROGRAM_HEADERS,
    check_program_id,
)
from thunderagent.proxy.reading.identity import IdentityRules, TurnRequest, identify, identify_side_call
from thunderagent.proxy.turns.fence import STALENESS_HEADER
from thunderagent.proxy.turns.record import HINT_HEADER, PATIENCE_HEADER

MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'


def identified(
    body: bytes = b"{" + MESSAGES + b"}", *, path_id: str | None = None, headers: dict[str, str] | None = None
) -> TurnRequest:
    turn = identify(path_id, CIMultiDictProxy(CIMultiDict(headers or {})), body)
    assert turn is not None
    return turn


# --- Sources of the id


def test_the_first_of_five_sources_wins() -> None:
    """Path, X-Program-ID, X-Session-ID, body, extra_body: each is used if those before it are missing."""
    sources = [
        ("path", "p"),
        ("x-program-id", "h"),
        ("x-session-id", "s"),
        ("body", "b"),
        ("extra_body", "e"),
        ("anonymous", None),
    ]
    for number, (source, program_id) in enumerate(sources):
        body: dict[str, object] = {"model": "m"}
        if number <= 4:
            body["extra_body"] = {"program_id": "e"}
        if number <= 3:
            body["program_id"] = "b"
        headers = {"X-Session-ID": "s"} if number <= 2 else {}
        headers |= {"X-Program-ID": "h"} if number <= 1 else {}
        turn = identified(json.dumps(body).encode(), path_id="p" if number == 0 else None, headers=headers)
        assert (turn.source, turn.program_id) == (source, program_id)


def test_our_field_is_taken_out_of_the_body_wherever_the_id_came_from() -> None:
    """The engine never sees it; the rest is the client's bytes."""
    body = b'{"program_id": "b", "extra_body": {"program_id": "e", "top_k": 5}, ' + MESSAGES + b"}"
    turn = identified(body, path_id="p")
    assert turn.body == b'{"extra_body": { "top_k": 5}, ' + MESSAGES + b"}"


@pytest.mark.parametrize("value", [b"null", b"1.5", b"true", b"[1,2]"])
def test_a_field_that_is_no_id_is_taken_out_too_where_another_source_names_the_program(value: bytes) -> None:
    """The engine has no use for our field; the body stays JSON."""
    assert identified(b'{"program_id":' + value + b',"x":1}', path_id="p").body == b'{"x":1}'


def test_containers_that_go_with_a_program_are_read_and_taken_out() -> None:
    """As `program_id`: beside it, or in `extra_body`; what is no name of a container is ignored, and taken out, too."""
    turn = identified(b'{"program_id":"b","docker_ids":["one", "two", 3, "", ["x"]],"x":1}')
    assert (turn.docker_ids, turn.body) == (("one", "two"), b'{"x":1}')
    turn = identified(b'{"extra_body":{"program_id":"e","docker_ids":["one"],"k":1}}')
    assert (turn.docker_ids, turn.body) == (("one",), b'{"extra_body":{"k":1}}')
    for value in (b"null", b'"one"', b"{}", b'["%s"]' % (b"x" * 300)):
        turn = identified(b'{"docker_ids":' + value + b',"x":1}')
        assert (turn.docker_ids, turn.body) == ((), b'{"x":1}')
    assert len(identified(json.dumps({"docker_ids": [str(n) for n in range(1000)]}).encode()).docker_ids) == 64
    assert identified(b'{"metadata":{"docker_ids":["one"]}}').docker_ids == ()


def test_a_null_names_nobody() -> None:
    """A client that always sends the field may leave it empty."""
    assert identified(b'{"program_id":null,"extra_body":{"program_id":null}}').program_id is None


def test_fields_of_other_clients_are_read_and_left_alone() -> None:
    """A program_id in messages is the client's business; one in metadata names the program, and stays."""
    body = b'{"metadata":{"program_id":"x"},"messages":[{"program_id":"y"}]}'
    turn = identified(body)
    assert (turn.program_id, turn.source, turn.body) == ("x", "metadata.program_id", body)
    assert identified(b'{"messages":[{"program_id":"y"}]}').program_id is None


@pytest.mark.parametrize("number", range(len(OTHERS_FIELDS)))
def test_each_of_other_peoples_fields_is_used_when_those_before_it_are_gone(number: int) -> None:
    """Each field has its own value."""
    body: dict[str, object] = {"model": "m"}
    for way in OTHERS_FIELDS[number:]:
        part = body
        for name in way[:-1]:
            part = part.setdefault(name, {})  # type: ignore[assignment]
        part[way[-1]] = "/".join(way)
    turn = identified(json.dumps(body).encode())
    assert (turn.program_id, turn.source) == ("/".join(OTHERS_FIELDS[number]), ".".join(OTHERS_FIELDS[number]))


@pytest.mark.parametrize("value", [None, "", 1.5, True, [], {}, "x" * 257, "a\nb"])
def test_invalid_id_in_a_foreign_field_is_no_error(value: object) -> None:
    """A client that only changed its base URL must not be refused for a field of its own."""
    body = {"session_id": value, "metadata": value, "nvext": {"agent_context": value}, "prompt_cache_key": value}
    assert identified(json.dumps({**body, "conversation_params": {"conversation_id": "c"}}).encode()).program_id == "c"
    assert identified(json.dumps({**body, "prompt_cache_key": "k"}).encode()).bucket == "k"
    turn = identified(json.dumps(body).encode())
    assert (turn.program_id, turn.bucket, turn.source) == (None, "", "anonymous")


@pytest.mark.parametrize(
    ("body", "bucket", "source"),
    [
        (b'{"prompt_cache_key":"k"}', "k", "prompt_cache_key"),
        (b'{"prompt_cache_key":0}', "0", "prompt_cache_key"),
        (b'{"metadata":{"session_id":"s"},"prompt_cache_key":"k"}', "s", "metadata.session_id"),
    ],
)
def test_a_bucket_names_no_program_unless_the_operator_says_so(body: bytes, bucket: str, source: str) -> None:
    turn = identified(body)
    assert (turn.program_id, turn.bucket, turn.source) == (None, bucket, source)
    headers = CIMultiDictProxy(CIMultiDict())
    named = identify(None, headers, body, IdentityRules(bucket_names_program=True))
    assert named is not None
    assert (named.program_id, named.bucket, named.source) == (bucket, "", source)
    unread = identify(None, headers, body, IdentityRules(infers_buckets=False))
    assert unread is not None
    assert (unread.program_id, unread.bucket, unread.source) == (None, "", "anonymous")
    other = identified(body, headers={"X-Program-ID": "p"})
    assert (other.program_id, other.bucket) == ("p", "")


@pytest.mark.parametrize("header", PROGRAM_HEADERS)
def test_every_known_header_names_the_program(header: str) -> None:
    """Ours is first, then those of the configuration, then the others."""
    headers = {header: "them"}
    assert identified(headers=headers).program_id == "them"
    configured = {**headers, "X-Run": "run"}
    turn = identify(None, CIMultiDictProxy(CIMultiDict(configured)), b"{}", IdentityRules(["x-run"]))
    assert turn is not None
    assert turn.program_id == ("them" if header == "X-Program-ID" else "run")
    assert identified(headers={**headers, "X-Program-ID": "ours"}).program_id == "ours"


@pytest.mark.parametrize(
    ("headers", "branch_id"),
    [
        ({"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Agent-Id": "a"}, "a"),
        ({"session_id": "s", "thread-id": "t"}, "t"),
        ({"X-Program-ID": "s", "thread-id": "t"}, ""),
        ({"session-id": "s", "thread-id": "t", "X-Program-Branch": "b"}, "b"),
    ],
)
def test_coding_agents_name_their_branches(headers: dict[str, str], branch_id: str) -> None:
    """The header belongs to the one that names the program; ours comes first."""
    assert identified(headers=headers).branch_id == branch_id


CLAUDE_CODE = {"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Parent-Agent-Id": "p"}
CODEX = {"session-id": "s", "x-codex-parent-thread-id": "p"}


@pytest.mark.parametrize(
    ("path_id", "headers", "parents"),
    [
        (None, {**CLAUDE_CODE, "X-Claude-Code-Agent-Id": "a"}, ("p", "")),
        ("run", {**CLAUDE_CODE, "X-Claude-Code-Agent-Id": "a"}, ("p", "")),
        (None, {**CLAUDE_CODE, "X-Claude-Code-Agent-Id": "a", "X-Program-Parent": "q"}, ("p", "q")),
        (None, CLAUDE_CODE, ("", "")),
        (None, {**CLAUDE_CODE, "X-Claude-Code-Agent-Id": "a", "X-Program-Branch": "b"}, ("", "")),
        (None, {"X-Session-ID": "s", **CLAUDE_CODE, "X-Claude-Code-Agent-Id": "a"}, ("", "")),
        (None, {**CODEX, "thread-id": "t"}, ("p", "")),
        ("run", {**CODEX, "thread-id": "s"}, ("p", "")),
        (None, {**CODEX, "thread-id": "t", "X-Dynamo-Parent-Session-ID": "q"}, ("p", "q")),
        (None, {**CODEX, "thread-id": "s"}, ("", "p")),
        (None, CODEX, ("", "p")),
    ],
)
def test_coding_agents_name_who_waits(path_id: str | None, headers: dict[str, str], parents: tuple[str, str]) -> None:
    """Beside a branch it names a branch of the same program; beside a Codex thread with its own session, a program."""
    turn = identify(path_id, CIMultiDictProxy(CIMultiDict(headers)), b"{}")
    assert turn is not None
    assert (turn.told.get("parent_branch_id", ""), turn.told.get("parent_id", "")) == parents


@pytest.mark.parametrize(("value", "is_final"), [("1", True), ("true", True), ("0", False), ("", False)])
@pytest.mark.parametrize("header", FINAL_HEADERS)
def test_the_last_turn_says_so(header: str, value: str, is_final: bool) -> None:
    assert identified(headers={header: value}).is_final is is_final


def test_a_body_that_needs_no_change_is_the_same_object() -> None:
    """A body of megabytes is not copied."""
    body = b'{"model":"m",' + MESSAGES + b"}"
    assert identified(body, headers={"X-Program-ID": "a"}).body is body


def test_the_branch_is_a_header() -> None:
    """The main branch has no name."""
    assert identified(headers={"X-Program-Branch": "sub-1"}).branch_id == "sub-1"
    assert identified().branch_id == ""


def test_the_group_is_a_header_that_is_checked_like_an_id() -> None:
    """Programs of one group finish together."""
    assert identified(headers={"X-Program-Group": "prompt 7"}).told == {"group_id": "prompt 7"}
    assert not identified().told
    for value in ("g" * 257, "a\nb"):
        with pytest.raises(InvalidProgramIdError, match="group id"):
            identified(headers={"X-Program-Group": value})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"text"',
        b"nonsense",
        b'{"a":',
        b"{}x",
        b"\xff\xfe",
        b"5",
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda body: body[:10],
)
def test_a_body_that_is_no_object_is_the_engines_to_judge(body: bytes) -> None:
    """It names no program and is no error of ours, however deep it is nested."""
    assert identify("p", CIMultiDictProxy(CIMultiDict()), body) is None


# --- Which ids are refused


@pytest.mark.parametrize(
    "value",
    ["", None, True, False, 1.5, [], {}, "x" * 257, "é" * 129, "a\nb", "a\x00", "\x7f", "\x85", "\u2028", "\u2029"],
)
def test_an_id_that_is_none_is_refused(value: object) -> None:
    """It is empty, no text, over 256 bytes, or has control characters: 400."""
    with pytest.raises(InvalidProgramIdError) as refused:
        check_program_id(value)
    assert (refused.value.status, refused.value.code) == (400, "invalid_program_id")


@pytest.mark.parametrize("body", [rb'{"model": "a\u2028b"}', rb'{"model": "a\u009bb"}', rb'{"model": "a\nb"}'])
def test_a_models_name_is_checked_as_others_are(body: bytes) -> None:
    fields = read_fields(body)
    assert fields is not None
    for model, form in ((fields.model, b""), (Raw(), b'--x\r\nname="model"\r\n\r\na\xc2\x9bb\r\n')):
        with pytest.raises(InvalidProgramIdError, match="model"):
            model_named(model, form)


def test_bytes_of_a_header_that_are_no_text_are_refused() -> None:
    """aiohttp gives them as lone surrogates, which no log, hash or JSON could carry."""
    for headers in ({"X-Program-ID": "caf\udce9"}, {"X-Program-Branch": "caf\udce9"}):
        with pytest.raises(InvalidProgramIdError, match="is UTF-8"):
            identified(headers=headers)


@pytest.mark.parametrize(
    "name", ["X-Program-ID", "X-Program-Branch", "X-Program-Group", "X-Program-Parent", "X-Program-Tenant"]
)
def test_a_header_of_ours_that_is_empty_or_doubled_is_refused(name: str) -> None:
    """Two values are ambiguous, and an unfilled template should be noticed early."""
    with pytest.raises(InvalidProgramIdError, match="empty"):
        identified(headers={name: ""})
    with pytest.raises(InvalidProgramIdError, match=f"{name} appears 2 times"):
        identify(None, CIMultiDictProxy(CIMultiDict([(name, "a"), (name, "a")])), b"{}")


@pytest.mark.parametrize(
    ("headers", "fields", "program_id"),
    [
        ({"x-litellm-trace-id": "1764_ab", "X-Title": "Cline", "HTTP-Referer": "https://cline.bot"}, {}, "1764_ab"),
        ({}, {"litellm_session_id": "cline-01J", "stream": True}, "cline-01J"),
        ({"agent-session-id": "20261129_1", "agent-working-dir": "/repo"}, {}, "20261129_1"),
        ({"originator": "roo-code", "session_id": "0193-task"}, {"prompt_cache_key": "0193-task"}, "0193-task"),
        ({"x-kilocode-mode": "code", "X-Session-Id": "ses_1", "x-session-affinity": "ses_1"}, {}, "ses_1"),
    ],
    ids=["cline", "cline-litellm", "goose", "roo", "kilo"],
)
def test_more_agents_name_their_sessions(headers: dict[str, str], fields: dict[str, object], program_id: str) -> None:
    """As their sources send them to a server that is compatible with OpenAI's; a sub-agent has a session of its own."""
    turn = identified(json.dumps({"model": "m", **fields}).encode(), headers=headers)
    assert (turn.program_id, turn.branch_id, turn.bucket) == (program_id, "", "")


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("X-Program-Idd", "X-Program-ID"),
        ("X-Progam-ID", "X-Program-ID"),
        ("X-ProgramID", "X-Program-ID"),
        ("x-program-limit", "X-Program-Limits"),
        ("X-Program-Group-Id", "X-Program-Group"),
        ("X-Program-Deadline", "X-Program-Limits: deadline_s=..."),
        ("X-Program-Max-Turns", "X-Program-Limits: max_turns=..."),
        ("X-Program-Next-Turn-In", "X-Program-Hint: next_turn_in_s=..."),
    ],
)
def test_a_header_that_is_nearly_ours_is_refused_with_the_right_one(name: str, right: str) -> None:
    """Nobody else has use for it, and what it says would be lost in silence."""
    with pytest.raises(RequestError, match=f"did you mean {re.escape(right)}"):
        identified(headers={name: "1"}, path_id="p")


@pytest.mark.parametrize("name", ["X-Program-Name", "X-Program-Session", "X-Progress", "X-Program-ID-Source"])
def test_a_header_that_is_near_none_of_ours_is_somebody_elses(name: str) -> None:
    """A network's own, or a header of our answers that comes back."""
    assert identified(headers={name: "1"}).source == "anonymous"


def test_each_header_of_ours_is_known() -> None:
    """Every header that a module reads, and those that an operator names."""
    read = [PATIENCE_HEADER, LIMITS_HEADER, HINT_HEADER, STALENESS_HEADER, OUTCOME_HEADER, CLASS_HEADER]
    ours = [*read, *header_words._SPELT.values()]
    assert [
        name for name in ours if name.startswith("X-Program-") and name[10:].lower() not in header_words._MEANT
    ] == []
    rules = IdentityRules(program_headers=("X-Program-Idd",))
    turn = identify(None, CIMultiDictProxy(CIMultiDict({"X-Program-Idd": "a"})), b"{}", rules)
    assert turn is not None
    assert turn.program_id == "a"


# --- Keys of the body that are nearly ours


@pytest.mark.parametrize("key", ["programId", "program-id", "progam_id", "programid", "PROGRAM_ID"])
@pytest.mark.parametrize("at", ["{%s}", '{"extra_body":{%s}}', '{"metadata":{%s}}'])
def test_a_misspelt_program_id_is_told_and_goes_on_unchanged(key: str, at: str) -> None:
    """An engine may know the key: it is no error, but its client should know that it names nobody."""
    body = (at % f'"{key}" : "a"').encode()
    turn = identified(body)
    assert (turn.program_id, turn.body) == (None, body)
    assert f"'{key}'" in turn.note
    assert "did you mean program_id?" in turn.note
    assert identified(body, path_id="p").note == ""


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": 'set "programId": "a"'}]},
        {"tools": [{"function": {"parameters": {"properties": {"programId": {"type": "string"}}}}}]},
        {"project_id": "a", "prompt_id": "b", "program": "c"},
        {"extra_body": {"program_id": None}},
    ],
)
def test_what_only_looks_like_a_misspelt_program_id_is_none(body: dict[str, object]) -> None:
    """Words of a prompt, a tool's own parameter, and other names."""
    assert identified(json.dumps(body).encode()).note == ""


def test_a_misspelt_hint_is_told() -> None:
    """The words of others for the same field are no mistakes."""
    turn = identified(b'{"agent_hint":{"next_turn_in":5}}', path_id="p")
    assert (turn.hint, turn.note) == (
        None,
        "agent_hint has the key 'next_turn_in', which says nothing here; did you mean next_turn_in_s?",
    )
    for hint in ({"next_turn_in_s": 5}, {"cache_control": {"ttl": 0}}, {"reuse": 3}):
        assert identified(json.dumps({"agent_hint": hint}).encode(), path_id="p").note == ""


def test_an_empty_header_of_somebody_elses_is_none() -> None:
    """A client that only changed its base URL is not refused for its own header."""
    headers = {"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Agent-Id": "", "X-Dynamo-Parent-Session-ID": ""}
    turn = identified(headers=headers)
    assert (turn.program_id, turn.branch_id, turn.told) == ("s", "", {})


@pytest.mark.parametrize("name", list(PROGRAM_HEADERS)[1:])
def test_an_empty_header_of_somebody_elses_names_no_program(name: str) -> None:
    """Clients send it before they have a session; a later source in the order may name one."""
    assert identified(headers={name: ""}).source == "anonymous"
    turn = identified(b'{"program_id":"b"}', headers={name: ""})
    assert (turn.program_id, turn.source) == ("b", "body")
    rules = IdentityRules(program_headers=("X-Rollout",))
    turn = identify(None, CIMultiDictProxy(CIMultiDict({"X-Rollout": "", "X-Session-ID": "s"})), b"{}", rules)
    assert turn is not None
    assert (turn.program_id, turn.source) == ("s", "x-session-id")


def test_parent_and_tenant_are_headers() -> None:
    """Dynamo's name for the parent counts too, after ours."""
    turn = identified(headers={"X-Program-Parent": "p", "X-Dynamo-Parent-Session-ID": "d", "X-Program-Tenant": "t"})
    assert (turn.told, turn.tenant) == ({"parent_id": "p"}, "t")
    assert identified(headers={"X-Dynamo-Parent-Session-ID": "d"}).told == {"parent_id": "d"}
    assert identified(headers={"X-Session-Affinity": "c", "X-Parent-Session-Id": "o"}).told == {"parent_id": "o"}
    assert (identified().told, identified().tenant) == ({}, "")


def test_the_user_names_the_program_only_if_that_is_wanted() -> None:
    """A user is a person: all their programs would be one. Other names in the body come first."""
    headers = CIMultiDictProxy(CIMultiDict())
    rules = IdentityRules(user_names_program=True)
    assert identified(b'{"user":"u"}').program_id is None
    for body, named in (
        (b'{"user":"u"}', ("u", "user")),
        (b'{"user":"u","prompt_cache_key":"k"}', ("u", "user")),
        (b'{"user":7}', ("7", "user")),
        (b'{"user":{}}', (None, "anonymous")),
        (b'{"user":"u","x":NaN}', ("u", "user")),
    ):
        turn = identify(None, headers, body, rules)
        assert turn is not None
        assert (turn.program_id, turn.source, turn.body) == (*named, body)


def test_a_branch_is_held_to_the_same_rules() -> None:
    """It is in the table and the event log, like the program's name."""
    with pytest.raises(InvalidProgramIdError, match="a branch id has at most 256 bytes"):
        identified(headers={"X-Program-Branch": "b" * 257})


@pytest.mark.parametrize("value", ["a", "x" * 256, "é" * 128, "with blank", "a/b:c%", "日本", "🤖" * 64, "-"])
def test_any_other_text_is_an_id(value: str) -> None:
    """Ids are opaque."""
    assert check_program_id(value) == value


def test_a_whole_number_is_taken_as_its_digits() -> None:
    """Trainers number their samples."""
    assert check_program_id(42) == "42"
    turn = identified(b'{"program_id":42,"x":1}')
    assert (turn.program_id, turn.body) == ("42", b'{"x":1}')


@pytest.mark.parametrize(
    ("source", "body"),
    [("header", b"{}"), ("body", b'{"program_id":""}'), ("extra_body", b'{"extra_body":{"program_id":[]}}')],
)
def test_a_wrong_id_is_refused_whatever_its_source(source: str, body: bytes) -> None:
    """It never counts as anonymous: the client meant to name one."""
    with pytest.raises(InvalidProgramIdError):
        identified(body, headers={"X-Session-ID": "a\tb"} if source == "header" else {})


# --- The prompt


def test_no_prefix_is_digested_where_nobody_needs_it() -> None:
    """All else about the turn is read as usual."""
    body = json.dumps({"model": "m", "program_id": "p", "messages": [{"role": "user", "content": "x" * 500}]}).encode()
    headers = CIMultiDictProxy(CIMultiDict())
    with_it, without = (identify(None, headers, body, IdentityRules(reads_prefixes=reads)) for reads in (True, False))
    assert with_it is not None
    assert with_it.prefix
    assert without is not None
    assert without.prefix == ()
    for name in dir(with_it):
        assert name.startswith("_") or name == "prefix" or getattr(without, name) == getattr(with_it, name), name


def test_a_body_that_goes_on_from_a_response_has_no_prefix_of_its_own() -> None:
    """Its prompt begins with the engine's stored response; its size says nothing."""
    rest = b'"input":"' + b"x" * 5000 + b'"}'
    whole = identified(b'{"previous_response_id":null,' + rest, path_id="a")
    assert (whole.has_whole_prompt, len(whole.prefix)) == (True, 1)
    going_on = identified(b'{"previous_response_id":"resp_1",' + rest, path_id="a")
    assert (going_on.has_whole_prompt, going_on.prefix) == (False, ())


# --- Usage


@pytest.mark.parametrize(
    ("members", "added"),
    [
        (b'"stream":true', True),
        (b'"stream":true,"stream_options":null', True),
        (b'"stream":true,"stream_options":{}', True),
        (b'"stream":true,"stream_options":{"include_usage":0}', True),
        (b'"stream":true,"stream_options":{"include_usage":"False"}', True),
        (b'"stream":true,"stream_options":{"include_usage":"perhaps"}', False),
        (b'"stream":1', True),
        (b'"stream":1.0', True),
        (b'"stream":"Yes"', True),
        (b'"stream":0', False),
        (b'"stream":"false"', False),
        (b'"stream":"perhaps"', False),
        (b'"stream":2', False),
        (b'"stream":[1]', False),
        (b'"stream":true,"stream_options":{"include_usage":false}', True),
        (b'"stream":true,"stream_options":{"include_usage":null}', True),
        (b'"stream":true,"stream_options":{"include_usage":true}', False),
        (b'"stream":true,"stream_options":{"include_usage":"yes"}', False),
        (b'"stream":true,"stream_options":{"include_usage":1}', False),
        (b'"stream":true,"stream_options":"all"', False),
        (b'"stream":false', False),
        (b'"stream":"true"', True),
        (b'"n":1', False),
    ],
)
def test_usage_is_asked_for_only_where_a_stream_would_have_none(members: bytes, added: bool) -> None:
    """What the engine would refuse, or reads as yes, stays as it was written."""
    body = b"{" + members + b"}"
    turn = identified(body)
    assert turn.usage_added == added
    if added:
        assert json.loads(turn.body)["stream_options"] == {"include_usage": True}
    else:
        assert turn.body == body


@pytest.mark.parametrize("text", [rb"\ud83d", b"NaN"])
def test_json_that_engines_read_and_msgspec_does_not_is_a_turn_all_the_same(text: bytes) -> None:
    """Cut-off tool output has halves of surrogate pairs; a turn with one is scheduled, and loses our field."""
    value = text if text == b"NaN" else b'"' + text + b'"'
    turn = identified(b'{"messages":[' + value + b'],"program_id":"a","stream":true}')
    assert turn.program_id == "a"
    assert turn.usage_added
    assert b"program_id" not in turn.body
    assert value in turn.body


def test_large_body_for_the_slow_reader_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mended copy of it is read; a body that is no object is anonymous."""
    read_bytes: list[int] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: (read_bytes.append(len(text)), loads(text))[1])
    filling = b"[" + b"0," * (SLOWLY_READ_BYTES // 2) + b"0]"
    before, after = b'{"messages":[NaN, -Infinity,"a\\\\","\\\\uD83D"],"x":' + filling, b',"y":"\\ud83d\\uDE00\\udE00"}'
    turn = identified(before + b',"program_id":"a\\\\ \\ud83d\\ude00","model":"m"' + after)
    assert (turn.program_id, turn.body) == ("a\\ \U0001f600", before + b',"model":"m"' + after)
    assert model_named(turn.model, b"") == "m"
    assert identify(None, CIMultiDictProxy(CIMultiDict()), b"[NaN," + filling + b"]") is None
    assert read_bytes == []
    assert identified(b'{"messages":[NaN],"program_id":"a"}').program_id == "a"
    assert len(read_bytes) == 1


@pytest.mark.parametrize("text", [rb"\ud83d", rb"\uDC00", rb"\ud83d\ud83d\ude00", rb"\ud83d\ude00\ude00", rb"\\\ud83d"])
def test_half_of_a_surrogate_pair_hides_nothing_of_a_large_body(text: bytes) -> None:
    """Cut-off tool output has one. The turn has its model and its prefix, and only what we change is changed."""
    rest = b'"messages":[{"role":"user","content":"' + text + b'"},"' + b"x" * SLOWLY_READ_BYTES + b'"]}'
    turn = identify(
        None,
        CIMultiDictProxy(CIMultiDict()),
        b'{"model":"alias","program_id":"a","priority":1,' + rest,
        IdentityRules(drops_priority=True, model_aliases={"alias": "served"}),
    )
    assert turn is not None
    assert (turn.program_id, turn.body) == ("a", b'{"model":"served",' + rest)
    assert (model_named(turn.model, b""), len(turn.prefix)) == ("served", 2)


@pytest.mark.parametrize("odd", [b'"\0"', b'"\\\0\0"', rb'"\ud8"', rb'"\ud8zz"', b"nan", b"\xff"])
def test_a_large_body_that_no_engine_reads_passes_unchanged(odd: bytes) -> None:
    """Its headers name its program."""
    body = b'{"program_id":"a","b":"' + b"x" * SLOWLY_READ_BYTES + b'","c":' + odd + b"}"
    for headers, program_id in (({"X-Program-ID": "h"}, "h"), ({}, None)):
        turn = identified(body, headers=headers)
        assert (turn.program_id, turn.body, turn.streams) == (program_id, body, False)


# --- Priorities that clients give engines

LARGE_FILLING = b'"x":"' + b"x" * SLOWLY_READ_BYTES + b'"'


@pytest.mark.parametrize(
    ("body", "forwarded"),
    [
        (b'{"priority":-9,"a":1}', b'{"a":1}'),
        (b'{"a":1, "priority" : -9}', b'{"a":1}'),
        (b'{"prior\\u0069ty":-9,"a":1}', b'{"a":1}'),
        (b'{"priority":1,"a":1,"priority":-9.0}', b'{"a":1}'),
        (b'{"priority":-9.' + b"0" * 100_000 + b',"a":1}', b'{"a":1}'),
        (b'{"a":NaN,"priority":-9}', b'{"a":NaN}'),
        (b'{"a":NaN,"priority":-9,' + LARGE_FILLING + b"}", b'{"a":NaN,' + LARGE_FILLING + b"}"),
        (
            b'{"a":NaN,"b":{"priority":1},' + LARGE_FILLING + b"}",
            b'{"a":NaN,"b":{"priority":1},' + LARGE_FILLING + b"}",
        ),
        ('{"a":NaN,"priority":-9}'.encode("utf-16"), b'{"a":NaN}'),
        ('{"a":1,"priority":-9}'.encode("utf-32"), b'{"a":1}'),
        (b'{"a":{"priority":-9},"b":"priority"}', b'{"a":{"priority":-9},"b":"priority"}'),
        (b'["priority"', b'["priority"'),
        (b'{"a":[1', b'{"a":[1'),
        (b"", b""),
        (b'--x\r\n{"priority":1}', b'--x\r\n{"priority":1}'),
        (b"\xff\xfe{", b"\xff\xfe{"),
    ],
    ids=range(16),
)
def test_a_priority_is_cut_out_however_it_is_spelt_where_that_is_wanted(body: bytes, forwarded: bytes) -> None:
    """This is for turns and side calls, even if only an engine's parser can read them; without the rule all stays."""
    rules = IdentityRules(drops_priority=True)
    headers = CIMultiDictProxy(CIMultiDict({"X-Program-ID": "a"}))
    assert identify_side_call(None, headers, body, rules).body == forwarded
    assert identify_side_call(None, headers, body).body == body
    turn = identify(None, headers, in_utf8(body), rules)
    assert (turn.body if turn is not None else forwarded) == forwarded


HALF_PAIR = rb'"a":"\ud800",'
"""What msgspec refuses and engines read."""


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        b"{'priority':-9}",
        b"{'a\"':1,'priority':-9,\"b\":2}",
        b"""{"x":'"',"priority":-9,"y":'"'}""",
        b"{priority:-9}",
        rb"{prior\u0069ty:-9}",
        rb'{"prior\x69ty":-9}',
        rb'{"\priority":-9}',
        b"{`priority`:-9}",
        b"{\xe2\x80\x9cpriority\xe2\x80\x9d:-9}",
        b'{/*"*/"priority":-9/*"*/}',
        b'// {\n{"priority":-9',
        b'#\n{"priority":-9',
        b'\xef\xbb\xbf{"priority":-9',
        b'{"priority":-9',
        b'{"priority"',
        b'{"a":"',
        b'{"priority":-9,"b":"\xff"',
        "{'priority':-9}".encode("utf-16"),
    ],
    ids=range(18),
)
def test_a_body_in_which_nobody_finds_the_priority_is_refused(body: bytes, *, is_large: bool) -> None:
    """An engine's parser may accept it; without the rule it is the engine's to judge."""
    if is_large and body.startswith(b"{"):
        body = b"{" + HALF_PAIR + LARGE_FILLING + b"," + body[1:]
    headers, rules = CIMultiDictProxy(CIMultiDict()), IdentityRules(drops_priority=True)
    with pytest.raises(RequestError, match="priority"):
        identify_side_call(None, headers, body, rules)
    assert identify_side_call(None, headers, body).body == body


# --- Side calls


@pytest.mark.parametrize(
    ("body", "named", "forwarded"),
    [
        (b'{"input":"x","program_id":"b"}', ("b", "body"), b'{"input":"x"}'),
        (b'{"extra_body":{"program_id":"e"},"a":1}', ("e", "extra_body"), b'{"extra_body":{},"a":1}'),
        (b'{"prompt_cache_key":"k","a": 1 }', (None, "anonymous"), b'{"prompt_cache_key":"k","a": 1 }'),
        (b'{"a":NaN, "program_id":7}', ("7", "body"), b'{"a":NaN}'),
        (b'{"a":1}', (None, "anonymous"), b'{"a":1}'),
        (b'["program_id"]', (None, "anonymous"), b'["program_id"]'),
        (b"--x\r\nprogram_id", (None, "anonymous"), b"--x\r\nprogram_id"),
        (b"\xff\x00", (None, "anonymous"), b"\xff\x00"),
        (b"", (None, "anonymous"), b""),
    ],
)
def test_a_side_call_is_whose_its_body_says(body: bytes, named: tuple[str | None, str], forwarded: bytes) -> None:
    """Our own field is cut out, as in a turn; what is not a JSON object stays as it is."""
    call = identify_side_call(None, CIMultiDictProxy(CIMultiDict()), body)
    assert (call.program_id, call.source, call.body) == (*named, forwarded)
    by_path = identify_side_call("p", CIMultiDictProxy(CIMultiDict()), body)
    assert (by_path.program_id, by_path.source, by_path.body) == ("p", "path", forwarded)


def test_a_side_call_with_many_token_ids_is_cut_around_them() -> None:
    tokens = json.dumps(list(range(100_000))).encode()
    body = b'{"model":"m","tokens":' + tokens + b',"program_id":"b"}'
    call = identify_side_call(None, CIMultiDictProxy(CIMultiDict()), body)
    assert call[:3] == ("b", "body", b'{"model":"m","tokens":' + tokens + b"}")
    assert model_named(call.model, b"") == "m"


def test_a_side_call_with_an_id_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidProgramIdError):
        identify_side_call(None, CIMultiDictProxy(CIMultiDict()), b'{"program_id":""}')
    with pytest.raises(InvalidProgramIdError):
        identify_side_call("x" * 257, CIMultiDictProxy(CIMultiDict()), b"")


def test_a_large_body_names_its_program_as_a_small_one_does() -> None:
    """No value of megabytes is built: an object or a list names no program."""
    padding = " " * 100_000
    headers = CIMultiDictProxy(CIMultiDict())
    for fields in ('"program_id":"a"', '"session_params":{"session_id":"a"}', '"extra_body":{"program_id":"a"}'):
        turn = identify(None, headers, (f'{{"messages":[],{fields},"x":"{padding}"}}').encode())
        assert turn is not None
        assert turn.program_id == "a"
    bomb = ",".join(["{}"] * 40_000)
    turn = identify(None, headers, (f'{{"messages":[],"metadata":{{"session_id":"a","x":[{bomb}]}}}}').encode())
    assert turn is not None
    assert (turn.program_id, turn.bucket) == (None, "")
    with pytest.raises(InvalidProgramIdError):
        identify(None, headers, ('{"program_id":"%s"}' % ("a" * 100_000)).encode())
