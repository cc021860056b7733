"""API keys: which one a request has, where they are stored, and what each may use."""

from thunderagent.proxy.gate.keys.keyring import (
    COOKIE,
    KEY_HEADER,
    NO_LIMITS,
    Key,
    KeyLimits,
    Keyring,
    caller_key,
    check_admin,
    check_key,
    cookies_of,
    mint_key,
)

__all__ = [
    "COOKIE",
    "KEY_HEADER",
    "NO_LIMITS",
    "Key",
    "KeyLimits",
    "Keyring",
    "caller_key",
    "check_admin",
    "check_key",
    "cookies_of",
    "mint_key",
]
