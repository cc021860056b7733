"""The ranks of an exposition, and the lines of one of them."""

from __future__ import annotations

import pytest

from thunderagent.backends.ranks import by_rank_of, rank_count_of
from thunderagent.backends.vllm import VllmBackend

EXPOSITION = """\
# HELP vllm:num_requests_running Number of requests, as engine="0"
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_running{engine="10",model_name="m"} 64.0
vllm:num_requests_waiting{model_name="m",engine="1"} 4.0
vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="2000"} 1.0
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="1000"} 1.0
vllm:kv_cache_usage_perc{other_engine="1"} 0.5
process_open_fds 9.0
"""


def test_the_lines_of_a_rank_are_read_alone() -> None:
    """The label may stand anywhere; lines of rank 10, or of a label that ends alike, are not read."""
    reading = VllmBackend().read_metrics(by_rank_of(EXPOSITION, "engine", [1])[1])
    assert (reading.capacity_tokens, reading.running_count, reading.waiting_count) == (2000, 2, 4)
    assert reading.kv_used_ratio is None
    assert by_rank_of(EXPOSITION, "engine", [7, None]) == {7: "", None: ""}


@pytest.mark.parametrize(
    ("labels", "count"),
    [
        (["0"], 1),
        (["0", "1", "2", "1"], 3),
        (["1", "2"], 0),
        (["0", "2"], 0),
        (["00", "1"], 2),
        (["x"], 0),
        (["12345"], 0),
        ([], 0),
    ],
)
def test_ranks_are_counted_from_zero_without_a_gap(labels: list[str], count: int) -> None:
    """A server with only some of all ranks is one replica: a header could not choose among those."""
    exposition = "".join(f'vllm:num_requests_running{{model_name="m",dp_rank="{label}"}} 1.0\n' for label in labels)
    assert rank_count_of(exposition, "dp_rank") == count
    assert rank_count_of(exposition, "engine") == 0
