"""What is learned about an engine's priorities, and for how long."""

from __future__ import annotations

from multidict import CIMultiDict

from thunderagent.backends import backend_of
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.backends.priority_field import with_priority
from thunderagent.proxy.fleet.known import KnownReplica
from thunderagent.proxy.fleet.priorities import EnginePriorities

CHAT = "/v1/chat/completions"


def test_a_refusal_is_remembered_until_the_replica_comes_up_again() -> None:
    """Another engine may run there then."""
    priorities = EnginePriorities({"r0": KnownReplica(ReplicaEndpoint("r0", "http://r0", backend_of("vllm")))}, 1.0)
    given = priorities.for_engine("r0", 7)
    assert given is not None
    how, priority = given
    assert how.put(CHAT, b'{"a": 1}', CIMultiDict(), priority) == b'{"priority":7,"a": 1}'
    priorities.refused("r0")
    assert priorities.for_engine("r0", 7) is None
    priorities.forget("r0")
    assert priorities.for_engine("r0", 7) is not None
    assert priorities.for_engine("gone", 7) is None
    priorities.refused("gone")


def test_only_the_engine_s_own_sentence_is_a_refusal() -> None:
    """A bad request may contain the word, too."""
    how = backend_of("vllm").priorities
    assert how is not None
    assert how.is_refusal(b"Got priority 7 but Priority scheduling is not enabled.")
    assert not how.is_refusal(b"the high-priority tool is not known")


def test_body_that_is_no_object_is_left_alone() -> None:
    """So is a body that already has one."""
    for body in (b"", b"[1]", b"{}", b" { } ", b'{"a": ', b'{"priority": null}', b'{"b": 1, "priority": 2}', b"\xff"):
        assert with_priority(body, 1) == body
    assert with_priority(b' { "a": {"priority": 2}}', -3) == b' {"priority":-3, "a": {"priority": 2}}'
