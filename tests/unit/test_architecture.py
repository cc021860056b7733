"""The structure of the package, checked on its source: imports, what the core may use, words and units.

Each rule is a function from a parsed module to its errors, tested first on a module that breaks it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import thunderagent
import thunderagent_nova
import thunderagent_workflows
from thunderagent.compilation import compiled_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE = Path(thunderagent.__file__).parent
PACKAGES = (PACKAGE, *(Path(str(each.__file__)).parent for each in (thunderagent_nova, thunderagent_workflows)))


@dataclass(frozen=True)
class Module:
    """One source file, with its dotted name."""

    name: str
    tree: ast.Module
    is_package: bool = False

    @property
    def room(self) -> str:
        """The part of thunderagent that it belongs to, "" its own `__init__`; or another package as a whole."""
        return room_of(self.name)

    def is_in(self, *prefixes: str) -> bool:
        """Return whether it is one of these modules, or inside one of them."""
        return any(self.name == prefix or self.name.startswith(f"{prefix}.") for prefix in prefixes)


def room_of(dotted: str) -> str:
    package, _, inner = dotted.partition(".")
    if package == "thunderagent":
        return inner.partition(".")[0]
    return package if package.startswith("thunderagent_") else ""


@cache
def all_modules() -> list[Module]:
    modules = []
    for package, path in ((each, path) for each in PACKAGES for path in sorted(each.rglob("*.py"))):
        parts = path.relative_to(package.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name, ast.parse(path.read_text(), str(path)), is_package))
    return modules


def imports_of(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import anywhere in the file, with relative imports resolved."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")
                parts = parts[: len(parts) - node.level + module.is_package]
                base = ".".join([*parts, *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def is_under(dotted: str, prefix: str) -> bool:
    return dotted == prefix or dotted.startswith(f"{prefix}.")


# --- Directions of imports ------------------------------------------------------------------------------------

EVERY_ROOM = frozenset(
    {
        *("errors", "programs", "policy_loader", "backends", "tools", "simulator", "faults"),
        *("leases", "runtime", "proxy", "client", "provision"),
    }
)

# Room: the other rooms from which it may import. Imports for types count too.
ARROWS: dict[str, frozenset[str]] = {
    "": frozenset(),
    "errors": frozenset(),
    "programs": frozenset({"errors"}),
    "policy_loader": frozenset({"errors", "faults", "programs"}),
    # Small parts that both backends and tools need; these two do not know each other.
    "faults": frozenset(),
    "cluster": frozenset(),
    # How much is read of what others answer.
    "bounded": frozenset(),
    # What a request's body may hold, for all who read one.
    "bodies": frozenset(),
    "backends": frozenset({"errors", "programs", "faults", "cluster", "bounded"}),
    "tools": frozenset({"errors", "programs", "faults", "cluster"}),
    "simulator": frozenset({"errors", "faults", "programs", "policy_loader", "tools", "bodies"}),
    "leases": frozenset({"programs"}),
    "rollouts": frozenset({"programs"}),
    "runtime": frozenset({"errors", "programs", "policy_loader", "leases"}),
    "proxy": frozenset(
        {
            "errors",
            "programs",
            "leases",
            "runtime",
            "backends",
            "faults",
            "compilation",
            "log_lines",
            "bodies",
            "rollouts",
        }
    ),
    # The link between gateways and a scheduler: both of its ends, and the proxy, which a gateway is. Its own rooms are
    # in `FORBIDDEN`. `backends` knows how to ask a cluster for a Lease.
    "redis_failover": frozenset(),
    "scale": frozenset(
        {"errors", "programs", "leases", "runtime", "proxy", "backends", "compilation", "redis_failover"}
    ),
    "client": frozenset(),
    # Says to whoever imports it where that is now.
    "workflows": frozenset(),
    # A list of its own files that are compiled: setup.py loads it alone.
    "compilation": frozenset(),
    "log_lines": frozenset(),
    # A client of an engine, which it knows only by its answers.
    "calibrate": frozenset({"bounded", "errors", "simulator"}),
    # Built once by the command line and passed down in slices: no other module may import it.
    "config": frozenset({"errors", "faults", "backends", "tools"}),
    "provision": frozenset({"errors", "programs", "backends", "tools"}),
    # Packages of their own, which nothing imports. The first is a separate engine behind the proxy, which knows it only
    # by its answers, the second is above the proxy, which it knows by HTTP alone. `cli` has the set-up of logs.
    "thunderagent_nova": frozenset({"errors", "bodies", "cli"}),
    "thunderagent_workflows": frozenset({"client", "redis_failover"}),
    # Composes everything; the command line starts it.
    "serving": EVERY_ROOM - {"simulator"} | {"config"},
    # The same for the parts that several processes share.
    "scaling": EVERY_ROOM | {"config", "serving", "scale"},
    # Both in one command.
    "one_machine": EVERY_ROOM | {"config", "serving", "scaling"},
    # Lets an Envoy carry the bytes: leases for it, beside a gateway or a whole proxy.
    "picker": frozenset({"errors", "leases", "proxy", "log_lines", "config", "scaling", "serving"}),
    # A client of engines and of a proxy, which it can start itself.
    "doctor": frozenset({"errors", "backends", "bounded", "config", "log_lines", "serving"}),
    "cli": EVERY_ROOM
    | {
        "config",
        "serving",
        "one_machine",
        "scaling",
        "calibrate",
        "compilation",
        "bounded",
        "doctor",
        "log_lines",
        "picker",
        "scale",
    },
    "__main__": frozenset({"cli"}),
}

SCALE = "thunderagent.scale"

# Modules: other modules that they must never import; and the exceptions.
FORBIDDEN: list[tuple[str, frozenset[str], frozenset[str]]] = [
    ("thunderagent.backends", frozenset({"thunderagent.programs.policies"}), frozenset()),
    # Clients of the admin API: they know the proxy only by its answers.
    ("thunderagent.cli.status", frozenset({"thunderagent.proxy", "thunderagent.runtime"}), frozenset()),
    ("thunderagent.cli.handover", frozenset({"thunderagent.proxy", "thunderagent.scale"}), frozenset()),
    ("thunderagent.proxy", frozenset({"thunderagent.programs.policies"}), frozenset()),
    ("thunderagent.runtime", frozenset({"aiohttp", "httpx2", "http"}), frozenset()),
    # Only a replayed log names the wanted policy.
    ("thunderagent.runtime", frozenset({"thunderagent.policy_loader"}), frozenset({"thunderagent.runtime.event_log"})),
    (
        "thunderagent.scale.gateway",
        frozenset({"thunderagent.scale.scheduler", "thunderagent.scale.leader"}),
        frozenset(),
    ),
    (
        "thunderagent.scale.scheduler",
        frozenset({"thunderagent.scale.gateway", "thunderagent.scale.leader"}),
        frozenset(),
    ),
    ("thunderagent.scale.leader", frozenset({"thunderagent.scale.gateway"}), frozenset()),
    (
        "thunderagent.simulator",
        frozenset({"asyncio", "socket", "socketserver", "selectors", "aiohttp", "httpx2", "uvloop"}),
        frozenset({"thunderagent.simulator.embedded"}),
    ),
]

# The rooms of the proxy, each with the others from which it may import. `ARROWS["proxy"]` has what all may import.
PROXY_ARROWS: dict[str, frozenset[str]] = {
    "reading": frozenset(),
    "wire": frozenset({"reading"}),
    "gate": frozenset({"reading", "wire"}),
    "fleet": frozenset({"reading", "wire", "gate"}),
    "judge": frozenset({"reading", "fleet"}),
    "watch": frozenset({"reading", "wire", "gate", "fleet"}),
    "turns": frozenset({"reading", "wire", "gate", "fleet", "judge", "watch"}),
    "control": frozenset({"reading", "wire", "gate", "fleet"}),
    "admin": frozenset({"reading", "gate", "fleet", "control", "watch"}),
    # Composition: it uses all, and none may import it; first the paths of requests, then the whole.
    "routing": frozenset({"reading", "wire", "gate", "fleet", "turns", "control", "watch"}),
    "app": frozenset({"reading", "wire", "gate", "fleet", "judge", "watch", "turns", "control", "admin", "routing"}),
}

# Further modules that a room of the proxy must never import.
UNKNOWN_TO_ROOMS: dict[str, frozenset[str]] = {
    "reading": frozenset({"aiohttp", "socket", "thunderagent.runtime", "thunderagent.backends"}),
    "wire": frozenset({"thunderagent.runtime", "thunderagent.programs"}),
    "gate": frozenset({"thunderagent.runtime"}),
    "turns": frozenset({"thunderagent.runtime"}),
}

CARRY_BYTES = tuple(f"thunderagent.proxy.{room}" for room in ("reading", "wire", "gate", "fleet", "turns"))
TABLES = frozenset({"scheduler", "pools", "ledger", "programs"})
"""Names of the scheduler's knowledge."""


