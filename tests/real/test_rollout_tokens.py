"""Every recorded token is the engine's own, whatever agents do: what a real engine's core got and made is written down.

Programs use all APIs that are recorded, streamed and whole, some with tools, several choices, or log probabilities of
their own. Clients leave in mid-turn, single turns are aborted, weights are updated and engines are killed meanwhile.
ROLLOUT_TURNS says how many turns there are; 20 of each program. `scripts/nightly tests` runs 10,000. With
ROLLOUT_MINUTES no program begins after so many, and what was done until then is compared.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from benchmarks.engine_kinds import MODEL_NAME
from benchmarks.real_engine import RealEngine, RealEngineConfig
from tests.loopback import free_ports
from tests.real import token_tap
from tests.real.conftest import HIDDEN_SIZE, LAYERS, MAX_MODEL_LEN
from tests.real.support import CHAT, COMPLETIONS, words

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.real.conftest import RunProxy

Json = dict[str, Any]

pytestmark = [pytest.mark.asyncio(loop_scope="session")]

TOKENS_PATH, RESPONSES, GENERATE = "/inference/v1/generate", "/v1/responses", "/generate"
APIS = {
    "vllm": ("chat", "tools", "completions", "ids", "tokens", "responses"),
    "sglang": ("chat", "tools", "completions", "ids", "generate", "generate text"),
}
ENGINE_ARGS = {"vllm": ("--max-num-seqs", "16", "--enable-scale-out"), "sglang": ("--max-running-requests", "16")}
TURNS_EACH_COUNT = 20
AT_A_TIME_COUNT = 12
KILLED_TOKENS = 60
"""The longest answers while engines are killed: long enough to be met in their middle."""
REQUEST_ID = re.compile(r"r\d{7}x")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@dataclass
class Asked:
    """A turn as its client knows it."""

    path: str
    how: str
    streams: bool = False
    had_answer: bool = False


@dataclass
class Own:
    """A choice of a request as the engine's core knows it."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)


