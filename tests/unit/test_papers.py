"""What the page of the papers says of our results is what their files say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TEXT = (ROOT / "docs" / "research" / "papers.md").read_text()
READMES = [(ROOT / "packages" / f"thunderagent-{name}" / "README.md").read_text() for name in ("workflows", "nova")]
PAGES = re.sub(r"\s+", " ", re.sub(r"\*\*|\[([^\]]+)\]\([^)]*\)", r"\1", "\n".join([TEXT, *READMES])))
"""Without emphasis, and links by their texts: the papers', and of Nalar and Nova those of their packages."""

Row = Mapping[str, str]


def figures(name: str) -> Any:
    """Return the figures of a result."""
    return json.loads((RESULTS / f"papers-{name}.json").read_text())["figures"]


def all_figures(name: str) -> Any:
    """Return the figures of all results of that name, made in parts: the parts of a setting, too, are of many files."""
    found: dict[str, Any] = {}
    for path in sorted(RESULTS.glob(f"papers-{name}*.json")):
        for title, figure in json.loads(path.read_text())["figures"].items():
            known = found.setdefault(title, {**figure, "rows": []})
            known["rows"] += [
                row for row in figure["rows"] if row["policy"] not in {each["policy"] for each in known["rows"]}
            ]
    return found


def by_policy(rows: Sequence[Row], programs: int | None = None) -> dict[str, Row]:
    """Return the rows at a load, by default the highest, by policy."""
    most = programs or max(int(row["programs"]) for row in rows)
    return {row["policy"]: row for row in rows if int(row["programs"]) == most}


def mean(pair: str) -> float:
    """Return the mean of a figure with its interval."""
    return float(pair.partition(" ")[0])


def cell(pair: str) -> str:
    """Return a ratio as the tables have it."""
    value, _, width = pair.partition(" ± ")
    digits = 1 if float(width) >= 0.95 else 2
    return f"{float(value):.{digits}f} ± {float(width):.{digits}f}"


def whole(pair: str) -> str:
    """Return a number and its interval without decimals."""
    value, _, width = pair.partition(" ± ")
    return f"{float(value):,.0f} ± {float(width):.0f}"


def span(values: Sequence[float], digits: int = 2) -> str:
    """Return the least and the most."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


SETTINGS = {
    "a, 8 bits: mini-SWE-agent, GLM-4.6": "a, KV of 8 bits",
    "b, 8 bits: OpenHands, GLM-4.6": "b, KV of 8 bits",
    "f, 8 bits: ScienceAgentBench, GLM-4.6": "f, KV of 8 bits",
    "a, 16 bits": "a: mini-SWE-agent, GLM-4.6",
    "b, 16 bits": "b: OpenHands, GLM-4.6",
    "f, 16 bits": "f: ScienceAgentBench, GLM-4.6",
    "c: ToolOrchestra HLE, Qwen3-8B": "c: ToolOrchestra HLE, Qwen3-8B",
    "d: mini-SWE-agent, Qwen3-235B": "d: mini-SWE-agent, Qwen3-235B",
    "e: OpenHands, Qwen3-235B": "e: OpenHands, Qwen3-235B",
}
FIG4_POLICIES = ("continuum", "thunderagent", "thunderagent-released", "breakeven")
FIG4_FILES = ("fig4-last", "fig4-rivals", "fig4", "fig4-released")
"""Of two that have a policy the first counts, which is of newer code."""


def fig4_rows() -> dict[str, dict[str, Row]]:
    """Return the last load's rows by setting and policy, over all files; without a policy they all say the same."""
    found: dict[str, dict[str, Row]] = {}
    for each in (figures("fig4"), *(all_figures(name) for name in FIG4_FILES if name != "fig4")):
        for title, figure in each.items():
            rows = by_policy(figure["rows"])
            known = found.setdefault(title, {})
            if known:
                assert rows["passthrough"]["turns_per_min"] == known["passthrough"]["turns_per_min"], title
    for name in reversed(FIG4_FILES):
        for title, figure in (figures("fig4") if name == "fig4" else all_figures(name)).items():
            found[title] |= by_policy(figure["rows"])
    return found


def fig4() -> Iterator[str]:
    older, of_all = figures("fig4"), fig4_rows()
    for shown, title in SETTINGS.items():
        of = of_all[title]
        cells = [cell(of[policy]["ratio"]) if policy in of else "" for policy in FIG4_POLICIES]
        paper = (older | all_figures("fig4-last"))[title]["paper_ratio"]
        yield re.sub(r"\s+", " ", f"| {shown} | {' | '.join(cells)} | {paper} |")
        if "16 bits" in shown:
            continue
        cells = [
            f"{mean(of[policy]['programs_per_hour']):.0f}, {mean(of[policy]['program_mean_s']):,.0f}"
            for policy in ("passthrough", *FIG4_POLICIES)
        ]
        yield f"| {shown.partition(':')[0]} | {' | '.join(cells)} |"

    def over_continuum(*letters: str) -> str:
        told = []
        for letter in letters:
            of = next(rows for title, rows in of_all.items() if title.startswith(letter))
            told.append(mean(of["thunderagent"]["ratio"]) / mean(of["continuum"]["ratio"]))
        return ", ".join(f"{each:.2f}" for each in told)

    yield f"8 bits {over_continuum('a, ', 'b, ', 'f, ')} (a, b, f)"
    yield f"16 bits {over_continuum('a:', 'b:', 'f:')}, else {over_continuum('c:', 'd:', 'e:')} (c, d, e)"

    def hits(policy: str, *titles: str) -> list[float]:
        return [100 * mean(of_all[title][policy]["hit_ratio"]) for title in titles]

    coding = [title for title in of_all if title[0] in "abde"]
    yield f"{span(hits('thunderagent', *coding), 0)} %; Continuum {span(hits('continuum', *coding), 0)} %"
    stochastic = [
        SETTINGS[shown] for shown in ("c: ToolOrchestra HLE, Qwen3-8B", "f, 8 bits: ScienceAgentBench, GLM-4.6")
    ]
    ours, theirs = (hits(policy, *stochastic) for policy in ("thunderagent", "continuum"))
    yield f"here {theirs[0]:.0f} against {ours[0]:.0f} %, {theirs[1]:.0f} against {ours[1]:.0f} %"


