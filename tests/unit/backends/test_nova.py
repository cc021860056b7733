"""NovaBackend's reading of metrics, and its messages to Nova about programs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.backends import backend_of
from thunderagent.backends.base import NOTHING_READ, ReplicaReading
from thunderagent.backends.nova import NovaBackend

SAMPLE = """\
# HELP nova:slots Requests that fit at the same time.
# TYPE nova:slots gauge
nova:slots 16.0
nova:slot_tokens 2048.0
nova:slots_used 4.0
nova:slots_kept 3.0
nova:num_requests_running 3.0
nova:num_requests_waiting 5.0
nova:pending_encode 6.0
nova:pending_encode_of_a_later_version 600.0
"""
CHAT = "/v1/chat/completions"


def read(exposition: str) -> ReplicaReading:
    return NovaBackend().read_metrics(exposition)


def test_the_capacity_is_slots_times_tokens() -> None:
    """16 requests of 2048 tokens; a quarter of the slots is used."""
    assert read(SAMPLE) == ReplicaReading(
        capacity_tokens=32768, kv_used_ratio=0.25, running_count=3, waiting_count=5, pending_encode_count=6
    )


def test_missing_figure_is_unknown() -> None:
    """It is never zero."""
    assert read("") == NOTHING_READ
    assert read("nova:slots 0\nnova:slot_tokens 2048\nnova:slots_used 0\n") == NOTHING_READ
    assert read("nova:slots NaN\nnova:slot_tokens 2048\nnova:pending_encode -1\n") == NOTHING_READ
    assert read("nova:pending_encode 0\n") == ReplicaReading(pending_encode_count=0)


@given(st.text())
def test_no_exposition_raises(exposition: str) -> None:
    """This holds whatever answers there."""
    read(exposition)
    read(f"nova:slots {exposition}")


def test_nova_is_detected_by_its_metrics() -> None:
    """The other kinds are detected this way, too."""
    backend = backend_of("auto")
    assert backend.read_metrics(SAMPLE).capacity_tokens == 32768
    assert (backend.kind, backend.notices) == ("nova", NovaBackend().notices)
    assert (backend.info_paths, backend.priorities, backend.readiness_path) == ((), None, "")
    assert backend_of("nova").read_info("{}") is None


def test_a_turn_is_tagged_if_that_is_wished_for() -> None:
    """Nothing else of the body changes."""
    notices = NovaBackend().notices
    named = notices.name_turn(CHAT, b' {"a": 1}', 'p "1"', tags_programs=True)
    assert json.loads(named.body) == {"program_id": 'p "1"', "a": 1}
    assert named.body.endswith(b'"a": 1}')
    assert (named.is_tagged, named.engine_request_id) == (True, "")


@pytest.mark.parametrize(
    ("path", "body", "program_id", "tags_programs"),
    [
        (CHAT, b'{"a": 1}', "p", False),
        (CHAT, b'{"a": 1}', None, True),
        (CHAT, b"{ }", "p", True),
        (CHAT, b"", "p", True),
        (CHAT, b"[1]", "p", True),
        (CHAT, b'[{"a": 1}]', "p", True),
        ("/tokenize", b'{"a": 1}', "p", True),
    ],
)
def test_unrelated_bodies_are_left_as_they_are(
    path: str, body: bytes, program_id: str | None, tags_programs: bool
) -> None:
    """These are requests that are no turns, are anonymous, or have no object."""
    named = NovaBackend().notices.name_turn(path, body, program_id, tags_programs=tags_programs)
    assert (named.body, named.is_tagged) == (body, False)


def test_the_end_of_a_program_gives_its_slot_back() -> None:
    """`/release` does this."""
    notice = NovaBackend().notices.program_ended("p")
    assert (notice.path, json.loads(notice.body)) == ("/release", {"program_id": "p"})
