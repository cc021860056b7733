"""SglangBackend's readings, and the bodies into which it puts names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from thunderagent.backends.base import NOTHING_READ, NamedTurn, ReplicaReading
from thunderagent.backends.sglang import SglangBackend
from thunderagent.backends.sglang_notices import SglangNotices

# SGLang 0.5.23 reports this with --enable-metrics-for-all-schedulers --enable-priority-scheduling, tp_size 4 and
# dp_size 2 with DP attention: each rank twice, and requests by priority beside all of them.
TWO_RANKS = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",pp_rank="0",priority="5",tp_rank="0"} 2.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="1"} 3.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="2"} 4.0
# TYPE sglang:num_running_reqs_offline_batch gauge
sglang:num_running_reqs_offline_batch{dp_rank="0",model_name="m",tp_rank="0"} 900.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{dp_rank="0",model_name="m",priority="",tp_rank="0"} 0.0
sglang:num_queue_reqs{dp_rank="1",model_name="m",priority="",tp_rank="2"} 2.0
# TYPE sglang:token_usage gauge
sglang:token_usage{dp_rank="0",model_name="m",tp_rank="0"} 0.5
sglang:token_usage{dp_rank="1",model_name="m",tp_rank="2"} 0.25
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{dp_rank="0",model_name="m",tp_rank="0"} 64000.0
sglang:max_total_num_tokens{dp_rank="0",model_name="m",tp_rank="1"} 64000.0
sglang:max_total_num_tokens{dp_rank="1",model_name="m",tp_rank="2"} 4.8e+04
sglang:max_total_num_tokens_swa{dp_rank="0",model_name="m",tp_rank="0"} 5.0
# TYPE sglang:kv_used_tokens gauge
sglang:kv_used_tokens{dp_rank="0",model_name="m",tp_rank="0"} 20000.0
sglang:kv_used_tokens{dp_rank="0",model_name="m",tp_rank="1"} 20000.0
sglang:kv_used_tokens{dp_rank="1",model_name="m",tp_rank="2"} 8000.0
# TYPE sglang:num_retracted_reqs gauge
sglang:num_retracted_reqs{dp_rank="0",model_name="m",pid="71",tp_rank="0"} 99.0
# TYPE sglang:num_retracted_requests_total counter
sglang:num_retracted_requests_total{dp_rank="0",model_name="m",tp_rank="0"} 7.0
sglang:num_retracted_requests_total{dp_rank="0",model_name="m",tp_rank="1"} 7.0
sglang:num_retracted_requests_total{dp_rank="1",model_name="m",tp_rank="2"} 1.0
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{dp_rank="0",model_name="m",tp_rank="0"} 0.99
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 1500.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",model_name="m"} 800.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 100.0
"""


def read(exposition: str) -> ReplicaReading:
    return SglangBackend().read_metrics(exposition)


def capacity_of(*samples: str) -> int | None:
    return read("\n".join(f"sglang:max_total_num_tokens{each}" for each in samples)).capacity_tokens


# --- metrics


def test_ranks_of_a_pool_count_once_and_pools_are_summed() -> None:
    """For each data-parallel rank the largest value counts; counts are summed over ranks, tokens over sources."""
    assert read(TWO_RANKS) == ReplicaReading(
        capacity_tokens=112_000,
        kv_used_ratio=0.25,
        running_count=7,
        waiting_count=2,
        preemptions_total=8.0,
        cache_query_tokens_total=1500.0,
        cache_hit_tokens_total=800.0,
        tier_query_tokens_total=700.0,
        tier_hit_tokens_total=100.0,
    )


def test_a_version_before_kv_used_tokens_gives_the_mean_of_its_usage() -> None:
    """Until April 2026 the used part of the pool was reported as a ratio only."""
    older = "\n".join(line for line in TWO_RANKS.splitlines() if "kv_used_tokens" not in line)
    assert read(older).kv_used_ratio == 0.375


def test_single_rank_has_no_label() -> None:
    """With dp_size 1 there is no `dp_rank`."""
    assert capacity_of('{model_name="m",tp_rank="0"} 1000.0', '{model_name="m",tp_rank="1"} 1000.0') == 1000