def tables_read(module: Module) -> Iterator[str]:
    """Find byte carriers that read the scheduler's tables, through an import or through the runtime."""
    if not module.is_in(*CARRY_BYTES):
        return
    for line, dotted in imports_of(module):
        known = is_under(dotted, "thunderagent.programs.messages") or is_under(
            dotted, "thunderagent.programs.state.health"
        )
        if is_under(dotted, "thunderagent.programs") and not known:
            yield f"{module.name}:{line}: {dotted} is the scheduler's"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in TABLES:
            yield f"{module.name}:{node.lineno}: {ast.unparse(node)} is a table of the scheduler's"


# The rooms of the simulator, from the engine up to the commands, each with the others from which it may import.
SIMULATOR_ARROWS: dict[str, frozenset[str]] = {
    "engine": frozenset(),
    "embedded": frozenset({"engine"}),
    "workloads": frozenset(),
    "figures": frozenset({"engine", "workloads"}),
    "runs": frozenset({"engine", "workloads", "figures"}),
    "comparison": frozenset({"engine", "workloads", "figures", "runs"}),
    "report": frozenset({"figures", "comparison"}),
    "commands": frozenset({"engine", "embedded", "workloads", "figures", "runs", "comparison", "report"}),
}

# The modules around the single writer.
RUNTIME_ARROWS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("observers", "event_log", "signal_log", "translation", "fleet", "served_models"), frozenset()),
    "writer": frozenset({"observers", "event_log", "translation", "fleet", "served_models"}),
    "operator": frozenset({"writer"}),
    "runtime": frozenset({"observers", "event_log", "translation", "fleet", "served_models", "writer", "operator"}),
    "learned_state": frozenset({"runtime"}),
}

# The slices of the configuration, and the module that combines them.
SLICES = frozenset({"access", "engines", "processes", "rollouts", "sandboxes", "scheduling", "turns"})
CONFIG_ARROWS: dict[str, frozenset[str]] = {
    "slices": frozenset(),
    **dict.fromkeys(SLICES, frozenset({"slices"})),
    "config": SLICES | {"slices"},
}

# The start of the proxy: each file leads from the configuration to one part; and the module that combines them.
PARTS = frozenset({"embedded", "lookups", "process", "provisioning", "replica_sources", "sandboxes", "security"})
SERVING_ARROWS: dict[str, frozenset[str]] = {
    **dict.fromkeys(PARTS, frozenset()),
    "building": frozenset({"security"}),
    "listening": frozenset({"security"}),
    "reloading": frozenset({"security", "replica_sources"}),
    "serving": PARTS - {"lookups"} | {"building", "listening", "reloading"},
}

# The commands, and the reader of the line.
CLI_ARROWS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("completion", "key", "log_output", "logs", "status"), frozenset()),
    "handover": frozenset({"status"}),
    "serve": frozenset({"log_output"}),
    "command_line": frozenset({"completion", "log_output", "logs", "serve", "status"}),
}

HOUSES = {
    "thunderagent.cli": CLI_ARROWS,
    "thunderagent.serving": SERVING_ARROWS,
    "thunderagent.config": CONFIG_ARROWS,
    "thunderagent.proxy": PROXY_ARROWS,
    "thunderagent.simulator": SIMULATOR_ARROWS,
    "thunderagent.runtime": RUNTIME_ARROWS,
}


