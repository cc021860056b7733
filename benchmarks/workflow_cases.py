"""The paper's three workflows (its Fig. 9) in virtual time, with LLMs whose latencies come from the engine's model.

An instance is an agent with an LLM of its own, which serves one request at a time: the prompt at the cost of a prefill,
each token of the answer at that of a decoding step (`simulator.engine`). The baselines are this same runtime with its
policies off: first come, first served, sticky sessions, static instances. They are not AutoGen, CrewAI or Ayo.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from thunderagent.simulator.engine.timing import IterationWork, TimingProfile, load_profiles
from thunderagent_workflows import Deployment, deploy, managed_list, stubs


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that skips time while it has nothing to do; it waits for threads."""

    def __init__(self) -> None:
        """Begin at 0 s."""
        self.now_s, self.aside_count = 0.0, 0
        super().__init__(_VirtualSelector(self))

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Stop time until a thread ends."""
        future = super().run_in_executor(executor, func, *args)
        self.aside_count += 1
        future.add_done_callback(self._come_back)
        return future

    def _come_back(self, _: object) -> None:
        self.aside_count -= 1


class _VirtualSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0 or self.loop.aside_count:
            return super().select(timeout if timeout is None or timeout <= 0 else 0.01)
        self.loop.now_s += timeout
        return super().select(0)


HERE = "benchmarks.workflow_cases"
PROFILE: TimingProfile = next(iter(load_profiles().values()))
ASK = {"ask": {"prompt_tokens": "int", "answer_tokens": "int"}}


class Llm:
    """An agent whose work is one request to an LLM."""

    async def ask(self, prompt_tokens: int, answer_tokens: int) -> int:
        """Take as long as the engine would."""
        work = IterationWork(prompt_tokens, prompt_tokens**2 / 2)
        decode_s = PROFILE.iteration_s(IterationWork(0, 0.0, 1, prompt_tokens))
        await asyncio.sleep(PROFILE.iteration_s(work) + decode_s * answer_tokens)
        return answer_tokens


class Remembering(Llm):
    """The same with a conversation: earlier messages are prefilled again only where the session is new."""

    said = managed_list("said")

    async def ask(self, prompt_tokens: int, answer_tokens: int) -> int:
        """Take as long as the engine would, and remember."""
        self.said.append(answer_tokens)
        return await super().ask(prompt_tokens, answer_tokens)


def agent(count: int, most: int, *, kind: str = "Llm", **directives: Any) -> dict[str, Any]:
    """Declare an agent with one GPU for each instance."""
    given = {"min_instances": count, "max_instances": most, "resources": {"gpu": 1}}
    return {"class": f"{HERE}:{kind}", "methods": ASK, **given, **directives}


def ask(name: str, prompt_tokens: float, answer_tokens: float) -> Any:
    """Make a call."""
    return stubs.call(name, "ask", (int(prompt_tokens), max(1, int(answer_tokens))))


async def financial(rng: random.Random, share: float) -> None:  # noqa: ARG001 - the three have one signature
    """Have an analyst ask four others and summarise, two or three times, as a user returns with questions."""
    for _ in range(rng.randrange(2, 4)):
        first = ask("analyst", 600, 60)
        others = [ask(name, 1200, rng.lognormvariate(3.8, 0.6)) for name in ("stock", "bond", "market", "news")]
        await first
        for each in others:
            await each
        await ask("analyst", 2400, rng.lognormvariate(5.3, 1.0))
        await asyncio.sleep(rng.expovariate(1 / 20))


async def routed(rng: random.Random, share: float) -> None:
    """Classify a query, and send it to chat or to code; the majority changes over time."""
    await ask("router", 200, 4)
    is_code = rng.random() < (0.9 if share < 0.5 else 0.1)
    await ask("coder" if is_code else "chat", 1500, rng.lognormvariate(5.0 if is_code else 4.6, 0.6))


async def software(rng: random.Random, share: float) -> None:  # noqa: ARG001
    """Plan, build the parts in parallel, test each, and rebuild those that fail."""
    await ask("planner", 800, 150)
    parts = [rng.randrange(1, 4) for _ in range(rng.randrange(2, 5))]
    while parts:
        built = [ask("developer", 1500, rng.lognormvariate(5.2, 0.5)) for _ in parts]
        for each in built:
            await each
        tested = [ask("tester", 900, rng.lognormvariate(4.0, 0.5)) for _ in parts]
        for each in tested:
            await each
        parts = [left - 1 for left in parts if left > 1]


@dataclass(frozen=True)
class Case:
    """A workflow, its agents with and without freedom, its rates a second, and the compared policies."""

    driver: Callable[[random.Random, float], Any]
    agents: dict[str, Any]
    static: dict[str, Any]
    rates_per_s: tuple[float, ...]
    policies: dict[str, tuple[str, ...]]
    gpus: int
    count: int = 300


DEFAULTS = ("balance", "head_of_line", "reassign")
CASES = {
    "financial": Case(
        financial,
        {
            "analyst": agent(3, 3, kind="Remembering"),
            **{name: agent(1, 1) for name in ("stock", "bond", "market", "news")},
        },
        {
            "analyst": agent(3, 3, kind="Llm", stateful=True),
            **{name: agent(1, 1) for name in ("stock", "bond", "market", "news")},
        },
        (0.15, 0.2),
        {"default": DEFAULTS, "default+srtf": (*DEFAULTS, "srtf")},
        7,
    ),
    "router": Case(
        routed,
        {"router": agent(1, 1), "chat": agent(1, 7), "coder": agent(1, 7)},
        {"router": agent(1, 1), "chat": agent(3, 3), "coder": agent(4, 4)},
        (2.4, 3.2),
        {"default": DEFAULTS},
        8,
    ),
    "software": Case(
        software,
        {"planner": agent(1, 6), "developer": agent(1, 6), "tester": agent(1, 6)},
        {"planner": agent(2, 2), "developer": agent(3, 3), "tester": agent(3, 3)},
        (0.15, 0.2),
        {"default": DEFAULTS, "default+srtf": (*DEFAULTS, "srtf"), "default+lpt": (*DEFAULTS, "lpt")},
        8,
    ),
}


def compare(case: Case, seeds_count: int) -> dict[str, Any]:
    """Run a case at each rate under each choice; return latencies in seconds, as means over seeds."""
    choices: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {"static, sticky, FCFS": (case.static, ())}
    choices |= {name: (case.agents, policies) for name, policies in case.policies.items()}
    found: dict[str, Any] = {}
    for rate_per_s in case.rates_per_s:
        for name, (agents, policies) in choices.items():
            runs = [run(case, agents, policies, rate_per_s, seed) for seed in range(seeds_count)]
            row = {key: [each[key] for each in runs] for key in runs[0]}
            found[f"{rate_per_s}/s {name}"] = {key: statistics.mean(values) for key, values in row.items()} | {
                "mean_s_of_seeds": row["mean_s"]
            }
            print(case.driver.__name__, rate_per_s, name, {key: round(statistics.mean(v), 1) for key, v in row.items()})
    return found


def run(
    case: Case, agents: dict[str, Any], policies: tuple[str, ...], rate_per_s: float, seed: int
) -> dict[str, float]:
    """Run one load in virtual time; return mean, median, p95 and p99 latencies in seconds, and programs an hour."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_run(case, agents, policies, rate_per_s, seed, loop))
    finally:
        loop.close()


