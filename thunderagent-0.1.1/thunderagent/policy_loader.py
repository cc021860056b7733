"""Creates a policy from the configuration: a name or `package.module:Class`, and settings as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from typing import Any, cast

from thunderagent.errors import ConfigurationError
from thunderagent.faults import nearest_hint
from thunderagent.programs.policies import PARTS, POLICIES
from thunderagent.programs.policies.composed import Composed, ControlChain
from thunderagent.programs.policy import (
    Admission,
    EnginePriority,
    GlobalPolicy,
    Order,
    Policy,
    Victims,
)

Setting = bool | int | float | str

PRESETS: dict[str, tuple[str, dict[str, Setting]]] = {
    "concur": ("passthrough", {"admission": "concur"}),
    "continuum-fixed": ("continuum", {"dynamic": False}),
    "fcfs": ("passthrough", {}),
    "thunderagent-ports": (
        "thunderagent",
        {
            "thrash_ratio": 0.95,
            "lambda_max": 0.80,
            "restore_ratio": 0.85,
            "lambda_min": 0.85,
            "half_life_s": float("inf"),
            "reserve_tokens": 100,
        },
    ),
}
"""Names for a policy with settings. `fcfs` is the stock engine, which serves turns as they come; `concur` that behind
CONCUR's window; `continuum-fixed` has the one time to live of its authors' code. `thunderagent-ports` are the
defaults of the public ports to NVIDIA Dynamo: programs pause from 0.95 of the capacity on, down to 0.80, and are
restored up to 0.95 less a hysteresis of 0.10; acting programs count in full, and each reserves 100 tokens."""


_KINDS: Mapping[str, type] = {
    "policy": Policy,
    "admission": Admission,
    "order": Order,
    "victims": Victims,
    "priority": EnginePriority,
    "global_policy": GlobalPolicy,
}

_TRUTHS = {"true": True, "false": False}


def parse_setting(text: str) -> Setting:
    """Parse a policy's setting from the command line: `true` or `false`, a whole number, a number, or a word."""
    if text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def load_policy(name: str, settings: Mapping[str, Setting]) -> Policy:
    """Create a policy from its name, that of a preset, or `package.module:Class`, with its settings.

    `admission`, `order`, `victims`, `priority` and `global_policy` among the settings choose a part of the policy
    separately, by its name or as `package.module:Class`; a setting of a part begins with its kind, as in `admission.n`.
    A setting of the policy for its own part (`part_settings` of the policy) applies to the part that replaces it,
    unless that was given its own.

    Raises `ConfigurationError` that names what exists if the policy, a part or a setting is unknown, and what is
    missing if a class is of another kind, or a value is invalid.
    """
    policy_name, preset = PRESETS.get(name, (name, {}))
    settings = preset | dict(settings)
    chosen = {kind: str(settings.pop(kind)) for kind in PARTS if kind in settings}
    of_parts: dict[str, dict[str, Setting]] = {kind: {} for kind in PARTS}
    for key in [key for key in settings if "." in key]:
        kind, _, part_key = key.partition(".")
        if kind not in chosen:
            known = ", ".join(PARTS)
            raise ConfigurationError(f"setting {key!r} is of a part that is not chosen; parts are {known}")
        of_parts[kind][part_key] = settings.pop(key)
    factory = POLICIES.get(policy_name) or cast("Callable[..., Policy]", _imported("policy", policy_name))
    part_settings = factory.part_settings if isinstance(factory, type) and issubclass(factory, Policy) else {}
    for key, kind in part_settings.items():
        if key in settings and kind in chosen:
            if key not in _settings_of_part(kind, chosen[kind]):
                raise ConfigurationError(
                    f"setting {key!r} of policy {name} is for its own {kind}; "
                    f"{chosen[kind]}, which was chosen instead, has no such setting"
                )
            of_parts[kind].setdefault(key, settings[key])
    of_chosen = [f"{kind}.{key}" for kind, part_name in chosen.items() for key in _settings_of_part(kind, part_name)]
    policy = cast("Policy", _made("policy", name, factory, settings, of_chosen))
    if not chosen:
        return policy
    parts = {}
    for kind, part_name in chosen.items():
        parts[kind] = _part(kind, part_name, of_parts[kind])
    return Composed(policy, **cast("dict[str, Any]", parts))


