"""Rollouts for trainers: read from the proxy, and given the shape that a trainer takes. It needs only Python's library.

    from thunderagent.client import rollouts

    for each in rollouts.ended(group="prompt-7"):
        if not each["mask_sample"]:
            rows += rollouts.for_verl(each)

Each function makes plain dicts with the fields of the trainer's own type, one row for each sample: nothing is merged
over a link that is no extension. Rewards are the trainer's. Log probabilities are 0.0 where the mask is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from thunderagent.client.errors import ProxyRefusedError, ProxyUnreachableError
from thunderagent.client.exchange import exchange, proxy_key
from thunderagent.client.program import DEFAULT_PROXY, PROXY_VARIABLE

Rollout = dict[str, Any]
Row = dict[str, Any]

_PAGE_COUNT = 100
_BESIDE_S = 30.0
"""How long the answer may take beyond the wait."""


def rollout(
    program_id: str, *, proxy: str | None = None, view: str = "samples", generation: int | None = None, wait_s: int = 0
) -> Rollout:
    """Return a program's rollout; with `wait_s` wait so long, at most a minute, for the program's end.

    Raises `ProxyRefusedError` with the code `no_rollout`, `rollout_dropped` or `rollouts_off`.
    """
    query: dict[str, str | int] = {"view": view, "wait_s": wait_s}
    if generation is not None:
        query["generation"] = generation
    path = f"/programs/{quote(program_id)}/trajectory?{urlencode(query)}"
    return exchange(_proxy(proxy), "GET", path, timeout_s=wait_s + _BESIDE_S)


def ended(
    *, proxy: str | None = None, group: str | None = None, after: int = 0, view: str = "samples"
) -> Iterator[Rollout]:
    """Yield ended rollouts in the order of their ending, of one group if it is given, until there is no further one.

    Go on later with the last one's `seq` as `after`. Raises as `rollout` does.
    """
    while True:
        query: dict[str, str | int] = {"after": after, "view": view, "limit": _PAGE_COUNT}
        if group is not None:
            query["group"] = group
        count = 0
        for line in _lines(_proxy(proxy), f"/rollouts?{urlencode(query)}"):
            count += 1
            found: Rollout = json.loads(line)
            after = found["seq"]
            yield found
        if not count:
            return


def _proxy(proxy: str | None) -> str:
    return (proxy or os.environ.get(PROXY_VARIABLE) or DEFAULT_PROXY).rstrip("/")


def _lines(proxy: str, path: str) -> Iterator[bytes]:
    """Yield the lines of an answer as they come."""
    parts = urlsplit(proxy)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    headers = {"X-ThunderAgent-Key": key} if (key := proxy_key()) else {}
    try:
        with closing(kind(parts.hostname or "", parts.port, timeout=_BESIDE_S)) as connection:
            connection.request("GET", parts.path + path, headers=headers)
            response = connection.getresponse()
            if response.status != 200:
                said = response.read(4096).decode("utf-8", "replace")
                raise ProxyRefusedError(f"GET {proxy}{path}: {response.status}: {said}", status=response.status)
            yield from response
    except (OSError, HTTPException) as error:
        raise ProxyUnreachableError(f"no proxy answers at {proxy}: {error!r}") from error


# --- what trainers take


def for_verl(found: Rollout) -> list[Row]:
    """Return fields of verl's `AgentLoopOutput` (0.9), one dict for each sample; its `metrics` are verl's defaults."""
    return [
        {
            "prompt_ids": sample["ids"][: sample["prompt_tokens"]],
            "response_ids": sample["ids"][sample["prompt_tokens"] :],
            "response_mask": sample["mask"][sample["prompt_tokens"] :],
            "response_logprobs": _response(sample, "logprobs"),
            "num_turns": 2 * len(sample["turns"]),
            "metrics": {},
            "extra_fields": _extra(found, sample),
        }
        for sample in found["samples"]
    ]


def for_skyrl(found: Iterable[Rollout]) -> dict[str, list[Any] | None]:
    """Return fields of SkyRL's `GeneratorOutput` (0.4), one row for each sample; add its `rewards`.

    The last sample of a program is its last step. `program_ids` says whose each row is: SkyRL's own `TrajectoryID` is
    made of it.
    """
    rows = [(each, sample) for each in found for sample in each["samples"]]
    logprobs = [_response(sample, "logprobs") for _, sample in rows]
    return {
        "prompt_token_ids": [sample["ids"][: sample["prompt_tokens"]] for _, sample in rows],
        "response_ids": [_response(sample, "ids") for _, sample in rows],
        "loss_masks": [_response(sample, "mask") for _, sample in rows],
        "rollout_logprobs": logprobs if all(each is not None for each in logprobs) else None,
        "stop_reasons": [sample["finish"] for _, sample in rows],
        "is_last_step": [sample is each["samples"][-1] for each, sample in rows],
        "program_ids": [each["program_id"] for each, _ in rows],
    }


def for_trl(found: Iterable[Rollout]) -> dict[str, list[Any]]:
    """Return what a `rollout_func` of TRL's `GRPOTrainer` (1.16) returns, one row for each sample.

    TRL wants one row for each prompt that it gave: take programs with one sample, or those rows that you choose.
    """
    rows = [(each, sample) for each in found for sample in each["samples"]]
    return {
        "prompt_ids": [sample["ids"][: sample["prompt_tokens"]] for _, sample in rows],
        "completion_ids": [_response(sample, "ids") for _, sample in rows],
        "logprobs": [_response(sample, "logprobs") for _, sample in rows],
        "env_mask": [_response(sample, "mask") for _, sample in rows],
        "program_id": [each["program_id"] for each, _ in rows],
    }


def for_verifiers(found: Rollout) -> list[Row]:
    """Return fields of verifiers' `TurnTokens` (0.4), one dict for each turn of a rollout that has `turns`.

    Turns without tokens are left out, and so are attempts whose answer their client did not get.
    """
    return [
        {"prompt_ids": prompt, "completion_ids": output["ids"], "completion_logprobs": output["logprobs"] or []}
        for _, prompt, output in _kept(found)
    ]


def for_nemo_gym(found: Rollout) -> list[Row]:
    """Return fields of NeMo Gym's `TokenEntry` (0.7), one dict for each turn of a rollout that has `turns`.

    Its rollout is the program, its model call our request. Otherwise as `for_verifiers`.
    """
    return [
        {
            "rollout_id": found["program_id"],
            "model_call_id": turn["request_id"],
            "model": turn["model"],
            "prompt_token_ids": prompt,
            "generation_token_ids": output["ids"],
            "generation_log_probs": output["logprobs"] or [],
            "created_at": turn["began_at"],
        }
        for turn, prompt, output in _kept(found)
    ]


def for_rllm(found: Rollout) -> list[Row]:
    """Return fields of rLLM's `TraceRecord` (rllm-model-gateway 0.1), one dict for each turn of a rollout with `turns`.

    Its session is the program. Otherwise as `for_verifiers`.
    """
    return [
        {
            "trace_id": turn["request_id"],
            "session_id": found["program_id"],
            "model": turn["model"],
            "prompt_token_ids": prompt,
            "completion_token_ids": output["ids"],
            "logprobs": output["logprobs"],
            "finish_reason": output["finish"] or None,
            "latency_ms": turn["total_s"] * 1000,
            "token_counts": {"prompt": len(prompt), "completion": len(output["ids"])},
            "timestamp": turn["began_at"],
            "metadata": {"link": turn["link"], "weights": turn["weights_after"], "branch_id": turn["branch_id"]},
        }
        for turn, prompt, output in _kept(found)
    ]


def _kept(found: Rollout) -> Iterator[tuple[Row, list[int], Row]]:
    """Yield each output that its client got, with its turn and the whole prompt."""
    whole: dict[tuple[int, int], list[int]] = {}
    for turn in found["turns"]:
        before = whole.get((turn["parent"], turn["parent_choice"]), [])
        prompt = before[: turn["shared_tokens"]] + turn["prompt_new_ids"]
        whole[turn["seq"], 0] = prompt
        for choice, output in enumerate(turn["outputs"]):
            whole[turn["seq"], choice] = prompt + output["ids"]
            if turn["kept"]:
                yield turn, prompt, output


def for_slime(found: Rollout) -> list[Row]:
    """Return fields of slime's `Sample`, one dict for each sample; `remove_sample` says not to train on it."""
    return [
        {
            "tokens": sample["ids"],
            "response_length": len(sample["ids"]) - sample["prompt_tokens"],
            "loss_mask": _response(sample, "mask"),
            "rollout_log_probs": _response(sample, "logprobs"),
            "weight_versions": list(dict.fromkeys(span["version"] for span in sample["spans"])),
            "remove_sample": found["mask_sample"],
            "metadata": _extra(found, sample),
        }
        for sample in found["samples"]
    ]


def _response(sample: Row, name: str) -> Any:
    """Return a list of a sample from the first sampled token on; None if there is none."""
    values = sample[name]
    return None if values is None else values[sample["prompt_tokens"] :]


def _extra(found: Rollout, sample: Row) -> Row:
    return {
        "program_id": found["program_id"],
        "group_id": found["group_id"],
        "link": sample["link"],
        "finish": sample["finish"],
        "verdict": found["verdict"],
        "mask_sample": found["mask_sample"],
        "spans": sample["spans"],
        "lag_count": found["lag_count"],
    }
