"""Measure what recording rollouts costs: the same proxy without and with them, on an engine that answers at once.

The proxies have a core of their own; engine, client and the processes that settle are on another. They are measured in
turn several times in one run, each round in the other direction. The programs are conversations of eight turns with
bodies of 2 KB on average: each prompt begins with all tokens before it, each answer has 40 tokens, and the last turn
ends its program, so what is packed at the end is part of the cost. The engine says ids and log probabilities only if it
is asked, spelt as vLLM spells them. Ratios are of pairs in the same round, with their 95 % intervals.

`cpu_us` is the processor time of the proxy for a turn, `settle_us` that of the process that settles, which is waited
for after each round. Whether it keeps up is said by `unsettled_bytes`, which wait for it when a round ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.instant import InstantEngine, answer_head, drive
from benchmarks.machine import save_results
from benchmarks.overhead import Counted, cpu_s, of_ratios, target
from thunderagent.compilation import build_kind
from thunderagent.provision.base import free_port
from thunderagent.serving.process import raise_file_limit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

Json = dict[str, Any]

TURNS_COUNT = 8
LANES_COUNT = 64
"""Programs at a time: more than connections, so that a turn's answer is there before the next turn is sent."""
ANSWER_TOKENS = 40
FIRST_BYTES, NEXT_BYTES = 1100, 60
VOCABULARY_COUNT = 150_000

ARMS: dict[str, tuple[str, ...]] = {
    "off": (),
    "ids": ("--rollouts", "ids"),
    "logprobs": ("--rollouts", "logprobs"),
    "disk": ("--rollouts", "logprobs", "--rollout-dir", "DIR"),
}
"""Options of each; DIR is a new folder."""

ASKS: dict[str, Json] = {
    "asks ids": {"return_token_ids": True},
    "asks logprobs": {"return_token_ids": True, "logprobs": True},
}
"""What a client asks for in its body, of the proxy of `off`."""


def compact(value: object) -> bytes:
    """Return JSON as vLLM spells it."""
    return json.dumps(value, separators=(",", ":")).encode()


class Turn:
    """One turn of the conversation: its messages, and what an engine answers."""

    def __init__(self, messages: list[Json], prompt: list[int], rng: random.Random) -> None:
        """Draw the answer."""
        self.messages = messages
        self.prompt = prompt
        self.output = [rng.randrange(VOCABULARY_COUNT) for _ in range(ANSWER_TOKENS)]
        self._words = [f" w{each % 1000:03}" for each in self.output]
        self._logprobs = [
            {"token": word, "logprob": -rng.expovariate(1.0), "bytes": list(word.encode()), "top_logprobs": []}
            for word in self._words
        ]
        self.text = "".join(self._words)

    def whole(self, *, ids: bool, logprobs: bool) -> bytes:
        """Return the whole answer with its head."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text, "refusal": None, "tool_calls": []},
            "logprobs": {"content": self._logprobs} if logprobs else None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": self.output if ids else None,
        }
        body = compact(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": "instant",
                "choices": [choice],
                "service_tier": None,
                "usage": self._usage(),
                "prompt_logprobs": None,
                "prompt_token_ids": self.prompt if ids else None,
            }
        )
        return answer_head("application/json", len(body)) + body

    def pieces(self, *, ids: bool, logprobs: bool) -> list[bytes]:
        """Return the pieces of a stream, an event for each token."""
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        events: list[Json] = [{"choices": [first], "prompt_token_ids": self.prompt if ids else None}]
        for word, token, logprob in zip(self._words, self.output, self._logprobs, strict=True):
            choice: Json = {"index": 0, "delta": {"content": word}}
            choice["logprobs"] = {"content": [logprob]} if logprobs else None
            choice |= {"finish_reason": None, "token_ids": [token] if ids else None}
            events.append({"choices": [choice]})
        events[-1]["choices"][0]["finish_reason"] = "stop"
        events.append({"choices": [], "usage": self._usage()})
        base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "instant"}
        datas = [b"data: %s\n\n" % compact({**base, **event}) for event in events]
        chunks = [b"%x\r\n%s\r\n" % (len(data), data) for data in (*datas, b"data: [DONE]\n\n")]
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        return [head + chunks[0], *chunks[1:-1], chunks[-1] + b"0\r\n\r\n"]

    def _usage(self) -> Json:
        prompt, output = len(self.prompt), len(self.output)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def conversation(seed: int = 0) -> list[Turn]:
    """Return the turns of a program; each prompt begins with the one before and its answer."""
    rng = random.Random(seed)

    def said(size_bytes: int) -> str:
        return "".join(f"w{rng.randrange(1000):03} " for _ in range(size_bytes // 5))

    turns: list[Turn] = []
    messages, prompt = [{"role": "user", "content": said(FIRST_BYTES)}], list[int]()
    for _ in range(TURNS_COUNT):
        new = sum(len(each["content"]) for each in messages) // 4 - len(prompt)
        prompt = prompt + [rng.randrange(VOCABULARY_COUNT) for _ in range(max(4, new))]
        turns.append(turn := Turn(messages, prompt, rng))
        answer = {"role": "assistant", "content": turn.text}
        messages = [*messages, answer, {"role": "user", "content": said(NEXT_BYTES)}]
        prompt = prompt + turn.output
    return turns


class TokenEngine(InstantEngine):
    """Answers the turn that the body's seed names; says tokens only if it is asked."""

    def __init__(self, answers: dict[tuple[int, bool, bool], bytes], streams: dict[Any, list[bytes]]) -> None:
        """Answer with these, by turn, and whether ids and log probabilities are asked for."""
        super().__init__()
        self._answers = answers
        self._streams = streams

    def _answer(self, head: bytes, body: bytes) -> None:
        at = body.find(b'"seed":')
        if at < 0:
            super()._answer(head, body)
            return
        key = (int(body[at + 7 : at + 8]), b'"return_token_ids":true' in body, b'"logprobs":true' in body)
        if b'"stream":true' in body:
            self._pieces = self._streams[key]
            self._write_piece(0)
        else:
            self._transport.write(self._answers[key])