def wrong_arrows(module: Module) -> Iterator[str]:
    """Find imports of a module from rooms that its own room must not know."""
    for house, arrows in HOUSES.items():
        if module.is_in(house) and module.name != house:
            yield from _wrong_in_house(module, house, arrows)


def _wrong_in_house(module: Module, house: str, arrows: dict[str, frozenset[str]]) -> Iterator[str]:
    room = module.name.split(".")[2]
    if room not in arrows:
        yield f"{module.name}: it is in no room"
        return
    for line, dotted in imports_of(module):
        if is_under(dotted, house) and dotted.split(".")[2] not in arrows[room] | {room}:
            yield f"{module.name}:{line}: {room} must not import {dotted}"
        for each in UNKNOWN_TO_ROOMS.get(room, ()):
            if is_under(dotted, each):
                yield f"{module.name}:{line}: {room} must never know {each}"


def wrong_imports(module: Module) -> Iterator[str]:
    """Find imports against the arrows, and imports that the module must never have."""
    if module.room not in ARROWS:
        yield f"{module.name}: the room {module.room!r} has no arrows"
        return
    allowed = ARROWS[module.room] | {module.room, ""}
    for line, dotted in imports_of(module):
        if room_of(dotted) in ARROWS and room_of(dotted) not in allowed:
            yield f"{module.name}:{line}: {module.room or 'the package'} must not import {dotted}"
        if module.room == "" and is_under(dotted, "thunderagent"):
            yield f"{module.name}:{line}: the package itself imports nothing of its rooms, but {dotted}"
        for where, what, excepted in FORBIDDEN:
            if module.is_in(where) and not module.is_in(*excepted):
                for prefix in what:
                    if is_under(dotted, prefix):
                        yield f"{module.name}:{line}: must never know {prefix}"


# Room of the core, or module beside the rooms: the other parts of the core from which it may import.
BELOW = frozenset({"messages", "state", "policy", "learned", "rules"})
CORE_ARROWS: dict[str, frozenset[str]] = {
    "messages": frozenset(),
    "state": frozenset({"messages"}),
    "policy": frozenset({"messages", "state"}),
    "learned": frozenset({"messages", "state", "policy"}),
    "rules": frozenset({"messages", "state", "policy"}),
    "policies": frozenset({"messages", "state", "policy", "transitions"}),  # transitions for the type of the view alone
    "transitions": BELOW,
    "handlers": BELOW | {"transitions"},
    "scheduler": BELOW | {"transitions", "handlers"},
    "invariants": BELOW | {"scheduler"},
    "concurrency": frozenset({"scheduler"}),
    "pools": frozenset({"messages", "state", "scheduler"}),
}
CORE_FOLDERS = ("state", "learned", "rules", "policies", "handlers")


def core_room_of(dotted: str) -> str:
    return dotted.split(".")[2] if is_under(dotted, "thunderagent.programs") and dotted.count(".") > 1 else ""


def wrong_core_imports(module: Module) -> Iterator[str]:
    """Find imports of the core against its arrows; those for a type checker count, too."""
    room = core_room_of(module.name)
    for line, dotted in imports_of(module):
        target = core_room_of(dotted)
        if room and target and target != room and target not in CORE_ARROWS.get(room, frozenset()):
            yield f"{module.name}:{line}: {room} must not import {dotted}"


def circles(modules: list[Module]) -> Iterator[str]:
    """Find modules that import each other, directly or through others, for a type checker or not."""
    names = {module.name for module in modules}
    left = {module.name: set[str]() for module in modules}
    for module in modules:
        for _, dotted in imports_of(module):
            target = dotted if dotted in names else dotted.rpartition(".")[0]
            if target in names and target != module.name:
                left[module.name].add(target)
    while free := {name for name, targets in left.items() if not targets}:
        left = {name: targets - free for name, targets in left.items() if name not in free}
    yield from (f"{name}: in a circle with {', '.join(sorted(targets))}" for name, targets in left.items())


# --- Events and decisions are read only ---------------------------------------------------------------------------

TOLD = frozenset({"event", "decision", "signal"})


def changed_events(module: Module) -> Iterator[str]:
    """Find assignments to fields of events, decisions or signals, which are not frozen so that making them is fast."""
    for node in ast.walk(module.tree):
        changes = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if changes and isinstance(node.value, ast.Name) and node.value.id in TOLD:
            yield f"{module.name}:{node.lineno}: {ast.unparse(node)} is changed"


# --- One writer of programs' places -------------------------------------------------------------------------------

SIZES = frozenset({"claim_tokens", "growth_tokens", "reserve_tokens"})
SUMS = frozenset({"demand_tokens", "active_count", "shared_tokens"})
WRITERS = {
    "place": frozenset({"state.book.Book.move", "state.book.Book.pause_until"}),  # it moves many in one batch
    "size": frozenset({"learned.knowledge.Knowledge.measure_claim"}),  # the next one calls it
    "measure": frozenset({"state.book.Book.move", "state.book.Book.resize"}),
    "size of a place": frozenset({"state.book.Book.resize"}),
    "who is in a place": frozenset({f"state.book.Book.{name}" for name in ("open", "move", "enter_anew", "act_anew")}),
}
"""The fields for a program's place and size, and their allowed writers."""


def wrong_writers(module: Module) -> Iterator[str]:
    """Find forbidden writers of a program's place, its claims, or a sum of them."""
    in_book = core_room_of(module.name) == "state"
    for where, node in _within(module.tree, module.name.removeprefix("thunderagent.programs.")):
        written = ""
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            of = ast.unparse(node.value)
            if node.attr == "place" and not where.endswith("Program.__init__"):
                written = "place"
            elif node.attr in SIZES and of.rpartition(".")[2] == "program":
                written = "size"
            elif not in_book and (node.attr in SUMS or of.endswith("place")):
                written = "sum"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = ast.unparse(node.func.value)
            is_places = of == "to" or of.endswith(("place", "announced"))
            if node.func.attr == "_measure" and len(node.args) == 1:
                written = "measure"
            elif node.func.attr == "resize" and is_places:
                written = "size of a place"
            elif node.func.attr in ("enter", "leave") and is_places:
                written = "who is in a place"
        if written and where not in WRITERS.get(written, ()):
            yield f"{where}:{node.lineno}: {ast.unparse(node)} writes a {written}"


