"""An encoder whose weights come and go gives the same bits as one with all weights in place."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch", reason="the extra `nova` is not installed")
pytest.importorskip("transformers", reason="the extra `nova` is not installed")

from tests.unit.nova import tiny  # noqa: E402
from thunderagent.nova.models import Vlm  # noqa: E402
from thunderagent.nova.offload import NullCopier, OffloadRing, resident_layers  # noqa: E402

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


def test_too_few_and_too_many_physical_layers_are_refused():
    vlm = Vlm(tiny.model("qwen2_5_vl"))
    for physical in (1, 6):
        with pytest.raises(ValueError, match="physical layers must be 2 to 5"):
            OffloadRing(list(vlm.encoder_layers), torch.device("cpu"), physical=physical, copier=NullCopier())


@pytest.mark.parametrize(
    ("pass_s", "bytes_per_s", "expected"), [(0.8, 16e9, 0), (0.127, 55e9, 14), (0.05, 25e9, 55), (0.01, 0.0, 64)]
)
def test_as_many_layers_stay_as_the_bus_cannot_carry(pass_s: float, bytes_per_s: float, expected: int):
    """Eq. 8 gives the number of layers that stay; the paper's card needs none."""
    assert resident_layers(64, 8.86e9, pass_s, bytes_per_s) == expected
