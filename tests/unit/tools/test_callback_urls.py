"""Which URLs of callbacks a client may give, and which addresses they may lead to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from thunderagent.errors import ConfigurationError, SandboxEngineError, SandboxRefusedError
from thunderagent.tools.callback_urls import CallbackUrls, url_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

TEMPLATE = ("http://10.0.0.2:9000/prepare", "http://10.0.0.2:9000/end?key=1")
LISTED = ("https://Sandboxes.example/v1/", "http://10.0.0.9:8080")


def resolver(*texts: str) -> Callable[[str], Awaitable[Sequence[str]]]:
    async def resolve(_: str) -> Sequence[str]:
        return texts

    return resolve


@pytest.mark.parametrize(
    "url",
    [
        *TEMPLATE,
        "https://sandboxes.example/v1",
        "https://sandboxes.example:443/v1/end?a=b/../c",
        "http://10.0.0.9:8080/anything",
    ],
)
def test_allowed_callback_urls_pass(url: str) -> None:
    CallbackUrls([TEMPLATE], LISTED).check(url_of(url))


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.2:9000/",
        "http://10.0.0.2:9000/end",
        "http://10.0.0.2:9000/end?key=2",
        "http://10.0.0.2/prepare",
        "https://sandboxes.example/v10",
        "https://sandboxes.example/",
        "https://sandboxes.example/v1/../admin",
        "https://sandboxes.example/v1/%2e%2e/admin",
        "https://sandboxes.example/v1/.%2E/admin",
        "https://sandboxes.example/v1/..;/admin",
        "https://sandboxes.example/v1/..%3Ba/admin",
        "https://sandboxes.example/v1/..%2fadmin",
        "https://sandboxes.example/v1/..\\admin",
        "https://sandboxes.example/v1/%5c../admin",
        "https://sandboxes.example.attacker.example/v1/",
        "https://sandboxes.example:444/v1/end",
        "http://sandboxes.example/v1/end",
        "http://10.0.0.9:8081/",
        "http://169.254.169.254/latest/meta-data",
    ],
)
def test_forbidden_callback_urls_are_refused(url: str) -> None:
    with pytest.raises(SandboxRefusedError, match="listed"):
        CallbackUrls([TEMPLATE], LISTED).check(url_of(url))


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.100.100.200"),
        *("224.0.0.1", "255.255.255.255", "192.0.0.192", "168.63.129.16"),
        *("::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "::127.0.0.1"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:1::1"),
    ],
)
async def test_addresses_inside_are_closed(address: str) -> None:
    """One of several is enough: which one is connected to would be chance."""
    for found in ((address,), ("93.184.215.14", address)):
        urls = CallbackUrls([], ["https://sandboxes.example"], resolve=resolver(*found))
        with pytest.raises(SandboxRefusedError, match="may not call") as raised:
            await urls.addresses_of(url_of("https://sandboxes.example/end"))
        assert address not in raised.value.message  # what a name leads to inside is nobody's business
        assert address in raised.value.for_operators


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("93.184.215.14", None),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", None),
        ("10.1.2.3", "10.1.0.0/16"),
        ("::ffff:10.1.2.3", "10.1.0.0/16"),
        ("127.0.0.1", "127.0.0.1"),
        ("fd00::1", "fd00::/8"),
    ],
)
async def test_addresses_that_are_open(address: str, network: str | None) -> None:
    networks = [] if network is None else [network]
    urls = CallbackUrls([], ["https://sandboxes.example"], networks, resolve=resolver(address))
    assert await urls.addresses_of(url_of("https://sandboxes.example/end")) == (address,)


async def test_an_address_in_a_listed_url_is_the_operators_word() -> None:
    urls = CallbackUrls([], ["http://10.0.0.9:8080", "http://sandboxes.example"], resolve=resolver("10.0.0.9"))
    assert await urls.addresses_of(url_of("http://10.0.0.9:8080/end")) == ("10.0.0.9",)
    with pytest.raises(SandboxRefusedError):
        await urls.addresses_of(url_of("http://sandboxes.example/end"))


async def test_a_name_without_an_address() -> None:
    """What the resolver says of it goes to the log."""

    async def resolve(_: str) -> Sequence[str]:
        raise OSError("no such name in zone secret")

    urls = CallbackUrls([], ["http://sandboxes.example"], resolve=resolve)
    with pytest.raises(SandboxEngineError) as raised:
        await urls.addresses_of(url_of("http://sandboxes.example/end"))
    assert "secret" not in raised.value.message
    assert "secret" in raised.value.for_operators


@pytest.mark.parametrize(
    ("listed", "networks", "what"),
    [
        (["sandboxes.example"], [], "sandbox_callback_urls"),
        (["http://h/?a=b"], [], "no query"),
        (["http://u:p@h/"], [], "sandbox_callback_urls"),
        (["http://h"], ["10.0.0.1/8"], "sandbox_callback_networks"),
        (["http://h"], ["everything"], "sandbox_callback_networks"),
    ],
)
def test_a_list_that_is_none(listed: list[str], networks: list[str], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        CallbackUrls([], listed, networks)
