"""Measure Nova on a card: partitions (e0), stages on the whole device at once (e1), weights on the host (e2)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import nova_rig
from thunderagent_nova.engine import Engine
from thunderagent_nova.messages import Profile
from thunderagent_nova.offload import CudaCopier, NullCopier, OffloadRing, resident_layers
from thunderagent_nova.partition import DECODE, GreenPool, PartitionError
from thunderagent_nova.profile import Subject, alone, beside, run_as
from thunderagent_nova.workers import ENCODE, PREFILL

if TYPE_CHECKING:
    from benchmarks.nova import Bench

Note = Callable[[str, Any], None]


def partitions(device: torch.device, note: Note) -> None:
    """Measure the resulting SMs, whether a graph keeps them, the cost of a switch, and the bus speed."""
    if device.type != "cuda":
        pool = nova_rig.pool_for(device)
        note("cores", {"splits": pool.splits, "switch_us": _switch_us(pool)})
        return
    torch.zeros(1, device=device)
    free_before = torch.cuda.mem_get_info(device)[0]
    try:
        pool = nova_rig.pool_for(device)
    except PartitionError as error:
        note("refused", str(error))
        return
    assert isinstance(pool, GreenPool)
    free_after = torch.cuda.mem_get_info(device)[0]
    note("splits", [(split, pool.rest_units(split)) for split in pool.splits])
    note("read_back", pool.realised())
    note("context_memory_mb", (free_before - free_after) / 2**20)
    _speed_by_split(device, pool, note)
    note("switch_us", _switch_us(pool))
    _bus(device, note)


def _speed_by_split(device: torch.device, pool: GreenPool, note: Note) -> None:
    """Time one product on lanes, as calls and as a graph: with fewer SMs it must be slower in proportion."""
    left = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(left)
    rows = []
    for split in (None, *pool.splits[::4], pool.splits[-1]):
        stream = pool.stream(DECODE, split)
        with torch.cuda.stream(stream):
            for _ in range(3):
                torch.mm(left, left, out=out)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            torch.mm(left, left, out=out)
            graph.capture_end()
        called = _event_ms(stream, lambda: torch.mm(left, left, out=out))
        replayed = _event_ms(stream, graph.replay)
        elsewhere = _event_ms(pool.stream(DECODE, None), graph.replay)
        rows.append({"split": split, "called_ms": called, "graph_ms": replayed, "graph_on_the_whole_ms": elsewhere})
    note("a product of 4096 by lane", rows)


def _event_ms(stream: Any, run: Callable[[], Any], repeats: int = 30) -> float:
    times = []
    with torch.cuda.stream(stream):
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return statistics.median(times[5:])


def _switch_us(pool: Any) -> dict[str, float]:
    """Time a change of lanes on the host, without and with the wait for the device."""
    lanes = [None, *pool.splits[:2]]
    with pool.enter(ENCODE, None):
        pool.mark().synchronize()
        begin_s = time.perf_counter()
        for index in range(600):
            pool.move(ENCODE, lanes[index % len(lanes)])
        host_s = time.perf_counter() - begin_s
        pool.mark().synchronize()
        whole_s = time.perf_counter() - begin_s
    return {"host": host_s / 600 * 1e6, "until_done": whole_s / 600 * 1e6}


def _bus(device: torch.device, note: Note) -> None:
    host = torch.empty(128 * 2**20, dtype=torch.uint8).pin_memory()
    on_card = torch.empty_like(host, device=device)
    stream = torch.cuda.Stream(device)
    milliseconds = _event_ms(stream, lambda: on_card.copy_(host, non_blocking=True), 20)
    note("pinned_to_card_gb_per_s", host.numel() / milliseconds / 1e6)


def graphs_agree(engine: Engine, subject: Subject) -> dict[str, bool]:
    """Return whether each lane's graph gives the tokens of a plain call."""
    rows = [turn.row for turn in subject.batch]
    agree: dict[str, bool] = {}

    def compare() -> None:
        with torch.inference_mode():
            called = engine.stepper.step(rows, None, plainly=True)
            for split in (None, *subject.pool.splits):
                agree[str(split)] = engine.stepper.step(rows, split) == called

    run_as(DECODE, compare)
    return agree


def beside_whole(subject: Subject, profile: Profile, repeats: int, batch: int) -> dict[str, float]:
    """Run stages concurrently on the whole device, as multi-stream does."""
    told = {}
    for stage, alone_s in ((ENCODE, profile.encode_s), (PREFILL, profile.prefill_s)):
        front_s, step_s = beside(subject, stage, None, repeats, batch)
        told |= {f"{stage}_s": front_s, f"decode_beside_{stage}_s": step_s,
                 f"gain_{stage}": alone_s / front_s + profile.decode_s[batch] / step_s - 1}  # fmt: skip
    return told


async def offload(bench: Bench, requests: int) -> None:
    """Time the encoder with its weights in place and with 2 to 5 physical layers, alone and serving."""
    vlm, engine = bench.engine(())
    await bench.started(engine, vlm)
    subject = nova_rig.subject_of(engine, bench.size, vlm, batch=1)
    layers = list(vlm.encoder_layers)
    whole_bytes = sum(p.numel() * p.element_size() for layer in layers for p in layer.parameters())
    raw_s = alone(subject, ENCODE, 6, 1)
    rate = 0.6 / (raw_s + alone(subject, PREFILL, 6, 1))
    bench.options.requests = requests
    served = (await bench.run(engine, "nova", None, rate, "raw")).figures()
    bench.note("raw", {"encode_s": raw_s, "layer_bytes": whole_bytes, "rate_per_s": rate, **served})
    host: dict[int, torch.Tensor] = {}
    bus_per_s = _ring_bytes_per_s(bench.device, whole_bytes // len(layers))
    needed = resident_layers(len(layers), whole_bytes, raw_s, 0.9 * bus_per_s)
    bench.note("resident", {"needed": needed, "bus_gb_per_s": bus_per_s / 1e9})
    settings = [(2, 0), (3, 0), (4, 0), (5, 0), *([(2, min(needed, len(layers) - 2))] if needed else [])]
    for physical, resident in settings:
        copier = CudaCopier(bench.device) if bench.device.type == "cuda" else NullCopier()
        ring = OffloadRing(
            layers, bench.device, physical=physical, resident=resident, copier=copier, host=host
        )  # fmt: skip
        engine.stages.lend(ring)
        encode_s = alone(subject, ENCODE, 6, 1)
        name = f"K={physical} R={resident}"
        served = (await bench.run(engine, "nova", None, rate, name)).figures()
        on_card = ring.device_bytes + whole_bytes * resident // len(layers)
        bench.note(name, {"encode_s": encode_s, "layer_bytes": on_card, **served})
        engine.stages.lend(None)
        ring.put_back()
    await engine.stop()


def _median_s(run: Callable[[], Any], repeats: int = 6) -> float:
    times = []
    with torch.inference_mode():
        for _ in range(repeats):
            begin_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin_s)
    return statistics.median(times[1:])


def _ring_bytes_per_s(device: torch.device, layer_bytes: int) -> float:
    host = torch.empty(layer_bytes, dtype=torch.uint8)
    host = host.pin_memory() if device.type == "cuda" else host
    there = torch.empty_like(host, device=device)

    def copy() -> None:
        there.copy_(host, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return layer_bytes / _median_s(copy, 10)
