"""The core's events from a replica's readings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thunderagent.backends import backend_of
from thunderagent.backends.base import ReplicaReading
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.backends.vllm_plugin import PluginReport
from thunderagent.programs.messages import EncodesPolled, Event, ReplicaDown, ReplicaPolled, ReplicaUp, TierPolled
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.fleet.client import ClientSettings, ReplicaClient
from thunderagent.proxy.fleet.polls import Polls
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.runtime import Runtime


def overheard() -> tuple[Runtime, list[Event]]:
    """Return a runtime, and its events."""
    runtime = Runtime(Scheduler(Cap(n=1)), clock=lambda: 1.0)
    events: list[Event] = []
    runtime.observe(lambda event, _: events.append(event))
    return runtime, events


def reading(queries: float | None, hits: float | None, preemptions: float | None = None) -> ReplicaReading:
    return ReplicaReading(
        capacity_tokens=1000,
        cache_query_tokens_total=queries,
        cache_hit_tokens_total=hits,
        preemptions_total=preemptions,
    )


def polled(
    hit_ratio: float | None = None, query_tokens: int | None = None, preemption_count: int | None = None
) -> ReplicaPolled:
    return ReplicaPolled(1.0, "r0", 1000, hit_ratio, query_tokens, preemption_count)


def heard(*readings: ReplicaReading) -> list[Event]:
    """Return the core's events from successive readings."""
    runtime, events = overheard()
    polls = Polls(runtime, Replicas(runtime, [ReplicaEndpoint("r0", "http://r0", backend_of("vllm"))]))
    for each in readings:
        polls.replica_polled("r0", each)
    return events


@pytest.mark.parametrize(("override_tokens", "expected_tokens"), [(None, 900), (1150, 900), (800, 800)])
def test_what_the_engines_scheduler_has_is_the_most_that_counts(
    override_tokens: int | None, expected_tokens: int
) -> None:
    """As soon as it is known, by the next poll."""
    runtime, events = overheard()
    replicas = Replicas(runtime, [ReplicaEndpoint("r0", "http://r0", backend_of("vllm"))])
    polls = Polls(runtime, replicas, capacity_override_tokens=override_tokens)
    polls.replica_polled("r0", ReplicaReading(capacity_tokens=1000))
    replicas.plugins.came_up("r0")
    replicas.plugins._take(
        replicas.plugins._by_replica["r0"], "r0", [PluginReport(protocol=1, is_on=True, capacity_tokens=900)]
    )
    polls.replica_polled("r0", ReplicaReading(capacity_tokens=1000))
    told = [event.capacity_tokens for event in events if isinstance(event, ReplicaPolled)]
    assert told == [override_tokens or 1000, expected_tokens][: 2 if expected_tokens != override_tokens else 1]


def test_the_load_of_an_engine_is_told_when_it_changes() -> None:
    """It has the fill of its memory and its queue, for policies that go by the engine's own gauges."""
    idle = ReplicaReading(capacity_tokens=1000, kv_used_ratio=0.0, waiting_count=0)
    busy = ReplicaReading(capacity_tokens=1000, kv_used_ratio=0.75, waiting_count=3)
    events = heard(idle, idle, busy, busy)
    told = [(event.kv_used_ratio, event.engine_waiting_count) for event in events if isinstance(event, ReplicaPolled)]
    assert told[-1] == (0.75, 3)
    assert told.count((0.75, 3)) == 1


def test_the_first_reading_says_the_capacity_alone() -> None:
    """Totals alone show nothing."""
    assert heard(reading(500, 100, 7)) == [polled()]


def test_a_reading_says_what_happened_since_the_one_before() -> None:
    """It reports the growth of each total."""
    assert heard(reading(500, 100, 7), reading(1500, 600, 9), reading(1600, 600, 9)) == [
        polled(),
        polled(0.5, 1000, 2),
        polled(0.0, 100, 0),
    ]