class Agent:
    """One program: a conversation in one API."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        number: int,
        asked: dict[str, Asked],
        kind: str = "vllm",
        tries_count: int = 3,
        most_tokens: int = 9,
    ) -> None:
        """Draw what it does by its number, on an engine of a kind; send a turn up to `tries_count` times."""
        self._most_tokens = most_tokens
        self._client = client
        self._kind = kind
        self._tries_count = tries_count
        self.was_cut = False
        """Whether it gave up after a turn to which it did nothing, and that failed."""
        self._asked = asked
        self._rng = random.Random(number)
        self.program_id = f"p{number}"
        self._number = number
        self._api = APIS[kind][number % 6]
        self._messages: list[Json] = []
        self._text = ""
        self._ids = [50 + number % 1000]

    async def run(self, turns_count: int) -> None:
        """Do its turns, and release."""
        for number in range(turns_count):
            self._extend(words(self._rng.randrange(4, 12), seed=1000 * self._number + number))
            is_answered, how = False, ""
            for _ in range(self._tries_count):
                how = self._rng.choices(("well", "leaves", "aborted"), (90, 5, 5))[0]
                if is_answered := await self._turn(how):
                    break
            if self._tries_count == 1 and not is_answered and how == "well":
                self.was_cut = True
                break
        await self._client.post("/programs/release", json={"program_id": self.program_id})

    def _extend(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        self._text += f" {text}"
        self._ids += [int(each[1:]) for each in text.split()]

    def _request(self, request_id: str, *, streams: bool) -> tuple[str, Json]:
        count = self._rng.randrange(self._most_tokens // 3, self._most_tokens + 1)
        sampling = {"temperature": 1.0, "ignore_eos": True, "min_tokens": count, "max_tokens": count}
        body: Json = {"model": MODEL_NAME, "stream": streams}
        if self._kind == "sglang":
            body["rid"] = request_id
        if self._api.startswith("generate"):
            of_its_own = {"temperature": 1.0, "ignore_eos": True, "min_new_tokens": count, "max_new_tokens": count}
            prompt = {"input_ids": self._ids} if self._api == "generate" else {"text": self._text}
            return GENERATE, {**body, **prompt, "sampling_params": of_its_own}
        if self._api in ("chat", "tools"):
            body |= {**sampling, "messages": self._messages}
            body |= {"tools": [TOOL], "tool_choice": "none"} if self._api == "tools" else {}
            body |= {"n": 2} if self._kind == "vllm" and self._rng.random() < 0.05 else {}
            body |= {"logprobs": True} if self._rng.random() < 0.1 else {}
            return CHAT, body
        if self._api == "completions":
            return COMPLETIONS, {**body, **sampling, "prompt": self._text}
        if self._api == "ids":
            return COMPLETIONS, {**body, **sampling, "prompt": self._ids, "return_token_ids": True}
        if self._api == "tokens":
            return TOKENS_PATH, {**body, "token_ids": self._ids, "sampling_params": sampling}
        fields = {"max_output_tokens": count, "temperature": 1.0, "request_id": f"resp_{request_id}"}
        return RESPONSES, {**body, **fields, "input": self._messages}

    async def _turn(self, how: str) -> bool:
        """Send one turn; return whether it had its answer."""
        streams = self._rng.random() < 0.5
        request_id = f"r{len(self._asked):07}x"
        path, body = self._request(request_id, streams=streams)
        asked = self._asked[request_id] = Asked(path, how, streams)
        headers = {"X-Program-ID": self.program_id, "X-Request-Id": request_id, "X-Program-Group": "g"}
        sent = asyncio.create_task(self._answer(path, body, headers, streams=streams))
        if how != "well":
            await asyncio.sleep(self._rng.random() * 0.3)
        if how == "leaves":
            sent.cancel()
        elif how == "aborted":
            if self._kind == "vllm":
                await self._client.post("/abort_requests", json={"request_ids": [request_id]})
            else:
                await self._client.post("/abort_request", json={"rid": request_id})
        try:
            answered = await sent
        except (asyncio.CancelledError, httpx2.HTTPError):
            return False
        asked.had_answer = answered
        return answered

    async def _answer(self, path: str, body: Json, headers: dict[str, str], *, streams: bool) -> bool:
        """Read an answer, and take it into the history unless it was cut."""
        answer = await self._client.post(path, json=body, headers=headers)
        if answer.status_code != 200:
            return False
        if streams:
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            parts = [json.loads(line) for line in lines]
        else:
            parts = [answer.json()]
        text, ids, finish = "", list[int](), ""
        for part in parts:
            if path == RESPONSES:
                found = part.get("response", part)
                finish = found.get("status") or finish
                texts = [each.get("text", "") for out in found.get("output") or () for each in out.get("content") or ()]
                text = "".join(texts) or text
                continue
            if path == GENERATE:  # each event has all so far
                text, ids = part.get("text") or "", part.get("output_ids") or []
                finish = ((part.get("meta_info") or {}).get("finish_reason") or {}).get("type", "")
                continue
            for choice in part.get("choices") or ():
                if choice.get("index"):
                    continue
                said = choice.get("delta") or choice.get("message") or {}
                text += said.get("content") or choice.get("text") or ""
                ids += choice.get("token_ids") or ()
                finish = choice.get("finish_reason") or finish
        if finish not in ("length", "stop", "completed", "incomplete"):
            return False
        self._messages.append({"role": "assistant", "content": text})
        self._text += text
        self._ids += ids
        return True


def own_tokens(tap: Path) -> dict[str, dict[int, Own]]:
    """Return what the engine's core got and made, by request and choice."""
    by_id: dict[str, Own] = {}
    found: dict[str, dict[int, Own]] = {}
    for line in tap.read_text().rpartition("\n")[0].splitlines():  # the last one may be half written
        said = json.loads(line)
        if "prompt" in said:
            by_id[said["id"]] = own = Own(said["prompt"])
            if (request_id := REQUEST_ID.search(said["id"])) is not None:
                found.setdefault(request_id[0], {})[said["index"]] = own
        elif said["id"] in by_id:
            by_id[said["id"]].tokens += said["tokens"]
    return found


def is_streaming(tap: Path, asked: dict[str, Asked], before: set[str]) -> bool:
    """Return whether an engine is in the middle of streams to clients that stay, none of them sent before."""
    if not tap.exists():
        return False
    made = {name: len(choices[0].tokens) for name, choices in own_tokens(tap).items() if name not in before}
    going = [
        name
        for name, count in made.items()
        if 4 <= count < KILLED_TOKENS // 3 and asked[name].streams and asked[name].how == "well"
    ]
    return len(going) > 1


def whole_prompts(turns: list[Json]) -> list[list[int]]:
    """Return the prompt of each turn of a rollout, rebuilt from what it shares with earlier ones."""
    ends: dict[tuple[int, int], list[int]] = {}
    prompts = []
    for turn in turns:
        before = ends.get((turn["parent"], turn["parent_choice"]), [])
        prompts.append(prompt := before[: turn["shared_tokens"]] + turn["prompt_new_ids"])
        ends[turn["seq"], 0] = prompt
        for choice, output in enumerate(turn["outputs"]):
            ends[turn["seq"], choice] = prompt + output["ids"]
    return prompts


