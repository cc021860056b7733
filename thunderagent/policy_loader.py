"""Make a policy from what a configuration says: a name or `package.module:Class`, and settings as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import cast

from thunderagent.errors import ConfigurationError
from thunderagent.programs.policies import POLICIES
from thunderagent.programs.policies.base import Policy

Setting = bool | int | float | str

PRESETS: dict[str, tuple[str, dict[str, Setting]]] = {
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
    )
}
"""Names for a policy with settings. `thunderagent-ports` are the defaults of the public ports to NVIDIA Dynamo:
programs pause from 0.95 of the capacity on, down to 0.80, and are restored up to 0.95 less a hysteresis of 0.10; acting
programs count in full, and each reserves 100 tokens."""


_TRUTHS = {"true": True, "false": False}


def parse_setting(text: str) -> Setting:
    """Read a policy's setting from the command line: `true` or `false`, a whole number, a number, or a word."""
    if text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def load_policy(name: str, settings: Mapping[str, Setting]) -> Policy:
    """Make a policy from its name, that of a preset, or `package.module:Class`, with its settings.

    Raises `ConfigurationError` that names what exists where the policy or a setting is unknown.
    """
    policy_name, preset = PRESETS.get(name, (name, {}))
    settings = preset | dict(settings)
    factory = POLICIES.get(policy_name) or _import_policy(policy_name)
    if is_dataclass(factory):
        known = [field.name for field in fields(factory)]
        if unknown := sorted(set(settings) - set(known)):
            raise ConfigurationError(f"policy {name} has no setting {unknown[0]!r}; it has: {', '.join(known)}")
    try:
        return factory(**settings)
    except TypeError as error:
        raise ConfigurationError(f"policy {name} does not take these settings: {error}") from error


def _import_policy(name: str) -> Callable[..., Policy]:
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise ConfigurationError(
            f"no policy {name!r}; there are {', '.join([*POLICIES, *PRESETS])}, or package.module:Class"
        )
    try:
        return cast("Callable[..., Policy]", getattr(import_module(module_name), class_name))
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"policy {name!r} cannot be loaded: {error}") from error
