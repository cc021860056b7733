"""The documentation site in a browser: it answers newcomers' questions, nothing is too wide, no other host is asked."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import yaml

from benchmarks.processes import stop
from tests.real.support import until
from tests.unit.test_docs import ROOT, nav_pages
from thunderagent import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Locator, Page

    from tests.e2e.conftest import OpenPage

pytestmark = pytest.mark.asyncio(loop_scope="session")

SITE = ROOT / "out" / "site"
BUILD_S = 900.0
QUESTIONS = {
    "how do I release a program from a shell script": "reference/turns/",
    "why is my turn waiting": "fix/",
    "what happens when a replica dies": "explanation/failures/",
    "install and try it without a GPU": "start/simulated/",
    "use it with mini-swe-agent": "how-to/batch/",
    "all turns are anonymous": "fix/",
    "add an API key": "explanation/security/",
    "deploy on Kubernetes": "how-to/kubernetes/",
    "which headers name a program": "reference/turns/",
    "prefix cache hit rate is 0": "fix/",
    "autoscaling with KEDA": "how-to/autoscale/",
    "high availability": "how-to/scale/",
    "rate limit": "explanation/security/",
    "TTFT": "how-to/observe/",
    "migrate from LiteLLM": "how-to/migrate/",
    "how do I see that it works": "start/check/",
    "what do I change in my agent framework": "integrations/",
    "upgrade without losing turns": "how-to/upgrade/",
    "how many gateways": "how-to/scale/",
    "does it need a GPU": "start/simulated/",
    "API keys": "explanation/security/",
    "failover": "explanation/failures/",
    "load balancing": "start/",
    "KV cache": "explanation/default-policy/",
    "prefix caching": "how-to/engines/",
    "how do I update thunderagent without downtime": "how-to/upgrade/",
    "rolling update drops requests": "how-to/upgrade/",
    "go back to the old version": "how-to/upgrade/",
    "replace an engine without failed requests": "how-to/upgrade/",
    "run more than one proxy": "how-to/scale/",
    "two proxies in front of the same engines": "how-to/deploy/",
    "a gateway for every core": "how-to/scale/",
    "upgrade gateways": "how-to/scale/",
    "what if the proxy crashes": "explanation/failures/",
    "retry on another replica": "explanation/failures/",
    "my client times out": "fix/",
    "429 too many requests": "fix/",
    "time to first token": "how-to/observe/",
    "rate limiting": "explanation/security/",
    "limit requests per user": "explanation/security/",
    "several models behind one endpoint": "how-to/models/",
    "does it modify my requests": "reference/turns/",
    "nginx in front": "how-to/deploy/",
    "are prompts logged": "explanation/security/",
    "which ports to open in the firewall": "explanation/security/",
    "does it work with Ollama or llama.cpp": "how-to/engines/",
    "how many agents fit": "how-to/tune/",
}


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site() -> AsyncIterator[str]:
    """Build the site, strictly, and serve it."""
    build = await asyncio.create_subprocess_exec(
        ROOT / "scripts" / "docs", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(BUILD_S):
            said, _ = await build.communicate()
    finally:
        await stop(build)
    assert build.returncode == 0, said.decode()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def pages() -> list[str]:
    """Return the pages of the menu."""
    nav = re.search(r"^nav:\n((?:[ -].*\n|\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert nav is not None
    return list(nav_pages(yaml.safe_load(nav[1])))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def searched(site: str, open_page: OpenPage) -> AsyncIterator[Page]:
    """Open a page for all questions: each new one would read all of the site's words again."""
    async with open_page(site, path=f"/{__version__}/") as page:
        yield page


@pytest.mark.parametrize(("question", "answer"), QUESTIONS.items(), ids=list(QUESTIONS))
async def test_a_newcomer_s_question_is_answered_by_the_search(
    question: str, answer: str, site: str, searched: Page
) -> None:
    """The page with the answer is among the first three that the site's own search shows."""
    box = searched.locator("input[name=query]")
    hits = searched.locator(".md-search-result__item > a.md-search-result__link")
    await typed(box, "")
    await hits.first.wait_for(state="detached")
    await typed(box, question)
    await hits.first.wait_for()
    found = await hits.evaluate_all("links => links.map(link => link.href)")
    paths = [link.removeprefix(f"{site}/{__version__}/").partition("?")[0] for link in found]
    assert answer in list(dict.fromkeys(path.partition("#")[0] for path in paths))[:3]


async def typed(box: Locator, text: str) -> None:
    """Replace the text of the search box."""
    await box.fill(text)
    await box.dispatch_event("keyup")  # at which it searches


@pytest.mark.timeout(180)  # every page of the site
async def test_no_page_is_wider_than_the_screen(site: str, open_page: OpenPage) -> None:
    """Wide tables and code scroll by themselves; every picture is there, in the dark, too."""
    fits = "width => window.innerWidth === width && document.documentElement.scrollWidth <= width"

    async def search_nothing(page: Page) -> None:
        """Give each page an index of one entry: to read the site's words takes longer than the page itself."""
        index = json.loads(Path(SITE, __version__, "search/search_index.json").read_text())
        index["docs"] = index["docs"][:1]
        await page.route("**/search/search_index.json", lambda route: route.fulfill(json=index))

    missing = "[...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src)"
    async with open_page(site, path=f"/{__version__}/", prepare=search_nothing) as page:
        for name in pages():
            place = re.sub(r"(index)?\.md$", "/", name).replace("//", "/").removeprefix("/")
            await page.goto(f"{site}/{__version__}/{place}")
            for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light")):
                await page.set_viewport_size({"width": width, "height": 800})
                await page.emulate_media(color_scheme=scheme)
                try:  # it is laid out some time after it is resized
                    await until(partial(page.evaluate, fits, width), within_s=10)
                except TimeoutError:
                    pytest.fail(f"{name} is wider than {width}, {scheme}")
                assert await page.evaluate(missing) == [], (name, width, scheme)


async def test_every_page_is_there_as_markdown_and_listed(site: str) -> None:
    """`llms.txt` lists all pages for programs that read; each page is complete, with its generated parts."""
    folder = Path(SITE, __version__)
    listed = re.findall(r"\]\((.+)\)", (folder / "llms.txt").read_text())
    assert listed == pages()
    for name in listed:
        text = (folder / name).read_text()
        assert text.startswith("# ")
        assert "<!-- generated" not in text
        assert "--8<--" not in text
    assert "--idle-limit-s" in (folder / "reference/configuration.md").read_text()
