"""Sources, the admin API, engines and turns act at random; the replicas end up in the wanted state."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.proxy.fleet.discovery_setup import A, B, C, Setup
from thunderagent.backends.discovery import Wanted
from thunderagent.backends.discovery.base import replica_id_of
from thunderagent.errors import NotFoundError, ReplicaLeavingError
from thunderagent.proxy.fleet.discovery import API, DiscoverySettings

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

SOURCES = st.sampled_from(["file", "dns"])
URLS = st.sampled_from([A, B, C])
WANTED = st.builds(Wanted, URLS, st.sampled_from([None, None, 2]), st.booleans())
SETS = st.lists(WANTED, max_size=3, unique_by=lambda each: each.url)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that waits for nothing external, without a loop."""
    with suppress(StopIteration):
        while True:
            work.send(None)


@pytest.fixture(autouse=True)
def _nothing_is_logged() -> Iterator[None]:
    """Hypothesis shows the steps; the log of all examples would bury them."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


class DiscoveryMachine(RuleBasedStateMachine):
    """In any order of events all parts agree on each replica; once nothing is in flight, it is in the wanted state."""

    @initialize()
    def begin(self) -> None:
        self.setup = Setup(DiscoverySettings(drain_limit_s=60.0))
        self.discovery = self.setup.discovery
        self.sets: dict[str, dict[str, Wanted]] = {API: {}}
        self.refused: set[str] = set()
        self.drained: set[str] = set()

    def teardown(self) -> None:
        if not hasattr(self, "sets"):
            return
        self.settle()
        for source in self.sets:
            if source != API:
                self.discovery.replicas_wanted(source, [])
        for replica_id in list(self.setup.replicas.known):
            self.discovery.remove(replica_id)
        self.everything_ends()
        assert self.setup.known == []
        assert not self.setup.runtime.scheduler.replicas
        assert not self.setup.runtime.scheduler.ledger.accounts

    def endpoints(self, *sets: dict[str, Wanted]) -> dict[str, Wanted]:
        """The replicas that some sets name."""
        return {
            replica_id_of(each.url, rank): each
            for wanted in sets
            for each in wanted.values()
            for rank in (range(2) if each.ranks_count == 2 else [None])
        }

    def forget_refusals(self) -> None:
        self.refused &= set(self.endpoints(*self.sets.values()))

    @rule(source=SOURCES, wanted=SETS)
    def a_source_says(self, source: str, wanted: list[Wanted]) -> None:
        self.discovery.replicas_wanted(source, wanted)
        self.sets[source] = {each.url: each for each in wanted}
        self.forget_refusals()

    @rule(source=SOURCES)
    def a_source_fails(self, source: str) -> None:
        self.discovery.source_failed(source, "oh")

    @rule(url=URLS)
    def the_api_adds(self, url: str) -> None:
        wanted = Wanted(url)
        self.discovery.add(wanted)
        self.sets[API][url] = wanted
        self.refused -= set(self.endpoints({url: wanted}))
        self.forget_refusals()

    @rule(data=st.data(), force=st.booleans())
    def the_api_removes(self, data: st.DataObject, force: bool) -> None:
        if not self.setup.replicas.known:
            return
        replica_id = data.draw(st.sampled_from(sorted(self.setup.replicas.known)))
        self.refused.add(replica_id)
        mine = self.sets[API]
        for url, wanted in list(mine.items()):
            if set(self.endpoints({url: wanted})) <= self.refused:
                del mine[url]
        self.forget_refusals()
        if force:
            run(self.discovery.remove_now(replica_id))
        else:
            self.discovery.remove(replica_id)

    @rule(data=st.data(), undo=st.booleans())
    def the_api_drains(self, data: st.DataObject, undo: bool) -> None:
        replica_id = data.draw(st.sampled_from([*sorted(self.setup.replicas.known), "nobody"]))
        try:
            (self.discovery.undrain if undo else self.discovery.drain)(replica_id)
        except NotFoundError:
            assert replica_id == "nobody"
        except ReplicaLeavingError:
            assert replica_id in self.setup.leaving()

    @rule(data=st.data(), up=st.booleans())
    def an_engine_changes(self, data: st.DataObject, up: bool) -> None:
        if self.setup.replicas.known:
            replica_id = data.draw(st.sampled_from(sorted(self.setup.replicas.known)))
            if up:
                self.setup.comes_up(replica_id)
            else:
                self.setup.polls.replica_down(replica_id, "oh")

    @rule(data=st.data(), count=st.integers(0, 2))
    def requests_run(self, data: st.DataObject, count: int) -> None:
        if self.setup.connections.open:
            self.setup.connections.open[data.draw(st.sampled_from(sorted(self.setup.connections.open)))] = count

    @rule(elapsed_s=st.floats(0, 40))
    def time_passes(self, elapsed_s: float) -> None:
        self.setup.now_s += elapsed_s
        run(self.discovery.remove_drained())

    def everything_ends(self) -> None:
        for _ in range(2):  # a replica with another name leaves, and comes again
            for replica_id in self.setup.connections.open:
                self.setup.connections.open[replica_id] = 0
            run(self.discovery.remove_drained())

    @rule()
    def settle(self) -> None:
        """End everything in flight; then the state is the wanted state."""
        self.everything_ends()
        wanted = set(self.endpoints(*self.sets.values())) - self.refused
        assert set(self.setup.known) == wanted
        assert self.setup.leaving() == []

    @invariant()
    def nothing_is_open_that_should_not_be(self) -> None:
        if not hasattr(self, "setup"):
            return
        known = self.setup.replicas.known
        assert list(known) == self.setup.known
        usable = {name for name, each in known.items() if each.is_up and each.draining_since_s is None}
        assert set(self.setup.open) == usable
        going = {
            name
            for wanted in self.sets.values()
            for name, each in self.endpoints(wanted).items()
            if each.is_draining and name not in self.refused
        }
        for name, replica in known.items():
            if replica.leaving_since_s is not None or name in going:
                assert replica.draining_since_s is not None
            assert bool(replica.sources) == (replica.leaving_since_s is None)


DiscoveryMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestDiscovery = DiscoveryMachine.TestCase
