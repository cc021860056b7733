"""Generate programs: what agents do, drawn from distributions that `workloads.toml` gives with their sources.

Everything that is random in a program comes from the workload's name, the seed and the program's index, so program k is
the same whatever the policy, the engine or the timing: runs with one seed are paired.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from random import Random
from statistics import NormalDist
from typing import Any, Protocol

from thunderagent.faults import nearest_hint
from thunderagent.simulator.workloads.plans import ProgramPlan, TurnPlan

Table = Mapping[str, Any]

NORMAL = NormalDist()
TOOL_COUNT = 8
TOOL_SHARE = 0.5
"""Of the variance of a tool's log time, the part that lies between tools. Eight equal classes keep 96 % of a normal
variable's variance, so the name explains 48 % of it: what was measured on recorded agents."""


class Distribution(Protocol):
    """A quantity that varies."""

    def draw(self, rng: Random) -> float:
        """Draw one value."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same value."""

    value: float

    def draw(self, rng: Random) -> float:  # noqa: ARG002 - the protocol's
        """Return the value."""
        return self.value


@dataclass(frozen=True, slots=True)
class Uniform:
    """Each whole number from `low` to `high`, both included, equally often."""

    low: int
    high: int

    def draw(self, rng: Random) -> float:
        """Draw one value."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Exponential:
    """Memoryless waiting times."""

    mean: float

    def draw(self, rng: Random) -> float:
        """Draw one value."""
        return rng.expovariate(1 / self.mean)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Values whose logarithm is normal around that of `p50` with standard deviation `sigma`."""

    p50: float
    sigma: float

    def draw(self, rng: Random) -> float:
        """Draw one value."""
        return self.at(rng.gauss(0.0, 1.0))

    def at(self, z: float) -> float:
        """Return the value `z` standard deviations above the median."""
        return self.p50 * math.exp(self.sigma * z)


@dataclass(frozen=True, slots=True)
class Mixture:
    """One of several distributions, chosen by weight; each may have its own outcome."""

    weights: tuple[float, ...]
    parts: tuple[Distribution, ...]
    outcomes: tuple[str, ...] = ()

    def draw(self, rng: Random) -> float:
        """Draw one value."""
        return self.draw_with_outcome(rng)[0]

    def draw_with_outcome(self, rng: Random) -> tuple[float, str]:
        """Draw one value with its outcome; empty if unknown."""
        place = rng.choices(range(len(self.parts)), self.weights)[0]
        return self.parts[place].draw(rng), self.outcomes[place] if self.outcomes else ""


@dataclass(frozen=True, slots=True)
class Clipped:
    """Another distribution, with what lies outside the limits moved onto them."""

    inner: Distribution
    at_least: float
    at_most: float

    def draw(self, rng: Random) -> float:
        """Draw one value."""
        return self.clip(self.inner.draw(rng))

    def clip(self, value: float) -> float:
        """Return the value within the limits."""
        return min(max(value, self.at_least), self.at_most)


def distribution(table: Table) -> Distribution:
    """Build the distribution that a table of `workloads.toml` describes; ValueError says what is wrong with it."""
    try:
        inner = _SHAPES[table["shape"]](table)
        if table.keys() & {"at_least", "at_most"}:
            return Clipped(inner, table.get("at_least", -math.inf), table.get("at_most", math.inf))
    except KeyError as error:
        raise ValueError(f"a distribution lacks {error}, or does not know it: {dict(table)}") from error
    return inner


def _log_normal(table: Table) -> LogNormal:
    p50 = table["p50"]
    if "mean" in table:
        return LogNormal(p50, math.sqrt(2 * math.log(table["mean"] / p50)))
    upper = next(name for name in ("p90", "p99", "p50") if name in table)
    if upper == "p50":
        raise ValueError(f"a log-normal distribution needs p50 and one of mean, p90, p99: {dict(table)}")
    return LogNormal(p50, math.log(table[upper] / p50) / NORMAL.inv_cdf(int(upper[1:]) / 100))


