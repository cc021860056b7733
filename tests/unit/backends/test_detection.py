"""DetectedBackend's choice of an engine's kind."""

from __future__ import annotations

from thunderagent.backends import backend_of
from thunderagent.backends.base import NOTHING_READ, ReplicaReading

VLLM = "# HELP vllm:num_requests_running Running\nvllm:num_requests_running 3.0\n"
SGLANG = "# HELP sglang:num_running_reqs Running\nsglang:num_running_reqs 4.0\n"


def test_the_prefix_of_the_metrics_says_the_kind() -> None:
    """Nothing else is needed; replacing an engine by one of another kind is noticed."""
    backend = backend_of("auto")
    assert backend.kind == "auto"
    assert backend.read_metrics(VLLM) == ReplicaReading(running_count=3)
    assert (backend.kind, backend.notices, backend.info_paths) == ("vllm", None, ())
    assert backend.read_metrics(SGLANG) == ReplicaReading(running_count=4)
    assert backend.kind == "sglang"
    assert backend.notices is not None
    assert backend.read_metrics("sglang:num_running_reqs 5.0") == ReplicaReading(running_count=5)


def test_an_engine_that_says_nothing_keeps_its_kind() -> None:
    """One poll without metrics is no reason to forget it."""
    backend = backend_of("auto")
    assert backend.read_metrics("up 1\n") == NOTHING_READ
    assert backend.kind == "auto"
    backend.read_metrics(SGLANG)
    assert backend.read_metrics("") == NOTHING_READ
    assert backend.kind == "sglang"


def test_an_sglang_without_metrics_is_known_by_its_information() -> None:
    """Without --enable-metrics /server_info alone shows the kind; vLLM's shows nothing that we read."""
    backend = backend_of("auto")
    assert "/server_info" in backend.info_paths
    assert backend.read_info('{"vllm_config": "..."}') is None
    assert backend.kind == "auto"
    assert backend.read_info('{"max_total_num_tokens": 1000}') == 1000
    assert backend.kind == "sglang"


def test_each_replica_is_found_out_for_itself() -> None:
    """One engine's kind says nothing about the next."""
    first, second = backend_of("auto"), backend_of("auto")
    first.read_metrics(SGLANG)
    assert (first.kind, second.kind) == ("sglang", "auto")
