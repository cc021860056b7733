"""Generate parts of the reference as Markdown from the code's own descriptions.

A page names a part by the comment `<!-- generated: NAME -->`, or `NAME OF-WHAT`; `PARTS` has the function of each name.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from scripts.docs_metrics import by_group
from thunderagent import errors
from thunderagent.cli import build_parser
from thunderagent.cli.serve import LIST_FIELDS
from thunderagent.config import ENVIRONMENT_PREFIX, ServeConfig
from thunderagent.programs import policies, policy
from thunderagent.programs.messages import Reason
from thunderagent.programs.state import program as places
from thunderagent.proxy.judge.prompt import DEFAULT_PROMPT
from thunderagent.simulator.engine.timing import load_profiles
from thunderagent.tools.template import Template
from thunderagent_nova.metrics import GAUGES

ROOT = Path(__file__).parents[1]
SAID = {"internal_error": "A bug of the proxy; its log has the trace."}
"""Meanings of codes whose class describes more than that code."""

COMMAND_LINE_ONLY = ("configuration_error", "event_log_error", "state_error", "calibration_error")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; bars in cells are escaped."""
    heads = list(heads)
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def configuration() -> str:
    """Return every option of `thunderagent serve` by group: option, default, meaning, name in file and environment."""
    said = []
    for each in ServeConfig.slices():
        rows = []
        for name, field in each.model_fields.items():
            option = f"--{LIST_FIELDS.get(name, name.replace('_', '-'))}"
            default = "" if field.default in (None, (), {}, "") else f"`{str(field.default).lower()}`"
            rows.append((f"`{option}`<br>`{ENVIRONMENT_PREFIX}{name.upper()}`", default, field.description or ""))
        said.append(f"## {each.heading()}\n\n{table(('Option, environment', 'Default', 'Meaning'), rows)}")
    return "\n\n".join(said)


def templates() -> str:
    """Return the fields of a sandbox template."""
    return _fields_of(Template)


def directives() -> str:
    """Return the directives of a workflow's agents."""
    from thunderagent_workflows.declare import Directives  # noqa: PLC0415 - an extra, which only its page needs

    return _fields_of(Directives)


def _fields_of(model: type[BaseModel]) -> str:
    rows = [
        (f"`{name}`", "" if default in (None, (), {}, "") else f"`{default}`", field.description or "")
        for name, field in model.model_fields.items()
        for default in [field.get_default(call_default_factory=True)]
    ]
    return table(("Field", "Default", "Meaning"), rows)


def workflow_policies() -> str:
    """Return the policies of workflows, as described by their modules."""
    folder = ROOT / "packages" / "thunderagent-workflows" / "thunderagent_workflows" / "policies"
    said = {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in folder.glob("*.py")}
    names = sorted(said.keys() - {"__init__"})
    return table(("Policy", "Meaning"), [(f"`{name}`", (said[name] or "").partition(": ")[2]) for name in names])