_SHAPES: dict[str, Callable[[Table], Distribution]] = {
    "constant": lambda table: Constant(table["value"]),
    "uniform": lambda table: Uniform(table["low"], table["high"]),
    "exponential": lambda table: Exponential(table["mean"]),
    "log-normal": _log_normal,
    "mixture": lambda table: Mixture(
        tuple(part["weight"] for part in table["parts"]),
        tuple(distribution(part) for part in table["parts"]),
        tuple(part.get("outcome", "") for part in table["parts"]),
    ),
}


@dataclass(frozen=True, slots=True)
class Poisson:
    """Programs that arrive independently."""

    rate_per_s: float

    def gap_s(self, index: int, rng: Random) -> float:  # noqa: ARG002 - the protocol's
        """Draw the time between program `index` and the one before it."""
        return rng.expovariate(self.rate_per_s)


@dataclass(frozen=True, slots=True)
class Bursts:
    """Programs that arrive in bursts."""

    programs_count: int
    period_s: float

    def gap_s(self, index: int, rng: Random) -> float:  # noqa: ARG002 - the protocol's
        """Return the time between program `index` and the one before it."""
        return self.period_s if index and index % self.programs_count == 0 else 0.0


@dataclass(frozen=True, slots=True)
class Role:
    """One of the agents of a program, and what it generates in a turn."""

    name: str
    weight: float
    output_tokens: Distribution