def _within(node: ast.AST, where: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield all nodes below one, each with the names of its enclosing definitions."""
    for inner in ast.iter_child_nodes(node):
        is_named = isinstance(inner, ast.ClassDef | ast.FunctionDef)
        place = f"{where}.{inner.name}" if is_named else where  # type: ignore[attr-defined]
        yield place, inner
        yield from _within(inner, place)


# --- The purity of the core -----------------------------------------------------------------------------------

PURE_IMPORTS = {
    *(
        "__future__",
        "abc",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
    ),
    *("json", "math", "operator", "re", "types", "typing", "zlib"),
}
OWN_PURE_IMPORTS = (
    *("thunderagent.errors", "thunderagent.programs"),
    *("thunderagent_workflows.core", "thunderagent_workflows.errors"),
)
# The core's messages are msgspec structs: what makes or changes one may import that.
MESSAGES = frozenset({"thunderagent.programs.messages", "thunderagent.programs.pools"})
# `hash` of text and `id` differ between runs, so a replay could decide otherwise.
IMPURE_CALLS = frozenset({"open", "print", "input", "exec", "eval", "compile", "__import__", "hash", "id"})


def impurities(module: Module) -> Iterator[str]:
    """Find ways for the core to use a clock, randomness, a loop, a log, the network or third-party code."""
    for line, dotted in imports_of(module):
        is_ours = any(is_under(dotted, prefix) for prefix in OWN_PURE_IMPORTS)
        is_message = module.name in MESSAGES and dotted.split(".")[0] == "msgspec"
        if not (is_ours or is_message) and dotted.split(".")[0] not in PURE_IMPORTS:
            yield f"{module.name}:{line}: the core must not import {dotted}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield f"{module.name}:{node.lineno}: the core awaits nothing"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            yield f"{module.name}:{node.lineno}: the core must not call {node.func.id}()"


# --- What a compiled core may not do ----------------------------------------------------------------------------

# Only an interpreted class has these, and mypyc compiles them silently.
INTERPRETED_ATTRIBUTES = frozenset({"__slots__", "__dict__", "__annotations__", "__weakref__", "__getattribute__"})
INTERPRETED_CALLS = frozenset({"vars", "get_type_hints", "globals", "locals", "weakref"})


def not_compilable(module: Module) -> Iterator[str]:
    """Find code that acts differently when compiled, or leaks there. What mypyc itself refuses is not repeated."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in INTERPRETED_ATTRIBUTES:
            yield f"{module.name}:{node.lineno}: a compiled class has no {node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in INTERPRETED_CALLS:
            yield f"{module.name}:{node.lineno}: {node.func.id}() sees nothing of what is compiled"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("__setattr__"):
            yield f"{module.name}:{node.lineno}: a compiled class is not set past its own way"
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            if any(base.endswith(("Error", "Exception")) for base in bases):
                yield f"{module.name}:{node.lineno}: {node.name} leaks when compiled: errors are in thunderagent.errors"


def compiled_bases(module: Module, compiled: dict[str, set[str]]) -> Iterator[str]:
    """Find interpreted classes with compiled bases, which refuse that; `compiled` has their names."""
    imported = {
        alias.asname or alias.name: node.module
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.name in compiled.get(node.module, ())
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                name = ast.unparse(base).partition("[")[0]
                if name in imported:
                    yield f"{module.name}:{node.lineno}: made from {imported[name]}.{name}, which is compiled"


# --- One word, one meaning ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Banned:
    """A synonym that our names must not use; and where it is still right, with the reason."""

    word: str
    instead: str
    # Module or identifier: the reason.
    allowed_modules: tuple[tuple[str, str], ...] = ()
    allowed_names: tuple[tuple[str, str], ...] = ()


BANNED = (
    Banned(
        "session",
        "program",
        allowed_modules=(
            ("thunderagent_workflows", "Nalar's word for what is a program at the proxy"),
            ("thunderagent.client.swe_rex", "SWE-ReX' word for a shell"),
        ),
        allowed_names=(
            ("finish_session", "the path that SkyRL and the vLLM router call is named so"),
            ("session_id", "other people's field of a body"),
            ("litellm_session_id", "LiteLLM's field of a body"),
            ("session_params", "SGLang's field of a body"),
        ),
    ),
    Banned("trajectory", "program"),
    Banned("job", "program", allowed_modules=(("thunderagent_nova", "what a stage's thread is given to do"),)),
    Banned("worker", "replica", allowed_modules=(("thunderagent_nova", "a thread that runs the passes of a stage"),)),
    Banned(
        "node",
        "replica",
        allowed_modules=(("thunderagent_workflows", "a process that runs agents"),),
    ),
    Banned(
        "slot",
        "lease",
        allowed_modules=(
            ("thunderagent_nova", "room for one request in the KV cache"),
            ("thunderagent.backends.nova", "as Nova's metrics say"),
        ),
    ),
    Banned("permit", "lease"),
    Banned(
        "resume",
        "restore",
        allowed_names=(
            ("resume_reading", "asyncio's word for going on"),
            ("resume_writing", "asyncio's word for it, too"),
        ),
    ),
    Banned("wake", "restore", allowed_modules=(("thunderagent.runtime", "it wakes waiting coroutines"),)),
    Banned(
        "evict",
        "pause",
        allowed_modules=(
            ("thunderagent.simulator.engine.engine", "an engine evicts blocks"),
            ("thunderagent_nova.slots", "an engine evicts slots"),
        ),
    ),
    Banned("park", "hold"),
    Banned(
        "container",
        "sandbox",
        allowed_modules=(
            ("thunderagent.tools.docker", "Docker's own word"),
            ("thunderagent.tools.kubernetes", "Kubernetes' own word"),
            ("thunderagent.client.mini_swe_agent", "mini-SWE-agent's own word"),
        ),
    ),
)


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of the names that a module defines; names that it only uses are defined elsewhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield 0, node.asname
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name


def words_of(name: str) -> list[str]:
    """Split a name at underscores and humps: `HTTPSessionId2` is http, session, id."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def forms_of(word: str) -> frozenset[str]:
    """Return a word's regular inflections: evict, evicts, evicted, evicting, eviction, evictor."""
    stem = word.removesuffix("e")
    plural = f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
    doubled = (f"{word}{word[-1]}ed", f"{word}{word[-1]}ing")
    return frozenset({word, plural, *doubled, *(stem + end for end in ("ed", "er", "ing", "ion", "ions", "or"))})


def synonyms(module: Module) -> Iterator[str]:
    """Find names with a word that the vocabulary gives no meaning, or another one."""
    for line, name in sorted(set(defined_names(module.tree))):
        if name.startswith("__") and name.endswith("__"):
            continue  # Python's own names, such as __slots__
        for banned in BANNED:
            if (
                forms_of(banned.word).isdisjoint(words_of(name))
                or module.is_in(*(where for where, _ in banned.allowed_modules))
                or name in {allowed for allowed, _ in banned.allowed_names}
            ):
                continue
            yield f"{module.name}:{line}: {name!r} says {banned.word!r}; the word is {banned.instead!r}"


# --- Docstrings -----------------------------------------------------------------------------------------------

DOCUMENTED = tuple(f"thunderagent.{room}" for room in ("programs", "tools", "backends", "runtime", "proxy"))


def missing_docstrings(module: Module) -> Iterator[str]:
    """Find modules without a docstring, and public names without one in the rooms that others use."""
    if not says_something(module.tree):
        yield f"{module.name}:1: the module has no docstring"
    if module.is_in(*DOCUMENTED):
        yield from _undocumented(module, module.tree)


def _undocumented(module: Module, parent: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in parent.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_") or any("overload" in ast.unparse(each) for each in node.decorator_list):
            continue
        if not says_something(node):
            yield f"{module.name}:{node.lineno}: {node.name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(module, node)


def says_something(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return len((ast.get_docstring(node) or "").split()) >= 2


# --- Units ----------------------------------------------------------------------------------------------------

UNIT = re.compile(r"(^|_)(tokens|bytes|ratio|count|id|total)$|_s$")
NUMBER = re.compile(r"\b(int|float)\b")
# Numbers without a unit, with the reason.
UNITLESS = {
    "engine_priority": "an order, as engines have it: lower goes first",
    "priority": "an order: lower goes first",
    "policy_priority": "an order: lower goes first",
    "value": "of a histogram: in the unit of its edges",
    "default": "of a histogram: in the unit of its edges",
    "time": "of a curve: in the unit of its ramps",
    "column": "a place in a matrix",
    "first": "of a histogram's edges: they are the unit",
    "growth_quantile": "statistics' own word: a part of all turns",
    "n": "the policy cap's number of programs; the command line says --policy-arg n=6",
    "lambda_max": "the paper's symbol: a part of the capacity",
    "lambda_min": "the paper's symbol: a part of the capacity",
    "generation": "counts the incarnations of an id; only compared",
}


def unitless_numbers(module: Module) -> Iterator[str]:
    """Find numeric dataclass fields and parameters whose name ends in no unit."""
    for line, name, annotation in _numbers(module.tree):
        if not UNIT.search(name) and name not in UNITLESS:
            yield f"{module.name}:{line}: {name!r} is {annotation}, in what unit?"


def _numbers(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        fields: list[tuple[int, str, ast.expr | None]] = []
        if isinstance(node, ast.ClassDef) and (
            any("dataclass" in ast.unparse(each) for each in node.decorator_list)
            or any(ast.unparse(each) == "Struct" for each in node.bases)
        ):
            fields = [
                (field.lineno, field.target.id, field.annotation)
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            ]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            fields = [(each.lineno, each.arg, each.annotation) for each in every]
        for line, name, annotation in fields:
            # Only a number, or a number or None: the name of a container covers its content.
            text = ast.unparse(annotation).strip("'\"") if annotation is not None else ""
            alternatives = {each.strip() for each in text.removeprefix("Optional[").rstrip("]").split("|")}
            if alternatives - {"None"} and alternatives <= {"int", "float", "None"}:
                yield line, name, text


# --- One reading of a target ----------------------------------------------------------------------------------

READS_TARGETS = ("thunderagent.proxy.reading.target", "thunderagent.proxy.wire.aiohttp_request")
# aiohttp's parts of a request's target: each is another reading of it. `match_info` and `query` are of the URL that the
# target was routed by.
OTHER_READINGS = frozenset({"raw_path", "rel_url", "path_qs", "query_string", "path_safe", "raw_parts"})


def other_readings(module: Module) -> Iterator[str]:
    """Find code that reads or splits a request's path outside the one place for it."""
    if not module.is_in("thunderagent.proxy", "thunderagent.backends") or module.is_in(*READS_TARGETS):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            of = ast.unparse(node.value)
            is_requests = node.attr in ("path", "url") and (of in ("request", "message") or of.endswith(".request"))
            if is_requests or (node.attr in OTHER_READINGS and module.is_in("thunderagent.proxy")):
                yield f"{module.name}:{node.lineno}: {of}.{node.attr} is another reading of the target"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            cuts = node.func.attr in ("partition", "rpartition", "split", "rsplit")
            if cuts and any(isinstance(each, ast.Constant) and each.value in ("?", "#") for each in node.args):
                yield f"{module.name}:{node.lineno}: it cuts a path, which only {READS_TARGETS[0]} may"


# --- The package follows the rules ----------------------------------------------------------------------------


@cache
def core() -> list[Module]:
    return [module for module in all_modules() if module.is_in("thunderagent.programs")]


@cache
def compiled_names() -> frozenset[str]:
    return frozenset(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in compiled_sources(PACKAGE)
    )


def compiled() -> list[Module]:
    return [module for module in all_modules() if module.name in compiled_names()]


def complaints(rule: Callable[[Module], Iterator[str]], modules: list[Module]) -> list[str]:
    return [complaint for module in modules for complaint in rule(module)]


def test_the_package_is_found() -> None:
    """The rules below need real modules: an empty list would pass them all."""
    assert {"thunderagent", "thunderagent.errors", "thunderagent.programs"} <= {module.name for module in all_modules()}
    assert core()


def test_imports_follow_the_arrows() -> None:
    """No module imports against the layers, or what its room must never import."""
    assert complaints(wrong_imports, all_modules()) == []


def test_rooms_of_the_proxy_know_only_what_they_may() -> None:
    """Each room imports only from those below it."""
    assert complaints(wrong_arrows, all_modules()) == []


def test_byte_carriers_read_no_table_of_the_scheduler() -> None:
    """What it needs comes with the lease, as a pushed map, or as a message."""
    assert complaints(tables_read, all_modules()) == []
    for source in ("from thunderagent.programs.pools import Pools", "self._leases.scheduler.queue"):
        assert list(tables_read(module_of(source, "thunderagent.proxy.turns.flow"))), source


def test_imports_of_the_core_follow_its_arrows() -> None:
    """They lead one way, from the scheduler down to the model, and every room has arrows."""
    assert complaints(wrong_core_imports, core()) == []
    rooms = {core_room_of(module.name) for module in core()} - {""}
    assert rooms == set(CORE_ARROWS)
    assert {path.name for path in (PACKAGE / "programs").iterdir() if path.is_dir()} - {"__pycache__"} == set(
        CORE_FOLDERS
    )


def test_messages_are_never_changed() -> None:
    """An event must be the same for the log, for observers and for a replay."""
    assert complaints(changed_events, all_modules()) == []
    assert list(changed_events(module_of("event.now_s = 1.0")))
    assert list(changed_events(module_of("def f(decision):\n    decision.reason += 'x'")))


def test_place_of_a_program_has_one_writer() -> None:
    """A move or another size updates sums, orders, story and decision in the same call."""
    assert complaints(wrong_writers, core()) == []
    for source in (
        "program.place = to",
        "turn.program.claim_tokens += 1",
        "self._core.book.ledger.accounts[replica_id].demand_tokens = 0",
        "program.place.count -= 1",
        "self._measure(program)",
        "program.place.resize(program, 1, 2, now_s)",
        "place.leave(program, now_s)",
        "del program.place",
    ):
        assert list(wrong_writers(module_of(f"def f(self):\n    {source}"))), source


def test_a_wrong_import_in_the_core_is_found() -> None:
    """The rule finds each kind of arrow against the layers, also one that only a type checker sees."""
    wrong = "from thunderagent.programs.rules.limits import Limits"
    assert list(wrong_core_imports(module_of(wrong, "thunderagent.programs.state.program")))
    assert list(wrong_core_imports(module_of(wrong, "thunderagent.programs.policies.baselines.cap")))
    assert list(
        wrong_core_imports(module_of("import thunderagent.programs.transitions", "thunderagent.programs.rules.limits"))
    )
    assert not list(wrong_core_imports(module_of(wrong, "thunderagent.programs.transitions")))
    typed = f"if TYPE_CHECKING:\n    {wrong}"
    assert list(wrong_core_imports(module_of(typed, "thunderagent.programs.state.program")))


def test_no_modules_import_each_other() -> None:
    """Nor do they through a third one, or for a type checker alone."""
    assert list(circles([module for module in all_modules() if not module.is_in("thunderagent_workflows")])) == []
    ring = [
        module_of(
            f"if TYPE_CHECKING:\n    from thunderagent.programs.{other} import X", f"thunderagent.programs.{name}"
        )
        for name, other in (("a", "b"), ("b", "c"), ("c", "a"))
    ]
    assert len(list(circles(ring))) == len(ring)


def test_the_core_is_pure() -> None:
    """The cores know no clock, randomness, asyncio, logging, network or third-party package."""
    assert complaints(impurities, core()) == []
    assert (
        complaints(impurities, [module for module in all_modules() if module.is_in("thunderagent_workflows.core")])
        == []
    )


def test_the_core_means_the_same_when_it_is_compiled() -> None:
    """mypyc would compile such code without a refusal, and it would act differently."""
    assert complaints(not_compilable, compiled()) == []
    classes = {
        module.name: {node.name for node in module.tree.body if isinstance(node, ast.ClassDef)} for module in compiled()
    }
    interpreted = [module for module in all_modules() if module.name not in compiled_names()]
    assert [each for module in interpreted for each in compiled_bases(module, classes)] == []


def test_no_word_is_used_for_two_things() -> None:
    """Names use the vocabulary, and none of its excluded synonyms."""
    assert complaints(synonyms, all_modules()) == []


def test_public_names_are_documented() -> None:
    """Every module says what it is, and so does every public name in the rooms that others use."""
    assert complaints(missing_docstrings, all_modules()) == []


def test_serve_imports_nothing_of_the_simulator() -> None:
    """Its simulated engines are separate processes."""
    says = "import sys, thunderagent.serving.serving; print([name for name in sys.modules if 'simulator' in name])"
    done = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_numbers_in_the_core_have_units() -> None:
    """The name of every number shows its unit."""
    assert complaints(unitless_numbers, core()) == []


def test_a_target_is_read_in_one_place() -> None:
    """Two readings of a path, one in the access check and one in the sender, would be a security hole."""
    allowed = "thunderagent.backends.discovery.base"  # the fragment of a URL in the configuration
    found = [each for each in complaints(other_readings, all_modules()) if not each.startswith(allowed)]
    assert found == []
    for source in (
        'path.partition("?")[0]',
        'path.split("#")',
        "request.path",
        "trace.request.url",
        "request.raw_path",
    ):
        assert list(other_readings(module_of(source, "thunderagent.proxy.sample"))), source


def test_no_exception_from_the_units_is_left_over() -> None:
    """A number that is gone, or got its unit, is no longer an exception."""
    assert set(UNITLESS) <= {name for module in core() for _, name, _ in _numbers(module.tree)}


# --- The rules can fail ---------------------------------------------------------------------------------------


def module_of(source: str, name: str = "thunderagent.programs.sample", *, is_package: bool = False) -> Module:
    return Module(name, ast.parse(source), is_package)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("thunderagent.errors", "import thunderagent.programs"),
        ("thunderagent.programs.transitions", "from thunderagent import backends"),
        ("thunderagent.programs.transitions", "from thunderagent.config import Settings"),
        ("thunderagent.backends.vllm", "from thunderagent.tools.sandbox import Sandbox"),
        ("thunderagent.backends.vllm", "from ..proxy import app"),
        ("thunderagent.backends.vllm", "from thunderagent.programs.policies import breakeven"),
        ("thunderagent.backends.vllm", "if TYPE_CHECKING:\n    from thunderagent.runtime import Runtime"),
        ("thunderagent.tools.docker", "def f():\n    import thunderagent.backends.vllm"),
        ("thunderagent.simulator.runs.run", "from thunderagent.runtime import Runtime"),
        ("thunderagent.simulator.runs.run", "import asyncio"),
        ("thunderagent.simulator.engine.engine", "from socket import socket"),
        ("thunderagent.runtime", "import aiohttp.web"),
        ("thunderagent.runtime", "from thunderagent.proxy import app"),
        ("thunderagent.proxy.turns.flow", "from thunderagent.config import Settings"),
        ("thunderagent.proxy.turns.flow", "from thunderagent.tools import manager"),
        ("thunderagent.proxy.turns.flow", "from thunderagent.programs.policies.baselines.cap import Cap"),
        ("thunderagent.client.sync", "from thunderagent.errors import ThunderAgentError"),
        ("thunderagent.config", "from thunderagent.cli import main"),
        ("thunderagent.policy_loader", "from thunderagent.runtime.event_log import replay"),
        ("thunderagent.serving", "from thunderagent.cli import main"),
        ("thunderagent.cli.status", "from thunderagent.proxy.admin.reports import Report"),
        ("thunderagent.runtime", "from thunderagent.policy_loader import load_policy"),
        ("thunderagent.extra", "import os"),
        ("thunderagent", "from thunderagent import errors"),
    ],
)
def test_a_wrong_import_is_found(name: str, source: str) -> None:
    """Each way to import against the arrows is found."""
    assert list(wrong_imports(module_of(source, name)))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("thunderagent.proxy.reading.prefix", "from thunderagent.proxy.wire.headers import forwarded"),
        ("thunderagent.proxy.reading.prefix", "from aiohttp import web"),
        ("thunderagent.proxy.reading.target", "from thunderagent.runtime import Runtime"),
        ("thunderagent.proxy.wire.headers", "from thunderagent.programs.events import Event"),
        ("thunderagent.proxy.gate.guard", "from thunderagent.runtime import Runtime"),
        ("thunderagent.proxy.turns.flow", "from thunderagent.runtime import Runtime"),
        ("thunderagent.proxy.fleet.replicas", "from thunderagent.proxy import turns"),
        ("thunderagent.proxy.turns.flow", "from thunderagent.proxy.admin.reports import Report"),
        ("thunderagent.proxy.control.leases", "from thunderagent.proxy.admin import reports"),
        ("thunderagent.proxy.watch.metrics", "from ..turns.turns import Turns"),
        ("thunderagent.proxy.admin.admin", "from thunderagent.proxy.wire import headers"),
        ("thunderagent.proxy.turns.flow", "from thunderagent.proxy.app import create_app"),
        ("thunderagent.proxy.attic", "import json"),
        ("thunderagent.simulator.engine.blocks", "from thunderagent.simulator.runs.run import simulate"),
        ("thunderagent.simulator.runs.tally", "from thunderagent.simulator.report import plots"),
        ("thunderagent.simulator.attic", "import json"),
    ],
)
def test_a_wrong_arrow_between_rooms_is_found(name: str, source: str) -> None:
    """Each room's own limits are checked in every way of importing, and so is a module in no room."""
    assert list(wrong_arrows(module_of(source, name)))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("thunderagent.programs.transitions", "from thunderagent.errors import LifecycleError"),
        ("thunderagent.programs.transitions", "from . import policies"),
        ("thunderagent.backends.vllm", "import httpx2, asyncio\nfrom .base import Backend"),
        ("thunderagent.simulator.embedded.server", "import asyncio\nfrom aiohttp import web"),
        (
            "thunderagent.proxy.fleet.polls",
            "from thunderagent.runtime import Runtime\nfrom thunderagent import __version__",
        ),
        ("thunderagent.client.sync", "import httpx2\nfrom thunderagent.client.base import Client"),
        ("thunderagent.cli", "from thunderagent.config import Settings\nimport thunderagent.tools.docker"),
        (
            "thunderagent.cli",
            "from thunderagent.serving.serving import serve\nfrom thunderagent.cli.status import watch_status",
        ),
        ("thunderagent.serving", "from thunderagent.config import ServeConfig\nimport thunderagent.proxy.app"),
        ("thunderagent.runtime.event_log", "from thunderagent.policy_loader import load_policy"),
    ],
)
def test_a_right_import_is_let_through(name: str, source: str) -> None:
    """Allowed imports give no error."""
    assert list(wrong_imports(module_of(source, name))) == []


