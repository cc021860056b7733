"""Check alerts and dashboard with Prometheus' own tool: they can be parsed, and each alert fires when it should."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import yaml

from tests.debian import apt_get

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
DASHBOARD = ROOT / "deploy/grafana/thunderagent.json"
SAMPLES_COUNT = 120
"""30 minutes with a sample every 15 s."""


@pytest.fixture(scope="module")
def promtool(require_real: Callable[[str], NoReturn], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide promtool; if missing, unpack it from Debian's package without installing, which would start a server."""
    found = shutil.which("promtool")
    if found is not None:
        return Path(found)
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        require_real("no promtool, and no apt-get to have it")
    folder = tmp_path_factory.mktemp("prometheus")
    apt_get("update")
    done = apt_get("download", "prometheus", folder=folder)
    packages = list(folder.glob("prometheus_*.deb"))
    if not packages:
        require_real(f"no promtool: {done.stderr[-500:]}")
    subprocess.run(["dpkg-deb", "--extract", packages[0], folder], check=True)
    return folder / "usr/bin/promtool"


def steady(value: float) -> str:
    return f"{value}x{SAMPLES_COUNT}"


def rising(step: float) -> str:
    return f"0+{step}x{SAMPLES_COUNT}"


def series(name: str, **labels: str) -> str:
    of_scrape = {"job": "proxy", "namespace": "n", "instance": "i", **labels}
    pairs = ", ".join(f'{key}="{value}"' for key, value in of_scrape.items())
    return f"{name}{{{pairs}}}"


def holds(name: str, *, within_1_s: float, within_60_s: float, within_300_s: float) -> dict[str, str]:
    """Return a histogram that grows by the given amount in each bucket."""
    buckets = {"1": within_1_s, "60": within_60_s, "300": within_300_s, "+Inf": within_300_s}
    found = {series(f"{name}_bucket", le=le): rising(step) for le, step in buckets.items()}
    return {**found, series(f"{name}_count"): rising(within_300_s)}


UP = [series("thunderagent_replica_up", replica=replica) for replica in ("a", "b")]
UNKNOWN = [series("thunderagent_capacity_unknown", replica=replica) for replica in ("a", "b")]
UNCACHED = series("thunderagent_prefix_caching_off", replica="b")
ENDED = {
    each: series("thunderagent_turns_total", outcome=each) for each in ("finished", "failed", "refused", "rejected")
}
SPENT = {
    each: series("thunderagent_cost_token_seconds_total", term=each, replica="a") for each in ("decode", "recompute")
}
IDLE = series("thunderagent_replica_idle_while_held_seconds_total", replica="a")
ACTING = series("thunderagent_programs", status="active", phase="acting")
HELD = series("thunderagent_turns_held")
GRANTED = {
    each: series("thunderagent_decisions_total", decision="grant", reason=each) for each in ("anonymous", "home")
}
SANDBOX_ENGINE = series("thunderagent_sandbox_engine_down", driver="docker")
LEADS = [series("thunderagent_scheduler_leads", instance=each) for each in ("s", "t")]
STANDBY, STORE, LED = (
    series(f"thunderagent_{name}") for name in ("scheduler_has_standby", "scheduler_store_answers", "gateway_led")
)
LAG = series("thunderagent_scheduler_log_lag_seconds", quantile="0.99")
WITHOUT_LEAVE = series("thunderagent_fail_open_turns_total")
HOLD, SANDBOX_WAIT = "thunderagent_hold_seconds", "thunderagent_sandbox_wait_seconds"

WELL = {
    **dict.fromkeys(UP, steady(1)),
    **dict.fromkeys(UNKNOWN, steady(0)),
    ENDED["finished"]: rising(100),
    ENDED["failed"]: rising(1),
    ENDED["refused"]: rising(1),
    ENDED["rejected"]: steady(0),
    SPENT["decode"]: rising(1000),
    SPENT["recompute"]: rising(100),
    IDLE: steady(7),
    ACTING: steady(50),
    HELD: steady(5),
    GRANTED["anonymous"]: rising(40),
    GRANTED["home"]: rising(60),
    SANDBOX_ENGINE: steady(0),
    **holds(HOLD, within_1_s=50, within_60_s=100, within_300_s=100),
    **holds(SANDBOX_WAIT, within_1_s=10, within_60_s=10, within_300_s=10),
}
WELL_IN_A_CELL = {
    **WELL,
    LEADS[0]: steady(1),
    LEADS[1]: steady(0),
    STANDBY: steady(1),
    STORE: steady(1),
    LED: steady(1),
    LAG: steady(0.004),
    WITHOUT_LEAVE: steady(0),
}
"""Of several processes: two schedulers, and a gateway."""

STOPPED = {GRANTED["anonymous"]: steady(70), GRANTED["home"]: steady(60)}
ON_HOLD = series("thunderagent_decisions_total", decision="hold", reason="no_room")


def _without(situation: dict[str, str], *names: str) -> dict[str, str]:
    return {name: values for name, values in situation.items() if name not in names}


