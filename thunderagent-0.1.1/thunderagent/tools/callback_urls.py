"""Where callbacks may go: to the operator's own URLs anywhere, to a client's only where the operator lists it.

Theory of operation
===================
A URL of a template in the configuration is the operator's word, and is called wherever its name leads. A URL that a
client gives must begin with a listed one, and is called at an address that was checked: its name is resolved once, and
the connection goes to that address. So a name whose address changes between check and use leads nowhere new. Addresses
of this machine, of a private network, of a cloud's metadata and the like are open only if the operator lists their
network, or lists the URL by that very address.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

import httpx2

from thunderagent.errors import ConfigurationError, SandboxEngineError, SandboxRefusedError
from thunderagent.tools.template import Template

Address = IPv4Address | IPv6Address

_INSIDE_BUT_GLOBAL = tuple(map(ip_network, ("168.63.129.16", "192.0.0.0/24", "fec0::/10")))
"""What Python takes for public: Azure's agent, protocols' and Oracle's metadata, old site-local addresses."""

_NAT64 = IPv6Network("64:ff9b::/96")
"""Addresses that lead to the IPv4 address in their last 32 bits (RFC 6052)."""

_COMPATIBLE = IPv6Network("::/96")
"""The same, long deprecated (RFC 4291, 2.5.5.1)."""

_CLIMBS = re.compile(r"(?i)(?:^|/)(?:\.|%2e){1,2}(?:[;/]|%3b|$)|%2f|%5c|\\")
"""A path that a service may read as another one."""


class CallbackUrls:
    """Decides which URLs of callbacks are called, and at which addresses."""

    def __init__(
        self,
        operators: Iterable[tuple[str, str]],
        listed: Iterable[str] = (),
        networks: Iterable[str] = (),
        *,
        resolve: Callable[[str], Awaitable[Sequence[str]]] | None = None,
    ) -> None:
        """Trust `operators`, the two URLs of each template; clients may also give what begins with a `listed` URL.

        Names there may lead to public addresses, and to `networks`. `resolve` returns a name's addresses, or raises
        OSError; by default it asks the system. Raises `ConfigurationError`.
        """
        self._resolve = resolve or _addresses_by_system
        self._pairs = frozenset(
            (str(_configured("sandbox_templates", prepare)), str(_configured("sandbox_templates", reclaim)))
            for prepare, reclaim in operators
        )
        self._operators = frozenset(each for pair in self._pairs for each in pair)
        self._listed = tuple(_configured("sandbox_callback_urls", each) for each in listed)
        if wrong := next((each for each in self._listed if each.query), None):
            raise ConfigurationError(f"sandbox_callback_urls: {wrong.host}: a listed URL has no query")
        try:
            self._networks = tuple(ip_network(each) for each in networks)
        except ValueError as error:
            raise ConfigurationError(f"sandbox_callback_networks: {error}") from error

    def __repr__(self) -> str:
        return f"<CallbackUrls: {len(self._operators)} of templates, {len(self._listed)} listed>"

    def is_operators(self, url: httpx2.URL) -> bool:
        """Return whether a template in the configuration has exactly this URL."""
        return str(url) in self._operators

    def check(self, url: httpx2.URL) -> None:
        """Check a URL that a client gave, or that leads on from one. Raises `SandboxRefusedError`."""
        if not self.is_operators(url) and not any(_begins_with(url, each) for each in self._listed):
            raise SandboxRefusedError("this URL is neither a template's nor listed in sandbox_callback_urls")

    def check_both(self, prepare_url: httpx2.URL, reclaim_url: httpx2.URL) -> None:
        """Check the URLs of a template, perhaps a client's. Raises `SandboxRefusedError`.

        The operator's are for each other: who makes a sandbox elsewhere chooses its handle, and might have the
        operator's service remove somebody else's.
        """
        if (str(prepare_url), str(reclaim_url)) in self._pairs:
            return
        for url in (prepare_url, reclaim_url):
            self.check(url)
            if self.is_operators(url):
                raise SandboxRefusedError("prepare_url and reclaim_url must be those of one template, or both listed")

    def check_template(self, template: Template) -> None:
        """Check a callback template's URLs, as `check_both` does."""
        self.check_both(url_of(template.prepare_url), url_of(template.reclaim_url))

    async def addresses_of(self, url: httpx2.URL) -> Sequence[str]:
        """Resolve the host of a client's URL, once; return its addresses, all of which it may call.

        Raises `SandboxRefusedError` if it may not call one of them, `SandboxEngineError` if there is none.
        """
        self.check(url)
        try:
            texts = await self._resolve(host_of(url))
        except (OSError, UnicodeError) as error:
            wrong = SandboxEngineError("the sandbox service cannot be reached")
            wrong.for_operators = f"{url.host} has no address: {error}"
            raise wrong from error
        for text in texts:
            if not self._may_call(url, text):
                refused = SandboxRefusedError("this URL leads to an address that callbacks may not call")
                refused.for_operators = f"{url.host} is at {text}, which is not in sandbox_callback_networks"
                raise refused
        return texts

    def _may_call(self, url: httpx2.URL, text: str) -> bool:
        address = ip_address(text)  # with its scope, if it has one
        for inner in _all_that(address):
            is_listed = any(inner in each for each in self._networks if each.version == inner.version)
            if not (is_listed or _is_public(inner) or self._is_listed_by_address(url, inner)):
                return False
        return True

    def _is_listed_by_address(self, url: httpx2.URL, address: Address) -> bool:
        """Return whether the operator wrote this address into the URL, instead of a name."""
        return any(_address_in(each) == address and _begins_with(url, each) for each in self._listed)