def test_relative_imports_are_resolved_from_modules_and_packages() -> None:
    """One dot is the folder of the file, for a module and for an `__init__`."""
    source = "from . import a\nfrom .b import c\nfrom ..errors import E"
    expected = ["thunderagent.programs.a", "thunderagent.programs.b.c", "thunderagent.errors.E"]
    for module in (
        module_of(source, "thunderagent.programs.transitions"),
        module_of(source, "thunderagent.programs", is_package=True),
    ):
        assert [dotted for _, dotted in imports_of(module)] == expected


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import random as r",
        "from asyncio import sleep",
        "import logging",
        "import os.path",
        "import msgspec",
        "import thunderagent",
        "from thunderagent.runtime import Runtime",
        "def f():\n    from datetime import datetime",
        "async def f(): ...",
        "print('x')",
        "key = hash(name)",
        "x = __import__('time').time()",
    ],
)
def test_an_impurity_is_found(source: str) -> None:
    """Each way out of the pure core is found."""
    assert list(impurities(module_of(source)))


def test_pure_code_is_let_through() -> None:
    """Arithmetic, data structures and our own errors give no error."""
    source = (
        "import heapq\nfrom collections.abc import Iterator\nfrom thunderagent.programs.state.accounts import Ledger"
    )
    assert list(impurities(module_of(source))) == []


