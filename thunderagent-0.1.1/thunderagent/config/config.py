"""The configuration: one frozen model, built once in `cli`, handed down in slices.

Each value comes from the first of: the command line, the environment (`THUNDERAGENT_` and the name in capitals), the
TOML file that `--config` names, the default of its field.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Any, ClassVar, Self

from pydantic import ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from thunderagent.config.access import Limits, Listening, Security
from thunderagent.config.engines import Engines, Provisioning, Simulated
from thunderagent.config.processes import Logs, Processes
from thunderagent.config.rollouts import Rollouts
from thunderagent.config.sandboxes import Sandboxes
from thunderagent.config.scheduling import Judging, Scheduling
from thunderagent.config.slices import Slice
from thunderagent.config.turns import Control, Names, Timeouts
from thunderagent.errors import ConfigurationError
from thunderagent.faults import faults_of
from thunderagent.tools.template import Template

ENVIRONMENT_PREFIX = "THUNDERAGENT_"
_OTHERS_VARIABLES = {"KEY", "PROXY", "PROGRAM_ID"}
"""Names with the prefix that are not settings: of the client, and of other commands."""
_SERVICE_LINK = re.compile(r"(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)?)")
"""What Kubernetes adds to every pod for a service whose name begins this way."""

ORBIT_JUDGE = "orbit-judge"
"""The part that uses a judge's verdicts."""


class ServeConfig(
    Simulated,
    Logs,
    Sandboxes,
    Judging,
    Provisioning,
    Rollouts,
    Control,
    Security,
    Limits,
    Names,
    Timeouts,
    Scheduling,
    Processes,
    Listening,
    Engines,  # the last one comes first
    BaseSettings,
):
    """All settings of `thunderagent serve`."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=False
    )
    toml_file: ClassVar[Path | None] = None
    given_names: ClassVar[frozenset[str]] = frozenset()
    """Settings that the command line gave beside a file."""

    @classmethod
    def slices(cls) -> list[type[Slice]]:
        """Return the slices, in order of documentation."""
        bases = [each for each in reversed(ServeConfig.__mro__) if issubclass(each, Slice)]
        return [each for each in bases if each not in (Slice, ServeConfig)]

    @property
    def has_replica_source(self) -> bool:
        """Whether replicas come from somewhere; else simulated engines are started."""
        return bool(self.backends or self.backends_file or self.kubernetes_replicas or self.provision)

    @property
    def simulates_engines(self) -> bool:
        """Whether simulated engines are started: nothing else names a replica."""
        return not self.has_replica_source and self.embedded_engines > 0

    @model_validator(mode="after")
    def _engines_are_named(self) -> Self:
        """Refuse an empty list of replicas: whoever gives one does not want made-up words."""
        given = [name for name in ("backends", "kubernetes_replicas") if name in self.model_fields_set]
        if given and self.simulates_engines and "embedded_engines" not in self.model_fields_set:
            raise ValueError(
                f"{given[0]} is given and names no replica; leave it out for simulated engines, or set "
                "embedded_engines = 0 to start without any"
            )
        return self

    @model_validator(mode="after")
    def _judges_who_can(self) -> Self:
        if not self.judge_url and ORBIT_JUDGE in (self.order, self.priority, *self.policy_args.values()):
            raise ValueError(f"{ORBIT_JUDGE} needs judge_url; without a judge it would be orbit-step")
        return self

    @model_validator(mode="after")
    def _nothing_is_without_effect(self) -> Self:
        for prefix, switch in (
            ("judge_", "judge_url"),
            ("provision_", "provision"),
            ("rollout_", "rollouts"),
            ("fence_", "fence"),
        ):
            given = [
                name
                for name, field in type(self).model_fields.items()
                if name.startswith(prefix) and name != switch and getattr(self, name) != field.default
            ]
            if given and not getattr(self, switch):
                raise ValueError(f"{', '.join(given)} {'goes' if len(given) == 1 else 'go'} with {switch}")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the base class's
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the base class's
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: command line, environment, file."""
        sources: list[PydanticBaseSettingsSource] = [init_settings]
        if any(name.upper().startswith(ENVIRONMENT_PREFIX) for name in os.environ):  # else it takes the most time
            sources.append(env_settings)
        if cls.toml_file is not None:
            sources.append(TomlConfigSettingsSource(settings_cls, toml_file=cls.toml_file))
        return tuple(sources)

    @classmethod
    def load(cls, toml_file: Path | None = None, **given: Any) -> Self:
        """Build the configuration; `given` is from the command line.

        Raises `ConfigurationError` with a line for each invalid value.
        """
        source: type[Self] = cls  # creating a class takes longer than all the rest
        if toml_file is not None:
            known = {"toml_file": toml_file, "given_names": frozenset(given), "__module__": cls.__module__}
            source = type(cls.__name__, (cls,), known)
        try:
            if toml_file is not None and not toml_file.is_file():
                raise ConfigurationError(f"there is no configuration file {toml_file}")
            loaded: Self = source(**given)
        except ValidationError as error:
            faults = faults_of(error, whole="value", place_of=partial(_place_of, given, toml_file), known=_known_at)
            raise ConfigurationError("; ".join(faults)) from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{toml_file}: not UTF-8: {error}") from error
        except TOMLDecodeError as error:
            raise ConfigurationError(f"{toml_file}: not TOML: {error}") from error
        except (OSError, SettingsError, ValueError) as error:
            raise ConfigurationError(str(error)) from error
        return loaded

    def lines_of(self, *names: str) -> str:
        """Return the file with the line of each of these settings that it has; empty if it has none of them."""
        if self.toml_file is None:
            return ""
        text = self.toml_file.read_text(encoding="utf-8", errors="replace")
        wanted = [name for name in names if name in self.model_fields_set and name not in self.given_names]
        lines = [f"line {number}: {name}" for name in wanted if (number := _line_number(text, (name,)))]
        return f"{self.toml_file}, {', '.join(lines)}" if lines else ""