@asynccontextmanager
async def token_engine(turns: list[Turn]) -> AsyncIterator[int]:
    """Run the engine during the block; yield its port."""
    kinds = [
        (number, ids, logprobs) for number in range(len(turns)) for ids in (False, True) for logprobs in (False, True)
    ]
    answers = {kind: turns[kind[0]].whole(ids=kind[1], logprobs=kind[2]) for kind in kinds}
    streams = {kind: turns[kind[0]].pieces(ids=kind[1], logprobs=kind[2]) for kind in kinds}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: TokenEngine(answers, streams), "127.0.0.1", 0, backlog=1024)
    async with server:
        yield server.sockets[0].getsockname()[1]


def requests_of(turns: list[Turn], port: int, run: str, *, stream: bool, asked: Json) -> Callable[[], bytes]:
    """Return a function that returns the next request: many programs side by side, the turns of each in order.

    `asked` are further keys of their bodies.
    """
    made = []
    for number, turn in enumerate(turns):
        fields: Json = {"model": "instant", "seed": number, "stream": stream, **asked}
        if stream:
            fields["stream_options"] = {"include_usage": True}
        body = compact({**fields, "messages": turn.messages})
        final = "X-Program-Final: 1\r\n" if number == len(turns) - 1 else ""
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Accept: application/json\r\nAccept-Encoding: gzip, deflate\r\nUser-Agent: bench\r\n{final}"
            f"Content-Length: {len(body)}\r\n"
        )
        made.append((head, body))
    numbers = count()

    def next_request() -> bytes:
        lane, step = (number := next(numbers)) % LANES_COUNT, number // LANES_COUNT
        head, body = made[step % len(made)]
        program = lane + LANES_COUNT * (step // len(made))
        return f"{head}X-Program-ID: {run}-{program}\r\n\r\n".encode() + body

    return next_request


async def measure(args: argparse.Namespace) -> Json:
    """Measure each arm in turn."""
    turns, logs = conversation(), Path(args.logs)
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    body_bytes = sum(len(compact({"messages": turn.messages})) for turn in turns) / len(turns)
    runs: dict[str, list[dict[str, float]]] = {}
    async with token_engine(turns) as engine_port, AsyncExitStack() as stack:
        started: dict[str, tuple[int, int]] = {}
        for name, options in (*ARMS.items(), ("off again", ())):
            port = free_port()
            serve = ["serve", "--backends", f"http://127.0.0.1:{engine_port}", "--backend-type", "vllm"]
            words = [str(logs.resolve() / "disk") if each == "DIR" else each for each in options]
            command = [sys.executable, "-m", "thunderagent", *serve, "--log-format", "json", "--port", str(port)]
            log = logs / f"{name.replace(' ', '-')}.log"
            process = await stack.enter_async_context(target([*command, *words], port, 0, log))
            started[name] = (port, process.pid)
        settling: dict[str, int] = {}
        for name, (port, pid) in started.items():
            first = requests_of(turns, port, "first", stream=False, asked={})
            await drive(port, first, connections_count=4, warmup_s=0.5, measure_s=2.0)
            for started_pid in children_of(pid):
                settling[name] = started_pid
                os.sched_setaffinity(started_pid, {1})
        started |= dict.fromkeys(ASKS, started["off"])
        for number in range(args.rounds):
            for load in ("whole", "stream"):
                for name in list(started)[:: 1 if number % 2 else -1]:
                    port, pid = started[name]
                    run = f"{number}-{name.replace(' ', '-')}"  # `off` has the programs of three arms
                    asked = ASKS.get(name, {})
                    counted = Counted(requests_of(turns, port, run, stream=load == "stream", asked=asked))
                    child = settling.get(name)
                    began_s, child_began_s = cpu_s(pid), cpu_s(child) if child else 0.0
                    figures = await drive(port, counted, connections_count=16, warmup_s=0.5, measure_s=args.seconds)
                    figures["unsettled_bytes"] = await unsettled_bytes(port)
                    while await unsettled_bytes(port):
                        await asyncio.sleep(0.2)
                    figures["settle_us"] = ((cpu_s(child) if child else 0.0) - child_began_s) / counted.count * 1e6
                    figures["cpu_us"] = (cpu_s(pid) - began_s) / counted.count * 1e6
                    runs.setdefault(f"{name} {load}", []).append(figures)
                    print(f"{name:13} {load:6} " + "  ".join(f"{key} {value:,.2f}" for key, value in figures.items()))
        recorded = {name: await recorded_count(started[name][0]) for name in ("ids", "logprobs", "disk")}
        disk_bytes = sum(path.stat().st_size for path in (logs / "disk").iterdir())
    return {
        "body_bytes": body_bytes,
        "build": build_kind(),
        "recorded": recorded,
        "disk_bytes": disk_bytes,
        "runs": runs,
        "summary": summary(runs),
    }


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(each) for words in found for each in words]


