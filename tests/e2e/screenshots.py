"""Take the pictures of the dashboard for the documentation: `python -m tests.e2e.screenshots`, some minutes.

They show simulated engines under a load that is too large for them. The pictures look best with the fonts Inter and
JetBrains Mono (Debian: fonts-inter, fonts-jetbrains-mono).
"""

from __future__ import annotations

import argparse
import asyncio
import io
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import httpx2
from PIL import Image

from tests.e2e.support import LAUNCH_S, chromium, load, serving

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

DOCS = Path(__file__).parents[2] / "docs" / "assets"
PROGRAMS = [
    *(f"swe-{name}" for name in ("django-11039", "django-12308", "sympy-18057", "sympy-20590", "flask-4045")),
    *(f"swe-{name}" for name in ("pytest-7373", "sphinx-8273", "astropy-6938", "sklearn-13497", "requests-3362")),
    *(f"grpo-{prompt}-sample-{sample}" for prompt in (17, 18) for sample in range(6)),
    *(f"research-{name}" for name in ("tides", "vaccines", "roman-law", "graphene", "basalt", "sonnets")),
]
ENGINES = ("--embedded-engines", "3", "--embedded-kv-tokens", "11000")
SETTLE_S = 1.5


async def take_all(warm_up_s: float) -> None:
    """Run the load, wait until the charts are full, and take each picture."""
    with tempfile.TemporaryDirectory() as folder:
        async with (
            serving(Path(folder, "proxy.log"), *ENGINES) as server,
            load(server.url, PROGRAMS, tool_s=2.5),
            chromium() as browser,
        ):
            await asyncio.sleep(warm_up_s)
            for scheme in ("light", "dark"):
                async with await _page(browser, server.url, scheme, width=1280, height=1280) as page:
                    await _save(page, f"dashboard-{scheme}.png")
                program_id = await _with_most_to_tell(server.url)
                where = urlencode({"program": program_id})
                async with await _page(browser, server.url, scheme, width=1000, height=860, where=where) as page:
                    await page.locator(".span").first.wait_for(timeout=1000 * LAUNCH_S)
                    await _save(page, f"dashboard-program-{scheme}.png")
            async with await _page(browser, server.url, "light", width=390, height=844) as page:
                await _save(page, "dashboard-narrow.png")


async def _page(browser: Browser, url: str, scheme: Any, *, width: int, height: int, where: str = "") -> Page:
    page = await browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    await page.goto(f"{url}/dashboard#{where}")
    while not await page.locator("#rows tr").count():
        await asyncio.sleep(SETTLE_S)
        if not await page.locator(".chart").count():  # Chromium gives up loading where a network of the machine changes
            await page.reload()
    return page


async def _with_most_to_tell(url: str) -> str:
    """Return the program with the most different kinds of events."""
    best = (0, 0, "")
    async with httpx2.AsyncClient(base_url=url, trust_env=False) as client:
        for program in (await client.get("/programs?limit=1000")).json()["programs"]:
            answer = await client.get(f"/programs/{program['program_id']}")
            if answer.status_code != 200:
                continue
            story = answer.json()["story"]
            kinds = {(entry["what"], entry["replica_id"]) for entry in story}
            lately = sum(entry["what"] == "pause" for entry in story)
            best = max(best, (len(kinds) + lately, -len(story), program["program_id"]))
    return best[2]


async def _save(page: Page, name: str) -> None:
    """Save a picture with the best compression."""
    await asyncio.sleep(SETTLE_S)
    picture = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
    picture.save(DOCS / name, optimize=True)
    print(f"{name}: {(DOCS / name).stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm-up-s", type=float, default=320.0, help="how long the load runs before")
    asyncio.run(take_all(parser.parse_args().warm_up_s))
