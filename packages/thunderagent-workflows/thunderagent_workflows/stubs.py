"""Stubs: importable modules whose functions look like an agent's methods, and return futures."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thunderagent_workflows.declare import Agent
from thunderagent_workflows.errors import DeclarationError
from thunderagent_workflows.future import Future
from thunderagent_workflows.scope import current_scope

GIVEN_DIRECTIVES: dict[str, dict[str, Any]] = {}
"""By agent, the directives given to `configure`. `deploy` reads them: code takes precedence over the YAML."""


def call(agent: str, method: str, args: tuple[Any, ...]) -> Future:
    """Make a call of the current session, and return its future at once. Raises `WorkflowError` outside of one."""
    scope = current_scope(f"{agent}.{method}")
    return scope.node.call(scope, agent, method, args)


def configure(agent: str, **directives: Any) -> None:
    """Give an agent directives, before `deploy`."""
    GIVEN_DIRECTIVES.setdefault(agent, {}).update(directives)


def write_stubs(agents: Mapping[str, Agent], folder: Path) -> list[Path]:
    """Write a module for each agent, and the package that holds them; return the files. Raises `DeclarationError`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not folder.name.isidentifier():
        raise DeclarationError(f"{folder.name!r} is not the name of a Python package")
    texts = {"__init__.py": f'"""Stubs of {", ".join(agents)}, written by `thunderagent workflow stubs`."""\n'}
    texts |= {f"{name}.py": stub_of(agent) for name, agent in agents.items()}
    written = []
    for name, text in texts.items():
        path = folder / name
        path.write_text(text)
        written.append(path)
    return written


def stub_of(agent: Agent) -> str:
    """Return the source of an agent's stub. Raises `DeclarationError` for names that Python does not take."""
    lines = [
        f'"""Stub of `{agent.class_path}`, written by `thunderagent workflow stubs`: do not edit.',
        "",
        "Each function makes a call and returns its future at once.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "import functools",
        "from typing import Any",
        "",
        "from thunderagent_workflows.stubs import call as _call",
        "from thunderagent_workflows.stubs import configure as _configure",
        "",
        f'configure = functools.partial(_configure, "{agent.name}")',
        '"""Give the agent directives, before `deploy`."""',
        "init = configure",
        '"""The paper\'s name of it."""',
    ]
    for name, parameters in agent.methods.items():
        _check_names(agent, name, *parameters)
        typed = ", ".join(f"{each}: {kind or 'Any'}" for each, kind in parameters.items())
        names = ", ".join(parameters) + ("," if len(parameters) == 1 else "")
        lines += ["", "", f"def {name}({typed}) -> Any:", f'    """Call `{agent.class_path}.{name}`; a future."""']
        lines += [f'    return _call("{agent.name}", "{name}", ({names}))']
    source = "\n".join(lines) + "\n"
    try:
        compile(source, agent.name, "exec")
    except SyntaxError as error:
        raise DeclarationError(f"agent {agent.name}: its declaration gives no valid Python: {error}") from error
    return source


def _check_names(agent: Agent, *names: str) -> None:
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name) or name in {"configure", "init"} or name[0] == "_":
            raise DeclarationError(f"agent {agent.name}: {name!r} is not a name for a method or a parameter here")