async def unsettled_bytes(port: int) -> float:
    """Return what a proxy has yet to settle."""
    return (await recorded_count(port)).get("thunderagent_rollout_unsettled_bytes", 0.0)


async def recorded_count(port: int) -> dict[str, float]:
    """Return what a proxy says of its rollouts: turns by link, and those without tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    said = (await reader.read()).decode()
    writer.close()
    rows = [line.rpartition(" ") for line in said.splitlines() if line.startswith("thunderagent_rollout_")]
    return {name: float(value) for name, _, value in rows}


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return what each arm adds in the same round to `off`, and recording to what asks for the same itself."""
    found: dict[str, float] = {}
    events_count = ANSWER_TOKENS + 3
    for load in ("whole", "stream"):
        off = runs[f"off {load}"]
        found[f"off_{load}_requests_per_s"] = median(run["requests_per_s"] for run in off)
        found[f"off_{load}_cpu_us"] = median(run["cpu_us"] for run in off)
        for name in ("off again", *ASKS, "ids", "logprobs", "disk"):
            pairs = list(zip(runs[f"{name} {load}"], off, strict=True))
            title = f"{name.replace(' ', '_')}_{load}"
            found |= ratios(title, pairs)
            found[f"{title}_settle_us"] = median(on["settle_us"] for on, _ in pairs)
            added_us = median(on["cpu_us"] - its["cpu_us"] for on, its in pairs)
            found[f"{title}_added_cpu_us"] = added_us
            if load == "stream":
                found[f"{title}_added_cpu_us_per_event"] = added_us / events_count
        for name in ("ids", "logprobs"):
            pairs = list(zip(runs[f"{name} {load}"], runs[f"asks {name} {load}"], strict=True))
            found |= ratios(f"{name}_beside_asking_{load}", pairs)
    return found


def ratios(title: str, pairs: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, float]:
    """Return the requests a second and the processor time of one arm over another's in the same round."""
    found = of_ratios(f"{title}_ratio", [on["requests_per_s"] / its["requests_per_s"] for on, its in pairs])
    return found | of_ratios(f"{title}_cpu_ratio", [on["cpu_us"] / its["cpu_us"] for on, its in pairs])


def main() -> None:
    """Measure, print and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=6, help="measurements of each kind")
    parser.add_argument("--logs", default="out/rollouts", help="folder for the servers' logs")
    parser.add_argument("--name", default="rollouts", help="name of the result file")
    args = parser.parse_args()
    os.sched_setaffinity(0, {1})
    raise_file_limit()
    results = uvloop.run(measure(args))
    for name, said in results["recorded"].items():
        print(name, said)
    for name, value in results["summary"].items():
        print(f"{name:45} {value:,.3f}")
    save_results(args.name, {"arguments": vars(args), **results})


if __name__ == "__main__":
    main()