E = "OpenHands, Qwen3-235B"


def fig10() -> Iterator[str]:
    older = figures("fig4")
    grew = [
        mean(by_policy(older["a: mini-SWE-agent, GLM-4.6"]["rows"], load)["passthrough"]["turn_mean_s"])
        for load in (24, 96)
    ]
    yield f"a turn takes {grew[1] / grew[0]:.1f} times as long from 24 to 96: shown"
    fell = [mean(by_policy(older[f"e: {E}"]["rows"], load)["passthrough"]["turns_per_min"]) for load in (24, 48)]
    yield f"in e turns a minute fall from {fell[0]:.0f} to {fell[1]:.0f} from 24 to 48 programs"
    theirs = [rows["continuum"] for title, rows in sorted(fig4_rows().items()) if title[:2] in ("a:", "b:", "d:", "e:")]
    yield "`continuum` has {}, {}, {} and {}".format(*(f"{mean(each['turn_mean_s']):.0f}" for each in theirs))
    for title in (title for title in older if title[0] in "abde"):
        pairs = [
            "/".join(f"{mean(by_policy(older[title]['rows'], load)[policy]['turn_mean_s']):.0f}" for load in (24, 96))
            for policy in ("passthrough", "thunderagent", "breakeven")
        ]
        yield f"{title[0]} {', '.join(pairs)}"


def table2() -> Iterator[str]:
    found = figures("table2")
    policies = ("thunderagent", "breakeven")
    released = {"mini-swe-agent": "table2-released", "openhands": "table2-released-openhands-closed"}
    for name, title in (
        ("mini-swe-agent", "mini-SWE-agent, an hour of a loop"),
        ("openhands", "OpenHands, an hour of a loop"),
    ):
        closed, batch = by_policy(found[name]["closed"]), by_policy(found[name]["batch"])
        paper = found[name]["paper"]
        ratio = f"{paper['thunderagent_per_min'] / paper['gateway_per_min']:.2f}"
        alone = by_policy(figures(released[name])[name]["closed"])
        assert alone["sticky"]["turns_per_min"] == closed["sticky"]["turns_per_min"]
        closed |= {policy: alone[policy] for policy in ("breakeven",) if policy in alone}  # of newer code
        shipped = f"{cell(alone['thunderagent-released']['ratio'])} "
        first, *others = (cell(closed[policy]["ratio"]) for policy in policies)
        yield f"| {title} | {first} | {shipped}| {' | '.join(others)} | {ratio} |"
        first, *others = (cell(batch[policy]["ratio"]) for policy in policies)
        shipped_batch = by_policy(figures(f"table2-released-{name}-batch")[name]["batch"])
        assert shipped_batch["sticky"]["turns_per_min"] == batch["sticky"]["turns_per_min"]
        shipped = cell(shipped_batch["thunderagent-released"]["ratio"])
        yield f"a batch to its end | {first} | {shipped} | {' | '.join(others)} | |"
    loops = [by_policy(found[name]["closed"]) for name in found]
    for loop, (name, file) in zip(loops, released.items(), strict=True):
        loop.update(by_policy(figures(file)[name]["closed"]))
    policies = ("sticky", "thunderagent", "thunderagent-released", "breakeven")
    theirs = [each for name in found for each in found[name]["paper"].values()]
    for shown, figure in (
        ("Steps a minute; paper {} and {}, {} and {}".format(*theirs), "turns_per_min"),
        ("Programs an hour", "programs_per_hour"),
        ("Mean seconds of a program", "program_mean_s"),
    ):
        cells = [", ".join(f"{mean(loop[policy][figure]):,.0f}" for loop in loops) for policy in policies]
        yield f"| {shown} | {' | '.join(cells)} |"
    yield f"{100 * mean(loops[1]['sticky']['limit_ratio']):.0f} % of the limit"


def fig2a() -> Iterator[str]:
    found = figures("fig2a")
    policies = ("sticky", "thunderagent", "thunderagent-released", "breakeven")
    minutes = [found["policies"][policy]["minutes_over_20_percent"] for policy in policies]
    gaps = [100 * found["policies"][policy]["gap_max_ratio"] for policy in policies]
    rows = by_policy(found["rows"])
    shown = " | ".join(f"{each:.0f}" if each > 9.5 else f"{each:.1f}" for each in minutes)
    yield f"| Minutes with a gap over 20 % | {shown} |"
    yield f"| Largest gap, % | {' | '.join(f'{each:.0f}' for each in gaps)} |"
    for name, figure in (("Programs an hour", "programs_per_hour"), ("Mean seconds of a program", "program_mean_s")):
        yield f"| {name} | {' | '.join(f'{mean(rows[policy][figure]):,.0f}' for policy in policies)} |"
    yield f"| Turns a minute ÷ `sticky` | 1 | {' | '.join(cell(rows[policy]['ratio']) for policy in policies[1:])} |"
    yield f"{minutes[0]:.0f} minutes, at most {gaps[0]:.0f} %"