def test_a_quiet_replica_is_not_heard_of() -> None:
    """It has no lookups, no preemptions, and the same size."""
    assert heard(reading(500, 100, 7), reading(500, 100, 7)) == [polled()]


def test_preemptions_are_heard_of_without_any_look_up() -> None:
    """The ratio is unknown then; that nothing was looked up is known."""
    assert heard(reading(500, 100, 7), reading(500, 100, 8))[1:] == [polled(None, 0, 1)]


@pytest.mark.parametrize("after", [(60, 5, 0), (10, 5, 9), (900, 5, 9), (900, 200, 0)])
def test_an_engine_that_began_again_says_nothing_until_the_next_reading(after: tuple[int, int, int]) -> None:
    """One total that shrank is enough: all restarted, and the core is told that nothing is known."""
    queries, hits, preemptions = after
    again = reading(queries + 100, hits + 100, preemptions + 1)
    assert heard(reading(500, 100, 7), reading(*after), again)[1:] == [polled(), polled(1.0, 100, 1)]


@pytest.mark.parametrize(
    ("before", "after", "restarted"),
    [
        (ReplicaReading(started_s=100.0), ReplicaReading(started_s=200.0), True),
        (ReplicaReading(started_s=100.0), ReplicaReading(started_s=100.0), False),
        (reading(5000, 100, 7), reading(40, 0, 0), True),
        (reading(5000, 100, 7), reading(2500, 50, 3), False),
        (reading(0, 0, 0), reading(0, 0, 0), False),
        (reading(None, None, 7), reading(None, None, 0), True),
        (replace(reading(5000, 100), started_s=100.0), replace(reading(40, 0), started_s=100.0), False),
    ],
)
def test_an_engine_that_died_and_came_back_between_two_polls_begins_anew(
    before: ReplicaReading, after: ReplicaReading, restarted: bool
) -> None:
    """When its process began decides; where that is not said, counters that all fell to a small part."""
    runtime, events = overheard()
    polls = Polls(runtime, Replicas(runtime, [ReplicaEndpoint("r0", "http://r0", backend_of("vllm"))]))
    polls.replica_polled("r0", before)
    polls.replica_up("r0")
    events.clear()
    polls.replica_polled("r0", ReplicaReading())  # a poll that failed tells nothing
    polls.replica_polled("r0", after)
    found = [type(event) for event in events if isinstance(event, ReplicaDown | ReplicaUp)]
    assert found == ([ReplicaDown, ReplicaUp] if restarted else [])
    state = runtime.replicas.get("r0")
    assert state is not None
    assert (state.is_up, state.incarnation, state.verdict) == (True, int(restarted), "up")


def test_two_processes_that_answer_by_turns_restart_once() -> None:
    """They are behind one URL."""
    runtime, _ = overheard()
    polls = Polls(runtime, Replicas(runtime, [ReplicaEndpoint("r0", "http://r0", backend_of("vllm"))]))
    for started_s in (100.0, 200.0, 100.0, 200.0, 100.0):
        polls.replica_polled("r0", ReplicaReading(started_s=started_s))
        polls.replica_up("r0")
    state = runtime.replicas.get("r0")
    assert state is not None
    assert state.incarnation == 1


def test_a_reading_that_failed_takes_nothing_out_of_what_is_counted() -> None:
    """Otherwise what the engine found cached meanwhile would count as lost."""
    failed = ReplicaReading()
    assert heard(reading(500, 100), failed, failed, reading(1500, 600))[1:] == [polled(0.5, 1000)]


def test_figure_that_an_engine_does_not_report_stays_unknown() -> None:
    """Such engines report no preemptions, or no hits."""
    assert heard(reading(0, 0), reading(10, 5))[1:] == [polled(0.5, 10, None)]
    assert heard(reading(0, None, 0), reading(10, None, 0))[1:] == [polled(None, 10, 0)]
    assert heard(reading(None, None, 0), reading(None, None, 3))[1:] == [polled(None, None, 3)]


