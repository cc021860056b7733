"""The user's documentation against the code: every link, option, metric, error and example that it names is real."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
import yaml

from scripts.docs_metrics import described
from scripts.docs_reference import (
    COMMAND_LINE_ONLY,
    configuration,
    error_classes,
    error_codes,
    filled,
    helps,
    profiles,
    reasons,
    settings_of,
    templates,
)
from scripts.docs_site import SHOWN, whole
from tests.builders import Driver
from thunderagent.backends import vllm
from thunderagent.backends.discovery.file import parse
from thunderagent.cli import build_parser
from thunderagent.cli.serve import LIST_FIELDS
from thunderagent.config import ENVIRONMENT_PREFIX, ServeConfig
from thunderagent.policy_loader import PRESETS, load_policy
from thunderagent.programs.invariants import check
from thunderagent.programs.messages import ProgramReleased, Reason, ReplicaPolled, ReplicaUp, Tick, TurnAsk, TurnEnd
from thunderagent.programs.policies import PARTS, POLICIES
from thunderagent.programs.policy import AccountView, Policy, ProgramView, ReplicaView, View
from thunderagent.programs.scheduler import Scheduler
from thunderagent.programs.state.program import ALLOWED
from thunderagent.proxy.judge.prompt import DEFAULT_PROMPT
from thunderagent.proxy.watch.event_feed import KINDS, SIGNAL_KINDS
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.engine.timing import load_profiles
from thunderagent.tools.template import Template
from thunderagent_nova.config import NovaConfig
from thunderagent_nova.metrics import GAUGES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INTEGRATIONS = DOCS / "integrations"
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md")),
        *(ROOT / "packages").glob("*/README.md"),
        *DOCS.rglob("*.md"),
    ]
)
PICTURES = sorted(DOCS.rglob("*.svg"))

HOSTS = {
    *("arxiv.org", "blog.vllm.ai", "docs.litellm.ai", "docs.nvidia.com", "docs.sglang.io", "github.com", "llm-d.ai"),
    *("pypi.org", "raw.githubusercontent.com"),
    "keepachangelog.com",
    "semver.org",
    "www.w3.org",
    "localhost",
    "127.0.0.1",
    "10.0.0.1",
    "10.0.0.2",
    "10.0.0.3",
    "engines.inference.svc.cluster.local",
}
# The first part of every path that begins with a slash: endpoints, not paths of a machine.
ENDPOINTS = {
    *("v1", "p", "sessions", "programs", "finish_session", "replicas", "queue", "health", "ready", "metrics"),
    *("sandboxes", "work", "NAMESPACE", "tools", "summary", "history", "events", "dashboard"),
    *("operations", "deployment", "statefulset", "keys", "config", "concurrency"),
    *("tokenize", "detokenize", "version", "reset_prefix_cache", "generate", "inference", "skyrl"),
    *("openapi", "docs", "dashboard", "internal", "thunderagent"),
    *("pause", "resume", "pause_generation", "continue_generation", "flush_cache", "is_paused", "is_sleeping"),
    *("sleep", "wake_up", "release_kv_cache_memory", "release_memory_occupation", "resume_memory_occupation"),
    *("start_weight_update", "start_draft_weight_update", "finish_weight_update", "finalize_weight_update"),
    *("update_weights", "update_weights_from_disk", "update_weight_version", "collective_rpc", "weight_info"),
    *("begin_weight_update", "end_weight_update", "pd_role_switch", "load_lora_adapter_from_tensors", "ready"),
    *("add_external_corpus", "remove_external_corpus", "register_transfer_engine_info", "kv_event_sources"),
    *("cohere", "generative_scoring"),
    "invocations",
    *("destroy_weights_update_group", "shutdown_weight_transfer_engine", "abort_request", "abort_requests"),
    *("load_lora_adapter", "unload_lora_adapter", "init_weights_update_group", "init_weight_transfer_engine"),
    *("init_weight_transfer", "init_broadcaster", "init_weights_send_group_for_remote_instance"),
    *("send_weights_to_remote_instance", "workers", "list_workers", "weight_sync", "leases", "rollouts"),
    *("get_load", "get_loads", "end", "release", "scheduler"),
    *("add_worker", "remove_worker", "profiles"),
    *("health_generate", "model_info", "server_info", "get_server_info", "open_session", "close_session"),
    "min",  # a column of a benchmark's table
}
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
ABSOLUTE_PATH = re.compile(r"(?<![\w.~:/<>)}\]*-])/([A-Za-z_][\w-]*)")


def ids(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def page(name: str) -> str:
    return (DOCS / name).read_text()


@cache
def shown(path: Path) -> str:
    """Return a page as the site shows it: with generated parts, and with the files in its tabs."""
    return whole(path.read_text())


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site makes them."""
    titles = re.findall(r"^#+ +(.+)$", FENCE.sub("", shown(path)), re.MULTILINE)
    own = {name for title in titles for name in re.findall(r"\{ #([\w-]+) \}$", title)}
    return own | {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def code_blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", shown(DOCS / name), re.DOTALL | re.MULTILINE)


def package_readme(name: str) -> str:
    return (ROOT / "packages" / f"thunderagent-{name}" / "README.md").read_text()


def metric_names() -> set[str]:
    """Return the metrics of `/metrics`, under the names that a dashboard uses."""
    return {each.name for each in described()}


@pytest.mark.parametrize("path", PAGES, ids=ids(PAGES))
def test_every_link_leads_somewhere(path: Path) -> None:
    """A relative link names an existing file and one of its headings."""
    broken = []
    for link in LINK.findall(FENCE.sub("", shown(path))):
        if urlsplit(link).scheme:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("path", [*PAGES, *PICTURES], ids=ids([*PAGES, *PICTURES]))
def test_nothing_of_a_machine_is_named(path: Path) -> None:
    """Absolute paths are endpoints, and URLs lead to the few hosts that readers should know."""
    text = path.read_text()
    if path.suffix == ".md":
        assert set(ABSOLUTE_PATH.findall(LINK.sub("", text))) <= ENDPOINTS
    hosts = {urlsplit(url).hostname for url in re.findall(r"https?://[\w.:-]+", text)}
    assert hosts <= HOSTS


@pytest.mark.parametrize("text", ["in /home/me/x", "`/etc/passwd`", "(/tmp/x)", "cd /root"])
def test_a_place_on_a_machine_is_found(text: str) -> None:
    """The rule above finds such places."""
    assert set(ABSOLUTE_PATH.findall(text)) - ENDPOINTS


def nav_pages(entry: object) -> Iterator[str]:
    """Yield the pages of a part of the site's navigation, in order."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for each in entry.values():
            yield from nav_pages(each)
    elif isinstance(entry, list):
        for each in entry:
            yield from nav_pages(each)


def test_every_page_is_in_the_navigation() -> None:
    """A page without a menu entry is not found; each page is there once."""
    nav = re.search(r"^nav:\n((?:[ -].*\n|\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert nav is not None
    listed = list(nav_pages(yaml.safe_load(nav[1])))
    assert len(listed) == len(set(listed))
    fragments = {str(path.relative_to(DOCS)) for path in INTEGRATIONS.glob("*.md")} - set(listed)
    included = {name for path in DOCS.rglob("*.md") for _, name in SHOWN.findall(path.read_text())}
    assert fragments == {name for name in included if name.endswith(".md")}
    examples = {str(path.relative_to(DOCS)) for path in (DOCS / "examples").glob("*/*.*")}
    assert examples == included - fragments
    assert {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - fragments == set(listed)


MOST_WORDS_COUNT = 30_000
SHOWN_PAGES = sorted(DOCS.rglob("*.md"))


def words_count(text: str) -> int:
    """Count what a reader reads in a page's file: words with a letter or digit, in prose, tables and code.

    Rulers and bars of tables are no words, and comments are not shown. What the site fills in is not counted.
    """
    said = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return sum(any(letter.isalnum() for letter in word) for word in said.split())


def test_the_pages_are_short_enough_to_read() -> None:
    assert words_count("| a b | - |\n|---|---|\n<!-- c -->\n```sh\nls --all  # d\n```") == 6
    assert sum(words_count(path.read_text()) for path in SHOWN_PAGES) <= MOST_WORDS_COUNT


FACTS = ["Program id", "End", "See that it works", "Tried with"]
FRAMEWORKS = [name for each in ("index", "training") for _, name in SHOWN.findall(page(f"integrations/{each}.md"))]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_says_its_facts(name: str) -> None:
    """They are how a program is named and ended, how to see that it works, and what was tried."""
    facts = re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", page(name), re.MULTILINE)
    assert [heading for heading, said in facts if said.strip()] == FACTS


@pytest.mark.parametrize(
    "words",
    [
        "autoscaling",
        "TTFT",
        "high availability",
        "failover",
        "rate limit",
        "load balancing",
        "KV cache",
        "prefix cach",
        "TRL",
        "OpenRLHF",
        "16 replicas",
    ],
)
def test_the_words_that_users_search_for_are_there(words: str) -> None:
    assert any(words.lower() in path.read_text().lower() for path in PAGES)


def test_every_option_is_in_the_configuration() -> None:
    """Each field has a row with its option, its environment variable, its default and its meaning."""
    rows = {cells[1].strip(): cells for row in configuration().splitlines() if len(cells := row.split("|")) > 4}
    for name, field in ServeConfig.model_fields.items():
        option, variable = LIST_FIELDS.get(name, name.replace("_", "-")), f"{ENVIRONMENT_PREFIX}{name.upper()}"
        _, _, default, meaning, _ = rows[f"`--{option}`<br>`{variable}`"]
        assert meaning.strip(), f"{name} has no description"
        if field.default not in (None, (), {}, ""):
            assert default.strip("` ").lower() == str(field.default).lower(), name
    assert "<!-- generated: configuration -->" in page("reference/configuration.md")
    assert set(Template.model_fields) == set(re.findall(r"^\| `(\w+)` \|", templates(), re.MULTILINE))
    assert "<!-- generated: templates -->" in page("how-to/sandboxes.md")


def test_every_command_and_option_is_in_the_command_line() -> None:
    """Each command has its help there except `serve`, whose options are the configuration; each profile has its row."""
    said = dict(helps())
    for name in ("engine", "simulate", "compare", "calibrate", "status", "key", "replay", "record", "nova serve"):
        assert "--help" in said[f"thunderagent {name}"], name
    assert {f"--{field.name.replace('_', '-')}" for field in fields(NovaConfig)} <= set(
        re.findall(r"--[\w-]+", said["thunderagent nova serve"])
    )
    assert "<!-- generated: commands -->" in page("reference/cli.md")
    assert set(load_profiles()) == set(re.findall(r"^\| `([\w.-]+)` \|", profiles(), re.MULTILINE))


def test_the_signatures_of_a_policy_and_its_view_are_listed() -> None:
    """Every member, with what it takes and returns."""
    shown_page = shown(DOCS / "how-to/write-a-policy.md")
    for kind in (Policy, View, ProgramView, ReplicaView, AccountView):
        members = [name for name in vars(kind) if not name.startswith("_")]
        assert [name for name in members if f"| `{name}" not in shown_page] == []
    assert "`hold_s(view: View, program: ProgramView) -> float`" in shown_page
    assert "`now_s: float`" in shown_page


def test_every_metric_of_nova_is_documented() -> None:
    named = set(re.findall(r"`([^`]+)`", FENCE.sub("", package_readme("nova"))))
    assert set(GAUGES) | {"nova:stage_seconds_total", "nova:stage_passes_total", "nova:tokens_total"} <= named


@pytest.mark.parametrize(
    ("package", "part"),
    [("nova", "nova_metrics"), ("workflows", "directives"), ("workflows", "workflow_policies")],
)
def test_a_table_of_a_package_is_as_generated(package: str, part: str) -> None:
    """A README is shown as it stands, so it holds a copy of the table; paste what `filled` returns."""
    assert filled(f"<!-- generated: {part} -->").strip() in package_readme(package)


def test_the_configuration_file_of_the_page_is_one(tmp_path: Path) -> None:
    """The example is read unchanged."""
    path = tmp_path / "thunderagent.toml"
    path.write_text(code_blocks("reference/configuration.md", "toml")[0])
    config = ServeConfig.load(path)
    assert config.policy_args == {"hold_ratio": "1.5", "pass_count": "8", "share_prefixes": "False"}


def test_the_templates_of_the_page_are_some(tmp_path: Path) -> None:
    """The example is read unchanged."""
    path = tmp_path / "thunderagent.toml"
    path.write_text(code_blocks("how-to/sandboxes.md", "toml")[0])
    assert ServeConfig.load(path).sandbox_templates["coder"].program_classes == ("coder",)


def test_every_metric_explains_itself_and_every_one_that_a_page_names_is_there() -> None:
    """The table is generated; pages, and files that are named there, use no other metric."""
    assert "<!-- generated: metrics -->" in page("reference/metrics.md")
    assert [each.name for each in described() if len(each.meaning.split()) < 2 or each.meaning[-1] != "."] == []
    named = {name for path in PAGES for name in re.findall(r"\bthunderagent_[a-z_]*[a-z]\b", shown(path))}
    others = {"thunderagent_vllm", "thunderagent_workflows"}  # modules
    others |= {"thunderagent_hold_s"}  # a field of a request's body
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} - others <= metric_names()


def test_every_metric_of_vllm_that_is_read_is_documented() -> None:
    """The page on engines names exactly those."""
    assert set(re.findall(r"`((?:vllm:|process_)\w+)`", page("how-to/engines.md"))) == set(vllm._NEEDED)


def test_every_error_and_reason_is_in_its_table() -> None:
    """Each code has status, Retry-After and meaning, or belongs to the command line; each reason has its meaning."""
    rows = {cells[2].strip("` "): cells for row in error_codes().splitlines() if len(cells := row.split("|")) == 6}
    for kind in error_classes():
        if kind.code in COMMAND_LINE_ONLY:
            assert f"`{kind.code}`" in page("reference/errors.md")
            continue
        assert int(rows[kind.code][1]) == kind.status
        assert rows[kind.code][3].strip() == (f"{kind.retry_after_s} s" if kind.retry_after_s else "")
        assert rows[kind.code][4].strip()
    said = {cells[1].strip(" `"): cells for row in reasons().splitlines()[2:] if (cells := row.split("|"))}
    assert set(said) == set(Reason)
    assert [name for name, cells in said.items() if not cells[2].strip() or not cells[3].strip()] == []
    assert "<!-- generated: errors -->" in page("reference/errors.md")
    assert "<!-- generated: reasons -->" in page("reference/logs.md")


def literal_codes(source: str) -> set[str]:
    """Return the texts that code gives as an error's code: in a dict, by keyword, or to `error_body`."""
    given: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            given += [value for key, value in zip(node.keys, node.values, strict=True) if is_text(key, "code")]
        elif isinstance(node, ast.Call):
            given += [each.value for each in node.keywords if each.arg == "code"]
            given += node.args[1:2] if isinstance(node.func, ast.Name) and node.func.id == "error_body" else []
    return {each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def is_text(node: ast.expr | None, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def test_no_error_of_the_proxy_has_a_code_of_its_own() -> None:
    """A literal would be in no list; facades repeat what other proxies say."""
    assert literal_codes('{"code": "a"}, f(code="b"), error_body(502, "c", why), {"code": d, "kind": "e"}') == {*"abc"}
    sources = [path.read_text() for path in (ROOT / "thunderagent").rglob("*.py")]
    found = set[str]().union(*map(literal_codes, sources))
    assert found <= {kind.code for kind in error_classes()} | {"WORKER_NOT_FOUND"}


def test_every_kind_of_message_is_documented() -> None:
    """The page names what `GET /events` may send, no other kind, and the signals."""
    table = page("reference/logs.md").partition("| Kinds | |\n")[2].partition("\n\n")[0]
    rows = [row for row in table.splitlines() if not row.startswith("| signals")]
    assert set(re.findall(r"`(\w+)`", "".join(rows))) - {"because", "reason"} == KINDS
    signals = page("reference/logs.md").partition("\n## The information stream\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", signals, re.MULTILINE)))) == SIGNAL_KINDS