def fig6a() -> Iterator[str]:
    parts = figures("fig6a")["parts"]
    for name, shown in (
        ("held_s", "held"),
        ("queued_and_prefilled_s", "queued and prefilled in the engine"),
        ("decoded_s", "decoded"),
        ("sandbox_wait_s_per_tool", "a tool's wait for its sandbox"),
        ("turns_per_min", "turns a minute"),
    ):
        cells = [f"{mean(each[name]):.1f}".removesuffix(".0" if name == "held_s" else "") for each in parts.values()]
        yield f"| {shown} | {' | '.join(cells)} |"
    gateway, theirs = parts["sticky"], parts["thunderagent"]
    gained = [mean(gateway[name]) - mean(theirs[name]) for name in ("turn_s", "sandbox_wait_s_per_tool")]
    yield f"sandboxes {100 * gained[1] / sum(gained):.0f} % of what is gained"


def fig6b() -> Iterator[str]:
    of = {row["policy"]: row["limit_ratio"] for row in figures("fig6b")["rows"]}

    def percent(policy: str) -> str:
        value, _, width = of[policy].partition(" ± ")
        return f"{100 * float(value):.0f} ± {100 * float(width):.0f} %"

    yield f"7 s reaches {percent('thunderagent:half_life_s=7.273')} of the limit"
    yield f"the default x = 2 {percent('thunderagent:half_life_s=1')}, `breakeven` {100 * mean(of['breakeven']):.0f} %"
    shipped = {row["policy"].partition("=")[2] or "5": row for row in figures("fig6b-released")["rows"]}
    parts = [f"{100 * mean(shipped[delta_s]['limit_ratio']):.0f}" for delta_s in ("1", "5", "10", "20")]
    yield "shipped order reaches {}, {}, {} and {} % with a Δt of 1, 5, 10 and 20 s".format(*parts)
    turns = [mean(row["turns_per_min"]) for row in shipped.values()]
    yield f"Shipped order: {span(turns, 0)} turns a minute"


def fig7b() -> Iterator[str]:
    of = {(row["programs"], row["prefilling"]): row for row in figures("fig7b")["splits"]}

    best = [max(mean(of[load, split]["turns_per_min"]) for split in (1, 2, 3)) for load in (24, 48, 96)]
    whole_nodes = [mean(of[load, 0]["turns_per_min"]) for load in (24, 48, 96)]
    both, split = (", ".join(f"{each:.0f}" for each in turns) for turns in (whole_nodes, best))
    yield f"four nodes that do both {both}; with 1, 2 or 3 for prefill at best {split}"
    beside = by_policy(figures("fig7b-policies-48")["rows"], 48)
    told = [f"{mean(row['turns_per_min']):.0f}/{mean(row['programs_per_hour']):.0f}" for row in beside.values()]
    assert [*beside] == ["sticky", "thunderagent", "thunderagent-released", "breakeven"]
    shown = "With 48, programs an hour beside: `sticky` {}, `thunderagent` {}, released {}, `breakeven` {}"
    yield shown.format(*told)


def tiers() -> Iterator[str]:
    found = json.loads((RESULTS / "policy-tiers.json").read_text())["found"]
    of = {(each["setting"], each["figure"]): each["mean"] for each in found if each["policy"] == "passthrough"}
    counts = (64, 128, 192)
    hits = [f"{100 * of[f'{count} programs, tier', 'prompt tokens found']:.0f}" for count in counts]
    gains = [of[f"{n} programs, tier", "turns/min"] / of[f"{n} programs, no tier", "turns/min"] for n in counts]
    yield f"hits of {hits[0]}, {hits[1]} and {hits[2]} %, {gains[0]:.1f}, {gains[1]:.2f} and {gains[2]:.2f} times"
    default = {(each["setting"], each["figure"]): each["mean"] for each in found if each["policy"] == "breakeven"}
    ended = [", ".join(f"{each[f'{n} programs, tier', 'programs/h']:.0f}" for n in counts) for each in (of, default)]
    yield f"Programs an hour with it {ended[0]}, under `breakeven` {ended[1]}"


def agents() -> Iterator[str]:
    runs = {each["arm"]: each for each in json.loads((RESULTS / "agents.json").read_text())["results"]}
    yield f"{runs['own-left']['disk_peak_bytes'] / runs['prepared']['disk_peak_bytes']:.1f} times, on real Docker"
    own_s, prepared = runs["own"]["setup_s"]["mean"], runs["prepared"]["prepare_s"]
    yield f"{own_s:.1f} s; prepared as four programs at a time are let in: {prepared['new']:.1f} s"


