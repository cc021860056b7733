"""Access to the port of a picker."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.picker.command import Options, add_arguments, check_port

if TYPE_CHECKING:
    from pathlib import Path


def check(*options: str, **settings: Any) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    check_port(ServeConfig.load(**settings), Options.of(parser.parse_args(options)))


def test_a_network_is_listened_on_only_if_it_is_said_who_may_reach_it(tmp_path: Path) -> None:
    ca, cert = tmp_path / "ca.pem", tmp_path / "cert.pem"
    trustme.CA().cert_pem.write_to_path(str(ca))
    for host in ("0.0.0.0", "::", "10.0.0.1", "engines.example.com"):
        with pytest.raises(ConfigurationError, match=r"^picker_port: .*picker_client_ca.*picker_network_private"):
            check(host=host, allow_open=True)
        with pytest.raises(ConfigurationError, match=r"^picker_port: "):  # TLS alone admits every client
            check(host=host, allow_open=True, tls_cert=cert)
        check("--picker-network-private", host=host, allow_open=True)
        check("--picker-client-ca", str(ca), host=host, allow_open=True, tls_cert=cert)
    for host in ("127.0.0.1", "::1", "localhost"):
        check(host=host)


def test_certificates_of_clients_need_a_certificate_and_an_authority(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^picker_client_ca.*tls_cert"):
        check("--picker-client-ca", "ca.pem")
    (tmp_path / "ca.pem").write_text("no certificate")
    for path in (tmp_path / "ca.pem", tmp_path / "missing.pem"):
        with pytest.raises(ConfigurationError, match=r"^picker_client_ca: cannot use "):
            check("--picker-client-ca", str(path), tls_cert=tmp_path / "cert.pem")
