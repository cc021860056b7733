"""Problems of engines in comparison: those that serve the same models, and all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from thunderagent.doctor.engines import Engine
from thunderagent.doctor.findings import Finding, fault, ok, warning


def findings_among(engines: Sequence[Engine]) -> Iterator[Finding]:
    """Yield findings on all engines in comparison, and on those of one pool of models."""
    engines = [engine for engine in engines if engine.model_ids]
    if len(engines) < 2:
        return
    pools = pools_of(engines)
    subject = f"{len(engines)} engines"
    if len(pools) > 1:
        listed = "; ".join(f"{', '.join(_names(pool))} ({_count(pool)})" for pool in pools)
        yield ok("models_alike", subject, f"They are {len(pools)} pools, by the models that they serve: {listed}.")
    elif _are_alike(engines):
        yield ok("models_alike", subject, "They serve the same model.")
    for pool in pools:
        yield from _differences(pool)
    versions = {engine.name: f"{engine.kind} {engine.version}".strip() for engine in engines}
    if len(set(versions.values())) > 1:
        text = f"Their engines differ: {_listed(versions)}."
        yield warning(
            "versions_alike", subject, text, "run the same version everywhere, unless an upgrade is under way"
        )


def pools_of(engines: Sequence[Engine]) -> list[list[Engine]]:
    """Group engines that share a model's name, directly or through others."""
    pools: list[list[Engine]] = []
    for engine in engines:
        joined = [pool for pool in pools if not set(_names(pool)).isdisjoint(engine.model_ids)]
        pools = [pool for pool in pools if pool not in joined]
        pools.append([*(each for pool in joined for each in pool), engine])
    return pools


def _differences(pool: Sequence[Engine]) -> Iterator[Finding]:
    """Yield problems within a pool, where a program may go on on any engine."""
    names = {engine.name: ", ".join(sorted(engine.model_ids)) for engine in pool}
    limits = {engine.name: _said(engine.context_limit_tokens) for engine in pool}
    if len(set(names.values())) > 1:
        yield warning(
            "models_alike",
            _count(pool),
            f"Their models differ, though they have some in common: {_listed(names)}.",
            "load each model and adapter on all of them: turns go only to engines that list their model",
        )
    if len(set(limits.values())) > 1:
        yield fault(
            "models_alike",
            _count(pool),
            f"Their context limits differ: {_listed(limits)}.",
            "start them with the same limit: a program is paused here and restored on any other engine of its pool",
        )


def _are_alike(engines: Sequence[Engine]) -> bool:
    return len({(frozenset(engine.model_ids), engine.context_limit_tokens) for engine in engines}) == 1


def _names(pool: Sequence[Engine]) -> list[str]:
    return list(dict.fromkeys(name for engine in pool for name in engine.model_ids))


def _count(pool: Sequence[Engine]) -> str:
    return "1 engine" if len(pool) == 1 else f"{len(pool)} engines"


def _listed(values: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in values.items())


def _said(limit_tokens: int | None) -> str:
    return "not said" if limit_tokens is None else f"{limit_tokens:,} tokens"