async def _addresses_by_system(host: str) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def url_of(text: str) -> httpx2.URL:
    """Return a callback's URL. Raises `SandboxRefusedError` if it cannot be used."""
    try:
        url = httpx2.URL(text)
        is_usable = url.scheme in {"http", "https"} and bool(url.host) and 0 < origin_of(url)[2] <= 65535
    except (httpx2.InvalidURL, ValueError) as error:
        raise SandboxRefusedError(f"a callback URL cannot be read: {error}") from error
    if not is_usable or url.userinfo or url.fragment:
        raise SandboxRefusedError("a callback URL must be http or https, with a host, and without a user or fragment")
    return url


def _configured(option: str, text: str) -> httpx2.URL:
    try:
        return url_of(text)
    except SandboxRefusedError as error:
        raise ConfigurationError(f"{option}: {error.message}") from error


def host_of(url: httpx2.URL) -> str:
    """Return the host as it is resolved, and as a certificate names it: in ASCII, without brackets."""
    return url.raw_host.decode("ascii")


def origin_of(url: httpx2.URL) -> tuple[str, str, int]:
    """Return scheme, host and port."""
    return url.scheme, url.host, (443 if url.scheme == "https" else 80) if url.port is None else url.port


def _begins_with(url: httpx2.URL, listed: httpx2.URL) -> bool:
    """Return whether a URL has the same origin as a listed one, and its path is that or lies below it."""
    path, below = url.raw_path.partition(b"?")[0].decode("ascii"), listed.raw_path.decode("ascii").rstrip("/")
    if origin_of(url) != origin_of(listed) or _CLIMBS.search(path):
        return False
    return path == below or path.startswith(f"{below}/")


def _address_in(url: httpx2.URL) -> Address | None:
    try:
        return ip_address(url.host)
    except ValueError:
        return None


def _all_that(address: Address) -> tuple[Address, ...]:
    """Return an address, or those that it stands for: an IPv4 address within one of IPv6."""
    if isinstance(address, IPv4Address):
        return (address,)
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address.sixtofour is not None:
        return address, address.sixtofour
    if address.teredo is not None:
        return address, *address.teredo
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        return address, IPv4Address(int(address) & 0xFFFF_FFFF)
    return (address,)


def _is_public(address: Address) -> bool:
    is_inside = any(address in each for each in _INSIDE_BUT_GLOBAL if each.version == address.version)
    return address.is_global and not address.is_multicast and not is_inside