def test_generated_pages_are_whole() -> None:
    """Pages have the lifecycle, the judge's prompt and the alerts as in the code."""
    life = shown(DOCS / "explanation/architecture.md").partition("## The life of a program")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:5]] for row in life.splitlines() if row.startswith("| ")][1:]
    assert {name: set(then.split(", ")) for name, _, _, then in rows} == {
        kind: set(then) or {"nowhere"} for kind, then in ALLOWED.items()
    }
    assert DEFAULT_PROMPT.strip() in shown(DOCS / "how-to/judge.md")
    assert "`thunderagent_replica_up == 0`" in shown(DOCS / "how-to/observe.md")


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_and_setting_is_documented(name: str) -> None:
    """The page on policies names each policy and each of its settings."""
    text, factory = shown(DOCS / "reference/policies.md"), POLICIES[name]
    assert f"\n## `{name}`\n" in text
    assert is_dataclass(factory)
    section = text.partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
    if name == "breakeven":
        section = shown(DOCS / "explanation/default-policy.md")
    settings = list(settings_of(factory))
    assert {field.name for field in fields(factory) if field.init} == {setting for setting, _, _ in settings}
    rows = {cells[1].strip("` "): cells for row in section.splitlines() if len(cells := row.split("|")) == 5}
    for setting, default, meaning in settings:
        assert meaning.strip(), setting
        assert rows[setting][2].strip("` ") == default, setting