async def all_come(one: Callable[[int], Any], count: int, rate_per_s: float, seed: int) -> float:
    """Start a number of sessions at random times, each with its number; return the seconds until the last one ends."""
    loop, rng, users = asyncio.get_running_loop(), random.Random(seed), []
    began_s = loop.time()
    for number in range(count):
        users.append(asyncio.create_task(one(number)))
        await asyncio.sleep(rng.expovariate(rate_per_s))
    await asyncio.gather(*users)
    return loop.time() - began_s


async def _run(
    case: Case, agents: dict[str, Any], policies: tuple[str, ...], rate_per_s: float, seed: int, loop: Any
) -> dict[str, float]:
    latencies: list[float] = []

    async def one(app: Deployment, number: int) -> None:
        began_s = loop.time()
        await app.run_async(case.driver, random.Random(seed * 10_000 + number), number / case.count)
        latencies.append(loop.time() - began_s)

    resources = {"gpu": case.gpus}
    options: dict[str, Any] = {"policies": policies, "period_s": 1.0, "clock": loop.time, "resources": resources}
    async with deploy(agents, **options) as app:
        took_s = await all_come(partial(one, app), case.count, rate_per_s, seed)
    ordered = sorted(latencies)
    return {
        "mean_s": statistics.mean(ordered),
        "p50_s": ordered[len(ordered) // 2],
        "p95_s": ordered[int(len(ordered) * 0.95)],
        "p99_s": ordered[int(len(ordered) * 0.99)],
        "programs_per_h": case.count / took_s * 3600,
    }