def _settings_of_part(kind: str, name: str) -> list[str]:
    names = name.split("+") if kind == "global_policy" else [name]
    return [key for each in names for key in _settings_of(PARTS[kind].get(each) or _imported(kind, each))]


def _part(kind: str, name: str, settings: Mapping[str, Setting]) -> object:
    """Create a part. Several global policies may be named, joined by +; each setting applies to those that have it."""
    names = name.split("+") if kind == "global_policy" else [name]
    factories = {each: PARTS[kind].get(each) or _imported(kind, each) for each in names}
    if len(names) == 1:
        return _made(kind, name, factories[name], settings)
    known = {each: set(_settings_of(factory)) for each, factory in factories.items()}
    if unknown := sorted(set(settings) - set().union(*known.values())):
        raise ConfigurationError(f"none of {name} has a setting {unknown[0]!r}")
    made = [
        _made(kind, each, factory, {key: value for key, value in settings.items() if key in known[each]})
        for each, factory in factories.items()
    ]
    return ControlChain(cast("list[GlobalPolicy]", made))


def _settings_of(factory: Callable[..., object]) -> dict[str, str]:
    """Return the settings by name, each with its type as written; empty if it is no dataclass."""
    made = factory.func if isinstance(factory, partial) else factory
    if not is_dataclass(made):
        return {}
    return {
        field.name: field.type.__name__ if isinstance(field.type, type) else str(field.type)
        for field in fields(made)
        if field.init
    }


def _made(
    kind: str,
    name: str,
    factory: Callable[..., object],
    settings: Mapping[str, Setting],
    of_chosen: Sequence[str] = (),
) -> object:
    """Create a policy or a part; `of_chosen` are the settings of parts that were chosen beside it."""
    what = f"{kind} {name}"
    if missing := sorted(getattr(factory, "__abstractmethods__", ())):
        raise ConfigurationError(f"{name} cannot be the {kind}: it has no {', '.join(missing)}")
    known = _settings_of(factory)
    if known or is_dataclass(factory):
        if unknown := sorted(set(settings) - set(known)):
            has = f"it has: {', '.join(known)}{nearest_hint(unknown[0], known)}" if known else "it has none"
            if meant := [each for each in of_chosen if each.endswith(f".{unknown[0]}")]:
                has = f"did you mean {' or '.join(meant)}?"
            raise ConfigurationError(f"{what} has no setting {unknown[0]!r}; {has}")
        for key, value in settings.items():
            if wanted := _wanted_instead(known[key], value):
                raise ConfigurationError(f"{what}: {key} must be {wanted}, not {value!r}")
        settings = {key: int(value) if known[key] == "int" else value for key, value in settings.items()}  # 1e3 is one
    try:
        made = factory(**settings)
    except TypeError as error:
        raise ConfigurationError(f"{what} does not take these settings: {error}") from error
    if not isinstance(made, _KINDS[kind]):
        base = _KINDS[kind]
        raise ConfigurationError(
            f"{name} cannot be the {kind}: its class is no subclass of {base.__name__} of {base.__module__}"
        )
    return made


def _wanted_instead(type_words: str, value: Setting) -> str:
    """Return what a setting of that type must be, if the value is not; only for numbers and booleans."""
    types = {word.strip() for word in type_words.split("|")} - {"None"}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if types <= {"int", "float"} and not is_number:
        return "a number"
    if types == {"int"} and float(value) % 1:
        return "a whole number"
    return "true or false" if types == {"bool"} and value not in (0, 1) else ""


def _imported(kind: str, name: str) -> Callable[..., object]:
    module_name, colon, class_name = name.partition(":")
    if not colon:
        known = [*POLICIES, *PRESETS] if kind == "policy" else PARTS[kind]
        raise ConfigurationError(
            f"no {kind} {name!r}; there are {', '.join(known)}, or package.module:Class{nearest_hint(name, known)}"
        )
    try:
        return cast("Callable[..., object]", getattr(import_module(module_name), class_name))
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{kind} {name!r} cannot be loaded: {error}") from error
