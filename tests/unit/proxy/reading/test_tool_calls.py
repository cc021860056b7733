"""The tool that an answer calls, in every API, however the answer is cut."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.proxy.reading.answers import StreamUsage, read_answer
from thunderagent.proxy.reading.dialects.openai import OpenAI
from thunderagent.proxy.reading.dialects.tool_calls import (
    MAX_CALLS,
    MAX_KEPT_CHARS,
    MAX_KEY_CHARS,
    StreamToolCalls,
    first_word,
)

# --- The word of a command


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("pytest -x", "pytest"),
        ("cd /repo && pytest", "pytest"),
        ("cd '/my repo'; cd tests && ls", "ls"),
        ("cd /repo", "cd"),
        ("FOO=1 BAR='a b' make test", "make"),
        ("export FOO=1 && set -e; source venv/bin/activate\nmake", "make"),
        (". venv/bin/activate && make", "make"),
        ("sudo -u root apt-get install x", "apt-get"),
        ("sudo timeout -k 5 60s nice -n 10 env A=1 cargo build", "cargo"),
        ("time ./run_tests.sh fast", "run_tests.sh"),
        ("/usr/bin/python3 setup.py", "python3"),
        ("python -m pytest tests", "pytest"),
        (".venv/bin/python3.11 -u -m mypy", "mypy"),
        ("bash -lc 'cd x && pytest'", "pytest"),
        ("bash run.sh", "bash"),
        ("# first, look\n\nls -la", "ls"),
        ("(cd x && git status)", "git"),
        ("timeout 60 \\\n  pytest", "pytest"),
        ("cat <<'EOF' > a.py\nimport os\nEOF", "cat"),
        ("ls|wc", "ls"),
        ("python - <<'EOF'\nEOF", "python"),
        ("env", "env"),
        ("sudo", "sudo"),
        ("", ""),
        ("  \n ;;", ""),
        ("/", ""),
    ],
)
def test_the_word_of_a_command_says_what_it_does(command: str, word: str) -> None:
    """Preparations, variables and wrappers are skipped, paths are cut off."""
    assert first_word(command) == word


@given(st.text(alphabet="cd sudo=;&'\"\\/-m\nsh$(#.1", max_size=200))
def test_any_command_has_a_word_or_none(command: str) -> None:
    """No command loops or raises, and a word has no space in it."""
    assert not any(character.isspace() for character in first_word(command))


@pytest.mark.parametrize(
    "piece", ["/", "a=", "a='' ", "sudo -", "sudo ", "cd ", "#\n", "bash -c ", "python -m ", '"', "- "]
)
def test_a_long_odd_command_is_read_at_once(piece: str) -> None:
    """The pattern does not backtrack without end."""
    first_word((piece * MAX_KEPT_CHARS)[:MAX_KEPT_CHARS])


# --- Whole answers


def chat(*calls: tuple[str, object], content: str | None = None) -> dict[str, object]:
    tool_calls = [
        {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    return {"id": "1", "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}], "usage": {}}


def tool_of_answer(body: bytes, content_encoding: str | None) -> str:
    return read_answer(OpenAI(), body, content_encoding, lambda _: None)[1]


def tool_of(answer: object) -> str:
    return tool_of_answer(json.dumps(answer).encode(), None)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ('{"command": "cd /repo && pytest -x"}', "shell:pytest"),
        ('{"timeout": 5, "cmd": "ls -la"}', "shell:ls"),
        ('{"command": ["bash", "-lc", "cd x && pytest [a]"], "workdir": "/"}', "shell:pytest"),
        ('{"command": ["rg", "--files"]}', "shell:rg"),
        ('{"command": "echo \\"command\\": x"}', "shell:echo"),
        ('{"command": "\\n\\tmake \\u0061ll"}', "shell:make"),
        ('{"content": "\\"command\\": \\"rm\\"", "path": "x"}', "shell"),
        ('{"command": ""}', "shell"),
        ('{"command": 5}', "shell"),
        ('{"command": []}', "shell"),
        ('{"command": "grep \\d x"}', "shell:grep"),
        ('{"command": "cat > x <<EOF\\nnever en', "shell:cat"),
        ('{"command": ["bash", "-lc", "git comm', "shell:git"),
        ('{"path": "x"}', "shell"),
        ("", "shell"),
        ("no JSON", "shell"),
        ({"command": "an object, not its text"}, "shell:an"),
        (None, "shell"),
    ],
)
def test_a_shell_is_told_apart_by_its_command(arguments: object, key: str) -> None:
    """The command may be in any field and form; all other tools go by their own names."""
    assert tool_of(chat(("shell", arguments))) == key


def test_calls_made_together_have_one_key_in_any_order() -> None:
    """The key has at most three names, each once."""
    names = ["write", "read", "bash", "read", "ask"]
    assert tool_of(chat(*((name, "{}") for name in names))) == "ask+bash+read"
    assert tool_of(chat(*((name, "{}") for name in reversed(names)))) == "ask+bash+read"


def test_a_key_is_short_and_printable() -> None:
    """Logs and labels have it."""
    key = tool_of(chat(("wör\nk tool", json.dumps({"command": "x" * 1000}))))
    assert len(key) == MAX_KEY_CHARS
    assert key.startswith("w_r_k_tool:xxx")


def test_answer_of_the_messages_api_calls_its_tool() -> None:
    """A tool's input is an object there."""
    block = {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "npm test"}}
    assert tool_of({"type": "message", "content": [{"type": "text", "text": "ok"}, block]}) == "Bash:npm"