@pytest.mark.parametrize(
    "source",
    [
        "for name in self.__slots__: ...",
        "vars(program)",
        "get_type_hints(TurnAsk)",
        "object.__setattr__(program, 'tokens', 1)",
        "class PlaceError(ThunderAgentError): ...",
    ],
)
def test_forbidden_statement_in_a_compiled_module_is_found(source: str) -> None:
    assert list(not_compilable(module_of(source)))


def test_allowed_statement_in_a_compiled_module_passes() -> None:
    """Declared slots, dataclasses, and fields by name are allowed."""
    source = "@dataclass(slots=True)\nclass A:\n    n_count: int\n\nclass B:\n    __slots__ = ('a',)\n\ngetattr(a, 'n')"
    assert list(not_compilable(module_of(source))) == []


def test_a_class_that_is_made_from_a_compiled_one_is_found() -> None:
    """This holds under any name, also if the base has parameters."""
    compiled = {"thunderagent.programs.state.book": {"Ranked", "Book"}}
    source = (
        "from thunderagent.programs.state.book import Ranked as R, Book\n"
        "class Mine(R[int]): ...\nclass Other: book: Book"
    )
    found = list(compiled_bases(module_of(source, "thunderagent.runtime"), compiled))
    assert [each.partition(" ")[0] for each in found] == ["thunderagent.runtime:2:"]