def commands() -> str:
    """Return the help of every command but `serve`, whose options are the configuration."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"  # argparse has no other way to set the width
    try:
        return "\n\n".join(f"## `{name}`\n\n```text\n{text.strip()}\n```" for name, text in helps())
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def helps() -> Iterator[tuple[str, str]]:
    """Yield each command with its help."""
    for name, parser in _parsers(build_parser(), "thunderagent"):
        text = parser.format_help()  # a command may not know its options before
        actions = {each.dest: each for each in parser._actions if each.dest != "help"}  # noqa: SLF001
        if "idle_limit_s" in actions:  # it serves
            own = [each for dest, each in actions.items() if dest not in ServeConfig.model_fields]
            options = "\n".join(f"  {' '.join(each.option_strings)}  {each.help}" for each in own)
            text = f"{parser.description}\n\noptions besides the configuration:\n{options}"
        yield name, text


def _parsers(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    parser.format_help()  # a command may not know its commands before
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to its commands
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for word, inner in action.choices.items():
                commands = list(_parsers(inner, f"{name} {word}"))
                yield from commands or [(f"{name} {word}", inner)]


def error_codes() -> str:
    """Return the errors that a client may get: status, code, Retry-After, meaning."""
    found: dict[str, tuple[int, str, str]] = {}
    for kind in error_classes():
        if kind.code not in COMMAND_LINE_ONLY:
            wait = f"{kind.retry_after_s} s" if kind.retry_after_s else ""
            said = SAID.get(kind.code) or (inspect.getdoc(kind) or "").split("\n\n")[0]
            found.setdefault(kind.code, (kind.status, wait, said))
    rows = [(str(status), f"`{code}`", wait, said) for code, (status, wait, said) in found.items()]
    return table(("Status", "Code", "`Retry-After`", "Meaning"), sorted(rows))


def error_classes() -> Iterator[type[errors.ThunderAgentError]]:
    """Yield every error of the one tree, parents first."""
    todo = [errors.ThunderAgentError]
    while todo:
        yield (kind := todo.pop(0))
        todo += kind.__subclasses__()


def reasons() -> str:
    """Return every reason of a decision, as described in its source."""
    rows, group = [], ""
    for line in inspect.getsource(Reason).splitlines():
        if comment := re.fullmatch(r"    # (.+)", line):
            group = comment[1]
        elif value := re.fullmatch(r'    [A-Z_]+ = "(\w+)"', line):
            rows.append([f"`{value[1]}`", group, ""])
        elif (said := re.fullmatch(r'    """(.+?)"""', line)) and rows:
            rows[-1][2] = said[1]
    return table(("Reason", "Mostly with", "Meaning"), rows)


def lifecycle() -> str:
    """Return the places of a program: the meaning of each, and the places that may follow it."""
    said = re.findall(r"^\| (\w+) \| (.+?) \| (.+?) \|$", places.__doc__ or "", re.MULTILINE)[1:]
    rows = [
        (name, state, who, ", ".join(sorted(places.ALLOWED[places.Kind(name)])) or "nowhere")
        for name, state, who in said
    ]
    return table(("Place", "Status, phase", "Who is there", "Goes to"), rows)


def judge_prompt() -> str:
    """Return the prompt that a judge gets by default."""
    return f"```text\n{DEFAULT_PROMPT.strip()}\n```"


def alerts() -> str:
    """Return the alerts shipped with the project."""
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    rows = [
        (rule["alert"], f"`{rule['expr']}`", rule.get("for", ""), " ".join(rule["annotations"].values()))
        for group in groups
        for rule in group["rules"]
    ]
    said = table(("Alert", "Expression", "For", "Meaning and what to look at"), rows)
    return re.sub(r"\{\{ .+? \}\}", "…", said)


def metrics() -> str:
    """Return the metrics that `/metrics` exposes, in groups."""
    return "\n\n".join(
        f"## {heading}\n\n"
        + table(
            ("Name", "Kind", "Labels", "Meaning"),
            [(f"`{e.name}`", e.kind, ", ".join(f"`{label}`" for label in e.labels), e.meaning) for e in group],
        )
        for heading, group in by_group().items()
    )


def nova_metrics() -> str:
    """Return the gauges of Nova."""
    return table(("Metric", "Meaning"), [(f"`{name}`", said) for name, (said, _) in GAUGES.items()])


def policy_settings(name: str) -> str:
    """Return the settings of a policy, or of a part as `KIND.NAME`: setting, default, meaning."""
    kind, _, part = name.rpartition(".")
    made = (policies.PARTS[kind] if kind else policies.POLICIES)[part]
    return table(
        ("Setting", "Default", "Meaning"),
        [(f"`{name}`", f"`{default}`", said) for name, default, said in settings_of(made)],
    )


def settings_of(made: Callable[..., object]) -> Iterator[tuple[str, str, str]]:
    """Yield each setting of a policy or a part, with its default and the text under its field."""
    kind: Any = made.func if isinstance(made, partial) else made
    said: dict[str, str] = {}
    for each in reversed([each for each in kind.__mro__ if is_dataclass(each)]):
        source = (ROOT / f"{each.__module__.replace('.', '/')}.py").read_text(encoding="utf-8")
        (node,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == each.__name__]
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                is_said = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                said[field.target.id] = str(text.value.value) if is_said else ""
    for field in fields(kind) if hasattr(kind, "__dataclass_fields__") else ():
        if field.init:
            default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
            yield field.name, default, said[field.name]


def profiles() -> str:
    """Return the engines that `--profile` knows by name."""
    rows = [
        (f"`{name}`", str(each.kv_tokens or ""), re.split(r"[.;:] ", each.source)[0])
        for name, each in load_profiles().items()
    ]
    return table(("Profile", "KV pool, tokens", "Source"), rows)


def api() -> str:
    """Return the HTTP API, as described by a running proxy's OpenAPI document."""
    return api_of(_openapi_document())