CASES: dict[str, tuple[dict[str, str], set[str]]] = {
    "all is well": (WELL, set()),
    "no proxy": ({}, {"ThunderAgentDown"}),
    "one replica down": ({**WELL, UP[0]: steady(0)}, {"ThunderAgentReplicaDown"}),
    "all replicas down": (
        {**WELL, **dict.fromkeys(UP, steady(0))},
        {"ThunderAgentReplicaDown", "ThunderAgentNoReplica"},
    ),
    "capacity unknown": ({**WELL, UNKNOWN[1]: steady(1)}, {"ThunderAgentCapacityUnknown"}),
    "capacity of one that is down": (
        {**WELL, UNKNOWN[1]: steady(1), UP[1]: steady(0)},
        {"ThunderAgentReplicaDown"},
    ),
    "prefix caching off": ({**WELL, UNCACHED: steady(1)}, {"ThunderAgentPrefixCachingOff"}),
    "turns rejected": ({**WELL, ENDED["rejected"]: rising(1)}, {"ThunderAgentTurnsRejected"}),
    "turns fail": ({**WELL, ENDED["failed"]: rising(5)}, {"ThunderAgentTurnsFail"}),
    "nothing granted": ({**WELL, **STOPPED}, {"ThunderAgentNothingIsGranted"}),
    "nothing granted ever": (
        {**_without(WELL, *GRANTED.values()), ON_HOLD: steady(9)},
        {"ThunderAgentNothingIsGranted"},
    ),
    "turns wait at a gateway": (_without(WELL, *GRANTED.values()), set()),
    "long holds": ({**WELL, **holds(HOLD, within_1_s=0, within_60_s=90, within_300_s=100)}, {"ThunderAgentLongHolds"}),
    "thrashing": ({**WELL, SPENT["recompute"]: rising(400)}, {"ThunderAgentThrashing"}),
    "a frozen replica": (
        {**WELL, 'thunderagent_replica_verdict{replica="r0",verdict="frozen"}': steady(1)},
        {"ThunderAgentReplicaVerdict"},
    ),
    "idle while held": ({**WELL, IDLE: rising(2)}, {"ThunderAgentIdleWhileHeld"}),
    "programs pile up": ({**WELL, ACTING: steady(2000)}, {"ThunderAgentProgramsPileUp"}),
    "most turns are nobody's": ({**WELL, GRANTED["anonymous"]: rising(70)}, {"ThunderAgentMostTurnsAreAnonymous"}),
    "nobody waits": ({**WELL, **STOPPED, HELD: steady(0)}, set()),
    "no engine of sandboxes": ({**WELL, SANDBOX_ENGINE: steady(1)}, {"ThunderAgentSandboxEngineDown"}),
    "late sandboxes": (
        {**WELL, **holds(SANDBOX_WAIT, within_1_s=5, within_60_s=10, within_300_s=10)},
        {"ThunderAgentSandboxesLate"},
    ),
    "all is well in a cell": (WELL_IN_A_CELL, set()),
    "no leader": ({**WELL_IN_A_CELL, LEADS[0]: steady(0)}, {"ThunderAgentNoLeader"}),
    "two leaders": ({**WELL_IN_A_CELL, LEADS[1]: steady(1)}, {"ThunderAgentTwoLeaders"}),
    "no store": ({**WELL_IN_A_CELL, STORE: steady(0)}, {"ThunderAgentStoreAway"}),
    "no standby": ({**WELL_IN_A_CELL, STANDBY: steady(0)}, {"ThunderAgentNoStandby"}),
    "a slow log": ({**WELL_IN_A_CELL, LAG: steady(1.5)}, {"ThunderAgentLogLags"}),
    "a gateway alone": (
        {**WELL_IN_A_CELL, LED: steady(0), WITHOUT_LEAVE: rising(1)},
        {"ThunderAgentGatewayAlone", "ThunderAgentTurnsWithoutLeave"},
    ),
}


def run(promtool: Path, *arguments: str | Path) -> None:
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", CASES)
def test_exactly_the_right_alerts_fire(name: str, promtool: Path, tmp_path: Path) -> None:
    """After 25 minutes of a situation these alerts fire, and no other."""
    given, fired = CASES[name]
    firing = {
        "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": "25m",
        "exp_samples": [{"labels": f'{{alertname="{each}"}}', "value": 1} for each in sorted(fired)],
    }
    situation = [{"series": each, "values": values} for each, values in given.items()]
    test: dict[str, Any] = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": situation, "promql_expr_test": [firing]}],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    run(promtool, "test", "rules", tmp_path / "test.yaml")


def test_every_alert_has_a_situation() -> None:
    """Every alert fires in some situation."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    assert {rule["alert"] for rule in group["rules"]} == set().union(*(fired for _, fired in CASES.values()))


def test_every_expression_of_the_dashboard_can_be_read(promtool: Path, tmp_path: Path) -> None:
    """Grafana's variables are inside strings, except the time variable."""
    targets = [each for panel in json.loads(DASHBOARD.read_text())["panels"] for each in panel.get("targets", ())]
    rules = [
        {"record": f"dashboard:{number}", "expr": target["expr"].replace("$__rate_interval", "1m")}
        for number, target in enumerate(targets)
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(promtool, "check", "rules", ALERTS, tmp_path / "rules.yaml")
