"""Several engines: those that form a pool, and what must be alike within one."""

from __future__ import annotations

import json

from thunderagent.doctor.among import findings_among, pools_of
from thunderagent.doctor.asking import Answer
from thunderagent.doctor.engines import Engine
from thunderagent.doctor.findings import Level


def engine(name: str, *models: str, limit_tokens: int = 1000) -> Engine:
    listed = [{"id": model, "max_model_len": limit_tokens} for model in models]
    return Engine(name, models=Answer(200, json.dumps({"data": listed})))


def test_engines_are_one_pool_by_any_name_that_joins_them() -> None:
    pools = pools_of([engine("one", "a"), engine("two", "b"), engine("three", "c"), engine("four", "a", "b")])
    assert [sorted(each.name for each in pool) for pool in pools] == [["three"], ["four", "one", "two"]]


def test_two_models_are_told_as_pools() -> None:
    (finding,) = findings_among([engine("one", "a"), engine("two", "b"), engine("three", "b")])
    assert finding.level is Level.OK
    assert "2 pools" in finding.text
    assert "a (1 engine); b (2 engines)" in finding.text


def test_within_a_pool_models_and_limits_must_be_alike() -> None:
    """Beyond a pool they may differ."""
    found = list(findings_among([engine("one", "a", "lora"), engine("two", "a"), engine("three", "b", limit_tokens=5)]))
    warnings = [finding for finding in found if finding.level is Level.WARNING]
    assert [finding.subject for finding in warnings] == ["2 engines"]
    assert "one: a, lora; two: a" in warnings[0].text
    found = list(findings_among([engine("one", "a"), engine("two", "a", limit_tokens=5)]))
    assert [finding.level for finding in found] == [Level.FAULT]
    assert "context limits" in found[0].text
