"""The Grafana dashboard and Prometheus' alerts use only metrics and labels that exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.docs_metrics import described
from tests.unit.test_docs import code_blocks, metric_names

Json = dict[str, Any]
ROOT = Path(__file__).parents[3]
DASHBOARD: Json = json.loads((ROOT / "deploy/grafana/thunderagent.json").read_text())
(GROUP,) = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
ALERTS: list[Json] = GROUP["rules"]
PANELS: list[Json] = DASHBOARD["panels"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel.get("targets", ())]
DURATION = re.compile(r"\d+[smh]")
OF_SCRAPES = {"job", "instance", "namespace", "le"}
"""Labels that Prometheus adds, and the label of a histogram's buckets."""


METRICS = {each.name: (each.kind, set(each.labels)) for each in described()}
EXPOSED = metric_names()


def asked(expression: str) -> tuple[set[str], set[str]]:
    """Return the metrics and the labels in an expression."""
    metrics = set(re.findall(r"\bthunderagent_\w+", expression))
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    lists = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", expression)
    return metrics, {*selected, *(name.strip() for each in lists for name in each.split(","))}


def wrong_in(expression: str, legend: str = "") -> list[str]:
    """Return the metrics and labels of an expression that are not exposed."""
    metrics, labels = asked(expression)
    wrong = [] if metrics else ["no metric"]
    allowed = set(OF_SCRAPES)
    for metric in metrics:
        base = re.sub(r"_(bucket|sum|count)$", "", metric)
        kind, its_labels = METRICS.get(base, ("", set()))
        if (metric != base) != (kind == "histogram") or base not in EXPOSED:
            wrong.append(metric)
        allowed |= its_labels
    return wrong + sorted((labels | set(re.findall(r"\{\{(?:\s*\$labels\.)?\s*(\w+)\s*\}\}", legend))) - allowed)


def test_the_documentation_has_what_is_compared() -> None:
    """It has kinds and labels."""
    assert METRICS["thunderagent_programs"] == ("gauge", {"status", "phase"})
    assert METRICS["thunderagent_hold_seconds"] == ("histogram", set())


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("thunderagent_turn_held", ["thunderagent_turn_held"]),
        ('thunderagent_turns_total{status="finished"}', ["status"]),
        ("sum by (program) (thunderagent_turns_held)", ["program"]),
        ("thunderagent_hold_seconds", ["thunderagent_hold_seconds"]),
        ("thunderagent_turns_held_count", ["thunderagent_turns_held_count"]),
        ("up", ["no metric"]),
        ('sum by (le) (rate(thunderagent_hold_seconds_bucket{job=~"$job"}[5m]))', []),
    ],
)
def test_metric_that_is_not_exposed_is_found(expression: str, wrong: list[str]) -> None:
    """The comparison finds what it looks for."""
    assert wrong_in(expression) == wrong


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{title}-{each['refId']}" for title, each in TARGETS])
def test_a_panel_asks_for_what_is_exposed(title: str, target: Json) -> None:
    """Each metric and label is one of ours, from the data source that the reader chose."""
    assert wrong_in(target["expr"], target["legendFormat"]) == []
    assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}


def test_the_dashboard_is_well_laid_out() -> None:
    """Panels have unique numbers, lie within the page, and none covers another."""
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    covered: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in columns for y in rows}
        assert columns.stop <= 24
        assert not cells & covered, panel["title"]
        covered |= cells
        assert panel["title"]
        assert panel["type"] == "row" or len({each["refId"] for each in panel["targets"]}) == len(panel["targets"])


def test_the_dashboard_s_variables_ask_for_a_metric_of_ours() -> None:
    """They list the jobs and namespaces in which a proxy is scraped."""
    queries = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    assert len(queries) == 2
    assert {re.fullmatch(r"label_values\((\w+), \w+\)", query)[1] for query in queries} <= EXPOSED  # type: ignore[index]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_asks_for_what_is_exposed(alert: Json) -> None:
    """Each metric and label is one of ours, and the alert explains the fault and where to look."""
    assert set(alert) <= {"alert", "expr", "for", "labels", "annotations"}
    assert set(alert["annotations"]) == {"summary", "description"}
    assert alert["labels"]["severity"] in {"warning", "critical"}
    assert DURATION.fullmatch(alert.get("for", "1m"))
    assert wrong_in(alert["expr"], " ".join(alert["annotations"].values())) == []


def test_alerts_have_names_of_their_own() -> None:
    """Two alerts of one name would hide each other."""
    assert len({alert["alert"] for alert in ALERTS}) == len(ALERTS)


def test_the_command_of_the_page_makes_a_rule_of_the_operator_s() -> None:
    """The command pipes a PrometheusRule with these alerts into kubectl."""
    (command,) = [each for each in code_blocks("how-to/deploy.md", "sh") if "PrometheusRule" in each]
    made, _, applied = command.rpartition("|")
    assert applied.split()[:2] == ["kubectl", "apply"]
    done = subprocess.run(["sh", "-c", made], cwd=ROOT, capture_output=True, text=True, check=True)
    rule = yaml.safe_load(done.stdout)
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert rule["spec"] == {"groups": [GROUP]}


def test_the_autoscaler_asks_for_what_is_exposed() -> None:
    """Each of its queries gives one number."""
    scaled = yaml.safe_load((ROOT / "deploy/kubernetes/autoscaling/scaled-object.yaml").read_text())
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert [wrong_in(query) for query in queries] == [[], []]
    assert all(query.startswith("max(") for query in queries)
