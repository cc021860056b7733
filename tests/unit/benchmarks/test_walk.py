"""The counter of calls: only functions of the package count, each at its depth, and the usual count is taken."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.walk import WALKS, Call, Walk, counted, measure, usual
from thunderagent.compilation import build_kind
from thunderagent.proxy.gate.access import Use, use_of
from thunderagent.proxy.reading.target import Target

MOST_COUNTS = {"turn": (115, 27), "release": (32, 18)}
"""Calls of the shell, and the files that they are in, without what is under `programs/`; here each turn is logged."""

MOST_OF_RELEASE_COUNT = 60
"""All calls of a release, those of the core with them."""

MOST_FURTHER_OF_STREAM_COUNT = 15
"""How many calls more than a turn a stream of two tokens takes, with those of the core."""

pytestmark = pytest.mark.skipif(build_kind() != "interpreted", reason="compiled functions cannot be counted")


def walk_with(calls_count: int) -> Walk:
    return Walk([Call("a.py", "f", 0)] * calls_count)


def test_calls_of_the_package_are_counted_at_their_depth() -> None:
    """What Python and tests call themselves does not count; nothing counts after the block."""
    target = Target.parse("/v1/chat/completions")
    with counted() as walk:
        sorted([3, 1], key=lambda each: each)
        assert use_of(target, "POST") is Use.TURN
    use_of(target, "POST")
    names = [(call.name, call.depth) for call in walk.calls]
    assert names[0] == ("use_of", 0)
    assert all(depth == 1 for _, depth in names[1:])
    assert {call.file for call in walk.calls} == {"proxy/gate/access.py"}
    assert walk.files_count == 1


def test_the_count_that_most_have_is_taken() -> None:
    """A walk into which something else came is left out; of two counts that are as frequent the lower one counts."""
    assert len(usual([walk_with(count) for count in (7, 5, 5, 9, 5)]).calls) == 5
    assert len(usual([walk_with(count) for count in (7, 7, 5, 5)]).calls) == 5


@pytest.mark.timeout(300)
def test_each_walk_is_taken() -> None:
    """A turn passes the flow, the scheduler and the wire; a stream takes more calls; the others take some."""
    walks = asyncio.run(measure())
    assert tuple(walks) == WALKS
    assert all(walk.calls for walk in walks.values())
    files = {call.file for call in walks["turn"].calls}
    assert {"proxy/turns/flow.py", "programs/scheduler.py", "proxy/wire/http11/client.py"} <= files
    for name, (calls_count, files_count) in MOST_COUNTS.items():
        walk, shell = walks[name], Walk([call for call in walks[name].calls if not call.file.startswith("programs/")])
        assert len(shell.calls) <= calls_count, f"{name}: {len(walk.calls)} in all"
        assert shell.files_count <= files_count, f"{name}: {walk.files_count} in all"
    assert len(walks["release"].calls) <= MOST_OF_RELEASE_COUNT
    assert 0 < len(walks["stream of two tokens"].calls) - len(walks["turn"].calls) <= MOST_FURTHER_OF_STREAM_COUNT
    assert "ProgramsReleased" not in {call.name for call in walks["turn"].calls}
    assert any("release" in call.name for call in walks["release"].calls)