def test_answer_of_the_responses_api_calls_its_tool() -> None:
    """A call is an output item there."""
    call = {"type": "function_call", "name": "shell", "arguments": '{"command":["bash","-lc","go test"]}'}
    patch = {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch"}
    output = [{"type": "reasoning", "summary": []}, call, patch, {"type": "message", "content": []}]
    assert tool_of({"object": "response", "output": output}) == "apply_patch+shell:go"


LOCAL_SHELL = {"type": "local_shell_call", "action": {"type": "exec", "command": ["bash", "-lc", "go test"]}}
HOSTED_SHELL = {"type": "shell_call", "action": {"commands": ["cd x && make", "ls"], "timeout_ms": 1000}}


@pytest.mark.parametrize(("call", "key"), [(LOCAL_SHELL, "shell:go"), (HOSTED_SHELL, "shell:make")])
def test_shells_of_the_responses_api_are_calls(call: dict[str, object], key: str) -> None:
    """They have no name, and an action instead of arguments; this covers whole answers and streams."""
    assert tool_of({"object": "response", "output": [call]}) == key
    calls = StreamToolCalls()
    calls.read(event({"type": "response.output_item.done", "output_index": 0, "item": call}))
    assert calls.key() == key


def test_text_of_sglang_calls_its_tool() -> None:
    """It may be whole, or a stream in which each event repeats the text before it."""
    text = "look:\n```bash\ngit status\n```\n"
    assert tool_of({"text": text, "meta_info": {}}) == "bash:git"
    calls = StreamToolCalls()
    for end in (5, 10, 20, len(text)):
        calls.read(event({"text": text[:end], "meta_info": {}}))
    assert calls.key() == "bash:git"


@pytest.mark.parametrize("fence", ["bash", "sh", "shell", "mswea_bash_command"])
def test_a_text_with_one_shell_block_calls_a_shell(fence: str) -> None:
    """Agents without tool calls write their commands this way."""
    text = f"THOUGHT: look `first`\n\n```{fence}\ncd /testbed && grep -rn x\n```\n"
    assert tool_of(chat(content=text)) == "bash:grep"
    assert tool_of({"choices": [{"index": 0, "text": text}]}) == "bash:grep"


@pytest.mark.parametrize(
    "text", ["```bash\nls\n```\nor\n```bash\npwd\n```", "```python\nls\n```", "say ```bash", "```bash\n```", "``` bash"]
)
def test_plain_text_calls_nothing(text: str) -> None:
    """Cases are two blocks, other languages, and an empty block."""
    assert tool_of(chat(content=text)) == ""


def test_tool_calls_go_before_text() -> None:
    """An agent with tools may explain itself with a block."""
    assert tool_of(chat(("read", "{}"), content="```bash\nls\n```")) == "read"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"tool_calls"',
        b'{"choices":[{"message":{"tool_calls":"x"}}]}',
        b'{"choices":[{"message":{"tool_calls":[{"function":{"name":5}}]}}]}',
        b'{"choices":[{"message":{"tool_calls":[{"function":{"name":"a","arguments":"\\ud800"}}]}}]}',
        b'{"choices":[{"message":{"tool_calls":[{"function":null}]}}]}',
        b'{"choices":[],"x":"```"}',
        b'{"content":"```bash\\nls"}',
        b'{"a":"tool_use","b":' + b"[" * 5000,
    ],
)
def test_unreadable_answer_calls_nothing(body: bytes) -> None:
    """The client still gets it unchanged."""
    assert tool_of_answer(body, None) == ""


def test_an_encoded_answer_is_read() -> None:
    """This holds for known encodings."""
    body = json.dumps(chat(("read", "{}"))).encode()
    assert tool_of_answer(gzip.compress(body), "gzip") == "read"
    assert tool_of_answer(body, "br") == ""
    assert tool_of_answer(b"broken", "gzip") == ""


# --- Streams


def event(data: object, name: str = "") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def delta(choice_index: int = 0, /, **fields: object) -> bytes:
    return event({"id": "1", "choices": [{"index": choice_index, "delta": fields, "finish_reason": None}]})


def call_piece(index: int, arguments: str, name: str | None = None) -> dict[str, object]:
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return {"index": index, "function": function}


