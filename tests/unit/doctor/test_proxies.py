"""What the doctor says of a proxy's replicas."""

from __future__ import annotations

import json

import pytest

from thunderagent.doctor.asking import Answer
from thunderagent.doctor.findings import Level
from thunderagent.doctor.proxies import NOT_UP, Proxy, findings_of
from thunderagent.programs.state.health import ReplicaState


@pytest.mark.parametrize(
    ("verdict", "why_down", "remedy"),
    [
        ("frozen", "its polls are answered, but its turns have stood still for 13 s", "restart it"),
        ("down", "connection refused", "start it"),
        ("silent", "no poll was answered for 60 s", "reachable from the proxy's machine"),
    ],
)
def test_remedy_for_a_replica_that_is_not_up_fits_its_verdict(verdict: str, why_down: str, remedy: str) -> None:
    """A frozen one answers: to make it reachable is no help."""
    replica = {
        "replica_id": "10.0.0.1:8000",
        "up": False,
        "verdict": verdict,
        "why_down": why_down,
        "verdict_reason": "",
    }
    ready = Answer(503, json.dumps({"ready": False, "why": "no replica is up"}))
    proxy = Proxy("here", has_key=False, health=Answer(200), ready=ready)
    proxy.listed = Answer(200, json.dumps({"replicas": [replica]}))
    found = {each.check: each for each in findings_of(proxy, "http://127.0.0.1:8300", is_own=True)}
    assert found["replica_up"].level is Level.FAULT
    assert why_down in found["replica_up"].text
    assert remedy in found["replica_up"].remedy
    assert ("reachable" in found["replica_up"].remedy) == (verdict != "frozen")


def test_every_verdict_has_its_remedy() -> None:
    """Those that are not named are of a replica that cannot be reached."""
    assert {*NOT_UP, ReplicaState.UP, ReplicaState.DOWN, ReplicaState.SILENT} == {*ReplicaState}
