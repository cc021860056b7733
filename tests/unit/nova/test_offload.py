"""An encoder whose weights come and go gives the same bits as one with all weights in place."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch", reason="what thunderagent-nova needs is not installed")
pytest.importorskip("transformers", reason="what thunderagent-nova needs is not installed")

from tests.unit.nova import tiny  # noqa: E402
from thunderagent_nova.graphs import Stepper  # noqa: E402
from thunderagent_nova.messages import Request  # noqa: E402
from thunderagent_nova.models import Vlm  # noqa: E402
from thunderagent_nova.offload import NullCopier, OffloadRing, resident_layers  # noqa: E402
from thunderagent_nova.partition import NullPool  # noqa: E402
from thunderagent_nova.workers import Job, Stages, Turn  # noqa: E402

LAYERS = 9


class LoggingCopier:
    """Records the order of recorded and awaited events, and their side."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, int]] = []
        self._side = "compute"
        self._events = 0

    def event(self):
        number, self._events = self._events, self._events + 1
        copier = self

        class Event:
            def record(self) -> None:
                copier.log.append((copier._side, "record", number))

            def wait(self) -> None:
                copier.log.append((copier._side, "wait", number))

        return Event()

    @contextmanager
    def stream(self):
        self._side = "copy"
        yield
        self._side = "compute"


class FailingCopier(NullCopier):
    """Has no room for a copy while it fails."""

    fails = False

    @contextmanager
    def stream(self):
        if self.fails:
            raise MemoryError("no room for a copy")
        yield


def _encode(vlm: Vlm, seed: int):
    with torch.inference_mode():
        return vlm.encode([tiny.image("qwen2_5_vl", seed)])[0].features


@pytest.mark.parametrize("physical", [2, 3, 5])
@pytest.mark.parametrize("resident", [0, 3])
def test_the_ring_is_bit_equal_over_consecutive_passes(physical: int, resident: int):
    whole, lent = (Vlm(tiny.model("qwen2_5_vl", encoder_layers=LAYERS)) for _ in range(2))
    ring = OffloadRing(
        list(lent.encoder_layers), torch.device("cpu"), physical=physical, resident=resident, copier=NullCopier()
    )
    lent.before_layer, lent.after_layer = ring.before, ring.after
    for seed in range(5):
        assert torch.equal(_encode(whole, seed), _encode(lent, seed))
    one = sum(parameter.numel() for parameter in whole.encoder_layers[0].parameters()) * 4
    assert ring.device_bytes == physical * one


def test_copies_and_passes_wait_for_each_other_in_order():
    """A layer computes after its copy is ready, and Eq. 7's layer overwrites it after that."""
    vlm = Vlm(tiny.model("qwen2_5_vl", encoder_layers=5))
    copier = LoggingCopier()
    ring = OffloadRing(list(vlm.encoder_layers), torch.device("cpu"), physical=2, copier=copier)
    ready, free = (0, 1), (2, 3)
    preload = [entry for k in (0, 1) for entry in (("copy", "wait", free[k]), ("copy", "record", ready[k]))]
    assert copier.log == preload
    copier.log.clear()
    vlm.before_layer, vlm.after_layer = ring.before, ring.after
    _encode(vlm, 1)
    expected = []
    for layer in range(5):
        k = layer % 2
        expected += [
            ("compute", "wait", ready[k]),
            ("compute", "record", free[k]),
            ("copy", "wait", free[k]),
            ("copy", "record", ready[k]),
        ]
    assert copier.log == expected
    assert ring._holds == {0: 1, 1: 0}, "the next pass finds its first layers there: 3 + 2 mod 5 and 4 + 2 mod 5"


@pytest.mark.parametrize("fails_at", range(5))
@pytest.mark.parametrize("is_copy", [False, True])
def test_a_pass_that_fails_halfway_leaves_the_next_one_its_weights(fails_at: int, is_copy: bool):
    """The ring begins anew, whichever layer or copy failed."""
    whole, lent = (Vlm(tiny.model("qwen2_5_vl", encoder_layers=5)) for _ in range(2))
    copier = FailingCopier()
    ring = OffloadRing(list(lent.encoder_layers), torch.device("cpu"), physical=2, copier=copier)
    pool = NullPool()
    stages = Stages(lent, lent.cache(1, 8), pool, Stepper(lent, lent.cache(1, 8), pool, (1,)), group=8, ring=ring)
    before = stages._vlm.before_layer

    def fail(layer: int) -> None:
        if layer == fails_at and not is_copy:
            raise MemoryError(f"no room for layer {layer}")
        before(layer)
        copier.fails = is_copy and layer == fails_at

    def encode(seed: int):
        prompt = tiny.prompt("qwen2_5_vl", seed)
        turn = Turn(Request("a", prompt, 1), lent.layout(prompt), [None], missing=[0])
        with torch.inference_mode():
            return stages.encode(Job((turn,), None))[0].features, whole.encode(prompt.images)[0].features

    lent.before_layer = fail
    with pytest.raises(MemoryError):
        encode(1)
    copier.fails, lent.before_layer = False, before
    for seed in (2, 3):
        assert torch.equal(*encode(seed))


def test_too_few_and_too_many_physical_layers_are_refused():
    vlm = Vlm(tiny.model("qwen2_5_vl"))
    for physical in (1, 6):
        with pytest.raises(ValueError, match="physical layers must be 2 to 5"):
            OffloadRing(list(vlm.encoder_layers), torch.device("cpu"), physical=physical, copier=NullCopier())


@pytest.mark.parametrize(
    ("pass_s", "bytes_per_s", "expected"), [(0.8, 16e9, 0), (0.127, 55e9, 14), (0.05, 25e9, 55), (0.01, 0.0, 64)]
)
def test_resident_layers_are_those_that_the_bus_cannot_carry(pass_s: float, bytes_per_s: float, expected: int):
    """Eq. 8 gives the number of layers that stay; the paper's card needs none."""
    assert resident_layers(64, 8.86e9, pass_s, bytes_per_s) == expected
