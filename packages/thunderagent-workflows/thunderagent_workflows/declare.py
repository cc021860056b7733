"""Agents' declarations: from YAML, or a mapping of the same shape, checked."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from thunderagent_workflows.core.call import Rules
from thunderagent_workflows.errors import DeclarationError
from thunderagent_workflows.state import ManagedDict, ManagedList
from thunderagent_workflows.type_check import takes

NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
MAX_BATCH_COUNT = 32


class Directives(BaseModel):
    """How an agent's calls may be run."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    stateful: bool = Field(False, description="a session's calls run in order on one instance, which it never leaves")
    managed: bool = Field(False, description="a session's calls run on one instance, may move as a whole; found out")
    batchable: bool = Field(False, description="parameters and answer are lists: waiting calls run as one")
    max_batch: int = Field(MAX_BATCH_COUNT, ge=1, description="the most calls of a batch")
    mix_sessions: bool = Field(
        False,
        description="a batch may hold calls of several sessions: its turns are anonymous, its calls the first one's",
    )
    preemptable: str = Field("", description="the method that stops a running call; true is `checkpoint`")
    min_instances: int = Field(1, ge=0, description="instances that are kept; with 0 the first call starts one")
    max_instances: int = Field(1, ge=1, description="instances that there may be")
    resources: dict[str, float] = Field(default_factory=dict, description="what an instance takes: cpu, gpu, memory")
    role: str = Field("", description="a label that policies route by")

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, given: Any) -> Any:
        """Accept the paper's other spellings, too."""
        if isinstance(given, Mapping):
            given = dict(given)
            if "max_resources" in given:
                given["resources"] = given.pop("max_resources")
            if isinstance(given.get("preemptable"), bool):
                given["preemptable"] = "checkpoint" if given["preemptable"] else ""
            if given.get("min_instances", 1) > 1:
                given.setdefault("max_instances", given["min_instances"])
        return given

    @field_validator("resources")
    @classmethod
    def _lower_names(cls, resources: dict[str, float]) -> dict[str, float]:
        return {name.lower(): amount for name, amount in resources.items()}

    @model_validator(mode="after")
    def _do_not_contradict(self) -> Directives:
        if self.batchable and self.managed:
            raise ValueError("a batchable agent cannot have managed state, because a batch may mix sessions")
        if self.batchable and self.preemptable:
            raise ValueError("an agent can be batchable or preemptable, not both: a batch cannot be interrupted")
        if self.mix_sessions and self.stateful:
            raise ValueError("mix_sessions is not possible for a stateful agent")
        if self.min_instances > self.max_instances:
            raise ValueError("min_instances is greater than max_instances")
        return self

    @property
    def rules(self) -> Rules:
        """Return what the core needs."""
        return Rules(
            is_stateful=self.stateful,
            is_managed=self.managed,
            batch_count=self.max_batch if self.batchable else 1,
            mixes_sessions=self.batchable and self.mix_sessions,
            is_preemptable=bool(self.preemptable),
        )


class Agent(BaseModel):
    """An agent or a tool: its class, its methods with their parameters, its directives."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    name: str = Field(pattern=NAME)
    class_path: str = Field(alias="class", pattern=r"^[\w.]+:[\w.]+$", description="module:Class")
    methods: dict[str, dict[str, str]] = Field(min_length=1, description="by name, the parameters and their types")
    directives: Directives = Directives()

    @model_validator(mode="before")
    @classmethod
    def _gather_directives(cls, given: Any) -> Any:
        """Accept directives beside the class, without a level of their own."""
        if isinstance(given, Mapping):
            known = {"name", "class", "class_path", "methods", "directives"}
            own = {key: value for key, value in given.items() if key in known}
            extra = {key: value for key, value in given.items() if key not in known}
            if extra:
                own["directives"] = {**dict(own.get("directives") or {}), **extra}
            own["methods"] = {name: each or {} for name, each in dict(own.get("methods") or {}).items()}
            return own
        return given

    def load(self) -> type:
        """Import the class. Raises `DeclarationError`."""
        module_name, _, path = self.class_path.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise DeclarationError(f"agent {self.name}: {self.class_path} cannot be imported: {error}") from error
        if not isinstance(found, type):
            raise DeclarationError(f"agent {self.name}: {self.class_path} is not a class")
        return found

    def check(self, kind: type) -> None:
        """Check the declaration against the class. Raises `DeclarationError`."""
        for name, parameters in self.methods.items():
            method = getattr(kind, name, None)
            if not callable(method):
                raise DeclarationError(f"agent {self.name}: {kind.__name__} has no method {name}")
            try:
                signature = inspect.signature(method)
                signature.bind(None, *parameters)
            except TypeError as error:
                text = f"agent {self.name}: {name}({', '.join(parameters)}) is not how {method} is called: {error}"
                raise DeclarationError(text) from error
            named = list(signature.parameters)[1:]
            if list(parameters) != named[: len(parameters)]:
                raise DeclarationError(
                    f"agent {self.name}: {name} is declared with ({', '.join(parameters)}), "
                    f"its parameters are ({', '.join(named)})"
                )
            self._check_types(name, parameters, signature, getattr(inspect.unwrap(method), "__globals__", {}))
        hook = self.directives.preemptable
        if hook and not callable(getattr(kind, hook, None)):
            raise DeclarationError(f"agent {self.name}: {kind.__name__} has no method {hook}, which preemptable names")

    def _check_types(
        self, name: str, parameters: Mapping[str, str], signature: inspect.Signature, names: Mapping[str, Any]
    ) -> None:
        """Check declared types against a method's; a batch takes a list for each parameter."""
        for parameter, declared in parameters.items():
            wanted = signature.parameters[parameter]
            given = f"list[{declared or 'Any'}]" if self.directives.batchable else declared or "Any"
            if not takes(wanted.annotation, given, names):
                raise DeclarationError(
                    f"agent {self.name}: {name} is declared with {parameter}: {declared}, its parameter is {wanted}"
                )

    def with_directives(self, **changes: Any) -> Agent:
        """Return the agent with other directives. Raises `DeclarationError`."""
        kept = {name: getattr(self.directives, name) for name in self.directives.model_fields_set}
        try:
            directives = Directives.model_validate({**kept, **changes})
        except ValidationError as error:
            raise DeclarationError(f"agent {self.name}: {_said(error)}") from error
        return self.model_copy(update={"directives": directives})


def load_agents(source: str | Path | Mapping[str, Any]) -> dict[str, Agent]:
    """Read the agents of a YAML file, or of a mapping of its shape. Raises `DeclarationError`."""
    if isinstance(source, Mapping):
        content: Any = source
    else:
        try:
            content = yaml.safe_load(Path(source).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise DeclarationError(f"{source}: {error}") from error
    if not isinstance(content, Mapping) or not content:
        raise DeclarationError(f"{source}: expected names of agents, each with its class and methods")
    agents = {}
    for name, given in content.items():
        if not isinstance(given, Mapping):
            raise DeclarationError(f"agent {name}: its class and methods are missing")
        try:
            agents[str(name)] = Agent.model_validate({"name": str(name), **given})
        except ValidationError as error:
            raise DeclarationError(f"agent {name}: {_said(error)}") from error
    return agents


def uses_managed_state(kind: type) -> bool:
    """Return whether a class, or its module, has managed state as an attribute."""
    module = importlib.import_module(kind.__module__)
    return any(isinstance(each, ManagedDict | ManagedList) for each in (*vars(kind).values(), *vars(module).values()))


def _said(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))}: {each['msg'].removeprefix('Value error, ')}".removeprefix(": ")
        for each in error.errors()
    )