@pytest.mark.parametrize("samples", [(), ("{} 0.0",), ('{dp_rank="0"} 64000.0', '{dp_rank="1"} 0.0'), ("{} NaN",)])
def test_an_absent_or_empty_capacity_is_no_number(samples: tuple[str, ...]) -> None:
    """Older versions report 0 or nothing before the first batch; a sum over only some ranks is no pool's size."""
    assert capacity_of(*samples) is None


def test_an_engine_without_metrics_says_nothing() -> None:
    """Another engine's exposition has no metric that we read."""
    assert read("vllm:num_requests_running 3.0\n") == NOTHING_READ


def test_tokens_loaded_from_a_tier_were_not_in_the_pool() -> None:
    """HiCache's tiers are the host and some kind of storage; without them there is no figure for a tier."""
    cached = 'sglang:cached_tokens_total{{cache_source="{0}"}} {1}.0\n'.format
    asked = "sglang:prompt_tokens_total 900.0\n"
    reading = read(asked + cached("device", 400) + cached("host", 100) + cached("storage_HiCacheFile", 50))
    assert (reading.cache_hit_tokens_total, reading.tier_query_tokens_total, reading.tier_hit_tokens_total) == (
        400.0,
        500.0,
        150.0,
    )
    only_loaded = read(asked + cached("host", 100))
    assert (only_loaded.cache_hit_tokens_total, only_loaded.tier_query_tokens_total) == (0.0, 900.0)
    assert read(asked + cached("device", 400)).tier_hit_tokens_total is None


def test_metrics_written_by_prometheus_client_are_read() -> None:
    """SGLang exposes its metrics with this library: counters get `_total` once."""
    registry = CollectorRegistry()
    labels = {"model_name": "m", "tp_rank": "0"}
    Gauge("sglang:num_running_reqs", "Running", labels, registry=registry).labels(**labels).set(2)
    retracted = Counter("sglang:num_retracted_requests_total", "Retracted", labels, registry=registry)
    retracted.labels(**labels).inc(3)
    cached = Counter("sglang:cached_tokens_total", "Cached", ["cache_source"], registry=registry)
    cached.labels("total").inc(64)
    reading = read(generate_latest(registry).decode())
    assert reading == ReplicaReading(running_count=2, preemptions_total=3.0, cache_hit_tokens_total=64.0)


@given(st.text() | st.lists(st.sampled_from(TWO_RANKS.splitlines())).map("\n".join))
def test_reading_never_raises(exposition: str) -> None:
    """Whatever an engine sends, there is a reading."""
    read(exposition)
    SglangBackend().read_info(exposition)


# --- server information


@pytest.mark.parametrize(
    ("info", "capacity_tokens"),
    [
        ({"max_total_num_tokens": 1000, "dp_size": 1, "internal_states": []}, 1000),
        ({"max_total_num_tokens": 1000, "dp_size": 4}, 4000),
        (
            {
                "max_total_num_tokens": 1000,
                "dp_size": 2,
                "internal_states": [
                    {"memory_usage": {"token_capacity": 1000, "weight": 3.5}, "last_gen_throughput": 0.0},
                    {"memory_usage": {"token_capacity": 900}},
                ],
            },
            1900,
        ),
        ({"max_total_num_tokens": 1000, "dp_size": 2, "internal_states": [{"memory_usage": None}, {}]}, 2000),
        ({"max_total_num_tokens": 0}, None),
        ({"vllm_config": "..."}, None),
        ({"max_total_num_tokens": "many"}, None),
        ([], None),
    ],
)
def test_the_server_information_says_the_capacity_over_all_ranks(info: Any, capacity_tokens: int | None) -> None:
    """Each rank's own value counts if reported; else the first rank's times their number; never zero."""
    assert SglangBackend().read_info(json.dumps(info)) == capacity_tokens


# --- names

CHAT = "/v1/chat/completions"