async def test_nothing_is_kept_of_priorities_on_a_replica_that_was_removed() -> None:
    """Pods come and go, each with its own address."""
    replicas = Replicas(overheard()[0], [])
    async with ReplicaClient(ClientSettings()) as client:
        replicas.attach(client)
        replicas.add(ReplicaEndpoint("r0", "http://r0", backend_of("vllm")))
        assert replicas.priorities.for_engine("r0", 7) is not None
        await replicas.remove("r0")
    assert not replicas.priorities._learned


def test_a_tier_is_told_of_by_what_was_asked_of_it_since() -> None:
    """Totals may restart; nothing is reported for an engine without a tier, or without queries to it."""
    runtime, events = overheard()
    polls = Polls(runtime, Replicas(runtime, [ReplicaEndpoint("r0", "http://r0", backend_of("vllm"))]))
    for asked, found in ((None, None), (100, 40), (100, 40), (250, 190), (30, 10), (60, 40)):
        told = ReplicaReading(
            capacity_tokens=1000,
            preemptions_total=0,
            tier_query_tokens_total=asked,
            tier_hit_tokens_total=found,
        )
        polls.replica_polled("r0", told)
    told_of = [(event.query_tokens, event.hit_tokens) for event in events if isinstance(event, TierPolled)]
    assert told_of == [(100, 40), (150, 150), (30, 30)]


def test_tier_that_was_never_read_is_not_reported() -> None:
    """The engine may have run for days: its totals are not only from the last poll on."""
    runtime, events = overheard()
    polls = Polls(runtime, Replicas(runtime, [ReplicaEndpoint("r0", "http://r0", backend_of("vllm"))]))
    for asked, found in ((1_000_000, 400_000), (1_000_100, 400_040)):
        told = ReplicaReading(
            capacity_tokens=1000, preemptions_total=0, tier_query_tokens_total=asked, tier_hit_tokens_total=found
        )
        polls.replica_polled("r0", told)
    told_of = [(event.query_tokens, event.hit_tokens) for event in events if isinstance(event, TierPolled)]
    assert told_of == [(100, 40)]


def test_images_to_encode_are_told_until_the_core_knows_as_many() -> None:
    """The core counts one for each turn until the next poll, so an unchanged reading may be news."""
    runtime, events = overheard()
    polls = Polls(runtime, Replicas(runtime, [ReplicaEndpoint("r0", "http://r0", backend_of("nova"))]))
    four = ReplicaReading(capacity_tokens=1000, pending_encode_count=4)
    for _ in range(3):
        polls.replica_polled("r0", four)
    account = runtime.scheduler.ledger.accounts["r0"]
    assert account.pending_encode_count is not None
    account.pending_encode_count += 1  # as for a turn
    polls.replica_polled("r0", four)
    polls.replica_polled("r0", ReplicaReading(capacity_tokens=1000))
    assert [event for event in events if isinstance(event, EncodesPolled)] == [EncodesPolled(1.0, "r0", 4)] * 2
    assert runtime.scheduler.ledger.accounts["r0"].pending_encode_count == 4


@pytest.mark.parametrize(("kind", "expected"), [("sglang", ("m", "/step-2")), ("vllm", ("/step-2",))])
def test_engine_that_takes_any_name_keeps_the_one_that_it_had(kind: str, expected: tuple[str, ...]) -> None:
    """SGLang calls its model by the folder of its last weights; another process is another model."""
    runtime, _ = overheard()
    polls = Polls(runtime, Replicas(runtime, [ReplicaEndpoint("r0", "http://r0", backend_of(kind))]))
    for number, name in enumerate(("m", "/step-1", "/step-2")):
        polls.replica_polled("r0", ReplicaReading(models=(name,), started_s=100.0))
        if not number:
            polls.replica_up("r0")
    assert runtime.pools.listing_of("r0") == expected
    polls.replica_polled("r0", ReplicaReading(models=("other",), started_s=200.0))
    assert runtime.pools.listing_of("r0") == ("other",)
