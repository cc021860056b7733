"""VllmBackend's readings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from thunderagent.backends import BACKENDS, backend_of
from thunderagent.backends.base import NOTHING_READ, ReplicaReading
from thunderagent.backends.vllm import VllmBackend, read_kv_event_sources
from thunderagent.errors import ConfigurationError

REAL_SAMPLE = Path(__file__).parent / "vllm_0_32_metrics.txt"

TWO_RANKS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="64000",num_gpu_blocks="3000"} 1.0
vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="48000",num_gpu_blocks="3000"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 900.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:num_preemptions_total{engine="1",model_name="m"} 1.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="m"} 1.77e+09
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 500.0
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.77e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 800.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 100.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 5555.0
"""


def read(exposition: str) -> ReplicaReading:
    return VllmBackend().read_metrics(exposition)


def capacity_of(*labels: str) -> int | None:
    return read("\n".join(f"vllm:cache_config_info{{{each}}} 1.0" for each in labels)).capacity_tokens


def test_counts_are_summed_over_ranks_and_ratios_averaged() -> None:
    """One reading describes a replica of two data-parallel ranks; `_created` times are in no sum."""
    assert read(TWO_RANKS) == ReplicaReading(
        capacity_tokens=112_000,
        kv_used_ratio=0.375,
        running_count=7,
        waiting_count=2,
        preemptions_total=8.0,
        cache_query_tokens_total=1500.0,
        cache_hit_tokens_total=900.0,
    )


def test_a_real_engine_is_read() -> None:
    """A vLLM 0.32 reported this under load: one rank, 14 requests on a pool of 500 blocks of 32 tokens."""
    assert read(REAL_SAMPLE.read_text()) == ReplicaReading(
        capacity_tokens=16_000,
        kv_used_ratio=0.687374749498998,
        running_count=4,
        waiting_count=10,
        preemptions_total=1.0,
        cache_query_tokens_total=1_367_472.0,
        cache_hit_tokens_total=883_968.0,
        computed_tokens_total=467_375.0,
        generated_tokens_total=26_370.0,
        iterations_total=8149.0,
        progress_total=1_383_846.0,
        uncached_ranks_count=0,
        started_s=1795193117.28,
    )


def test_a_version_that_does_not_say_what_it_computed_says_what_it_found() -> None:
    """All prompt tokens but those found in the pool were computed."""
    said = 'vllm:prompt_tokens_total{engine="0"} 900.0\nvllm:prefix_cache_hits_total{engine="0"} 400.0\n'
    assert read(said).computed_tokens_total == 500.0
    assert read('vllm:prompt_tokens_total{engine="0"} 900.0\n').computed_tokens_total is None


def test_a_tier_is_known_once_it_was_asked() -> None:
    """Without a KV connector both counters exist and are zero; with one they are summed over ranks."""
    counters = 'vllm:external_prefix_cache_{0}_total{{engine="{1}"}} {2}.0\n'.format
    assert read(counters("queries", 0, 0) + counters("hits", 0, 0)) == NOTHING_READ
    asked = (
        counters("queries", 0, 500) + counters("queries", 1, 100) + counters("hits", 0, 300) + counters("hits", 1, 0)
    )
    assert read(asked) == ReplicaReading(tier_query_tokens_total=600.0, tier_hit_tokens_total=300.0)


def test_old_names_are_read_where_the_new_are_absent() -> None:
    """An engine from before 0.12 is read by its own names."""
    old = """\
vllm:gpu_cache_usage_perc{model_name="m"} 0.75
vllm:gpu_prefix_cache_queries_total{model_name="m"} 40.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 30.0
"""
    assert read(old) == ReplicaReading(kv_used_ratio=0.75, cache_query_tokens_total=40.0, cache_hit_tokens_total=30.0)


def test_the_new_name_wins_over_the_old() -> None:
    """An engine that exposes both generations of a name is not counted twice."""
    both = "vllm:gpu_cache_usage_perc 0.1\nvllm:kv_cache_usage_perc 0.9\n"
    assert read(both).kv_used_ratio == 0.9


