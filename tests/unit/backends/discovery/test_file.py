"""What a file may contain, and when it counts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.unit.backends.discovery.fakes import following
from thunderagent.backends.discovery import file as file_source
from thunderagent.backends.discovery.base import Wanted
from thunderagent.backends.discovery.file import FileSource, parse
from thunderagent.errors import DiscoveryError

if TYPE_CHECKING:
    from pathlib import Path

A, B = Wanted("http://a:1"), Wanted("http://b:2", 4)


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".txt", "http://a:1\n\n  http://b:2#dp=4  # big\n#http://c:3\n"),
        ("", "http://a:1/\r\nhttp://b:2#dp=4"),
        (".json", '["http://a:1", "http://b:2#dp=4"]'),
        (".json", '{"replicas": ["http://a:1", {"url": "http://b:2", "data_parallel_ranks": 4}]}'),
        (".toml", 'replicas = ["http://a:1", {url = "http://b:2", data_parallel_ranks = 4}]'),
        (".toml", '[[replicas]]\nurl = "http://a:1"\n[[replicas]]\nurl = "http://b:2"\ndata_parallel_ranks = 4\n'),
    ],
)
def test_a_file_is_read(suffix: str, text: str) -> None:
    assert parse(text.encode(), suffix) == [A, B]


@pytest.mark.parametrize(("suffix", "text"), [(".txt", "# none\n"), (".json", "[]"), (".toml", "replicas = []")])
def test_a_file_can_say_that_there_is_no_replica(suffix: str, text: str) -> None:
    assert parse(text.encode(), suffix) == []


@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        (".txt", b"", "empty"),
        (".txt", b" \n", "empty"),
        (".json", b"", "empty"),
        (".toml", b"\n", "empty"),
        (".txt", b"http://a:1\nhttp://b", None),
        (".txt", b"http://a:1\nhello\n", "'hello' is not an http or https URL"),
        (".txt", b"http://a:1\nhttp://a:1/\n", "http://a:1 is named twice"),
        (".txt", b"\xff\xfe", "cannot be read"),
        (".json", b'["http://a:1"', "cannot be read"),
        (".txt", b"http://a:1\0\n", "damaged"),
        (".txt", b"http://a:1\n\0\0\0\0", "damaged"),
        (".txt", b"\0" * 100, "damaged"),
        (".txt", b"http://a:1\nhttp://b\x1b:2\n", "damaged"),
        (".txt", b"http://a:1\x0c#http://b:2\n", "damaged"),
        (".txt", b"http://a:1\rhttp://b:2\n", "damaged"),
        (".txt", "http://a:1\x85http://b:2\n".encode(), "damaged"),
        (".toml", b'replicas = ["http://a:1"]\n\0', "damaged"),
        (".json", rb'["http://a\u0000:1"]', "not an http or https URL"),
        (".json", rb'["http://a\u2028:1"]', "not an http or https URL"),
        (".json", b"5", "one name, replicas"),
        (".json", b'{"replica": []}', "one name, replicas"),
        (".json", b'{"replicas": {}}', "list"),
        (".json", b'[{"url": "http://a:1", "dp": 3}]', "0.dp: Extra inputs"),
        (".json", b'[{"url": "http://a:1", "data_parallel_ranks": 0}]', "0.data_parallel_ranks"),
        (".json", b'[{"url": "http://a:1", "data_parallel_ranks": true}]', "0.data_parallel_ranks"),
        (".json", b"[5]", "^0: "),
        (".json", b"[" * 100_000, "cannot be read"),
        (".toml", b"replicas = [", "cannot be read"),
        (".toml", b"replicas = " + b"[" * 100_000, "cannot be read"),
        (".toml", b"replicas = [" + b"9" * 5000 + b"]", "cannot be read"),
        (".toml", b'[replicas]\nurl = "http://a:1"', "list"),
    ],
)
def test_a_file_that_is_not_wholly_right_is_refused(suffix: str, content: bytes, message: str | None) -> None:
    """The error says what is wrong, and where."""
    if message is None:
        assert len(parse(content, suffix)) == 2
        return
    with pytest.raises(DiscoveryError, match=message):
        parse(content, suffix)


async def test_a_change_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "replicas.txt"
    path.write_text("http://a:1\n")
    async with following(FileSource(path, interval_s=0.002)) as heard:
        await heard.until(lambda: heard.sets)
        await asyncio.sleep(0.05)
        assert heard.sets == [[A]]
        path.write_text("http://a:1\nhttp://b:2#dp=4\n")
        await heard.until(lambda: len(heard.sets) > 1)
        assert heard.sets == [[A], [A, B]]
        assert not heard.failures


async def test_wrong_file_is_reported_and_changes_no_replica(tmp_path: Path) -> None:
    """Missing, rubbish, a folder, too large: the last set stays."""
    path = tmp_path / "replicas.txt"
    async with following(FileSource(path, interval_s=0.002)) as heard:
        await heard.until(lambda: heard.failures)
        assert "No such file" in heard.failures[-1]
        assert str(path) in heard.failures[-1]
        path.write_text("http://a:1\n")
        await heard.until(lambda: heard.sets)
        for spoil, message in (
            (lambda: path.write_text("rubbish"), "'rubbish' is not an http"),
            (lambda: path.write_bytes(b"#" * (file_source.MOST_BYTES + 1)), "larger than"),
            (lambda: (path.unlink(), path.mkdir()), "directory"),
        ):
            spoil()
            await heard.until(lambda message=message: message in heard.failures[-1])
        assert heard.sets == [[A]]
        path.rmdir()
        path.write_text("http://a:1\n")
        await heard.until(lambda: len(heard.sets) == 2)


async def test_a_file_that_is_being_written_is_not_believed(tmp_path: Path) -> None:
    """The first half of it would be a complete but wrong set."""
    path = tmp_path / "replicas.txt"
    path.write_text("http://a:1\nhttp://b:2#dp=4\n")
    async with following(FileSource(path, interval_s=0.002)) as heard:
        await heard.until(lambda: heard.sets)
        with path.open("w") as slow:
            slow.write("http://a:1\n")
            for _ in range(8):
                slow.write("# more\n")
                slow.flush()
                await asyncio.sleep(file_source.SETTLE_S / 2)
            slow.write("http://b:2#dp=4\n")
        await heard.until(lambda: len(heard.sets) > 1)
        assert heard.sets == [[A, B], [A, B]]