async def rollouts_of(client: httpx2.AsyncClient, view: str) -> list[Json]:
    """Return all ended rollouts."""
    found: list[Json] = []
    while True:
        after = found[-1]["seq"] if found else 0
        answer = await client.get("/rollouts", params={"view": view, "after": after})
        if not (lines := answer.text.splitlines()):
            return found
        found += [json.loads(line) for line in lines]


async def all_ended(client: httpx2.AsyncClient, programs_count: int) -> list[Json]:
    """Return the rollouts, with their turns, once all programs have ended."""
    async with asyncio.timeout(120):
        while len(found := await rollouts_of(client, "turns")) < programs_count:
            await asyncio.sleep(0.2)
    return found


async def update_weights(client: httpx2.AsyncClient, until: asyncio.Event, kind: str) -> int:
    """Pause, name new weights, and go on, now and then; turns in flight are kept. Return how often."""
    count = 0
    while not until.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(until.wait(), 3)
        count += 1
        if kind == "vllm":
            await client.post("/pause?mode=keep&clear_cache=false")
        else:
            await client.post("/pause_generation", json={"mode": ("in_place", "retract")[count % 2]})
        await client.post("/weight_sync/begin")
        await client.post("/resume" if kind == "vllm" else "/continue_generation", json={})
        await client.post("/weight_sync/end", json={"weight_version": str(count), "cache_cleared": False})
    return count


@asynccontextmanager
async def tapped(kind: str, folder: Path, count: int = 1) -> AsyncIterator[dict[RealEngine, Path]]:
    """Run engines of a kind, each of which writes its own tokens into the file beside it."""
    (plugin := folder / "plugin").mkdir()
    token_tap.install(plugin)
    taps = {
        RealEngine(
            RealEngineConfig(
                engine=kind,
                hidden_size=HIDDEN_SIZE,
                layers=LAYERS,
                pool_blocks=500 if kind == "vllm" else 16_000,
                block_size=32 if kind == "vllm" else 1,
                max_model_len=MAX_MODEL_LEN,
                port=port,
                core=None,
                ready_timeout_s=600,
                extra_args=ENGINE_ARGS[kind],
                extra_variables=(("PYTHONPATH", str(plugin)), ("TOKEN_TAP", str(folder / f"tap-{number}.jsonl"))),
            )
        ): folder / f"tap-{number}.jsonl"
        for number, port in enumerate(free_ports(count))
    }
    async with AsyncExitStack() as stack:
        for engine in taps:
            await stack.enter_async_context(engine)
        yield taps


async def replica_ids(client: httpx2.AsyncClient) -> dict[str, str]:
    """Return the id of each replica, by its URL."""
    return {each["url"].rstrip("/"): each["replica_id"] for each in (await client.get("/replicas")).json()["replicas"]}


