"""A profile measures every split of the pool, and reads back as it was written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="what thunderagent-nova needs is not installed")
pytest.importorskip("transformers", reason="what thunderagent-nova needs is not installed")

from tests.unit.nova import tiny  # noqa: E402
from thunderagent_nova.engine import Engine, EngineConfig  # noqa: E402
from thunderagent_nova.messages import Profile, Request, SplitTimes  # noqa: E402
from thunderagent_nova.models import Vlm  # noqa: E402
from thunderagent_nova.partition import CorePool, NullPool  # noqa: E402
from thunderagent_nova.profile import Subject, load, measure, save, warm  # noqa: E402
from thunderagent_nova.scheduler import Scheduler  # noqa: E402
from thunderagent_nova.workers import Turn  # noqa: E402


def subject(pool) -> Subject:
    vlm = Vlm(tiny.model("qwen2_5_vl"))
    engine = Engine(vlm, pool, Scheduler(slots=3), EngineConfig(slots=3, slot_tokens=128, batch_buckets=(1,)))
    turns = []
    for slot in range(3):
        prompt = tiny.prompt("qwen2_5_vl", slot)
        request = Request(str(slot), prompt, 5)
        turns.append(Turn(request, vlm.layout(prompt), [None], missing=[0], slot=slot, tokens=[3]))
    return Subject(engine.stages, engine.pool, turns[2], turns[:2])


def test_every_split_and_batch_is_measured(tmp_path):
    pool = CorePool()
    measured = subject(pool)
    before = os.sched_getaffinity(0), Path("/proc/thread-self/comm").read_text()
    warm(measured)
    profile = measure(measured, repeats=2, batch=2)
    assert (os.sched_getaffinity(0), Path("/proc/thread-self/comm").read_text()) == before, "who measures stays"
    assert [times.decode_units for times in profile.splits] == list(pool.splits)
    assert all(times.decode_units + times.rest_units == pool.units for times in profile.splits)
    assert set(profile.decode_s) == {1, 2}
    assert min(profile.encode_s, profile.prefill_s, *profile.decode_s.values()) > 0
    save(profile, tmp_path / "profile.json", about={"device": "cpu"})
    assert load(tmp_path / "profile.json") == profile


class RefusingPool(NullPool):
    """Has two splits; a library refuses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.units, self.splits = 8, (2, 6)

    def enter(self, stage, split):
        if (stage, split) == ("prefill", 6):
            raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
        return super().enter(stage, split)


def test_a_split_that_a_library_refuses_is_left_out_and_told():
    """cuBLAS refuses a remainder of twelve SMs."""
    refused = []
    measured = subject(RefusingPool())
    profile = measure(measured, repeats=1, batch=1, on_refused=lambda split, error: refused.append((split, str(error))))
    assert [times.decode_units for times in profile.splits] == [2]
    assert refused == [(6, "CUBLAS_STATUS_EXECUTION_FAILED")]
    with pytest.raises(RuntimeError, match="EXECUTION_FAILED"):
        measure(measured, repeats=1, batch=1)


def test_a_file_without_a_profile_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"about": {}}')
    with pytest.raises(ValueError, match="holds no profile"):
        load(path)


def test_a_profile_keeps_batches_as_numbers(tmp_path):
    profile = Profile("card", 8, 0.2, 0.1, {1: 0.01, 16: 0.02}, (SplitTimes(2, 6, 0.3, 0.2, 0.02, 0.03),))
    save(profile, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == profile