def companions() -> Iterator[str]:
    settings = list(figures("companions").values())
    rows = [{row["policy"]: row for row in each} for each in settings]

    def all_of(policy: str, figure: str, scale: float = 1, digits: int = 2) -> str:
        return ", ".join(f"{scale * mean(each[policy][figure]):.{digits}f}" for each in rows)

    yield f"{all_of('infercept', 'limit_ratio', 100, 0)} % of the limit, against"
    yield f"{all_of('ttl:ttl_s=0', 'limit_ratio', 100, 0)} and {all_of('ttl:ttl_s=inf', 'limit_ratio', 100, 0)} %"
    yield f"in two of four: {all_of('continuum', 'throughput_ratio')} |"
    yield f"{all_of('concur', 'hit_ratio', 100, 0)} % against {all_of('fcfs', 'hit_ratio', 100, 0)} %"
    yield f"faster in two of four: {all_of('concur', 'throughput_ratio')}"
    beside = figures("companions-beside")
    newer = [{row["policy"]: row for row in beside[title]} for title in figures("companions") if title in beside]
    same = [new["fcfs"]["turns_per_min"] == old["fcfs"]["turns_per_min"] for new, old in zip(newer, rows, strict=True)]
    assert same == [True, True, True, False]  # GAIA's programs are others now

    def of_newer(policy: str, figure: str, digits: int = 2) -> str:
        return "/".join(f"{mean(each[policy][figure]):.{digits}f}" for each in newer)

    shipped, default = "thunderagent-released", "breakeven"
    turns, times = ([of_newer(each, f"{of}_ratio") for each in (shipped, default)] for of in ("throughput", "latency"))
    ended = [of_newer(each, "programs_ended", 0) for each in (shipped, default, "fcfs")]
    yield "turns a minute of the shipped order {}, of `breakeven` {}".format(*turns)
    yield "mean time of a program {} and {}".format(*times)
    yield "programs that end {}, {}, under `fcfs` {}".format(*ended)


def orbit() -> Iterator[str]:
    found = {(each["policy"], each["figure"]): each for each in figures("orbit")["found"]}

    def ratio(policy: str, what: str, *, wide: bool) -> str:
        each = found[policy, f"latency of {what} tasks / FCFS"]
        return f"{each['mean']:.2f} ± {each['half_width']:.2f}" if wide else f"{each['mean']:.2f}"

    paper = figures("orbit")["paper"]["latency_s"]
    own, theirs = found["JUDGE", "latency of all tasks / FCFS"]["mean"], paper["JUDGE"][-1] / paper["FCFS"][-1]
    of = {
        percent: [found[policy, f"P{percent} of right tasks (s)"]["mean"] for policy in paper] for percent in (50, 90)
    }
    yield "P50 {:.0f} s under FCFS, {:.0f} STEP, {:.0f} JUDGE".format(*of[50])
    yield "P90 {:.0f}, {:.0f}, {:,.0f}".format(*of[90])
    queued = {policy: found[policy, "to a turn's first token (s) / FCFS"]["mean"] for policy in ("STEP", "JUDGE")}
    yield f"STEP {100 - 100 * queued['STEP']:.0f} % less"
    yield f"JUDGE {100 * queued['JUDGE'] - 100:.0f} % more"
    yield f"all tasks take {100 * own - 100:.0f} % longer, in the paper {100 * theirs - 100:.0f} %"
    for policy, shown in (("STEP", "STEP (`orbit-step`)"), ("JUDGE", "JUDGE (`orbit-judge`), each step")):
        theirs = [f"{each / fcfs:.2f}" for each, fcfs in zip(paper[policy], paper["FCFS"], strict=True)]
        ours = [
            ratio(policy, what, wide=not (policy == "STEP" and what == "wrong")) for what in ("right", "wrong", "all")
        ]
        yield f"| {shown} | " + " | ".join(f"{own} | {other}" for own, other in zip(ours, theirs, strict=True)) + " |"
    every_5 = " | | ".join(ratio("JUDGE, every 5", what, wide=True) for what in ("right", "wrong", "all"))
    yield f"| JUDGE, every 5 | {every_5} | |"


def orbit_front() -> Iterator[str]:
    def found(name: str) -> Callable[[str, str], str]:
        of = {(each["policy"], each["figure"]): each for each in figures(name)["found"]}

        def shown(policy: str, figure: str) -> str:
            each = of[policy, figure]
            if figure == "programs/h":
                return f"{each['mean']:.0f}"
            if each["half_width"] == 0:
                return f"{each['mean']:.0f}"
            return cell(f"{each['mean']} ± {each['half_width']}")

        return shown

    right, wrong = (f"latency of {what} tasks / FCFS" for what in ("right", "wrong"))
    policies = ("breakeven", "breakeven, STEP", "breakeven, JUDGE")
    of = found("orbit-front")
    ratios, ended = ([of(policy, figure) for policy in policies] for figure in (right, "programs/h"))
    yield "÷ FCFS's is {} for `breakeven`, {} with STEP, {} with JUDGE".format(*ratios)
    yield "{}, {} and {} programs an hour".format(*ended)
    of = found("orbit-front-short")
    ratios = [of(policy, right) for policy in policies]
    yield f"{ratios[0]} (wrong ones {of('breakeven', wrong)}), {ratios[1]} and {ratios[2]}"


REGIMES = ("125k", "167k", "220k", "263k")
PUBLISHED = ("fcfs", "autellix", "infercept", "continuum", "continuum-fixed", "concur")


