"""Protection against strangers, from the configuration: keys, TLS, limits, and the refusal of an open network."""

from __future__ import annotations

import ssl
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from pydantic import SecretStr

from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.proxy.gate.access import ForwardUnknown
from thunderagent.proxy.gate.guard import GuardSettings
from thunderagent.proxy.gate.held import HeldLimits
from thunderagent.proxy.gate.keys import Keyring
from thunderagent.proxy.gate.keys.file import read_keys
from thunderagent.proxy.judge import read_prompt

log = structlog.get_logger("thunderagent.security")


def build_keyring(config: ServeConfig) -> Keyring:
    """Read the keys, and refuse an accidentally open proxy. Raises `ConfigurationError`."""
    keyring = Keyring(config.api_keys, config.admin_keys, has_file=config.keys_file is not None)
    if config.keys_file is not None:
        keyring.set_filed(entry.key() for entry in read_keys(config.keys_file))
    if config.metrics_need_key and not keyring.has_admin_keys:
        raise ConfigurationError("metrics_need_key: there is no admin key; set admin_keys")
    if not (keyring.has_data_keys or config.allow_open or is_loopback(config.host)):
        raise ConfigurationError(
            f"host: {config.host!r} can be reached from other machines, and there is no API key: set api_keys "
            "(`thunderagent key NAME` makes one), or allow_open if anybody who reaches it may use it"
        )
    return keyring


def check_security(config: ServeConfig) -> None:
    """Raise `ConfigurationError` for what would otherwise fail after other parts were started."""
    build_keyring(config)
    if config.simulates_engines and not (config.demo or is_loopback(config.host)):
        raise ConfigurationError(
            f"backends: there are none, and simulated engines would answer anybody who reaches {config.host!r} with "
            "made-up words; set backends (THUNDERAGENT_BACKENDS=URL,URL), or demo to have simulated engines"
        )
    ServerTls.of(config)
    backend_ssl_context(config)
    backend_api_key(config)
    judge_api_key(config)
    read_prompt(config.judge_prompt)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address; of names, only `localhost` certainly does."""
    try:
        return ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def guard_settings(config: ServeConfig) -> GuardSettings:
    """Return the guard's settings."""
    return GuardSettings(
        max_body_bytes=config.max_body_bytes,
        body_timeout_s=config.body_timeout_s,
        cors_origins=config.cors_origins,
        metrics_need_key=config.metrics_need_key,
        client_stall_limit_s=config.client_stall_limit_s,
        forward_unknown=ForwardUnknown(config.forward_unknown) if config.forward_unknown is not None else None,
        hosts=(config.host, *_own_names(config), *config.allowed_hosts),
        rate_limit_per_s=config.rate_limit_per_s,
        rate_limit_burst_count=config.rate_limit_burst_count,
    )


def _own_names(config: ServeConfig) -> tuple[str, ...]:
    """Return the name by which others reach this process, if it was given."""
    return (urlsplit(config.reached_at).netloc,) if config.reached_at else ()


def held_limits(config: ServeConfig) -> HeldLimits:
    """Return the limits of held turns."""
    return HeldLimits(
        config.max_held_turns_count,
        config.max_held_bytes,
        config.key_max_held_turns_count,
        config.key_max_held_bytes,
        config.tenant_max_held_turns_count,
        config.tenant_max_held_bytes,
        config.max_running_bytes,
        config.max_websockets_count,
        config.key_max_websockets_count,
        config.max_leases_count,
        config.key_max_leases_count,
        config.key_max_leased_ratio,
    )


def backend_api_key(config: ServeConfig) -> str:
    """Return the key for the engines, from the configuration or from its file. Raises `ConfigurationError`."""
    return _key_of("backend_api_key_file", config.backend_api_key, config.backend_api_key_file)


def judge_api_key(config: ServeConfig) -> str:
    """Return the key for the judge, from the configuration or from its file. Raises `ConfigurationError`."""
    return _key_of("judge_api_key_file", config.judge_api_key, config.judge_api_key_file)


def _key_of(field: str, key: SecretStr | None, file: Path | None) -> str:
    if file is None:
        return key.get_secret_value() if key is not None else ""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{field}: cannot read {file}: {error}") from error


def backend_ssl_context(config: ServeConfig) -> ssl.SSLContext | None:
    """Return the certificates to trust for engines, besides the system's. Raises `ConfigurationError`."""
    if config.backend_ca_file is None:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(config.backend_ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigurationError(f"backend_ca_file: cannot use {config.backend_ca_file}: {error}") from error
    return context


class ServerTls:
    """The certificate for clients. It can be reloaded while connections are open, which keep the old one."""

    def __init__(self, cert: Path, key: Path | None) -> None:
        """Read it. `key` None: the private key is in the same file. Raises `ConfigurationError`."""
        self._cert = cert
        self._key = key
        self.context = self._read()

    @classmethod
    def of(cls, config: ServeConfig) -> ServerTls | None:
        """Return the configured certificate; None is plain HTTP. Raises `ConfigurationError`."""
        if config.tls_cert is None:
            return None
        return cls(config.tls_cert, config.tls_key)

    async def reload(self) -> None:
        """Reload the certificate; keep the old one if the new one is invalid."""
        try:
            self._read()  # into a new context first: half a change would break ours
            self.context.load_cert_chain(self._cert, self._key)
        except (ConfigurationError, OSError) as error:
            log.error("certificate_not_reloaded", why=str(error))  # noqa: TRY400 - no bug, so no trace
        else:
            log.info("certificate_reloaded", file=str(self._cert))

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self._cert, self._key, password=lambda: "")  # never ask on the terminal
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"tls_cert: cannot use {self._cert} with its key: {error}") from error
        return context