def _openapi_document() -> dict[str, Any]:
    command = [sys.executable, "-m", "thunderagent", "serve", "--port", "0", "--embedded-engines", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as proxy:  # noqa: S603
        try:
            assert proxy.stdout is not None
            url = re.findall(r"ready at (\S+?):? ", proxy.stdout.readline())[0]
            with urllib.request.urlopen(f"{url}/openapi.json", timeout=10) as answer:  # noqa: S310
                return dict(json.load(answer))
        finally:
            proxy.terminate()


def api_of(document: dict[str, Any]) -> str:
    """Return all operations and objects of an OpenAPI document."""
    index, parts = [], []
    for path, operations in sorted(document["paths"].items()):
        for method, operation in operations.items():
            title = f"{method.upper()} {path}"
            key = re.findall(r"configured: (\w+)", operation["description"])[0]
            index.append((f"[`{title}`](#{_anchor(title)})", operation["summary"], key))
            parts.append(_operation(title, operation, key))
    objects = [
        f"### {name}\n\n{schema.get('description', '')}\n\n{_fields(schema)}"
        for name, schema in sorted(document["components"]["schemas"].items())
    ]
    return "\n\n".join([table(("Endpoint", "", "Key"), index), *parts, "## Objects", *objects])


def _operation(title: str, operation: dict[str, Any], key: str) -> str:
    lines = [f"### `{title}` {{ #{_anchor(title)} }}", operation["summary"]]
    said = operation["description"].partition("Key, where keys are")[0].strip()
    lines += [said] if said else []
    rows = [
        (f"`{each['name']}`", each["in"], _type(each["schema"]), each["schema"].get("description", ""))
        for each in operation["parameters"]
    ]
    lines += [table(("Parameter", "In", "Type", "Meaning"), rows)] if rows else []
    if "requestBody" in operation:
        lines.append(f"Body: {_type(operation['requestBody']['content']['application/json']['schema'])}.")
    status, answer = next(iter(operation["responses"].items()))
    ((kind, content),) = answer["content"].items()
    lines.append(f"Answer: {status}, {_type(content['schema']) or kind}. Key: {key}.")
    return "\n\n".join(lines)


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def _fields(schema: dict[str, Any]) -> str:
    if "properties" not in schema:
        return _type(schema)
    required = set(schema.get("required", ()))
    rows = [
        (f"`{name}`", _type(each), each.get("description", "") + ("" if name in required else " (optional)"))
        for name, each in schema["properties"].items()
    ]
    return table(("Field", "Type", "Meaning"), rows)


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "allOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[several]))
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {})) or 'anything'}"
    return str(schema.get("type", ""))


def checked_engines() -> str:
    """Return which versions of engines were compared with the tables, and how much each serves."""
    rows = ["| Package | Version | Routes | Metrics |", "|---|---|---:|---:|"]
    for package, found in json.loads((ROOT / "scripts" / "engines.json").read_text()).items():
        rows.append(f"| `{package}` | {found['version']} | {len(found['routes'])} | {len(found['metrics'])} |")
    return "\n".join(rows)


def protocol(name: str) -> str:
    """Return the members of a class of `programs/policy.py`, and of those that it is made of: signature and meaning."""
    kind = getattr(policy, name)
    members = {
        member: value
        for each in reversed(kind.__mro__)
        if each.__module__ == policy.__name__
        for member, value in vars(each).items()
    }
    rows = []
    for member, value in sorted(members.items()):
        function = value.fget if isinstance(value, property) else value
        if member.startswith("_") or not inspect.isfunction(function):
            continue
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[1:]
        text = str(signature.replace(parameters=parameters)).replace("'", "")
        shown = member + (text.replace("() -> ", ": ") if isinstance(value, property) else text)
        rows.append((f"`{shown}`", inspect.getdoc(function) or ""))
    return f"**{name}**: {(inspect.getdoc(kind) or '').partition(chr(10))[0]}\n\n{table(('Member', 'Meaning'), rows)}"


PARTS: dict[str, Callable[..., str]] = {
    "alerts": alerts,
    "api": api,
    "checked_engines": checked_engines,
    "commands": commands,
    "configuration": configuration,
    "directives": directives,
    "errors": error_codes,
    "judge_prompt": judge_prompt,
    "lifecycle": lifecycle,
    "metrics": metrics,
    "nova_metrics": nova_metrics,
    "policy": policy_settings,
    "profiles": profiles,
    "protocol": protocol,
    "reasons": reasons,
    "templates": templates,
    "workflow_policies": workflow_policies,
}
MARK = re.compile(r"^<!-- generated: (\w+)(?: ([\w.-]+))? -->$", re.MULTILINE)


def filled(text: str) -> str:
    """Return a page with its generated parts filled in. Raises KeyError for an unknown name."""
    return MARK.sub(lambda mark: PARTS[mark[1]](*filter(None, [mark[2]])), text)