CHAT_STREAM = b"".join(
    [
        delta(role="assistant", content=""),
        delta(content="I look\u2028at ", tool_calls=None),
        delta(tool_calls=[call_piece(0, "", "bash")]),
        delta(tool_calls=[call_piece(0, '{"comm')]),
        delta(1, tool_calls=[call_piece(0, "{}", "of_another_choice")]),
        delta(tool_calls=[call_piece(0, 'and":"cd /x && py')]),
        delta(tool_calls=[call_piece(0, 'test \\"tests\\""}')]),
        delta(tool_calls=[call_piece(1, "{}", "read")]),
        event("[DONE]"),
    ]
)
TEXT_STREAM = b"".join(
    [
        *(delta(content=text) for text in ["THOUGHT", ": so\n\n", "```", "bash", "\n", "cd /", "x && ", "gr", "ep x"]),
        delta(content="\n```"),
        event("[DONE]"),
    ]
)
COMPLETION_STREAM = b"".join(
    event({"id": "1", "choices": [{"index": 0, "text": text}]}) for text in ["so\n```sh\n", "make", " all\n```\n"]
)
MESSAGES_STREAM = b"".join(
    event(data, data["type"])
    for data in [
        {"type": "message_start", "message": {"content": []}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hm"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "Bash", "input": {}}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"command'}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '":"ls -a'}},
        {"type": "content_block_stop", "index": 1},
    ]
)
SHELL_CALL = {"type": "function_call", "name": "shell", "arguments": '{"command":["bash","-lc","cd x && ls"]}'}
RESPONSES_STREAM = b"".join(
    event(data, str(data["type"]))
    for data in [
        {"type": "response.output_item.added", "output_index": 0, "item": {**SHELL_CALL, "arguments": ""}},
        {"type": "response.function_call_arguments.delta", "output_index": 0, "delta": '{"command":'},
        {"type": "response.output_item.done", "output_index": 0, "item": SHELL_CALL},
        {"type": "response.completed", "response": {"output": [SHELL_CALL], "usage": {}}},
    ]
)
STREAMS = {
    CHAT_STREAM: "bash:pytest+read",
    TEXT_STREAM: "bash:grep",
    COMPLETION_STREAM: "bash:make",
    MESSAGES_STREAM: "Bash:ls",
    RESPONSES_STREAM: "shell:ls",
    delta(content="no ") + delta(content="call") + event("[DONE]"): "",
}


def tool_of_stream(*pieces: bytes, take_out: bool = False) -> str:
    calls = StreamToolCalls()
    stream = StreamUsage(take_out=take_out, listener=calls.read)
    relayed = b"".join(stream.feed(piece) for piece in pieces) + stream.rest()
    assert relayed == b"".join(pieces)
    return calls.key()


@pytest.mark.parametrize("take_out", [True, False])
@pytest.mark.parametrize("stream", STREAMS, ids=STREAMS.values())
def test_a_stream_split_at_every_byte_calls_the_same(stream: bytes, take_out: bool) -> None:
    """This holds wherever the network cuts; no relayed byte is changed."""
    for at in range(len(stream) + 1):
        assert tool_of_stream(stream[:at], stream[at:], take_out=take_out) == STREAMS[stream]
    every_byte = (stream[at : at + 1] for at in range(len(stream)))
    assert tool_of_stream(*every_byte, take_out=take_out) == STREAMS[stream]


def test_a_stream_of_crlf_and_comments_is_read() -> None:
    """Other servers write events this way."""
    stream = b": ping\r\n\r\n" + CHAT_STREAM.replace(b"\n", b"\r\n")
    assert tool_of_stream(stream) == "bash:pytest+read"


def test_an_encoded_stream_is_read() -> None:
    """The listener gets the decoded content."""
    calls = StreamToolCalls()
    StreamUsage(take_out=True, content_encoding="gzip", listener=calls.read).feed(gzip.compress(CHAT_STREAM))
    assert calls.key() == "bash:pytest+read"


def test_kept_part_of_a_stream_is_bounded() -> None:
    """A written file, a flood of calls, a long text: their beginnings suffice."""
    calls = StreamToolCalls()
    calls.read(delta(tool_calls=[call_piece(0, '{"command":"cat > x <<EOF', "bash")]))
    for _ in range(100):
        calls.read(delta(tool_calls=[call_piece(0, "x" * 1000)]))
    for index in range(1, 100):
        calls.read(delta(tool_calls=[call_piece(index, "", "bash")]))
    calls.read(delta(content="```bash\n"))
    for _ in range(100):
        calls.read(delta(content="x" * 1000))
    kept = [arguments for _, arguments in calls._calls.values()]
    assert len(kept) == MAX_CALLS
    assert len(kept[0]) == MAX_KEPT_CHARS
    assert len(calls._text or "") == MAX_KEPT_CHARS
    assert calls.key() == "bash+bash:cat"


KNOWN_KEYS = (
    "choices message delta tool_calls function name arguments index content type content_block item output input text"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("```bash\nls\n```"),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from(KNOWN_KEYS.split()) | st.text(max_size=3), children, max_size=4)
    ),
    max_leaves=15,
)


@given(JSON)
def test_any_answer_and_any_event_is_survived(value: object) -> None:
    """Wrong types anywhere give no error."""
    marked = {"x": ["tool_calls", "tool_use", "```"], **value} if isinstance(value, dict) else value
    assert isinstance(tool_of(marked), str)
    calls = StreamToolCalls()
    calls.read(event(marked) + event({"choices": [{"index": 0, "delta": marked}]}))
    assert isinstance(calls.key(), str)