def _place_of(given: Mapping[str, Any], toml_file: Path | None, loc: tuple[int | str, ...]) -> str:
    """Return where a setting comes from: the option's name, the variable, or the file with the line and the key."""
    place, name = ".".join(map(str, loc)), str(loc[0]) if loc else ""
    if not name or name in given:
        return place
    variable = f"{ENVIRONMENT_PREFIX}{name.upper()}"
    if any(each.upper() == variable for each in os.environ):
        return variable
    if toml_file is None:
        return place
    number = _line_number(toml_file.read_text(encoding="utf-8", errors="replace"), loc)
    return f"{toml_file}{f', line {number}' if number else ''}: {place}"


def _line_number(toml: str, loc: tuple[int | str, ...]) -> int | None:
    """Return the line of the innermost key of `loc` that is found, each behind the one around it; None without any."""
    position, found = 0, None
    for key in loc:
        word = rf"""["']?{re.escape(str(key))}["']?"""
        table = rf"\[[^\]\n]*(?<![\w-]){word}[ \t]*[.\]]"
        line = rf"(?:[\w\-\"'. \t]+\.)?{word}[ \t]*[=.]"
        match = re.compile(rf"^[ \t]*(?:{table}|{line})|[{{,][ \t]*{word}[ \t]*=", re.MULTILINE).search(toml, position)
        if match is not None:
            position, found = match.start(), match.end()
    return None if found is None else toml.count("\n", 0, found) + 1


def _known_at(loc: tuple[int | str, ...]) -> Iterable[str]:
    """Return the keys that may stand where one does that is none."""
    return Template.model_fields if loc[0] == "sandbox_templates" else ServeConfig.model_fields


def unknown_variables(names: Iterable[str]) -> dict[str, str]:
    """Return environment names that look like settings but are none, each with the nearest setting.

    It is empty if none is near. They may be of another version, so they cause a warning, not an error.
    """
    known = [name.upper() for name in ServeConfig.model_fields]
    unknown = {}
    for name in sorted(names):
        if not name.upper().startswith(ENVIRONMENT_PREFIX):
            continue
        setting = name.upper().removeprefix(ENVIRONMENT_PREFIX)
        if setting not in known and setting not in _OTHERS_VARIABLES and not _SERVICE_LINK.fullmatch(setting):
            nearest = get_close_matches(setting, known, n=1)
            unknown[name] = ENVIRONMENT_PREFIX + nearest[0] if nearest else ""
    return unknown