@pytest.mark.parametrize(
    "source",
    [
        "class SessionTable: ...",
        "def resume_program(): ...",
        "def f(worker_id): ...",
        "def f(*, jobs=()): ...",
        "self.evicted_count = 0",
        "for node in nodes: ...",
        "async def wakeUp(): ...",
        "with take() as permit: ...",
        "import a as trajectories",
        "field: int\nslot_count: int = 0",
        "parking = [x for parked in y]",
        "try: ...\nexcept E as session: ...",
        "match x:\n    case session: ...",
        "lambda container: container",
    ],
)
def test_a_synonym_is_found(source: str) -> None:
    """Each place that defines a name is checked, and each regular form of a word is known."""
    assert list(synonyms(module_of(source)))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("thunderagent.proxy.app", "import aiohttp\nclient = aiohttp.ClientSession()"),
        ("thunderagent.programs.transitions", "class A:\n    __slots__ = ('b',)"),
        ("thunderagent.programs.transitions", "import dataclasses\n@dataclasses.dataclass(slots=True)\nclass A: ..."),
        ("thunderagent.simulator.engine.engine", "def evict_blocks(): ..."),
        ("thunderagent.programs.transitions", "obsession = jobless = sparkle = None"),
        ("thunderagent.runtime", "def wake(): ..."),
    ],
)
def test_a_right_word_is_let_through(name: str, source: str) -> None:
    """Third-party names, other words that contain one of ours, and listed exceptions give no error."""
    assert list(synonyms(module_of(source, name))) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("session_id", ["session", "id"]),
        ("ClientSession", ["client", "session"]),
        ("X_SESSION_ID", ["x", "session", "id"]),
        ("HTTPSession2", ["http", "session"]),
        ("_wakeAll", ["wake", "all"]),
    ],
)
def test_names_are_split_into_words(name: str, words: list[str]) -> None:
    """Underscores and humps both separate words."""
    assert words_of(name) == words


