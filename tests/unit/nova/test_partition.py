"""Lanes are disjoint, made in order, and live as long as anything may have run on them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="what thunderagent-nova needs is not installed")

from thunderagent_nova.partition import DECODE, CorePool, GreenPool, NullPool, PartitionError, nearest  # noqa: E402

SMS = 132
GRANULE = 8


class FakeDriver:
    """Hands out SMs as Hopper's driver does: in eights, disjoint, the rest unchanged. Records its calls."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, *, contexts_at_most: int = 1000) -> None:
        self.log: list[tuple[str, object]] = []
        self.alive: dict[int, frozenset[int]] = {}
        self.streams: dict[int, int] = {}
        self._contexts_at_most = contexts_at_most
        self._next = 100

    @staticmethod
    def _resource(sms: range):
        return SimpleNamespace(sm=SimpleNamespace(smCount=len(sms)), sms=frozenset(sms))

    def _new(self) -> int:
        self._next += 1
        return self._next

    def cuDeviceGet(self, index):  # noqa: N802
        return 0, index

    def cuDeviceGetDevResource(self, device, kind):  # noqa: N802
        return 0, self._resource(range(SMS))

    def cuDevSmResourceSplitByCount(self, groups, whole, flags, count):  # noqa: N802
        assert (groups, flags, len(whole.sms)) == (1, 0, SMS)
        rounded = -(-count // GRANULE) * GRANULE
        return 0, [self._resource(range(rounded))], 1, self._resource(range(rounded, SMS))

    def cuDevResourceGenerateDesc(self, resources, count):  # noqa: N802
        assert len(resources) == count == 1
        return 0, resources[0]

    def cuGreenCtxCreate(self, descriptor, device, flags):  # noqa: N802
        if len(self.alive) >= self._contexts_at_most:
            return 2, None
        context = self._new()
        self.alive[context] = descriptor.sms
        self.log.append(("context", context))
        return 0, context

    def cuGreenCtxStreamCreate(self, context, flags, priority):  # noqa: N802
        assert context in self.alive
        assert flags == 1, "a stream that waits for the default stream would serialise the lanes"
        stream = self._new()
        self.streams[stream] = context
        self.log.append(("stream", stream))
        return 0, stream

    def cuGreenCtxGetDevResource(self, context, kind):  # noqa: N802
        return 0, self._resource(range(len(self.alive[context])))

    def cuStreamSynchronize(self, stream):  # noqa: N802
        assert stream in self.streams
        self.log.append(("wait", stream))
        return (0,)

    def cuStreamDestroy(self, stream):  # noqa: N802
        del self.streams[stream]
        self.log.append(("destroy stream", stream))
        return (0,)

    def cuGreenCtxDestroy(self, context):  # noqa: N802
        assert context not in self.streams.values(), "its streams go first"
        del self.alive[context]
        self.log.append(("destroy context", context))
        return (0,)


def pool_of(driver: FakeDriver, *counts: int) -> GreenPool:
    whole = SimpleNamespace(units=SMS, name="a card", stream=lambda stage, split: f"whole {stage}")
    return GreenPool(driver, torch.device("cuda:0"), counts, lambda handle: handle, whole)


def test_the_two_lanes_of_each_split_are_disjoint_and_cover_the_device():
    driver = FakeDriver()
    pool = pool_of(driver, 8, 16, 40)
    assert pool.splits == (8, 16, 40)
    assert pool.realised() == [(8, 124), (16, 116), (40, 92)]
    for split in pool.splits:
        decode, rest = (driver.alive[driver.streams[pool.stream(stage, split)]] for stage in (DECODE, "encode"))
        assert not decode & rest
        assert len(decode | rest) == SMS
        assert (len(decode), pool.rest_units(split)) == (split, len(rest))
        assert pool.stream("encode", split) == pool.stream("prefill", split), "they never run beside each other"


def test_size_rounded_by_the_driver_is_learned_from_the_result():
    """Counts of 5 and 8 are both 8 SMs: it is one split, made once."""
    driver = FakeDriver()
    assert pool_of(driver, 5, 8, 17).splits == (8, 24)
    assert len(driver.alive) == 4


def test_each_context_comes_before_its_stream_and_lives_on_after_the_pool_closes():
    """PyTorch uses streams when it frees their memory, later than any close: so close only waits."""
    driver = FakeDriver()
    pool = pool_of(driver, 8, 16)
    assert [what for what, _ in driver.log] == ["context", "stream"] * 4
    alive, driver.log = dict(driver.alive), []
    pool.close()
    assert driver.alive == alive
    assert sorted(driver.log) == sorted(("wait", stream) for stream in driver.streams)


def test_a_driver_that_refuses_half_way_gets_back_what_it_gave_the_last_first():
    driver = FakeDriver(contexts_at_most=3)
    with pytest.raises(PartitionError, match="cuGreenCtxCreate: 2"):
        pool_of(driver, 8, 16)
    assert not driver.alive
    assert not driver.streams
    destroyed = [which for what, which in driver.log if what == "destroy context"]
    assert destroyed == sorted(destroyed, reverse=True)


def test_without_a_split_each_stage_has_the_whole_device():
    pool = pool_of(FakeDriver(), 8)
    assert pool.stream(DECODE, None) == "whole decode"
    assert pool.stream("encode", None) == "whole encode"


@pytest.mark.parametrize(("split", "expected"), [(None, None), (7, 8), (8, 8), (23, 16), (100, 24)])
def test_a_split_that_is_not_there_becomes_the_next_smaller(split, expected):
    assert nearest((8, 16, 24), split) == expected
    assert nearest((), 8) is None


def test_cores_of_a_split_are_disjoint_and_all_of_them_are_used():
    pool = CorePool((0, 1, 2, 3))
    assert pool.splits == (1, 2, 3)
    for split in pool.splits:
        decode, rest = pool.cores(DECODE, split), pool.cores("encode", split)
        assert len(decode) == split
        assert not set(decode) & set(rest)
        assert {*decode, *rest} == {0, 1, 2, 3}
    assert pool.cores(DECODE, None) == pool.cores("prefill", None) == (0, 1, 2, 3)


def test_a_stage_and_its_team_of_threads_run_on_the_cores_of_their_lane():
    """The affinity of every thread that a stage's products run on is the lane's, before and after a move.

    A core alone cannot be split: there every lane is that core.
    """
    pool = CorePool()
    seen: list[tuple[tuple[int, ...], int, set[frozenset[int]]]] = []

    def run() -> None:
        left = torch.randn(512, 512)
        with pool.enter("encode", None):
            left @ left
            seen.append((pool.cores("encode", None), torch.get_num_threads(), _team("nova-encode")))
            pool.move("encode", 1)
            left @ left
            seen.append((pool.cores("encode", 1), torch.get_num_threads(), _team("nova-encode")))
            pool.move("encode", None)
            left @ left
            seen.append((pool.cores("encode", None), torch.get_num_threads(), _team("nova-encode")))

    for _ in range(2):  # the second thread of a stage is moved as the first one was
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(seen) == 6
    for cores, threads, team in seen:
        assert threads == len(cores)
        assert team == {frozenset(cores)}


def _team(name: str) -> set[frozenset[int]]:
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().strip() == name]
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in tasks}


def test_single_lane_changes_nothing():
    pool = NullPool()
    with pool.enter("encode", None):
        pool.move("encode", 3)
        pool.mark().synchronize()
    assert pool.splits == ()