@dataclass(frozen=True, slots=True)
class AgentWorkload:
    """A kind of program; each of its numbers is drawn from a distribution.

    `sources` gives the origin of every parameter. `programs_count` is the number of tasks if that is fixed; more can be
    requested. `sandbox_s` is None if nobody measured the preparation time. With `roles` each turn belongs to one of
    them, drawn by weight, and generates that role's output.
    """

    name: str
    description: str
    turns: Distribution
    first_prompt_tokens: Distribution
    new_tokens: Distribution
    output_tokens: Distribution
    tool_s: Distribution
    shared_prefix_tokens: int = 0
    group_count: int = 1
    arrivals: Poisson | Bursts | None = None
    sandbox_s: Distribution | None = None
    programs_count: int | None = None
    roles: tuple[Role, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    _arrivals_s: dict[int, list[float]] = field(default_factory=dict, compare=False, repr=False)

    def program(self, index: int, seed: int) -> ProgramPlan:
        """Return program number `index`, from 0.

        In a group all members have one first prompt: what is shared is all of it but its last token.
        """
        rng = self._rng(seed, index)
        drawn, outcome = self.turns.draw_with_outcome(rng) if isinstance(self.turns, Mixture) else (None, "")
        turns_count = _at_least_1(self.turns.draw(rng) if drawn is None else drawn)
        first_tokens = _at_least_1(self.first_prompt_tokens.draw(rng))
        prefix_id, prefix_tokens, group_id = f"{self.name}-{seed}", self.shared_prefix_tokens, ""
        if self.group_count > 1:
            prefix_id = group_id = f"{self.name}-{seed}-g{index // self.group_count}"
            first_of_group = self._rng(seed, index // self.group_count, "group")
            prefix_tokens += _at_least_1(self.first_prompt_tokens.draw(first_of_group)) - 1
            first_tokens = 1
        turns = []
        for turn in range(turns_count):
            new_tokens = _at_least_1(self.new_tokens.draw(rng)) if turn else first_tokens
            role = rng.choices(self.roles, [role.weight for role in self.roles])[0] if self.roles else None
            output_tokens = _at_least_1((role or self).output_tokens.draw(rng))
            tool_s, tool_name = self._draw_tool(rng)
            turns.append(TurnPlan(new_tokens, output_tokens, tool_s, tool_name, role.name if role else ""))
        return ProgramPlan(
            program_id=f"{self.name}-{seed}-{index}",
            turns=tuple(turns),
            shared_prefix_id=prefix_id if prefix_tokens else "",
            shared_prefix_tokens=prefix_tokens,
            arrival_s=self._arrival_s(index, seed),
            group_id=group_id,
            outcome=outcome,
        )

    def sandbox_preparation_s(self, index: int, seed: int) -> float | None:
        """Return how long the program's sandbox takes to be ready; None if unknown."""
        return None if self.sandbox_s is None else self.sandbox_s.draw(self._rng(seed, index, "sandbox"))

    def _rng(self, seed: int, index: int, *what: str) -> Random:
        return Random("/".join((self.name, str(seed), *what, str(index))))  # noqa: S311 - loads are seeded, not secret

    def _draw_tool(self, rng: Random) -> tuple[float, str]:
        """Draw a tool's time and its name: some tools are slower than others, and the mix is as distributed."""
        clipped = self.tool_s if isinstance(self.tool_s, Clipped) else Clipped(self.tool_s, 0.0, math.inf)
        if not isinstance(clipped.inner, LogNormal):
            return clipped.draw(rng), "tool"
        rank = max(rng.random(), 1e-12)
        z = math.sqrt(TOOL_SHARE) * NORMAL.inv_cdf(rank) + math.sqrt(1 - TOOL_SHARE) * rng.gauss(0.0, 1.0)
        return clipped.clip(clipped.inner.at(z)), f"tool-{int(rank * TOOL_COUNT)}"

    def _arrival_s(self, index: int, seed: int) -> float | None:
        if self.arrivals is None:
            return None
        known = self._arrivals_s.setdefault(seed, [])
        while len(known) <= index:
            previous_s = known[-1] if known else 0.0
            known.append(previous_s + self.arrivals.gap_s(len(known), self._rng(seed, len(known), "arrival")))
        return known[index]


def _at_least_1(value: float) -> int:
    return max(1, round(value))


SHARED_PREFIX = "shared-prefix"


@functools.cache
def load_workloads() -> Mapping[str, AgentWorkload]:
    """Read the workloads that come with the package, by name (`workloads.toml`, each number with its source)."""
    text = resources.files(__package__).joinpath("workloads.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    return {
        name: _workload(name, tables[table["like"]] | table if "like" in table else table)
        for name, table in tables.items()
    }


def workload_names() -> list[str]:
    """Return the names that `workload` knows, for a help text."""
    return sorted(f"{name}-N" if name == SHARED_PREFIX else name for name in load_workloads())


def workload(name: str) -> AgentWorkload:
    """Return the workload of that name; `shared-prefix-N` shares N per cent of the first prompt, 0 to 99.

    Raises ValueError with the names that exist.
    """
    known = load_workloads()
    if name in known and name != SHARED_PREFIX:
        return known[name]
    base, _, percent = name.rpartition("-")
    if base == SHARED_PREFIX and percent.isdecimal() and int(percent) <= 99:
        whole = known[SHARED_PREFIX]
        tokens = round(whole.first_prompt_tokens.draw(Random(0)))  # noqa: S311 - it is a constant
        shared_tokens = tokens * int(percent) // 100
        return replace(
            whole,
            name=name,
            shared_prefix_tokens=shared_tokens,
            first_prompt_tokens=Constant(tokens - shared_tokens),
            _arrivals_s={},
        )
    names = workload_names()
    raise ValueError(f"unknown workload {name!r}; there are: {', '.join(names)}{nearest_hint(name, names)}")


def _workload(name: str, table: Table) -> AgentWorkload:
    values: dict[str, Any] = {}
    for key in ("turns", "first_prompt_tokens", "new_tokens", "output_tokens", "tool_s", "sandbox_s"):
        if key in table:
            values[key] = distribution(table[key])
    for key in ("shared_prefix_tokens", "group_count", "programs_count"):
        if key in table:
            values[key] = table[key]["value"]
    if roles := table.get("roles"):
        values["roles"] = tuple(Role(role["name"], role["weight"], distribution(role)) for role in roles["of"])
    if arrivals := table.get("arrivals"):
        kind: type[Poisson | Bursts] = {"poisson": Poisson, "bursts": Bursts}[arrivals["shape"]]
        values["arrivals"] = kind(**{each.name: arrivals[each.name] for each in fields(kind)})
    sources = {key: value["source"] for key, value in table.items() if isinstance(value, dict)}
    return AgentWorkload(name=name, description=table["description"], sources=sources, **values)