@pytest.mark.parametrize(
    "source",
    [
        "x = 1",
        '"""."""',
        '"""A module."""\nclass A: ...',
        '"""A module."""\ndef f(): ...',
        '"""A module."""\nasync def f(): ...',
        '"""A module."""\nclass A:\n    """A class."""\n    def f(self): ...',
        '"""A module."""\nclass A:\n    """A class."""\n    @property\n    def f(self): ...',
    ],
)
def test_a_missing_docstring_is_found(source: str) -> None:
    """Modules, classes, functions and methods each need a docstring."""
    assert list(missing_docstrings(module_of(source)))


def test_private_names_need_no_docstring() -> None:
    """A name that begins with an underscore is clear by itself or has a comment."""
    assert list(missing_docstrings(module_of('"""A module."""\ndef _f(): ...\nclass _A:\n    def g(self): ...'))) == []


@pytest.mark.parametrize(
    "source",
    [
        "@dataclass\nclass A:\n    size: int",
        "@dataclasses.dataclass(frozen=True)\nclass A:\n    timeout: float | None = None",
        "def f(limit: int) -> None: ...",
        "def f(*, delay: 'float') -> None: ...",
        "def f(s: float) -> None: ...",
        "class A:\n    def f(self, tokens_left: int) -> None: ...",
        "def f(limit: Optional[int]) -> None: ...",
    ],
)
def test_a_number_without_a_unit_is_found(source: str) -> None:
    """Fields and parameters that are a number, or a number or None, must name their unit."""
    assert list(unitless_numbers(module_of(source)))


@pytest.mark.parametrize(
    "source",
    [
        "@dataclass\nclass A:\n    size_tokens: int\n    age_s: float | None\n    name: str\n    ok: bool",
        "def f(hit_ratio: float, tokens: int, sizes: list[int], rates: dict[str, float]) -> int: ...",
        "class A:\n    def __init__(self, turn_id: int) -> None: ...",
    ],
)
def test_a_number_with_a_unit_is_let_through(source: str) -> None:
    """Names that end in a unit, and values that are no numbers, give no error."""
    assert list(unitless_numbers(module_of(source))) == []
