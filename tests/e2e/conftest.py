"""A browser for all tests here, and pages that must report no errors."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.e2e.support import CLOSE_S, BrowserError, chromium

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from typing import NoReturn

    from playwright.async_api import Browser, Page

    OpenPage = Callable[..., AbstractAsyncContextManager[Page]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests here; all of them share one browser and one loop."""
    for item in items:
        if "tests/e2e/" in item.path.as_posix():
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.timeout(180, func_only=True))  # the set-up may install the browser


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(require_real: Callable[[str], NoReturn]) -> AsyncIterator[Browser]:
    """Run Chromium."""
    try:
        async with chromium() as running:
            yield running
    except BrowserError as error:
        require_real(str(error))


@pytest.fixture(scope="session")
def open_page(browser: Browser) -> OpenPage:
    """Open the dashboard of a proxy: `async with open_page(url) as page`.

    At the end the page must have written nothing to the console, thrown nothing, and asked no other host. `allowed` is
    a part of the text that Chromium may write; `prepare` is called with the page before it is opened.
    """

    @asynccontextmanager
    async def opening(
        url: str,
        *,
        width: int = 1280,
        allowed: str | None = None,
        path: str = "/dashboard",
        prepare: Callable[[Page], Awaitable[None]] | None = None,
        **context: Any,
    ) -> AsyncIterator[Page]:
        complaints: list[str] = []
        strangers: list[str] = []
        window = await browser.new_context(viewport={"width": width, "height": 900}, **context)
        try:
            page = await window.new_page()
            page.set_default_timeout(30_000)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
            page.on("request", lambda request: strangers.append(request.url))
            if prepare is not None:
                await prepare(page)
            await page.goto(url + path)
            yield page
        finally:
            async with asyncio.timeout(CLOSE_S):
                await window.close()
        assert [other for other in strangers if not other.startswith(f"{url}/")] == []
        assert [each for each in complaints if allowed is None or allowed not in each] == []

    return opening