@pytest.mark.parametrize("kind", PARTS)
def test_every_part_and_setting_is_documented(kind: str) -> None:
    """The page names each part in the row of its kind, and each of its settings somewhere."""
    text = shown(DOCS / "reference/policies.md")
    (row,) = [row for row in text.splitlines() if row.startswith(f"| `--{kind.replace('_', '-')}` |")]
    assert set(PARTS[kind]) <= set(re.findall(r"`([\w-]+)`", row))
    for factory in PARTS[kind].values():
        settings = list(settings_of(factory))
        assert [setting for setting, _, meaning in settings if not meaning.strip() or f"`{setting}`" not in text] == []


def test_every_policy_and_preset_is_named() -> None:
    """The page and the help list all names that `--policy` takes."""
    named = set(re.findall(r"`([\w-]+)`", page("reference/policies.md").partition("\n## ")[0]))
    assert {*POLICIES, *PRESETS} <= named
    assert {*POLICIES, *PRESETS} <= set(re.findall(r"[\w-]+", ServeConfig.model_fields["policy"].description or ""))


@pytest.mark.parametrize(
    "example", code_blocks("how-to/write-a-policy.md", "python"), ids=lambda text: text.partition("\n")[0]
)
def test_a_policy_of_the_page_can_be_loaded_and_works(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each example loads as module:Class, holds programs that do not fit, and lets them in after a release."""
    module = example.partition("\n")[0].removeprefix("# ").removesuffix(".py")
    (tmp_path / f"{module}.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    class_name = re.findall(r"^class (\w+)", example, re.MULTILINE)[0]
    assert f"{module}:{class_name}" in page("how-to/write-a-policy.md") or module == "full_house"
    is_global = "def decide" in example
    name, settings = (
        ("breakeven", {"global_policy": f"{module}:{class_name}"}) if is_global else (f"{module}:{class_name}", {})
    )
    try:
        drive(Scheduler(load_policy(name, settings)))
    finally:
        del sys.modules[module]


def example_of(module: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make an example of the page importable; return it without its imports."""
    text = next(each for each in code_blocks("how-to/write-a-policy.md", "python") if each.startswith(f"# {module}.py"))
    (folder / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, module, raising=False)
    return text[text.index("@dataclass") :]


@pytest.mark.parametrize(
    ("module", "first"), [("srtf", ["further", "larger", "new"]), ("lpt", ["larger", "further", "new"])]
)
def test_the_short_global_policies_of_the_page_order_who_waits(
    module: str, first: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In at most 15 lines the first orders by turns, the other by what was computed."""
    assert len(example_of(module, tmp_path, monkeypatch).strip().splitlines()) <= 15
    policy = load_policy("ttl", {"ttl_s": 1.0, "reserve_tokens": 0, "global_policy": f"{module}:{module.title()}"})
    driver = Driver(policy, replicas={"r0": 10_000})
    for _ in range(3):
        driver.takes_turn("further", 1000)
    for _ in range(2):
        driver.takes_turn("larger", 4000)
    driver.ticks(5.0)
    busy = driver.arrives("busy", 10_000)
    turns = {driver.arrives(name, 6000): name for name in ("new", "larger", "further")}
    driver.ticks(1.0)
    order = []
    driver.finishes(busy, 10_000)
    driver.releases("busy")
    while len(order) < 3:
        turn_id = next(turn_id for turn_id in turns if turn_id in driver.granted_on and turns[turn_id] not in order)
        order.append(turns[turn_id])
        driver.finishes(turn_id, 6000)
        driver.releases(turns[turn_id])
    assert order == first


def test_the_whole_global_policy_of_the_page_gives_and_takes_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of a class have a replica of their own, more while they wait; others keep at least one."""
    example_of("chat_first", tmp_path, monkeypatch)
    policy = load_policy("ttl", {"ttl_s": 1000.0, "reserve_tokens": 0, "global_policy": "chat_first:ChatFirst"})
    driver = Driver(policy, replicas={"r0": 1000, "r1": 1000, "r2": 1000})
    driver.ticks(1.0)
    turns = [driver.arrives(f"chat-{number}", 1000, program_class="chat") for number in range(4)]
    driver.arrives("batch", 1000)
    assert driver.home("chat-0") == "r0"
    assert driver.home("batch") in ("r1", "r2")
    driver.ticks(1.0)
    assert sum(turn_id in driver.granted_on for turn_id in turns) == 2
    assert len({driver.home(f"chat-{number}") for number in range(4)} - {None, driver.home("batch")}) == 2
    for turn_id in turns:
        driver.finishes(turn_id, 1000)
    driver.releases_all(*(f"chat-{number}" for number in range(4)))
    driver.ticks(1.0)
    routes = {name: set(route.targets) for _, name, route in driver.scheduler.core.routing.routes}
    assert len(routes["chat"]) == 1
    assert len(routes[""]) == 2


def test_the_comparison_of_the_page_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its policies are read as written, with the module that lies beside."""
    example_of("chat_first", tmp_path, monkeypatch)
    (line,) = [line for line in page("how-to/write-a-policy.md").splitlines() if "thunderagent compare" in line]
    command = shlex.split(line.removeprefix("PYTHONPATH=. thunderagent "))
    _, text = build_parser().parse_args(command).policies
    assert dict(Contestant.parse(text).settings) == {"global_policy": "chat_first:ChatFirst"}


def drive(scheduler: Scheduler) -> None:
    """Bring four programs of 4,000 tokens onto a replica of 10,000, release them one by one, and see all served."""
    granted: set[int] = set()

    def send(event: object) -> None:
        granted.update(d.turn_id for d in scheduler.handle(event) if type(d).__name__ == "Grant")
        check(scheduler)

    send(ReplicaPolled(0.0, "r", 10_000))
    send(ReplicaUp(0.0, "r"))
    for turn_id in range(4):
        send(TurnAsk(now_s=1.0 + turn_id, turn_id=turn_id, program_id=f"p{turn_id}", prompt_bytes=16_000))
    assert {0} <= granted <= {0, 1}  # a policy may leave room for the first to grow
    for turn_id in range(4):
        now_s = 10.0 * (turn_id + 1)
        send(TurnEnd(now_s=now_s, turn_id=turn_id, prompt_tokens=3800, output_tokens=200, cached_tokens=0))
        send(ProgramReleased(now_s + 1, f"p{turn_id}"))
        send(Tick(now_s + 6))
    assert granted == {0, 1, 2, 3}
    assert len(scheduler.programs) == 0


@pytest.mark.parametrize(("language", "suffix"), [("json", ".json"), ("toml", ".toml"), ("text", ".txt")])
def test_the_files_of_replicas_of_the_page_are_some(language: str, suffix: str) -> None:
    """Each example is read unchanged."""
    wanted = parse(code_blocks("how-to/scale.md", language)[0].encode(), suffix)
    assert [each.url for each in wanted][:1] == ["http://10.0.0.1:8000"]
    assert wanted[-1].ranks_count == 4


RESULTS = ROOT / "benchmarks" / "results"
FIGURE = re.compile(r"\d ?(?:turns/min|turns a minute|turns/s|events/s|µs|ms|[KMG]B|points)(?!\w)|\d,\d{3} \||± ?\d")
FROM = re.compile(r"<!-- figures: ([\w.*-]+\.json(?:, [\w.*-]+\.json)*|none measured) -->")


def sections_of(text: str) -> Iterator[str]:
    """Yield the text under each heading, without examples."""
    return iter(
        re.split(r"^#+ ", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), flags=re.MULTILINE)
    )


@pytest.mark.parametrize("path", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda path: path.stem)
def test_no_figure_is_without_the_file_that_it_is_from(path: Path) -> None:
    """A section with figures names its result files; `none measured` stands for limits that are no results."""
    for section in sections_of(path.read_text()):
        if FIGURE.search(section):
            named = FROM.findall(section)
            assert named, f"{section.partition(chr(10))[0]!r} has figures, and names no file of them"
            for name in ", ".join(named).split(", "):
                assert name == "none measured" or list(RESULTS.glob(name)), name


BEFORE = re.compile(r"<!-- made before results said so: \w[^>]{20,} -->")


def says_its_code(path: Path) -> bool:
    """Say whether a result has a single commit, a hash of its code, and a named machine."""
    report = json.loads(path.read_text())
    if path.stem.endswith("-runs"):
        by_code = {code: each["commit"] for code, each in report.items()}
        return all(
            re.fullmatch("[0-9a-f]{16}", code) and re.fullmatch("[0-9a-f]{7,40}", by_code[code]) for code in by_code
        )
    by_one_code = re.fullmatch(r"[0-9a-f]{7,40}\+?", report["commit"]) and re.fullmatch(r"[0-9a-f]{16}", report["code"])
    return bool(by_one_code and report["machine"])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_figure_of_code_that_is_not_known_says_so(path: Path) -> None:
    """The section gives the reason, and no section does so without need."""
    for section in sections_of(path.read_text()):
        names = ", ".join(FROM.findall(section)).split(", ")
        files = [file for name in names if name.endswith(".json") for file in RESULTS.glob(name)]
        unknown = [file.name for file in files if not says_its_code(file)]
        assert bool(unknown) == bool(BEFORE.search(section)), (section.partition("\n")[0], unknown)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_result_says_which_code_made_it_and_where(path: Path) -> None:
    """Results say so as far as it was recorded; figures of other results say that it is unknown."""
    report = json.loads(path.read_text())
    if path.stem.endswith("-runs"):
        assert all(each.keys() == {"commit", "runs"} for each in report.values())
    else:
        assert report["commit"]
        assert report["code"]
        assert report["machine"]


@pytest.mark.parametrize(
    ("paper", "figure_count", "table_count"), [("ThunderAgent", 10, 5), ("ORBIT", 8, 2), ("MARS", 13, 1)]
)
def test_every_figure_and_table_of_a_paper_has_a_row(paper: str, figure_count: int, table_count: int) -> None:
    """What is not made is named as well. Each row has a verdict, or says why there is none."""
    section = page("research/papers.md").partition(f"\n## {paper}\n")[2].partition("\n## ")[0]
    table = section.partition("| In the paper | Ours | The paper | Verdict |\n")[2].partition("\n\n")[0]
    named: dict[str, set[int]] = {"Fig.": set(), "Table": set()}
    for row in table.splitlines()[1:]:
        first, _ours, _theirs, verdict = (cell.strip() for cell in row.strip("|").split("|"))
        assert verdict, first
        kind = ""
        for word in re.findall(r"Fig\.|Table|\d+", first.partition(":")[0]):
            if word.isdigit():
                named[kind].add(int(word))
            else:
                kind = word
    assert named == {"Fig.": {*range(1, figure_count + 1)}, "Table": {*range(1, table_count + 1)}}
