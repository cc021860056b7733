"""The dashboard in a real Chromium, on a real proxy with simulated engines."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import pytest_asyncio

from benchmarks.processes import stop
from tests.e2e.support import serving, turn
from tests.integration.test_pools import engine
from tests.loopback import free_ports

try:
    from playwright.async_api import expect
except ImportError:  # then there is no browser either, and its fixture reports that
    expect: Any = None  # type: ignore[no-redef]
else:
    expect.set_options(timeout=30_000)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from playwright.async_api import Page, Route

    from tests.e2e.conftest import OpenPage

pytestmark = pytest.mark.asyncio(loop_scope="session")

TWO_ACTIVE = ("--policy", "cap", "--policy-arg", "n=2", "--embedded-engines", "1")
HELD_COUNT = 3
HELD_S = 1800.0
"""How long their clients wait: longer than all tests of a slow machine take."""
NO_REPLICA = ("--backends", "http://127.0.0.1:9")
FAILED_REQUEST = "Failed to load resource"
"""What Chromium itself writes."""


class World:
    """A proxy with two programs at their tools and three held ones, until one is ended."""

    def __init__(self, url: str, client: httpx2.AsyncClient) -> None:
        self.url = url
        self.client = client

    async def get(self, path: str) -> Any:
        return (await self.client.get(path)).raise_for_status().json()


@asynccontextmanager
async def world_at(log_path: Path) -> AsyncIterator[World]:
    async with (
        serving(log_path, *TWO_ACTIVE) as server,
        httpx2.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client,
        httpx2.AsyncClient(base_url=server.url, timeout=HELD_S, trust_env=False) as patient,
    ):
        world = World(server.url, client)
        for name in ("first", "second"):
            for _ in range(3):
                await turn(client, name, "what is the time " * 50)
        async with asyncio.TaskGroup() as group:
            for number in range(HELD_COUNT):  # one after another: the first of them continues first
                group.create_task(turn(patient, f"held/{number}", "and where am I"))
                async with asyncio.timeout(60):
                    while (await world.get("/queue"))["waiting_count"] <= number:
                        await asyncio.sleep(0.02)
            try:
                yield world
            finally:
                await client.post("/programs/release", json={"all": True})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with world_at(tmp_path_factory.mktemp("e2e") / "proxy.log") as running:
        yield running


def rows(page: Page) -> Any:
    return page.locator("#rows tr")


async def test_the_figures_are_the_apis(world: World, open_page: OpenPage) -> None:
    """Key figures, bars, queue and table agree with the admin API."""
    async with open_page(world.url) as page:
        await expect(page.locator("#connection")).to_have_text("Live · 1 replica")
        await expect(page.locator("#tile-programs")).to_have_text("5")
        await expect(page.locator("#note-programs")).to_have_text("2 active · 3 held · 0 paused")
        await expect(page.locator("#note-turns")).to_have_text("3 held")
        await expect(page.locator("#queue-note")).to_have_text("3 turns held · 0 paused")
        (replica,) = (await world.get("/replicas"))["replicas"]
        demand, limit = replica["demand_tokens"], replica["limit_tokens"]
        full = round(100 * demand / limit)
        await expect(page.locator(".replica h3")).to_have_text(replica["replica_id"])
        await expect(page.locator(".replica .demand")).to_have_text(f"{demand:,} of {limit:,} tokens · {full} %")
        acting_px = await page.locator(".part.acting").evaluate("part => part.getBoundingClientRect().width")
        bar_px = await page.locator(".bar").evaluate("bar => bar.getBoundingClientRect().width")
        scale = max(limit, replica["capacity_tokens"])
        assert acting_px / bar_px == pytest.approx(demand / scale, abs=0.005)
        summary = await world.get("/summary")
        assert await page.locator("#policy").text_content() == summary["policy"] == "cap"
        queue = await world.get("/queue")
        await expect(page.locator("#queue .id")).to_have_text([each["program_id"] for each in queue["waiting"]])
        programs = (await world.get("/programs"))["programs"]
        await expect(rows(page)).to_have_count(5)
        for row, program in zip(await rows(page).all(), programs, strict=True):
            cells = await row.locator("td").all_text_contents()
            assert cells[0] == program["program_id"]
            computed_tokens = (
                program["prompt_tokens_total"] - program["cached_tokens_total"] + program["output_tokens_total"]
            )
            assert cells[4:7] == [f"{program['claim_tokens']:,}", f"{computed_tokens:,}", str(program["turn_count"])]
        states = await page.locator("#rows .state").all_text_contents()
        assert states == ["acting", "acting", "held", "held", "held"]


async def test_the_charts_tell_the_last_sample(world: World, open_page: OpenPage) -> None:
    """The legend shows the figures of the history, and something is drawn."""
    async with open_page(world.url) as page:
        chart = page.locator(".chart", has=page.get_by_role("heading", name="Programs", exact=True))
        await expect(chart.locator(".key li")).to_have_text(["reasoning 0", "acting 2", "held 3", "paused 0"])
        await expect(chart.locator("path.held")).to_have_attribute("d", re.compile("^M.+Z$"))
        costs = page.locator(".chart", has=page.get_by_role("heading", name="Memory spent on")).locator(".key li")
        assert [text.split()[0] for text in await costs.all_text_contents()] == [
            *("decode", "prefill", "recompute", "caching", "unused")
        ]
        picture = chart.get_by_role("img")
        await picture.focus()
        await page.keyboard.press("ArrowLeft")
        await expect(chart.locator(".when")).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))


WRITTEN = """async values => {
  const [charts, format] = await Promise.all(["charts", "format"].map(name => import(`/dashboard/${name}.js`)));
  const kinds = [[charts.niceTop, format.short], [charts.niceTopS, format.duration]];
  return kinds.map(([top, write]) => values.map(value => {
    const chart = new charts.Chart({ title: "t", unit: "", series: [{ name: "a" }], format: write, nice: top });
    document.querySelector("#charts").append(chart.element);
    chart.show([{ at_s: 1, values: [value] }], 1, 300);
    const left = Math.min(...[...chart.grid.querySelectorAll("text")].map(text => text.getBBox().x));
    chart.element.remove();
    return [value, top(value), write(top(value)), write(top(value) / 2), left];
  }));
}"""
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}


async def test_a_line_of_a_chart_is_where_its_label_says(world: World, open_page: OpenPage) -> None:
    """Of counts and of times: what is written at the top of an axis and at its half is not rounded, and not cut off."""
    values = [digits * 10**power for power in range(-3, 5) for digits in (1, 1.2, 1.5, 2.2, 3.4, 4.9, 5.7, 7, 9.3)]
    async with open_page(world.url) as page:
        kinds = await page.evaluate(WRITTEN, values)

    def read(text: str) -> float:
        return sum(float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+) ?([a-zA-Z]*)", text))

    for value, top, whole, half, left_px in (row for kind in kinds for row in kind):
        assert left_px >= 0, whole
        assert top >= 0.999 * value, value
        assert (read(whole), read(half)) == (pytest.approx(top), pytest.approx(top / 2)), value


async def test_what_is_not_there_has_no_colour_in_a_stack(world: World, open_page: OpenPage) -> None:
    """Areas stand on each other: one of nothing has no height, wherever the others are."""
    async with open_page(world.url) as page:
        flat = await page.evaluate("""async () => {
          const { Chart } = await import("/dashboard/charts.js");
          const series = ["reasoning", "acting", "held"].map((name) => ({ name, colour: name }));
          const chart = new Chart({ title: "t", unit: "", series, stacked: true, format: String });
          document.body.append(chart.element);
          chart.show([1, 2, 3].map((at_s) => ({ at_s, values: [at_s, 0, 2] })), 3, 5);
          return chart.paths.map((path) => path.getBBox().height && path.getTotalLength() > 0
            && new Set(path.getAttribute("d").match(/[\\d.]+,[\\d.]+/g)).size);
        }""")
    assert flat == [6, 3, 6]  # corners: three above, three below; those of nothing are the same


async def test_reason_of_the_queue_head_stands_above_the_queue(world: World, open_page: OpenPage) -> None:
    """The sentence is the API's; each row says for how long and why; the tile shows the longest wait."""
    async with open_page(world.url) as page:
        queue = await world.get("/queue")
        first = queue["waiting"][0]["program_id"]
        await expect(page.locator("#first-needs")).to_have_text(f"For {first} to go on: {queue['first_needs']}.")
        await expect(page.locator("#queue .for").first).to_have_text(re.compile(r"^held \d+(\.\d)? (s|min.*)$"))
        await expect(page.locator("#queue .why").first).to_have_text("no replica has room for its claim")
        await expect(page.locator("#tile-held")).to_have_text(re.compile(r"^\d+(\.\d)? (s|min.*)$"))
        held = chart_of(page, "Held").locator(".key li")
        await expect(held.last).to_have_text(re.compile(r"^now, longest [1-9]"))