def mars() -> Iterator[str]:
    found = figures("mars")
    points = {each["point"]: each for each in found["points"]}
    columns = (("h100", "1"), ("h100", "1.5"), ("h100", "2"), ("h200", "1"), ("h200", "1.5"))
    of = {name: each["mars: x best published"] for name, each in points.items()}
    for regime in REGIMES:
        yield f"| {regime} | {' | '.join(cell(of[f'{regime} {gpu} {load}']) for gpu, load in columns)} |"
    for gpu in ("h100", "h200"):
        speedups = [mean(text) for name, text in of.items() if f" {gpu} " in name]
        won = sum(each > 1 for each in speedups)
        default = [
            min(mean(points[name]["mean_s"][policy]) for policy in PUBLISHED)
            / mean(points[name]["mean_s"]["breakeven"])
            for name in of
            if f" {gpu} " in name
        ]
        yield f"mean {span(speedups)} (`breakeven` {span(default)}), best at {won} of {len(speedups)}"
    runs = json.loads((RESULTS / "papers-mars-runs.json").read_text())["unknown"]["runs"]

    def over_seeds(regime: str, policy: str, figure: Callable[[Mapping[str, float]], float], load: str = "2") -> float:
        return fmean(figure(runs[f"{regime} h100 {load}|{policy}|{seed}"]) for seed in range(10))

    at_most = {
        policy: over_seeds("263k", policy, lambda run: 1 / run["simulated_s"])
        for policy in ("mars", "infercept", "fcfs", "breakeven")
    }
    in_time = {policy: over_seeds("263k", policy, lambda run: run["goodput_3"]) for policy in at_most}
    parts = {
        policy: [100 * values[policy] / values["mars"] for values in (at_most, in_time)]
        for policy in ("infercept", "fcfs", "breakeven")
    }
    yield "`infercept` keeps {:.0f} % of the throughput and {:.0f} % of the programs in time".format(
        *parts["infercept"]
    )
    shown = "`fcfs` {:.0f} and {:.0f} %, `breakeven` {:.0f} and {:.0f} %: shown"
    yield shown.format(*parts["fcfs"], *parts["breakeven"])

    def goodput(regime: str, policy: str, alpha: int) -> float:
        """Return the part in time over the loads of the H100, on which Fig. 9 is."""
        loads = ("1", "1.5", "2")
        return fmean(over_seeds(regime, policy, lambda run: run[f"goodput_{alpha}"], load) for load in loads)

    for alpha in (2, 3):
        assert all(max(PUBLISHED, key=lambda each: goodput(at, each, alpha)) == "infercept" for at in REGIMES)
        gains = [goodput(at, "mars", alpha) / goodput(at, "infercept", alpha) for at in REGIMES]
        yield f"within {alpha}: {'/'.join(f'{each:.2f}' for each in gains)}"
    assert max(goodput(at, policy, 1) for at in REGIMES for policy in ("mars", "breakeven", *PUBLISHED)) < 0.001
    default = [goodput(at, "breakeven", 3) / goodput(at, "infercept", 3) for at in REGIMES]
    yield f"`breakeven` within 3: {'/'.join(f'{each:.2f}' for each in default)}"
    kept = [100 * goodput(regime, "infercept", 3) for regime in REGIMES]
    hourly = [
        [
            over_seeds(at, policy, lambda run: 200 * 3600 / run["simulated_s"])
            for policy in ("infercept", "breakeven", "mars")
        ]
        for at in REGIMES
    ]
    ended = ["{:.0f}, {:.0f}, {:.0f}".format(*each) for each in hourly]
    yield "under `infercept`, `breakeven` and it: {} (125k); {}; {}; {} (263k)".format(*ended)
    overloaded = [100 * over_seeds(regime, "infercept", lambda run: run["goodput_3"]) for regime in REGIMES]
    yield f"keeps {span(kept, 0)} %, at twice the saturation {span(overloaded, 0)} %"
    alone = figures("mars-fig13")["places"][-1]["mean_s"]
    without = [points["263k h100 2"]["mean_s"]["fcfs"], alone["no control plane"], alone["mars"]]
    yield "{:,.0f} with neither, {:.0f} with both, {:.0f} with all three".format(*map(mean, without))


def mars_tails() -> Iterator[str]:
    places = figures("mars-tails")["places"]
    baselines = PUBLISHED

    def faster(policy: str, gpu: str, figure: str) -> list[float]:
        of = [{name: float(text) for name, text in each[figure].items()} for each in places if gpu in each["place"]]
        return [min(each[name] for name in baselines) / each[policy] for each in of]

    def won(policy: str, gpu: str, figure: str) -> int:
        return sum(each > 1 for each in faster(policy, gpu, figure))

    for gpu in ("h100", "h200"):
        yield f"of `mars` {span(faster('mars', gpu, 'mean_s'))}"
        ratios = faster("mars", gpu, "p95_s")
        default = won("breakeven", gpu, "p95_s")
        if gpu == "h100":
            p90 = faster("mars", gpu, "p90_s")
            yield f"P90 better at {won('mars', gpu, 'p90_s')} of {len(p90)}, up to {max(p90):.2f}"
            yield f"P95 at {won('mars', gpu, 'p95_s')}, up to {max(ratios):.2f}"
            yield f"(`breakeven` {won('breakeven', gpu, 'p90_s')} and {default})"
        else:
            better = won("mars", gpu, "p95_s")
            yield f"P95 better at {better} of {len(ratios)}, up to {max(ratios):.2f} (`breakeven` {default})"
    heaviest = next(each for each in places if each["place"] == "263k h100 2.0")
    p50, p99 = (
        {name: float(text) for name, text in heaviest[f"first_token_{each}_s"].items()} for each in ("p50", "p99")
    )
    others = [[each[name] for name in baselines] for each in (p50, p99)]
    yield f"P50 {p50['mars']:.1f} s, the baselines {min(others[0]):.1f} to {max(others[0]):.0f}"
    ends = f"the baselines {min(others[1]):.0f} to {max(others[1]):,.0f}"
    yield f"P99 {p99['mars']:.0f} s, {ends} (`breakeven` {p50['breakeven']:.1f} and {p99['breakeven']:,.0f})"


