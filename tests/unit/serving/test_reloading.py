"""Which changes of the configuration are applied at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from aiohttp import web

from thunderagent.config import ServeConfig
from thunderagent.serving.reloading import Reloader, take_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thunderagent.backends.discovery import Wanted
    from thunderagent.proxy.fleet.discovery import Discovery


class Found:
    """Remembers the engines last wanted."""

    def __init__(self) -> None:
        self.urls: list[str] | None = None

    def replicas_wanted(self, source: str, wanted: Sequence[Wanted]) -> None:
        assert source == "static"
        self.urls = [each.url for each in wanted]


@pytest.mark.parametrize(
    ("before", "after", "applied_urls"),
    [
        ("http://a:1", "http://b:1", ["http://b:1"]),
        ("dns+http://a:1", "http://b:1", None),
        ("http://b:1", "dns+http://a:1", None),
        ("dns+http://a:1,http://b:1", "dns+http://a:1,http://c:1", ["http://c:1"]),
        ("dns+http://a:1", "dns+http://b:1", None),
    ],
)
async def test_names_to_be_resolved_change_at_a_restart_alone(
    before: str, after: str, applied_urls: list[str] | None
) -> None:
    """A change of them is reported as one that needs a restart, and the engines stay."""
    found = Found()
    reloader = Reloader(ServeConfig.load(backends=before), lambda: ServeConfig.load(backends=after))
    take_over(reloader, web.Application(), cast("Any", None), cast("Discovery", found), simulated=False)
    for _ in range(2 if applied_urls is None else 1):  # what was not applied is reported again
        report = await reloader.reload()
        assert list(report["needs_restart" if applied_urls is None else "applied"]) == ["backends"]
    assert found.urls == applied_urls