def chart_of(page: Page, name: str) -> Any:
    return page.locator(".chart", has=page.get_by_role("heading", name=name, exact=True))


async def test_percentiles_over_time_are_those_of_the_turns(tmp_path: Path, open_page: OpenPage) -> None:
    """First token and turn: as a client measures them here, within the width of a bucket and what a client adds."""
    async with (
        serving(tmp_path / "proxy.log", "--embedded-engines", "1") as server,
        httpx2.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        body = {"model": "simulated", "messages": [{"role": "user", "content": "x " * 200}], "stream": True}
        firsts_s, turns_s = [], []
        for number in range(9):
            started_s = perf_counter()
            asked = {**body, "max_tokens": 20 * (number + 1), "program_id": "timed"}
            async with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
                chunks = answer.aiter_bytes()
                await anext(chunks)
                firsts_s.append(perf_counter() - started_s)
                async for _ in chunks:
                    pass
            turns_s.append(perf_counter() - started_s)
        async with open_page(server.url) as page:
            for name, seen_s in (("First token", firsts_s), ("Turn", turns_s)):
                key = chart_of(page, name).locator(".key li")
                await expect(key.first).to_have_text(re.compile(r"^median [1-9\d.]"))
                shown_s = [seconds_of(text) for text in await key.locator("b").all_text_contents()]
                assert shown_s == sorted(shown_s)
                assert min(seen_s) * 0.5 <= shown_s[0] <= median(seen_s) * 1.25
                assert shown_s[2] <= max(seen_s) * 1.25
                await expect(chart_of(page, name).locator("path.reasoning")).to_have_attribute("d", re.compile("^M.+L"))
            tile_s = seconds_of(await page.locator("#tile-first").text_content() or "")
            assert tile_s <= median(firsts_s) * 1.25
            sample = (await client.get("/summary")).json()["now"]
            assert sample["turn"]["p99_s"] == pytest.approx(max(turns_s), rel=0.25)


def seconds_of(text: str) -> float:
    number, unit = text.split()
    return float(number) / {"ms": 1000, "s": 1}[unit]


async def test_errors_and_the_verdict_on_their_replica_are_shown(tmp_path: Path, open_page: OpenPage) -> None:
    """A turn that its engine refuses: its program, replica and cause; a rate; and how the engine does, with why."""
    async with (
        engine("a") as one,
        serving(tmp_path / "proxy.log", "--backends", f"{one},{NO_REPLICA[1]}") as server,
        httpx2.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client,
        open_page(server.url) as page,
    ):
        await expect(page.locator("#replicas-note")).to_have_text("1 up · 1 down")
        down = page.locator(".replica").first  # what is not up comes first
        await expect(down.locator("h3")).to_have_text(NO_REPLICA[1].removeprefix("http://"))
        await expect(down.locator("p.bad")).not_to_have_text("")
        facts = ["0 reasoning · 0 acting", "gets nothing new", "0 turns", "0 % hits"]
        await expect(down.locator(".facts li:visible")).to_have_text(facts)
        await expect(page.locator("#connection")).to_have_attribute("data-state", "warn")
        await expect(page.locator("#errors-card")).to_be_hidden()
        await expect(page.locator("#tile-errors")).to_have_text("0")
        body = {"model": "a", "messages": "not a list"}
        answer = await client.post("/v1/chat/completions", json=body, headers={"X-Program-ID": "broken"})
        assert 400 <= answer.status_code < 500
        summary = (await client.get("/summary")).json()
        (error,) = summary["last_errors"]
        cells = page.locator("#errors tr td")
        await expect(cells.nth(0)).to_have_text(re.compile("s$"))
        await expect(cells.nth(1)).to_have_text("broken")
        await expect(cells.nth(3)).to_have_text("agent error")
        await expect(cells.nth(4)).to_have_text(error["cause"])
        await expect(page.locator("#tile-errors")).not_to_have_text("0")
        badly = chart_of(page, "Turns ended badly")
        await expect(badly.locator("path.held")).to_have_attribute("d", re.compile("^M.+Z$"))


async def test_a_program_that_waits_tells_what_must_happen(world: World, open_page: OpenPage) -> None:
    """A click opens its story: the hold as a bar, the reason, and the sentence of the API."""
    async with open_page(world.url) as page:
        await page.get_by_role("button", name="held/1").first.click()
        story = page.get_by_role("dialog")
        await expect(story.get_by_role("heading", name="held/1")).to_be_visible()
        waiting = (await world.get("/programs/held/1"))["waiting"]
        await expect(story.locator(".sentence")).to_contain_text(f"To go on: {waiting['what_must_happen']}.")
        await story.locator(".span.hold").hover()
        await expect(story.locator(".caption")).to_contain_text("no replica has room for its claim")
        await expect(story.locator(".caption")).to_contain_text("so far")
        assert "#program=held%2F1" in page.url
        await page.keyboard.press("Escape")
        await expect(story).to_have_count(0)
        await expect(page).to_have_url(re.compile("^[^#]+$"))


async def test_a_timeline_has_turns_tools_and_the_claim(world: World, open_page: OpenPage) -> None:
    """The keyboard alone opens it, and so does its address."""
    async with open_page(world.url, path="/dashboard#program=first") as page:
        story = page.get_by_role("dialog")
        await expect(story.locator(".span.turn.finished")).to_have_count(3)
        tools_count = await story.locator(".span.tool").count()
        assert 1 <= tools_count <= 3  # gaps under a millisecond do not count
        await expect(story.locator(".span.claim")).to_have_count(1)
        (replica,) = (await world.get("/replicas"))["replicas"]
        await expect(story.locator(".lane")).to_have_text(["held", f"on {replica['replica_id']}", "tools"])
        await story.locator(".timeline [tabindex='0']").focus()
        await page.keyboard.press("ArrowLeft")
        await expect(story.locator(".caption")).to_contain_text("finished")
        program = await world.get("/programs/first")
        shown = await story.locator("tbody tr td:nth-child(2)").all_text_contents()
        assert shown == [entry["what"] for entry in reversed(program["story"])]
        await story.get_by_role("button", name="Close").click()
        await page.get_by_role("button", name="second", exact=True).focus()
        await page.keyboard.press("Enter")
        await expect(story.get_by_role("heading", name="second")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("button", name="second", exact=True)).to_be_focused()


async def test_programs_are_searched_filtered_and_sorted(world: World, open_page: OpenPage) -> None:
    async with open_page(world.url) as page:
        await expect(rows(page)).to_have_count(5)
        await page.get_by_role("searchbox").fill("HELD/2")
        await expect(rows(page)).to_have_count(1)
        await page.get_by_role("searchbox").fill("nobody")
        await expect(page.locator("#no-rows")).to_have_text("No live program is like that.")
        await page.get_by_role("searchbox").fill("")
        await page.get_by_label("Show programs that are").select_option("acting")
        await expect(page.locator("#rows .id")).to_have_text(["first", "second"])
        await page.get_by_label("Show programs that are").select_option("all")
        await page.get_by_role("button", name="Program", exact=True).click()
        await expect(page.locator("#rows .id")).to_have_text(["first", "held/0", "held/1", "held/2", "second"])
        await page.get_by_role("button", name="Program", exact=True).click()
        await expect(page.locator("#rows .id").first).to_have_text("second")
        await expect(page.locator("th[aria-sort='descending']")).to_have_text("Program")


async def test_dashboard_follows_without_a_reload(tmp_path: Path, open_page: OpenPage) -> None:
    """Programs come, continue when there is room, and end; an open story shows this."""
    async with world_at(tmp_path / "proxy.log") as world, open_page(world.url) as page:
        await page.evaluate("window.notReloaded = true")
        await page.get_by_role("button", name="held/0").first.click()
        story = page.get_by_role("dialog")
        await expect(story.locator(".state")).to_have_text("held")
        await expect(story.locator("dt").last).to_have_text("Branches")
        (replica,) = (await world.get("/replicas"))["replicas"]
        said = {"program_id": "held/0", "priority": 3, "replica_id": replica["replica_id"]}
        assert (await world.client.post("/operations/set_priority", json=said)).status_code == 200
        await expect(story.locator("dt").last).to_have_text("Priority")
        await expect(story.locator("dd").last).to_have_text(f"3 on {replica['replica_id']}")
        await world.client.post("/programs/release", json={"program_id": "first"})
        await expect(story.locator(".state")).to_have_text("acting")
        await expect(story.locator(".event.restore")).to_have_count(1)
        await expect(story.locator(".span.turn.finished")).to_have_count(1)
        await world.client.post("/programs/release", json={"program_id": "held/0"})
        await expect(story.locator(".sentence")).to_have_text("This program is not live: its client released it.")
        await page.keyboard.press("Escape")
        await world.client.post("/programs", json={"program_id": "newcomer"})
        await expect(page.get_by_role("button", name="newcomer")).to_be_visible()
        await expect(page.get_by_role("button", name="held/0")).to_have_count(0)
        assert await page.evaluate("window.notReloaded")


async def test_a_link_to_a_program_that_is_not_there_says_so(world: World, open_page: OpenPage) -> None:
    """It may have ended long ago, or be misspelt."""
    async with open_page(world.url, path="/dashboard#program=nobody", allowed="404 (Not Found)") as page:
        story = page.get_by_role("dialog")
        await expect(story.locator(".state")).to_have_text("not live")
        await expect(story.locator(".sentence")).to_have_text(
            "No live program has this id. It ended, or its id is another."
        )


async def test_later_answer_contradicts_no_key_figure(world: World, open_page: OpenPage) -> None:
    """The same count stands on the page twice: both come from one answer."""
    asked = asyncio.Event()

    async def later(route: Route) -> None:
        said = await world.get("/queue?limit=6")
        await route.fulfill(json={**said, "turns_held_count": 99, "waiting_count": 99, "paused_acting_count": 77})
        asked.set()

    async def prepare(page: Page) -> None:
        await page.route(f"{world.url}/queue?*", later)

    async with open_page(world.url, prepare=prepare) as page:
        await asyncio.wait_for(asked.wait(), 30)
        await expect(page.locator("#note-programs")).to_have_text("2 active · 3 held · 0 paused")
        await expect(page.locator("#queue-note")).to_have_text("3 turns held · 0 paused")
        await expect(page.locator("#queue-more")).to_be_hidden()


@pytest.mark.parametrize("late_s", [0.0, 1.5], ids=("earlier", "later"))
async def test_a_chart_ends_with_what_its_key_figure_shows(world: World, open_page: OpenPage, late_s: float) -> None:
    """The last sample is up to a second old, or later than the key figures: the legend beside them said another."""
    asked = asyncio.Event()

    async def other(route: Route) -> None:
        await asyncio.sleep(late_s)
        said = await world.get("/history?since=0")
        samples = [{**sample, "paused_reasoning_count": 99} for sample in said["samples"]]
        await route.fulfill(json={**said, "samples": samples})
        asked.set()

    async def prepare(page: Page) -> None:
        await page.route(f"{world.url}/history?*", other)

    async with open_page(world.url, prepare=prepare) as page:
        await asyncio.wait_for(asked.wait(), 30)
        await expect(page.locator("#note-programs")).to_have_text("2 active · 3 held · 0 paused")
        assert await chart_of(page, "Programs").locator(".key li").nth(2).text_content() == "held 3"


async def test_ids_are_text_whatever_they_look_like(world: World, open_page: OpenPage) -> None:
    """Text that looks like HTML is shown literally, in the table and in the story, and never runs."""
    name = "<img src=x onerror=document.title='broken'>&amp;\"'`/../#?%2F"
    await world.client.post("/programs", json={"program_id": name})
    try:
        async with open_page(world.url, allowed="TrustedHTML") as page:
            button = page.locator("#rows").get_by_role("button", name=name, exact=True)
            await expect(button).to_have_text(name)
            await button.click()
            await expect(page.locator("#story-title")).to_have_text(name)
            await expect(page.get_by_role("dialog").locator(".state")).to_have_text("paused")
            assert "broken" not in await page.title()
            await expect(page.locator("#rows img, #story img")).to_have_count(0)
            refused = await page.evaluate("try { document.body.innerHTML = 'x'; 'set' } catch (e) { e.name }")
            assert refused == "TypeError"  # Trusted Types: no code of the page can make HTML of text
    finally:
        await world.client.post("/programs/release", json={"program_id": name})


async def test_dashboard_is_readable_in_dark_and_light(world: World, open_page: OpenPage) -> None:
    """The page follows the system; the button changes it, and the choice stays."""
    ground = "getComputedStyle(document.body).backgroundColor"
    async with open_page(world.url, color_scheme="dark") as page:
        dark = await page.evaluate(ground)
        await page.get_by_role("button", name="Switch between light and dark").click()
        light = await page.evaluate(ground)
        await page.reload()
        assert await page.evaluate(ground) == light
    async with open_page(world.url, color_scheme="light") as page:
        assert await page.evaluate(ground) == light
    assert sum(channels(dark)) < 120
    assert sum(channels(light)) > 600


def channels(colour: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", colour)[:3]]


CLIPPED = """() => [...document.querySelectorAll("main *")].filter((element) => {
  const style = getComputedStyle(element);
  return element.clientWidth && style.display !== "inline" && !["auto", "scroll"].includes(style.overflowX)
    && (element.scrollWidth > element.clientWidth + 1 || element.scrollHeight > element.clientHeight + 3)
    && !element.closest("svg");
}).map((element) => `${element.tagName}.${element.className}#${element.id}: ${element.textContent.slice(0, 40)}`)"""
HOLES = """() => ["#charts", ".tiles"].map((name) => {
  const all = [...document.querySelector(name).children].map((element) => element.getBoundingClientRect());
  const [first, last] = [all[0], all.at(-1)];
  const page = document.querySelector("main").getBoundingClientRect();
  return Math.abs(last.right - Math.max(...all.map(({ right }) => right))) + Math.max(0, innerWidth - page.width - 20);
})"""


LONGEST = """() => {
  const excess = (which, text) => {
    const cell = document.querySelector(`#rows td:${which}`);
    (cell.querySelector(".state") ?? cell).textContent = text;
    return cell.scrollWidth - cell.clientWidth;
  };
  return Math.max(excess("last-child", "59 min 59 s"), excess("nth-child(2)", "reasoning"));
}"""
"""How many pixels the longest time held, or the longest state, is too wide for its column."""


OVERLAPS = """() => {
  const ticks = [...document.querySelectorAll(".timeline .tick")];
  if (!ticks.length) return ["no ticks"];
  for (const tick of ticks) if (tick.textContent !== "now") tick.textContent = "-59 min 59 s";
  const boxes = ticks.map((tick) => tick.getBBox()).sort((a, b) => a.x - b.x);
  return boxes.filter((box, index) => index && box.x < boxes[index - 1].x + boxes[index - 1].width)
    .map((box) => `a time at ${box.x} stands on the one before`);
}"""


@pytest.mark.parametrize("width", [390, 760, 1280, 1920])
async def test_nothing_is_clipped_or_wider_than_the_screen(world: World, open_page: OpenPage, width: int) -> None:
    """No text is cut off, no row scrolls inside a card, and the rows of tiles and charts are full."""
    async with open_page(world.url, width=width) as page:
        await expect(rows(page)).to_have_count(5)
        await expect(page.locator("#queue li")).to_have_count(3)
        await expect(chart_of(page, "Held").locator("path").last).to_have_attribute("d", re.compile("^M"))
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await page.evaluate(CLIPPED) == []
        assert max(await page.evaluate(HOLES)) < 2
        assert await page.evaluate(LONGEST) <= 0
        await page.locator("#rows button").first.click()
        await expect(page.locator(".span.turn").first).to_be_visible()
        assert await page.evaluate(OVERLAPS) == []
        for element in ("#story", "#story-body", "#story-body .wide"):
            assert await page.locator(element).first.evaluate("e => e.scrollWidth - e.clientWidth") <= 0


async def test_empty_dashboard_says_that_nothing_is_there(tmp_path: Path, open_page: OpenPage) -> None:
    """The page shows that no program is live, that no turn waits, and why a replica is down."""
    async with serving(tmp_path / "proxy.log", *NO_REPLICA, ready=False) as server, open_page(server.url) as page:
        await expect(page.locator("#no-rows")).to_contain_text("No program is live. Send a turn to")
        await expect(page.locator("#queue-empty")).to_have_text("No turn is held.")
        await expect(page.locator("#tile-hits")).to_have_text("\u2013")
        await expect(page.locator("#tile-held")).to_have_text("\u2013")
        await expect(page.locator("#connection")).to_have_text("No replica is up")
        await expect(page.locator(".replica .pill")).to_have_text(re.compile("^down for "))
        (replica,) = httpx2.get(f"{server.url}/replicas", timeout=60, trust_env=False).json()["replicas"]
        await expect(page.locator(".replica p.bad")).to_have_text(replica["why_down"])


async def test_turns_that_are_nobodys_are_told_of(tmp_path: Path, open_page: OpenPage) -> None:
    """The notice, with a remedy, shows while most turns of the last minute name no program."""
    async with (
        serving(tmp_path / "proxy.log") as server,
        httpx2.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client,
        open_page(server.url) as page,
    ):
        body = {"model": "simulated", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        for number in range(30):
            named = {"program_id": f"named/{number}"} if number < 12 else {}
            assert (await client.post("/v1/chat/completions", json={**body, **named})).status_code == 200
            if number == 11:
                await expect(page.locator("#rows tr")).to_have_count(12)
                await expect(page.locator("#anonymous")).to_be_hidden()
        await expect(page.locator("#anonymous")).to_contain_text("Most turns name no program")
        await expect(page.locator("#anonymous")).to_contain_text("thunderagent doctor")


async def test_a_proxy_that_goes_and_comes_back(tmp_path: Path, open_page: OpenPage) -> None:
    """The page reports the loss, keeps its contents, and continues by itself with the next process."""
    (port,) = free_ports(1)  # so that nobody else gets it meanwhile
    async with (
        serving(tmp_path / "first.log", *NO_REPLICA, port=port, ready=False) as server,
        httpx2.AsyncClient(timeout=60, trust_env=False) as client,
    ):
        await client.post(f"{server.url}/programs", json={"program_id": "before"})
        async with open_page(server.url, allowed=FAILED_REQUEST) as page:
            await expect(page.get_by_role("button", name="before")).to_be_visible()
            await stop(server.process)
            await expect(page.get_by_role("alert").first).to_contain_text("The proxy does not answer")
            await expect(page.locator("#connection")).to_have_text("Not connected")
            await expect(page.get_by_role("button", name="before")).to_be_visible()
            async with serving(tmp_path / "second.log", *NO_REPLICA, port=port, ready=False):
                await client.post(f"{server.url}/programs", json={"program_id": "after"})
                await expect(page.get_by_role("button", name="after")).to_be_visible()
                await expect(page.locator("#trouble")).to_be_hidden()
                await expect(page.get_by_role("button", name="before")).to_have_count(0)
                await expect(page.locator("#connection")).to_have_text("No replica is up")


async def test_pools_have_a_column_where_there_are_several(world: World, tmp_path: Path, open_page: OpenPage) -> None:
    """Replicas and programs say theirs; a program of two pools has a row, and a story, in each."""
    async with open_page(world.url) as page:
        await expect(page.get_by_role("columnheader", name="Pool")).to_be_hidden()
    async with (
        engine("a") as one,
        engine("b") as other,
        serving(tmp_path / "proxy.log", "--backends", f"{one},{other}") as server,
        httpx2.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        for model in "aab":
            body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
            await client.post("/v1/chat/completions", json=body, headers={"X-Program-ID": "both"})
        async with open_page(server.url) as page:
            await expect(page.get_by_role("columnheader", name="Pool")).to_be_visible()
            await expect(page.locator(".replica .pool")).to_have_text(["a", "b"])
            await expect(page.locator("#rows .pool")).to_have_text(["a", "b"])
            await expect(page.locator("#note-programs")).to_have_text("2 active · 0 held · 0 paused")
            for pool, turns in (("b", "1"), ("a", "2")):
                await rows(page).filter(has=page.locator(".pool", has_text=pool)).get_by_role("button").click()
                story = page.get_by_role("dialog")
                await expect(story.get_by_role("heading", name=f"both in {pool}")).to_be_visible()
                await expect(story.locator("dl div", has_text="Turns").locator("dd")).to_have_text(turns)
                assert f"#program=both&pool={pool}" in page.url
                await page.keyboard.press("Escape")


async def test_ten_thousand_programs_are_pages(tmp_path: Path, open_page: OpenPage) -> None:
    """Only a page of them is asked for and drawn; the last is a search away."""
    async with serving(tmp_path / "proxy.log", *NO_REPLICA, ready=False) as server:
        await open_programs(server.url, 10_000)
        async with open_page(server.url) as page:
            await expect(page.locator("#page-note")).to_have_text("1\u201325 of 10,000")
            await expect(rows(page)).to_have_count(25)
            await page.get_by_role("button", name="Next").click()
            await expect(page.locator("#page-note")).to_have_text("26\u201350 of 10,000")
            await page.get_by_role("searchbox").fill("09999")
            await expect(page.locator("#rows .id")).to_have_text(["task-09999"])
            await expect(page.locator("#page-note")).to_have_text("1\u20131 of 1")


async def open_programs(url: str, count: int) -> None:
    """Open programs `task-00000` and so on, on one connection, a hundred ahead of their answers."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for first in range(0, count, 100):
        for number in range(first, first + 100):
            body = json.dumps({"program_id": f"task-{number:05}"})
            head = f"POST /programs HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(f"{head}{body}".encode())
        async with asyncio.timeout(30):
            for _ in range(100):
                await reader.readuntil(b'"opened":true')
    writer.close()
    await writer.wait_closed()


async def test_a_key_is_asked_for_where_one_is_needed(world: World, open_page: OpenPage) -> None:
    """401 opens a prompt; a wrong key is reported, a right one lets the page continue."""
    sent: list[str] = []

    async def guard(route: Route) -> None:
        if "right" in sent or "/dashboard" in route.request.url:
            await route.continue_()
        else:
            await route.fulfill(status=401, json={"error": {"message": "no key"}})

    async def take(route: Route) -> None:
        sent.append(json.loads(route.request.post_data or "{}")["key"])
        await route.fulfill(status=204 if sent[-1] == "right" else 401, body="")

    async def prepare(page: Page) -> None:
        await page.route(f"{world.url}/**", guard)
        await page.route(f"{world.url}/dashboard/login", take)

    async with open_page(world.url, allowed=FAILED_REQUEST, prepare=prepare) as page:
        dialog = page.get_by_role("dialog", name="This proxy asks for a key")
        await expect(dialog).to_be_visible()
        await page.get_by_label("Admin key").fill("wrong")
        await page.keyboard.press("Enter")
        await expect(dialog.get_by_role("alert")).to_have_text("This key is not right.")
        await page.get_by_label("Admin key").fill("right")
        await page.keyboard.press("Enter")
        await expect(dialog).to_be_hidden()
        await expect(page.locator("#tile-programs")).to_have_text("5")
        assert sent == ["wrong", "right"]


def entry(ago_s: float, what: str, why: str = "", replica_id: str | None = None, began: float | None = None) -> Any:
    return {
        "ago_s": ago_s,
        "what": what,
        "why": why,
        "replica_id": replica_id,
        "claim_tokens": 1000,
        "began_ago_s": began,
    }


async def test_a_story_becomes_spans(world: World, open_page: OpenPage) -> None:
    """The story is long, its beginning forgotten: claims on two replicas, an abandoned hold, sandboxes."""
    program = {
        "status": "active",
        "phase": "reasoning",
        "replica_id": "b",
        "age_s": 500,
        "waiting": None,
        "holding": None,
        "story": [
            entry(100, "finished", "calls bash:make", "a", 105),
            entry(90, "sandbox ready", "box after 2.0 s", "a"),
            entry(80, "pause", "expired", "a"),
            entry(70, "hold", "no_room"),
            entry(65, "abandoned", "", "a"),
            entry(60, "hold", "queue_ahead"),
            entry(50, "restore", "fits", "b"),
            entry(40, "failed", "", "b", 50),
            entry(30, "mark", "thrashing", "b"),
        ],
        "turns": [
            {"granted_ago_s": 35, "arrived_ago_s": 35, "replica_id": "b", "started_ago_s": None},
            {"granted_ago_s": None, "arrived_ago_s": 1, "replica_id": None, "started_ago_s": None},
        ],
    }
    async with open_page(world.url) as page:
        spans = await page.evaluate(
            "async program => (await import('/dashboard/timeline.js')).spansOf(program)", program
        )
    assert spans["begins"] == 105

    def of(kind: str, *names: str) -> list[tuple[Any, ...]]:
        return [tuple(span.get(name) for name in ("from", "to", *names)) for span in spans[kind]]

    assert of("claims", "replica") == [(105, 80, "a"), (50, 0, "b")]
    assert of("holds", "why") == [(70, 65, "no_room"), (60, 50, "queue_ahead")]
    assert of("turns", "replica", "outcome") == [(105, 100, "a", "finished"), (50, 40, "b", "failed"), (35, 0, "b", "")]
    assert of("tools", "name", "away") == [(100, 70, "bash:make", False), (65, 60, "", True), (40, 35, "", True)]
    assert [mark["what"] for mark in spans["marks"]] == ["sandbox ready", "pause", "restore", "mark"]
