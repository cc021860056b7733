"""Checks that many policies make of their settings."""

from __future__ import annotations

from thunderagent.errors import ConfigurationError


def check_not_negative(policy_name: str, settings: object, *names: str) -> None:
    """Raise `ConfigurationError` for the first of these settings that is negative or not a number."""
    for name in names:
        value = getattr(settings, name)
        if not value >= 0:
            raise ConfigurationError(f"{policy_name}: {name} must not be negative, not {value}")


def check_whole_from_one(policy_name: str, settings: object, *names: str) -> None:
    """Raise `ConfigurationError` for the first of these settings that is not a whole number from 1 on."""
    for name in names:
        value = getattr(settings, name)
        if value < 1 or value % 1:
            raise ConfigurationError(f"{policy_name}: {name} must be a whole number, at least 1, not {value}")