def mars_evictions() -> Iterator[str]:
    tenths = figures("mars-evictions")["evicted blocks for each program by tenth"]
    of = {policy: sum(each) for policy, each in tenths.items()}
    assert max(tenths["mars"][:2]) < max(tenths["mars"][2:])
    ends = span([of[policy] for policy in PUBLISHED], 0)
    default = f"(`breakeven` {of['breakeven']:.0f})"
    yield f"{of['mars']:.0f} blocks a program, evenly over the run, the baselines {ends} {default}"


def hourly(figure: str, place: str, *policies: str) -> str:
    """Return how many of a run's 200 programs end in an hour, over the newest code's seeds; all but the first named."""
    runs = [*json.loads((RESULTS / f"papers-mars-{figure}-runs.json").read_text()).values()][-1]["runs"]
    ended = [
        fmean(200 * 3600 / runs[f"{place}|{policy}|{seed}"]["simulated_s"] for seed in range(10)) for policy in policies
    ]
    names = ["", *(f"{'Continuum' if policy == 'continuum' else f'`{policy}`'} " for policy in policies[1:])]
    return ", ".join(f"{name}{each:.0f}" for name, each in zip(names, ended, strict=True))


def mars_fig8() -> Iterator[str]:
    best = figures("mars-fig8")["best baseline / it"]
    default = best["breakeven"]["mean_s"].partition(",")[0]
    places = [each["best baseline / it"]["mars"] for each in figures("mars-fig8")["places"]]
    least, most = min(places, key=mean), max(places, key=mean)
    low, _, high = default.split()
    ended = hourly("fig8", "S-ILR3 gpt-oss 2", "breakeven", "mars", "continuum")
    yield f"{least} to {cell(most)} (`breakeven` {low} to {float(high):.1f}; programs an hour at the heaviest {ended})"
    for percentile in ("p90_s", "p95_s"):
        low, _, high = best["mars"][percentile].partition(",")[0].split()
        yield f"P{percentile[1:3]} {low} to {float(high):.1f}"


def mars_fig11() -> Iterator[str]:
    found = figures("mars-fig11")
    best = {
        policy: {name: text.partition(",")[0] for name, text in each.items()}
        for policy, each in found["best baseline / it"].items()
    }
    ours = best["mars"]
    ended = hourly("fig11", "263k h200 1.5", "breakeven", "mars", "infercept")
    yield f"mean {ours['mean_s']} (`breakeven` {best['breakeven']['mean_s']}; programs an hour at 263k {ended}); P90"
    yield f"P90 {ours['p90_s']}, P95 {ours['p95_s']}"
    tail = {policy: mean(text) for policy, text in found["places"][0]["p90_s"].items()}
    yield f"P90 {tail['mars']:.0f} s, `breakeven` {tail['breakeven']:.0f}, `infercept` {tail['infercept']:.0f}"
    assert {ratio for each in found["places"] for ratio in each["completed_ratio"].values()} == {"1.000 ± 0.000"}


def mars_fig13() -> Iterator[str]:
    best = figures("mars-fig13")["best baseline / it"]

    def slower(policy: str) -> list[float]:
        low, _, high = best[policy]["mean_s"].partition(",")[0].split()
        return [1 / float(high), 1 / float(low)]

    yield f"without the coordinator {span(slower('no coordinator'))}"
    low, high = slower("no control plane")
    yield f"without the control plane {low:.2f} to {high:.1f}"
    yield f"without the co-scheduler {span(slower('no co-scheduler'))}"
    low, high = slower("breakeven")
    yield f"`breakeven` {low:.2f} to {high:.1f}."