def test_names_are_matched_whole() -> None:
    """A name that only begins like one we need, or has an extra namespace, is another metric."""
    alike = """\
vllm:num_requests_waiting_by_reason{reason="capacity"} 5.0
vllm:num_requests_running_max 9.0
sglang:num_requests_running 3.0
my_vllm:num_requests_running 3.0
"""
    assert read(alike) == NOTHING_READ


@pytest.mark.parametrize(
    ("labels", "capacity_tokens"),
    [
        pytest.param(['kv_cache_size_tokens="64000"'], 64_000, id="exact"),
        pytest.param(['kv_cache_size_tokens="64000",num_gpu_blocks="9",block_size="16"'], 64_000, id="exact-wins"),
        pytest.param(['num_gpu_blocks="500",block_size="32"'], 16_000, id="blocks"),
        pytest.param(
            ['kv_cache_size_tokens="None",num_gpu_blocks="500",block_size="32"'],
            16_000,
            id="none-then-blocks",
        ),
        pytest.param(['kv_cache_size_tokens="0",num_gpu_blocks="500",block_size="32"'], 16_000, id="zero-then-blocks"),
        pytest.param(['num_gpu_blocks="None",block_size="32"'], None, id="blocks-none"),
        pytest.param(['num_gpu_blocks="0",block_size="32"'], None, id="blocks-zero"),
        pytest.param(['num_gpu_blocks="500"'], None, id="no-block-size"),
        pytest.param(['kv_cache_size_tokens="-5"'], None, id="negative"),
        pytest.param(['kv_cache_size_tokens="1e5"'], None, id="not-a-whole-number"),
        pytest.param(['kv_cache_size_tokens="' + "9" * 5000 + '"'], None, id="absurd"),
        pytest.param(['enable_prefix_caching="True"'], None, id="absent"),
        pytest.param([], None, id="no-metric"),
        pytest.param(
            ['engine="0",kv_cache_size_tokens="100"', 'engine="1",kv_cache_size_tokens="None"'],
            None,
            id="a-rank-unknown",
        ),
        pytest.param(
            ['engine="0",kv_cache_size_tokens="0"', 'engine="1",kv_cache_size_tokens="0"'],
            None,
            id="all-zero",
        ),
        pytest.param(
            ['engine="0",kv_cache_size_tokens="100"', 'engine="0",kv_cache_size_tokens="None"'],
            100,
            id="stale-none-of-the-same-rank",
        ),
        pytest.param(
            [f'engine="{rank}",num_gpu_blocks="2000",block_size="16"' for rank in range(2)],
            32_000,
            id="blocks-are-those-of-all-ranks",
        ),
        pytest.param(
            [f'engine="0",num_gpu_blocks="{blocks}",block_size="16"' for blocks in ("2000", "None")],
            32_000,
            id="stale-blocks-of-the-same-rank",
        ),
    ],
)
def test_capacity_is_read(labels: list[str], capacity_tokens: int | None) -> None:
    """Capacity is the exact label, else blocks times their size, and never zero or a sum over some ranks."""
    assert capacity_of(*labels) == capacity_tokens


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e300", "9" * 400])
def test_values_that_mean_nothing_are_not_numbers(value: str) -> None:
    """NaN, infinity, a negative or an absurd value leaves its field unread."""
    exposition = "\n".join(
        f'{name}{{engine="0"}} {value}'
        for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total")
    )
    assert read(exposition) == NOTHING_READ


@pytest.mark.parametrize(
    "broken",
    [
        'vllm:num_requests_running{engine="0",engine="1"} 1.0',
        'vllm:num_requests_running{engine="0} 1.0',
        'vllm:num_requests_running{engine="0"}',
        'vllm:num_requests_running{engine="0"} many',
        'vllm:num_requests_running{,,engine="0"} 1.0',
        "vllm:num_requests_running",
    ],
)
def test_a_broken_line_costs_only_itself(broken: str) -> None:
    """An exposition with one broken line still gives everything else."""
    reading = read(f"{broken}\nvllm:num_requests_waiting 4.0\n")
    assert (reading.running_count, reading.waiting_count) == (None, 4)


@pytest.mark.parametrize("garbage", ["", "\n\n", "<html>502</html>", '{"detail":"Not Found"}', "\0\ufffd"])
def test_total_garbage_gives_an_empty_reading(garbage: str) -> None:
    """Text that is no exposition at all gives an empty reading."""
    assert read(garbage) == NOTHING_READ