def name(body: str, *, path: str = CHAT, program_id: str | None = "p/1", tags: bool = False) -> tuple[str, bool]:
    """Return what precedes the body's own members, its id written as ID, and whether it is tagged."""
    named = SglangNotices().name_turn(path, body.encode(), program_id, tags_programs=tags)
    text = named.body.decode()
    if named.engine_request_id:
        assert len(named.engine_request_id) == 32
        text = text.replace(named.engine_request_id, "ID")
    assert text.endswith(body.lstrip()[1:])
    return text.removesuffix(body.lstrip()[1:]), named.is_tagged


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, '{"messages":[{"role":"user","content":"n"}],"n":1}'),
        (CHAT, '  {"messages": []}'),
        ("/v1/completions", '{"prompt": "hello"}'),
        ("/v1/completions", '{"prompt": [ 1, 2 ], "n": null}'),
        ("/generate", '{"text": "a", "sampling_params": {"n": 1, "max_new_tokens": 3}}'),
        ("/generate", '{"text": null, "input_ids": [1, 2, 3], "stream": true}'),
    ],
)
def test_single_request_gets_our_id_at_its_front(path: str, body: str) -> None:
    """The rest of the body is as the client wrote it."""
    indent = body[: len(body) - len(body.lstrip())]
    assert name(body, path=path) == (f'{indent}{{"rid":"ID",', False)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, '{"messages":[],"rid":"mine"}'),
        (CHAT, '{"messages":[],"rid":null}'),
        (CHAT, '{"messages":[],"n":2}'),
        ("/v1/completions", '{"prompt": ["a", "b"]}'),
        ("/v1/completions", '{"prompt": [ [1], [2] ]}'),
        ("/generate", '{"text": ["a"]}'),
        ("/generate", '{"input_ids": [[1, 2]], "text": null}'),
        ("/generate", '{"text": "a", "sampling_params": {"n": 4}}'),
        ("/generate", '{"text": "a", "sampling_params": [{}]}'),
        ("/generate", '{"input_embeds": [[0.5]]}'),
        ("/v1/responses", '{"input": "a"}'),
        (CHAT, '{"messages":[],"seed":NaN}'),
        (CHAT, "[]"),
        (CHAT, "{"),
        (CHAT, ""),
    ],
)
def test_request_with_an_id_or_in_a_batch_is_left_as_it_is(path: str, body: str) -> None:
    """Older versions refuse one id for several prompts; a client's own id stays."""
    named = SglangNotices().name_turn(path, body.encode(), "p", tags_programs=False)
    assert named == NamedTurn(body.encode())


def test_programs_are_tagged_only_if_that_is_wished_for() -> None:
    """A body that names the program itself is tagged; one that names something else stays as it is."""
    assert name('{"messages":[]}') == ('{"rid":"ID",', False)
    assert name('{"messages":[]}', tags=True) == ('{"rid":"ID","session_id":"p/1",', True)
    assert name('{"messages":[]}', tags=True, program_id=None) == ('{"rid":"ID",', False)
    assert name('{"messages":[],"session_id":"p/1"}') == ('{"rid":"ID",', True)
    assert name('{"messages":[],"session_id":"other"}', tags=True) == ('{"rid":"ID",', False)
    assert name('{"messages":[],"session_params":{"id":"s"}}', tags=True) == ('{"rid":"ID",', False)
    assert name('{"messages":[],"rid":"mine"}', tags=True) == ('{"session_id":"p/1",', True)


def test_ids_differ_and_none_begins_with_another() -> None:
    """SGLang aborts by prefix."""
    names = [SglangNotices().name_turn(CHAT, b'{"messages":[]}', None, tags_programs=False) for _ in range(100)]
    assert len({each.engine_request_id for each in names}) == 100
    assert {len(each.engine_request_id) for each in names} == {32}


def test_notices_are_what_sglang_reads() -> None:
    """They have the paths and fields of its `AbortReq` and `CloseSessionReqInput`."""
    notices = SglangNotices()
    assert notices.turn_left("ab12") == ("/abort_request", b'{"rid":"ab12"}')
    assert notices.program_ended("p/ü") == ("/close_session", '{"session_id":"p/ü"}'.encode())


@given(st.binary())
def test_naming_never_raises(body: bytes) -> None:
    """Rubbish stays as it is."""
    SglangNotices().name_turn("/generate", body, "p", tags_programs=True)


def test_the_size_of_hicache_s_host_tier_is_summed_over_ranks() -> None:
    name = "sglang:hicache_host_total_tokens"
    lines = [f'{name}{{dp_rank="{dp}",tp_rank="{tp}"}} 4000.0' for dp in (0, 1) for tp in (0, 1)]
    assert read("\n".join(lines)).tier_tokens == 8000
    assert read(f"{name} 0.0").tier_tokens is None