def plugin() -> Iterator[str]:
    of = {}
    for name in ("plugin-mars", "plugin-mars-ablations"):
        for run in json.loads((RESULTS / f"{name}.json").read_text())["runs"]:
            of[run["vllm"]["gpu"], run["vllm"]["regime"], run["vllm"]["arm"]] = run
    baselines = ("fcfs", "infercept", "continuum", "concur")
    percentiles = ("mean_s", "p90_s", "p95_s")
    for gpu in ("h100", "h200"):
        for regime in REGIMES:
            ours = of[gpu, regime, "mars"]
            seconds = " | ".join(f"{ours['vllm'][each]:.0f} ({ours['simulated'][each]:.0f})" for each in percentiles)
            best = min(baselines, key=lambda arm: of[gpu, regime, arm]["vllm"]["mean_s"])
            ratios = []
            for each in percentiles:
                least = [min(of[gpu, regime, arm][where][each] for arm in baselines) for where in ("vllm", "simulated")]
                ratios.append(f"{least[0] / ours['vllm'][each]:.2f} ({least[1] / ours['simulated'][each]:.2f})")
            yield f"| {gpu.upper()}, {regime} | {seconds} | `{best}` | {' | '.join(ratios)} |"
    for arm in ("no coordinator", "no control plane", "no co-scheduler", "mars, stock engine"):
        ratios = []
        for regime in REGIMES:
            alone, whole = of["h100", regime, arm], of["h100", regime, "mars"]
            both = [
                "/".join(f"{alone[where][each] / whole[where][each]:.2f}" for each in percentiles)
                for where in ("vllm", "simulated")
            ]
            ratios.append("{} ({})".format(*both))
        yield f"| {arm} | {' | '.join(ratios)} |"
    for run in json.loads((RESULTS / "plugin-mars-default.json").read_text())["runs"]:
        of[run["vllm"]["gpu"], run["vllm"]["regime"], "breakeven"] = run

    def means(gpu: str, *arms: str) -> str:
        done = [regime for regime in reversed(REGIMES) if (gpu, regime, "breakeven") in of]
        return "/".join(f"{min(of[gpu, regime, arm]['vllm']['mean_s'] for arm in arms):.0f}" for regime in done)

    yield f"a mean of {means('h100', 'breakeven')} seconds at 263k/220k/167k/125k, the best baseline"
    yield f"{means('h100', *baselines)}; on the H200 {means('h200', 'breakeven')} and {means('h200', *baselines)}."
    apart = {
        arm: max(
            abs(of[gpu, regime, arm]["vllm"]["mean_s"] / of[gpu, regime, arm]["simulated"]["mean_s"] - 1)
            for gpu in ("h100", "h200")
            for regime in REGIMES
        )
        for arm in baselines
    }
    assert max(apart[arm] for arm in baselines[:3]) < 0.03
    yield f"`concur` vLLM takes up to {1 + apart['concur']:.1f} times as long"


def nalar() -> Iterator[str]:
    cases = json.loads((RESULTS / "workflows-cases.json").read_text())["cases"]
    higher = {
        name: {
            arm.partition(" ")[2]: each
            for arm, each in arms.items()
            if arm.startswith(list(arms)[-1].partition(" ")[0])
        }
        for name, arms in cases.items()
    }
    baseline = "static, sticky, FCFS"

    def seconds(name: str, arm: str) -> str:
        return ", ".join(f"{higher[name][arm][each]:.0f}" for each in ("mean_s", "p50_s", "p95_s", "p99_s"))

    for name in ("financial", "router", "software"):
        yield f"baseline {seconds(name, baseline)}; default {seconds(name, 'default')}"
    yield f"with `srtf` {seconds('financial', 'default+srtf')}"
    for name, arm, figure in (("financial", "default+srtf", "mean_s"), ("software", "default+lpt", "makespan")):
        ours, default = higher[name][arm], higher[name]["default"]
        tail = 100 * (ours["p95_s"] / default["p95_s"] - 1)
        if figure == "makespan":
            yield f"{100 * (default['programs_per_h'] / ours['programs_per_h'] - 1):+.1f} and {tail:.0f} %"
        else:
            yield f"{100 * (ours[figure] / default[figure] - 1):.0f} and {tail:.0f} %"
    scale = json.loads((RESULTS / "workflows-scale.json").read_text())
    changed, tenth = (scale["fig_10"][f"131072 calls, 128 controllers, {part}% changed"] for part in (100, 10))
    loops = f"{changed['loop_ms']:.0f} ms if all changed, {tenth['loop_ms']:.0f} ms if a tenth did"
    yield f"{loops} | {changed['paper_loop_ms']:.0f} ms"
    most = scale["table_4"]["131072"]
    paper = f"{most['paper_one_level_ms']} and {most['paper_two_level_ms']} ms"
    yield f"{most['one_level_ms']:,.0f} and {most['two_level_ms']:.3f} ms | {paper}"


def nova() -> Iterator[str]:
    e1, e2, e3, e4 = (json.loads((RESULTS / f"nova-e{number}.json").read_text()) for number in (1, 2, 3, 4))
    alone = [e1["alone"]["encode_s"], e1["alone"]["prefill_s"], e1["alone"]["decode_s"]["1"]]
    yield "{:.0f}, {:.0f} and {:.0f} ms".format(*(1000 * each for each in alone))
    for stage, shown in (
        ("encode", "most with {} beside an encoding (+{:.0f} %, which takes {:.2f} times as long)"),
        ("prefill", "{} beside a prefill (+{:.0f} %, {:.2f} times)"),
    ):
        best = max(e1["splits"], key=lambda split: split[f"gain_{stage}"])
        slower = best[f"{stage}_s"] / e1["alone"][f"{stage}_s"]
        yield shown.format(best["decode_units"], 100 * best[f"gain_{stage}"], slower)
    for title, policy in (("adaptive", "nova"), ("`multi_stream`", "multi_stream"), ("`pf_limit`", "pf_limit")):
        runs = [e3[f"{policy} at load {load}"] for load in (0.55, 0.7)]
        yield f"{title} {runs[0]['decode_batch']:.1f} and {runs[1]['decode_batch']:.1f}"
        mean_s, most_s = runs[1]["average_s"], runs[1]["max_s"]
        assert f"{mean_s:.2f}" in PAGES
        assert f"{most_s:.1f}" in PAGES
    heavy, beside = e3["nova at load 0.7"], e3["multi_stream at load 0.7"]
    less = [100 * (1 - heavy[figure] / beside[figure]) for figure in ("average_s", "max_s")]
    yield f"mean latency is {less[0]:.0f} % less than `multi_stream`'s, the maximum {less[1]:.0f} %"
    for load in (0.55, 0.7):
        assert f"{e4[f'adaptive at load {load}']['average_s']:.2f}" in PAGES
    encoded = [f"{1000 * e2[each]['encode_s']:.1f}" for each in ("raw", "K=2 R=0", "K=3 R=0", "K=4 R=0", "K=5 R=0")]
    yield f"{encoded[0]}; {', '.join(encoded[1:])} ms"