@pytest.mark.nightly
@pytest.mark.timeout(7200, func_only=True)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_every_recorded_token_is_the_engines_own(
    kind: str, run_proxy: RunProxy, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """No difference, none lost, and what must not be trained on is in no sample."""
    request.getfixturevalue(kind)
    turns_count = int(os.environ.get("ROLLOUT_TURNS", "10000"))
    programs_count = max(6, turns_count // TURNS_EACH_COUNT)
    asked: dict[str, Asked] = {}
    async with (
        tapped(kind, tmp_path) as taps,
        run_proxy(tuple(taps), "--rollouts", "logprobs") as proxy,
        httpx2.AsyncClient(base_url=proxy.url, timeout=600, limits=httpx2.Limits(max_connections=None)) as client,
    ):
        agents = [Agent(client, number, asked, kind) for number in range(programs_count)]
        over = asyncio.Event()
        updates = asyncio.create_task(update_weights(client, over, kind))
        agents = await run_all(agents, turns_count // programs_count, float(os.environ.get("ROLLOUT_MINUTES", "inf")))
        over.set()
        print(f"{await updates} updates of weights")
        await check_all(client, agents, asked, taps, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600, func_only=True)
async def test_engines_that_are_killed_lose_no_turn(vllm: None, run_proxy: RunProxy, tmp_path: Path) -> None:
    """Turns that one had begun to answer are marked, others run elsewhere; each has a record, and no token is wrong."""
    kills_count, programs_count = int(os.environ.get("ROLLOUT_KILLS", "4")), 36
    asked: dict[str, Asked] = {}
    async with (
        tapped("vllm", tmp_path, 2) as taps,
        run_proxy(tuple(taps), "--rollouts", "logprobs") as proxy,
        httpx2.AsyncClient(base_url=proxy.url, timeout=600, limits=httpx2.Limits(max_connections=None)) as client,
    ):
        agents = list[Agent]()
        for number in range(kills_count):
            engine = list(taps)[number % 2]
            new = [
                Agent(client, len(agents) + each, asked, tries_count=1, most_tokens=KILLED_TOKENS)
                for each in range(programs_count)
            ]
            agents += new
            running = asyncio.create_task(run_all(new, TURNS_EACH_COUNT // 2))
            before = set(asked)
            async with asyncio.timeout(300):
                while not is_streaming(taps[engine], asked, before):
                    await asyncio.sleep(0.01)
            await engine.kill()
            await engine.start()
            await running
        cut = {agent.program_id for agent in agents if agent.was_cut}
        assert cut
        await check_all(client, agents, asked, taps, tmp_path)
        for each in await rollouts_of(client, "summary"):
            if each["program_id"] in cut:
                assert each["mask_sample"], each
        print(f"{kills_count} engines killed, {len(cut)} programs ended by that")


async def run_all(agents: list[Agent], turns_count: int, minutes: float = inf) -> list[Agent]:
    """Run programs, some at a time; return those that began within so many minutes."""
    waiting, begun, until_s = iter(agents), list[Agent](), monotonic() + 60 * minutes

    async def work() -> None:
        for agent in waiting:
            if monotonic() > until_s:
                return
            begun.append(agent)
            await agent.run(turns_count)

    await asyncio.gather(*(work() for _ in range(AT_A_TIME_COUNT)))
    return begun


async def check_all(
    client: httpx2.AsyncClient,
    agents: list[Agent],
    asked: dict[str, Asked],
    taps: dict[RealEngine, Path],
    folder: Path,
) -> None:
    """Compare all that was recorded with what the engines wrote down, and print the counts."""
    found = await all_ended(client, len(agents))
    sampled = {each["program_id"]: each["samples"] for each in await rollouts_of(client, "samples")}
    kept = {"found": found, "sampled": sampled, "asked": {key: asdict(each) for key, each in asked.items()}}
    (folder / "rollouts.json").write_text(json.dumps(kept))  # beside the taps, for who looks into a failure
    ids = await replica_ids(client)
    own = {ids[engine.url]: own_tokens(tap) for engine, tap in taps.items()}
    counts, lost = compare(found, sampled, asked, own)
    print(f"{len(asked)} turns sent")
    for name, count in sorted(counts.items()):
        print(f"{count:9,} {name}")
    assert not lost


def compare(
    found: list[Json],
    sampled: dict[str, list[Json]],
    asked: dict[str, Asked],
    own: dict[str, dict[str, dict[int, Own]]],
) -> tuple[Counter[str], set[str]]:
    """Compare all recorded tokens with each engine's own; return what was compared, and what engines got in vain."""
    seen, counts = set[str](), Counter[str]()
    for each in found:
        assert each["granted_count"] == each["turns_count"], each["program_id"]
        trained: list[int] = []
        for turn, prompt in zip(each["turns"], whole_prompts(each["turns"]), strict=True):
            request_id = named(turn["request_id"])
            seen.add(request_id)
            engines_own = own.get(turn["replica_id"], {}).get(request_id, {})
            trained += check_turn(turn, prompt, asked[request_id], engines_own, counts)
        bearing = Counter(
            token
            for sample in sampled[each["program_id"]]
            for token, mask in zip(sample["ids"], sample["mask"], strict=True)
            if mask
        )
        assert bearing == Counter(trained), each["program_id"]
        counts["programs"] += 1
        counts["programs to train on"] += not each["mask_sample"]
    in_engines = {request_id for each in own.values() for request_id in each}
    counts["requests in engines"] = len(in_engines)
    return counts, in_engines - seen


def check_turn(turn: Json, prompt: list[int], asked: Asked, own: dict[int, Own], counts: Counter[str]) -> list[int]:
    """Check one turn; return its tokens that may be trained on."""
    counts["turns"] += 1
    counts[f"{turn['path']} {turn['link']}"] += 1
    counts[f"{turn['outcome']}, client {asked.how}"] += 1
    counts["turns that ran on several replicas"] += turn["tries_count"] > 1
    if asked.had_answer:
        assert turn["kept"], turn
        assert turn["missing"] == ("no_logprobs" if turn["path"] == RESPONSES else ""), turn
        assert turn["outputs"], turn
    if not turn["outputs"]:
        return []
    assert prompt == own[0].prompt, turn
    counts["prompt tokens compared"] += len(prompt)
    trained: list[int] = []
    for choice, output in enumerate(turn["outputs"]):
        made = own[choice].tokens
        assert output["ids"] == (made if asked.had_answer else made[: len(output["ids"])]), turn
        counts["output tokens compared"] += len(output["ids"])
        if turn["kept"] and output["finish"] != "abort":
            trained += output["ids"]
    return trained


def named(request_id: str) -> str:
    """Return the client's part of an id."""
    found = REQUEST_ID.search(request_id)
    assert found is not None, request_id
    return found[0]