@given(st.lists(st.tuples(st.sampled_from(TWO_RANKS.splitlines()), st.text(max_size=6), st.integers(0, 120))))
def test_no_damage_raises(damages: list[tuple[str, str, int]]) -> None:
    """Lines cut and overwritten anywhere never raise and never give a capacity of zero."""
    reading = read("\n".join(line[:at] + text + line[at + len(text) :] for line, text, at in damages))
    assert reading.capacity_tokens is None or reading.capacity_tokens > 0


def test_windows_line_ends_are_read() -> None:
    """A relay that rewrites line ends changes nothing."""
    assert read(TWO_RANKS.replace("\n", "\r\n")) == read(TWO_RANKS)


def test_metrics_written_by_prometheus_client_are_read() -> None:
    """vLLM exposes its metrics with this library; its output, `_created` samples included, is understood."""
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Running", ["engine"], registry=registry).labels("0").set(2)
    Counter("vllm:prefix_cache_hits", "Hits", ["engine"], registry=registry).labels("0").inc(64)
    Histogram("vllm:e2e_request_latency_seconds", "Latency", ["engine"], registry=registry).labels("0").observe(1)
    reading = read(generate_latest(registry).decode())
    assert reading == ReplicaReading(running_count=2, cache_hit_tokens_total=64.0)


def test_backend_of_knows_each_kind_by_its_name() -> None:
    """The registry's keys are the backends' own kinds."""
    assert {kind: backend_of(kind).kind for kind in BACKENDS} == {kind: kind for kind in BACKENDS}


def test_an_unknown_kind_is_a_configuration_error_that_names_the_known() -> None:
    """The error for a misspelt kind names the right ones."""
    with pytest.raises(ConfigurationError, match=r"unknown backend 'vlm'; known are: .*vllm"):
        backend_of("vlm")


def test_the_size_of_a_tier_is_that_in_host_memory_of_all_ranks() -> None:
    name = "vllm:kv_offload_config_info"
    sizes = [("0", "1000", "cpu"), ("0", "", "disk"), ("1", "500", "cpu"), ("2", "None", "cpu")]
    lines = [
        f'{name}{{engine="{rank}",cpu_kv_cache_size_tokens="{size}",tier="{tier}"}} 1.0' for rank, size, tier in sizes
    ]
    assert read("\n".join(lines)).tier_tokens == 1500
    assert read(lines[1]).tier_tokens is None
    assert read("").tier_tokens is None


@pytest.mark.parametrize(
    ("said", "rank", "expected"),
    [
        (
            {"0": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}},
            0,
            ("tcp://h:5557", None),
        ),
        ({"0": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}}, 1, None),
        ({"0": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://10.0.0.9:5557"}}, 0, None),
        ({"0": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "ipc:///tmp/x"}}, 0, None),
        ({"0": {"enable_kv_cache_events": False, "publisher": "zmq", "endpoint": "tcp://*:5557"}}, 0, None),
        ({"0": {"enable_kv_cache_events": True, "publisher": "null", "endpoint": "tcp://*:5557"}}, 0, None),
        ({}, 0, None),
        ([], 0, None),
        ({"0": {"endpoint": 5}}, 0, None),
    ],
)
def test_endpoint_of_kv_events_is_read(said: object, rank: int, expected: tuple[str, str | None] | None) -> None:
    assert read_kv_event_sources(json.dumps(said).encode(), "h", rank) == expected
    assert read_kv_event_sources(b"\xff", "h", rank) is None


@pytest.mark.parametrize(
    ("words", "count"),
    [(["True"], 0), (["False"], 1), (["True", "False"], 1), (["None"], None), ([], None), (["maybe"], None)],
)
def test_ranks_whose_prefix_cache_is_off_are_counted(words: list[str], count: int | None) -> None:
    """None: nothing was said."""
    lines = [
        f'vllm:cache_config_info{{enable_prefix_caching="{word}",engine="{rank}"}} 1.0'
        for rank, word in enumerate(words)
    ]
    assert VllmBackend().read_metrics("\n".join(lines)).uncached_ranks_count == count
