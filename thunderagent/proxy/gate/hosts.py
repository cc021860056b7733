"""By which names the proxy may be called: against pages whose own host name was made to lead to it (DNS rebinding).

For a browser such a page is of the same origin as the proxy, so `Origin` does not tell. The name in `Host` does: it is
the page's. An address that is no name cannot be made to lead elsewhere, so all addresses are taken.
"""

# compiled: each turn passes here

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from multidict import CIMultiDictProxy, istr

from thunderagent.errors import HostRefusedError

ANY = "*"

_ORIGIN, _SITE, _USER_AGENT = istr("Origin"), istr("Sec-Fetch-Site"), istr("User-Agent")


class Hosts:
    """The names that are taken."""

    def __init__(self, names: Iterable[str]) -> None:
        """Take `names`, besides those of loopback and all addresses; `*` is any."""
        self._names = {host_of(name) for name in names}

    def check(self, headers: CIMultiDictProxy[str]) -> None:
        """Check what a request calls us. Raises `HostRefusedError`. Browsers always send `Host`; others may not."""
        for value in headers.getall("Host", ()):
            if not self._takes(host_of(value)):
                raise HostRefusedError("this name is not one of the proxy's; allowed_hosts says which are")

    def _takes(self, host: str) -> bool:
        if host in self._names or ANY in self._names or host == "localhost" or host.endswith(".localhost"):
            return True
        try:
            ip_address(host.strip("[]"))
        except ValueError:
            return False
        return True


def host_of(value: str) -> str:
    """Return the name or address in a `Host` header, without its port."""
    value = value.strip().lower()
    host = value.partition("]")[0] + "]" if value.startswith("[") else value.partition(":")[0]
    return host.rstrip(".")


def comes_from_a_browser(headers: CIMultiDictProxy[str]) -> bool:
    """Say whether a request is a browser's, by what all of them send."""
    return _ORIGIN in headers or _SITE in headers or headers.get(_USER_AGENT, "").startswith("Mozilla/")