CLAIMS = (
    *(fig4, fig10, table2, fig2a, fig6a, fig6b, fig7b, tiers, agents, companions, orbit, orbit_front),
    *(mars, mars_evictions, mars_tails, mars_fig8, mars_fig11, mars_fig13, plugin, nalar, nova),
)


@pytest.mark.parametrize("claims", CLAIMS, ids=lambda each: each.__name__)
def test_the_pages_say_what_the_files_say(claims: Callable[[], Iterator[str]]) -> None:
    """Each text is made of a file, as the page words it."""
    wrong = [text for text in claims() if text not in PAGES]
    assert not wrong


def rows_after(text: str, heads: str) -> list[list[str]]:
    """Return the cells of the table under these heads."""
    rows = text.partition(f"| {heads} |\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


TABLES = {
    section.partition("\n")[0]: (section, rows)
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)
    if (rows := rows_after(section, "In the paper | Ours | The paper | Verdict"))
}
"""By paper: its section, and the rows of its figures and tables."""

VERDICTS = r"shown|contradicts|circular|smaller|worse|below|says nothing|as Fig|our load's|read as|no burst|have these"
NOT_MEASURED = r"nothing to measure|\[`mars`\]|^ours: public traces$"

PUBLISHED_PARTS = {
    "ThunderAgent": (
        *("Fig. 1a", "Fig. 1b", "Fig. 1c", "Fig. 2a", "Fig. 2b", "Fig. 2c", "Fig. 3", "Fig. 4", "Fig. 5", "Fig. 6a"),
        *("Fig. 6b", "Fig. 7a", "Fig. 7b", "Fig. 8", "Fig. 9", "Fig. 10"),
        *(f"Table {number}" for number in range(1, 6)),
    ),
    "MARS": (
        *("Fig. 1", "Fig. 2", "Fig. 3A", "Fig. 3B", *(f"Fig. {number}" for number in range(4, 14))),
        *("Table 1", "Algorithm 1"),
    ),
    "ORBIT": (*(f"Fig. {number}" for number in range(1, 9)), "Table 1", "Table 2"),
    "Nalar": (
        *(*(f"Fig. {number}" for number in range(1, 9)), "Fig. 9a", "Fig. 9b", "Fig. 9c", "Fig. 10"),
        *(f"Table {number}" for number in range(1, 5)),
    ),
    "Nova": (
        *(f"Fig. {number}" for number in range(1, 17)),
        *(f"Table {number}" for number in ("I", "II", "III", "IV", "V", "VI")),
        "Algorithm 1",
    ),
}
"""What a reader of each paper finds in it."""

ROMAN = ("", "I", "II", "III", "IV", "V", "VI")


def parts_named(cell: str) -> Iterator[str]:
    """Return the figures and tables that the first cell of a row names, ranges spelt out."""
    named = r"(Fig\.|Tables?|Algorithm) ((?:\d+[a-cAB]?|[IVX]+)(?:(?:, | to )(?:\d+[a-cAB]?|[IVX]+)\b)*)"
    for kind, numbers in re.findall(named, cell):
        for each in numbers.split(", "):
            first, _, last = each.partition(" to ")
            spelt = [first]
            if last.isdigit():
                spelt = [str(number) for number in range(int(first), int(last) + 1)]
            elif last:
                spelt = list(ROMAN[ROMAN.index(first) : ROMAN.index(last) + 1])
            yield from (f"{kind.removesuffix('s')} {number}" for number in spelt)


@pytest.mark.parametrize("paper", PUBLISHED_PARTS)
def test_a_reader_of_a_paper_finds_each_of_its_figures_and_tables(paper: str) -> None:
    """None is left out, none stands twice, and none is made up."""
    if paper in TABLES:
        rows = TABLES[paper][1]
    elif paper == "Nalar":
        rows = rows_after(READMES[0], "In the paper | Here | The paper, and verdict")
    else:
        rows = rows_after(READMES[1], "In the paper | Here | Paper")
    assert sorted(part for row in rows for part in parts_named(row[0])) == sorted(PUBLISHED_PARTS[paper])


def test_each_row_has_a_file_or_says_why_not() -> None:
    """Its files exist and are among those that the section is said to be from; it has a number of the paper, a verdict.

    What has no file is nothing that can be measured, or went in.
    """
    assert {*TABLES} == {"ThunderAgent", "ORBIT", "MARS"}
    tables = [(section, row) for section, rows in TABLES.values() for row in rows]
    assert len(tables) > 30
    for section, row in tables:
        first, ours, theirs, verdict = row
        assert theirs or re.search(NOT_MEASURED, verdict), first
        assert re.search(f"{VERDICTS}|{NOT_MEASURED}", verdict), (first, verdict)
        files = re.findall(r"[\w-]+\.json", ours)
        assert (
            files or "not made" in ours or "*input*" in ours or verdict.startswith(("nothing to measure", "[`mars`]"))
        ), first
        for name in files:
            assert (RESULTS / name).exists(), name
            said = " ".join(re.findall(r"<!-- figures: ([^>]*) -->", section))
            assert name in said or name.removesuffix("-runs.json") + ".json" in said, (first, name)
