"""The judge: its input, the answers that count, and its queue."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.builders import Driver
from thunderagent.errors import ConfigurationError
from thunderagent.programs.pools import Pool
from thunderagent.programs.state.program import Level
from thunderagent.proxy.judge import DEFAULT_PROMPT, Judge, JudgeCollector, JudgeSettings, judge, read_prompt
from thunderagent.proxy.judge.answer import READ_CHARS, Answered, Failure, Opinion, opinion_of, read_answer
from thunderagent.proxy.judge.judge import MAX_BODY_BYTES, MAX_WAITING_COUNT
from thunderagent.proxy.judge.prompt import filled
from thunderagent.proxy.judge.transcript import GAP, LEAST_CHARS, Transcript, cut, transcript_of, transcript_of_all
from thunderagent.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

VERDICT = {"prediction": "failure", "confidence": 0.8, "reasoning": "it goes in circles"}
SAID = Opinion(will_succeed=False, confidence_ratio=0.8, reasoning="it goes in circles")


# --- the judge's input


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


CHAT = body_of(
    messages=[
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "find the"}, {"type": "text", "text": "answer"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "search", "arguments": '{"q": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "nothing"},
    ]
)
MESSAGES = body_of(
    system="be brief",
    messages=[
        {"role": "user", "content": "find the answer"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "tool_use", "name": "search", "input": {"q": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "nothing"}]}]},
    ],
)
RESPONSES = body_of(
    instructions="be brief",
    input=[
        {"role": "user", "content": [{"type": "input_text", "text": "find the answer"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "name": "search", "arguments": '{"q": 1}'},
        {"type": "function_call_output", "output": "nothing"},
    ],
)


@pytest.mark.parametrize(
    ("body", "steps", "round_count"),
    [
        (CHAT, '1. assistant: calls search({"q": 1})\n2. tool: nothing', 2),
        (MESSAGES, '1. assistant: hm calls search({"q":1})\n2. user: result: nothing', 2),
        (
            RESPONSES,
            '1. reasoning: hm\n2. function_call: calls search({"q": 1})\n3. function_call_output: nothing',
            2,
        ),
        (body_of(input="find the answer"), "", 1),
    ],
)
def test_task_and_steps_are_read_in_every_api_with_messages(body: bytes, steps: str, round_count: int) -> None:
    """The task is the first message of the user; what the model thinks, calls and gets back are steps.

    The answer to this body is one more round than the agent's answers that it holds.
    """
    assert transcript_of(body, 10_000) == Transcript("find the answer", steps, "m", round_count)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[1]",
        body_of(prompt="a text"),
        body_of(messages=[]),
        body_of(messages="x"),
        body_of(messages=[1, None, "x"]),
        body_of(messages=[{"role": "system", "content": "x"}]),
        body_of(messages=[{"role": "user", "content": {"odd": 1}}]),
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
    ],
)
def test_a_body_without_a_task_is_none(body: bytes) -> None:
    """Nothing raises for it."""
    assert transcript_of(body, 10_000) is None


def test_odd_messages_are_passed_over() -> None:
    """A client may send anything."""
    body = body_of(messages=[{"role": "user", "content": "task"}, 5, {"tool_calls": [1, {"function": 2}]}, {}], model=5)
    assert transcript_of(body, 1000) == Transcript("task", "1. ?\n2. ?: \n3. ?: ", "", 1)


def test_long_programs_lose_their_middle() -> None:
    """The beginning stays, and more of the end; no message takes all the room."""
    steps = [{"role": "assistant", "content": f"step {number} " + "x" * 90} for number in range(1000)]
    steps[-1]["content"] = "y" * 100_000
    body = body_of(messages=[{"role": "user", "content": "t" * 50_000}, *steps])
    read = transcript_of(body, 8000)
    assert read is not None
    assert 1990 < len(read.task) <= 2000
    assert GAP in read.task
    assert 5700 < len(read.steps) <= 6000 + 1
    lines = read.steps.split("\n")
    assert lines[0].startswith("1. assistant: step 0 ")
    assert lines[-1].startswith("1000. assistant: yyy")
    gap = next(line for line in lines if "left out" in line)
    assert lines.index(gap) < len(lines) - lines.index(gap)
    assert f"[{1000 - (len(lines) - 1)} messages are left out here]" == gap


@pytest.mark.parametrize(("text", "limit"), [("abc", 3), ("a" * 100, 20), ("a" * 100, 2), ("", 0)])
def test_cut_text_is_no_longer_than_asked_for(text: str, limit: int) -> None:
    """Only the mark is added, if there is room for nothing else."""
    assert len(cut(text, limit)) <= max(limit, len(GAP))


# --- the prompt


def test_the_default_prompt_has_all_places() -> None:
    """Inserted text is taken literally, whatever it holds."""
    text = filled(DEFAULT_PROMPT, "{transcript} %s {0}", "{task} {step}", 12, 7)
    assert "{transcript} %s {0}" in text
    assert text.count("{task} {step}") == 1
    assert "had 12 steps" in text
    assert "round 7, and" in text
    assert filled("b {transcript} a {task} c {other}", "T", "S", 1, 1) == "b S a T c {other}"


def test_a_prompt_is_a_file_with_both_places(tmp_path: Path) -> None:
    """Each place is there once; otherwise the proxy does not start."""
    path = tmp_path / "prompt"
    path.write_text("{task} {transcript}")
    assert read_prompt(path) == "{task} {transcript}"
    assert read_prompt(None) == DEFAULT_PROMPT
    for text in ("{task}", "{task} {task} {transcript}", ""):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match="must hold"):
            read_prompt(path)
    with pytest.raises(ConfigurationError, match="cannot read"):
        read_prompt(tmp_path / "none")


# --- its answer


@pytest.mark.parametrize(
    ("text", "opinion"),
    [
        (json.dumps(VERDICT), SAID),
        (f"I think so:\n```json\n{json.dumps(VERDICT, indent=2)}\n```\nDone {{}}.", SAID),
        ('{"prediction": "success", "confidence": 1}' + json.dumps(VERDICT), SAID),
        (f"<think>{{maybe}} [1] {{{'x' * 40_000}</think>{json.dumps(VERDICT)}", SAID),
        ('{"prediction": " Success ", "confidence": 0}', Opinion(will_succeed=True, confidence_ratio=0, reasoning="")),
        ('{"prediction": "failure", "confidence": 0.5, "reasoning": 3}', Opinion(False, 0.5, "")),
        ("", Failure.NO_JSON),
        ("no", Failure.NO_JSON),
        ("[1, 2]", Failure.NO_JSON),
        ("null", Failure.NO_JSON),
        ('{"verdict": "success"}', Failure.NO_JSON),
        ('{"prediction": "success", "confidence": ', Failure.NO_JSON),
        ('{"a' * 50_000, Failure.NO_JSON),
        ('{"a":' * 50_000, Failure.NO_JSON),
        ('{"prediction": "success"}', Failure.WRONG_SHAPE),
        ('{"prediction": "maybe", "confidence": 0.5}', Failure.WRONG_SHAPE),
        ('{"prediction": true, "confidence": 0.5}', Failure.WRONG_SHAPE),
        ('{"prediction": "success", "confidence": true}', Failure.WRONG_SHAPE),
        ('{"prediction": "success", "confidence": "high"}', Failure.WRONG_SHAPE),
        ('{"prediction": "success", "confidence": 80}', Failure.WRONG_SHAPE),
        ('{"prediction": "success", "confidence": NaN}', Failure.WRONG_SHAPE),
        ('{"prediction": "success", "confidence": -1e999}', Failure.WRONG_SHAPE),
        ('{"prediction": "success", "confidence": 1%s}' % ("0" * 400), Failure.WRONG_SHAPE),
        (json.dumps(VERDICT) + "x" * READ_CHARS, Failure.NO_JSON),
    ],
)
def test_the_last_verdict_in_a_text_counts(text: str, opinion: Opinion | Failure) -> None:
    """The text around it does not matter; an answer without one is a failure of its kind."""
    assert opinion_of(text) == opinion


@pytest.mark.parametrize(
    ("body", "answered"),
    [
        (
            {
                "choices": [{"message": {"content": json.dumps(VERDICT)}}],
                "usage": {"prompt_tokens": 9, "completion_tokens": 3},
            },
            Answered(SAID, 9, 3),
        ),
        ({"choices": [{"message": {"content": json.dumps(VERDICT)}}], "usage": None}, Answered(SAID)),
        ({"choices": []}, Answered(Failure.WRONG_SHAPE)),
        ({"choices": [{"message": {"content": None}}]}, Answered(Failure.WRONG_SHAPE)),
        ({"choices": [{"message": None}]}, Answered(Failure.WRONG_SHAPE)),
        ({"choices": "x"}, Answered(Failure.NO_JSON)),
        ({"usage": {"prompt_tokens": -5}}, Answered(Failure.WRONG_SHAPE)),
        ({"usage": {"prompt_tokens": 10**400, "completion_tokens": 3}}, Answered(Failure.WRONG_SHAPE, 0, 3)),
        ([1], Answered(Failure.NO_JSON)),
    ],
)
def test_an_answer_is_a_chat_completion(body: object, answered: Answered) -> None:
    """Anything else is a failure; its usage is counted if it is reported."""
    assert read_answer(json.dumps(body).encode()) == answered


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff", b"[" * 100_000])
def test_rubbish_is_no_answer(body: bytes) -> None:
    """Nothing raises for it."""
    assert read_answer(body) == Answered(Failure.NO_JSON)


# --- its queue


class Oracle:
    """A judge that gives a set answer when a test lets it."""

    def __init__(self, answer: bytes | Failure = Failure.STATUS) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ask(self, body: bytes) -> bytes | Failure:
        self.asked.append(json.loads(body))
        await self.may_answer.wait()
        return self.answer


class Court:
    """A judge in front of a scheduler that a driver drives."""

    def __init__(self, oracle: Oracle, **settings: Any) -> None:
        self.driver = Driver()
        self.runtime = Runtime(self.driver.scheduler, clock=lambda: self.driver.now_s)
        self.oracle = oracle

        @asynccontextmanager
        async def opened() -> AsyncIterator[Oracle]:
            yield oracle

        self.judge = Judge(self.runtime, opened, JudgeSettings(rate_per_s=1e6, **settings))

    def takes_turns(self, program_id: str, count: int = 1, body: bytes = CHAT) -> None:
        for _ in range(count):
            self.driver.takes_turn(program_id, 10)
            self.judge.turn_seen(program_id, body)

    async def sits_until(self, condition: Callable[[], object]) -> None:
        task = asyncio.create_task(self.judge.run())
        try:
            async with asyncio.timeout(5):
                while not condition():
                    await asyncio.sleep(0.001)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), task.exception()


def completion(value: object) -> bytes:
    content = value if isinstance(value, str) else json.dumps(value)
    return json.dumps({"choices": [{"message": {"content": content}}], "usage": {"prompt_tokens": 7}}).encode()


async def test_every_so_many_turns_make_a_question() -> None:
    """Its answer becomes the scheduler's event, with the turns that it is about."""
    court = Court(Oracle(completion(VERDICT)), every_turns_count=3, model="judge", max_output_tokens=99)
    court.takes_turns("a", 2)
    assert court.judge.waiting_count == 0
    court.takes_turns("a", 2)
    assert court.judge.waiting_count == 1
    await court.sits_until(lambda: court.judge.verdict_counts["failure"])
    program = court.driver.program("a")
    assert program.level is Level.MEDIUM
    assert program.verdicts.last[0].turn_count == 3
    (asked,) = court.oracle.asked
    assert (asked["model"], asked["max_tokens"], asked["stream"]) == ("judge", 99, False)
    assert "find the answer" in asked["messages"][0]["content"]
    assert court.judge.prompt_tokens_total == 7


def test_a_program_that_one_of_its_pools_forgets_is_asked_about_all_the_same() -> None:
    """Its turns there count no more, neither those of before."""
    court, other = Court(Oracle(), every_turns_count=3), Driver()
    court.runtime.pools.all.append(Pool(other.scheduler, 1))
    for _ in range(10):
        other.takes_turn("a", 10)
    court.takes_turns("a")
    assert (court.judge.waiting_count, court.judge.dropped_counts["newer"]) == (1, 0)
    other.releases("a")
    court.takes_turns("a", 3)
    assert court.judge.dropped_counts["newer"] == 0
    court.takes_turns("a")
    assert court.judge.dropped_counts["newer"] == 1


async def test_without_a_model_it_is_the_program_s_own() -> None:
    """On the replicas it does the same."""
    court = Court(Oracle(), every_turns_count=1)
    court.takes_turns("a")
    await court.sits_until(lambda: court.judge.failure_counts[Failure.STATUS])
    assert court.oracle.asked[0]["model"] == "m"


async def test_questions_are_as_short_as_was_asked_for() -> None:
    """This holds however long the program is."""
    court = Court(Oracle(), every_turns_count=1, max_prompt_tokens=1000)
    long = body_of(messages=[{"role": "user", "content": "x" * 9000}, *[{"role": "user", "content": "y" * 500}] * 99])
    court.takes_turns("a", body=long)
    await court.sits_until(lambda: court.judge.failure_counts[Failure.STATUS])
    assert len(court.oracle.asked[0]["messages"][0]["content"]) <= 4000


async def test_newest_question_of_a_program_alone_waits() -> None:
    """Questions of an ended program are dropped."""
    court = Court(Oracle(), every_turns_count=1)
    court.takes_turns("a", 3)
    court.takes_turns("b", 1)
    court.runtime.release("b")
    court.judge.turn_seen("b", CHAT)
    assert court.judge.waiting_count == 1
    assert court.judge.dropped_counts == {"newer": 2, "ended": 1}
    await court.sits_until(lambda: court.judge.failure_counts[Failure.STATUS])
    assert len(court.oracle.asked) == 1


async def test_the_oldest_is_dropped_where_too_many_wait() -> None:
    """The limits are a number and bytes; a body that would take long to read is not asked about."""
    court = Court(Oracle(), every_turns_count=1)
    for number in range(MAX_WAITING_COUNT + 3):
        court.takes_turns(f"p{number}")
    assert court.judge.waiting_count == MAX_WAITING_COUNT
    assert court.judge.dropped_counts["full"] == 3
    large = CHAT + b" " * (MAX_BODY_BYTES - len(CHAT))
    for number in range(40):
        court.takes_turns(f"large{number}", body=large)
    assert court.judge.waiting_count == 32
    court.takes_turns("larger", body=large + b" ")
    assert court.judge.failure_counts == {Failure.TOO_LARGE: 1}


async def test_no_answer_in_time_is_a_failure_and_others_go_on() -> None:
    """A silent judge does not block questions about other programs while it has places."""
    court = Court(Oracle(completion(VERDICT)), every_turns_count=1, timeout_s=0.05)
    court.oracle.may_answer.clear()
    for number in range(40):
        court.takes_turns(f"p{number}")
    await court.sits_until(lambda: court.judge.failure_counts[Failure.TIMEOUT] == 40)
    assert court.judge.asking_count == court.judge.waiting_count == 0
    assert not court.judge.verdict_counts


async def test_questions_are_bounded_in_rate() -> None:
    """At ten a second, a few pass in a quarter of one."""
    court = Court(Oracle(completion(VERDICT)), every_turns_count=1)
    court.judge = Judge(court.runtime, court.judge._open_asker, JudgeSettings(every_turns_count=1, rate_per_s=10.0))
    for number in range(20):
        court.takes_turns(f"p{number}")
    began_s = asyncio.get_running_loop().time()
    await court.sits_until(lambda: len(court.oracle.asked) == 4)
    assert asyncio.get_running_loop().time() - began_s >= 0.28


async def test_each_step_can_be_judged() -> None:
    """ORBIT does so: no bound on the rate, no turn left out; the judge is told the step and the round."""
    court = Court(Oracle(completion(VERDICT)), every_turns_count=1)
    settings = JudgeSettings(every_turns_count=1, rate_per_s=float("inf"), prompt="{task}{transcript} {step}/{round}")
    court.judge = Judge(court.runtime, court.judge._open_asker, settings)
    for number in range(1, 13):
        court.takes_turns("a")
        await court.sits_until(lambda number=number: court.judge.verdict_counts["failure"] == number)
        assert court.oracle.asked[-1]["messages"][0]["content"].endswith(f" {number}/2")
    program = court.driver.program("a")
    assert program.verdicts.failure_count == 12
    assert program.level is Level.LOWEST


async def test_open_questions_are_bounded() -> None:
    """The rest wait for an answer to one of them."""
    court = Court(Oracle(completion(VERDICT)), every_turns_count=1, asked_count=3)
    court.oracle.may_answer.clear()
    for number in range(8):
        court.takes_turns(f"p{number}")
    await court.sits_until(lambda: len(court.oracle.asked) == 3 and court.judge.waiting_count == 5)


async def test_a_verdict_on_who_ended_meanwhile_is_nobody_s() -> None:
    """It does not count for the next program of that id either."""
    court = Court(Oracle(completion(VERDICT)), every_turns_count=1)
    court.oracle.may_answer.clear()
    court.takes_turns("a")

    def asked() -> bool:
        if not court.oracle.asked:
            return False
        court.runtime.release("a")
        court.driver.takes_turn("a", 10)
        court.oracle.may_answer.set()
        return bool(court.judge.verdict_counts["failure"])

    await court.sits_until(lambda: court.driver.scheduler.programs.get("a") is not None and asked())
    assert court.driver.program("a").level is None


def test_everything_is_counted() -> None:
    """All existing names are there from the beginning."""
    court = Court(Oracle())
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in JudgeCollector(court.judge).collect()
        for sample in family.samples
    }
    assert {name for name, *_ in samples} == {
        *(f"thunderagent_judge_{name}" for name in ("waiting", "asking")),
        *(f"thunderagent_judge_{name}_total" for name in ("verdicts", "failures", "dropped", "tokens", "seconds")),
    }
    assert {why for name, *whys in samples for why in whys if "failures" in name} == set(Failure)
    assert not any(samples.values())
    assert repr(court.judge) == "<Judge: 0 cases wait, 0 are asked about>"


# --- the trajectory of all agents of a program


def chat(*said: tuple[str, str]) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}).encode()


MAIN_CHAT = chat(("system", "rules"), ("user", "find the walks"), ("assistant", "I ask the surfer"))
SUB_CHAT = chat(("user", "open the page"), ("assistant", "it has a table"))


async def test_a_sub_agents_turn_does_not_hide_the_users_task() -> None:
    """The task is the first agent's, and what each did is under its name."""
    court = Court(Oracle(completion(VERDICT)), every_turns_count=2, prompt="{task}|{transcript}|{round}{budget}")
    for branch, body in (("", MAIN_CHAT), ("surfer", SUB_CHAT)):
        court.driver.takes_turn("a", 10)
        court.judge.turn_seen("a", body, branch)
    await court.sits_until(lambda: court.oracle.asked)
    task, steps, progress = court.oracle.asked[0]["messages"][0]["content"].split("|")
    assert task == "find the walks"
    assert steps.index("I ask the surfer") < steps.index("surfer was asked: open the page") < steps.index("a table")
    assert progress == "2"


async def test_the_judge_is_told_how_many_rounds_there_are() -> None:
    court = Court(Oracle(completion(VERDICT)), every_turns_count=1, round_limit_count=20)
    court.takes_turns("a")
    await court.sits_until(lambda: court.oracle.asked)
    assert "round 2 of at most 20, and" in court.oracle.asked[0]["messages"][0]["content"]


def test_memory_of_programs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one program the first agent and the last others; of all, those heard last; of an ended one, nothing."""
    court = Court(Oracle(), every_turns_count=100)
    for number in range(judge.MAX_AGENTS_COUNT + 3):
        court.driver.takes_turn("a", 10)
        court.judge.turn_seen("a", CHAT, f"b{number}")
    kept = court.judge._bodies["a"]
    assert [*kept] == ["b0", *(f"b{number}" for number in range(4, judge.MAX_AGENTS_COUNT + 3))]
    assert court.judge._bodies_bytes == len(kept) * len(CHAT)
    monkeypatch.setattr(judge, "MAX_KEPT_BYTES", judge.MAX_AGENTS_COUNT * len(CHAT))
    court.takes_turns("b")
    assert [*court.judge._bodies] == ["b"]
    court.runtime.release("b")
    assert court.judge._bodies == {}
    assert court.judge._bodies_bytes == 0


@pytest.mark.parametrize("limit_chars", [0, 10, 100, 1000])
def test_a_trajectory_keeps_to_its_limit(limit_chars: int) -> None:
    long = chat(("user", "t" * 2000), *(("assistant", "s" * 300) for _ in range(20)))
    read = transcript_of_all([("", long), ("x" * 200, long), ("y", long)], limit_chars)
    assert read is None or len(read.task) + len(read.steps) <= limit_chars + LEAST_CHARS
    assert transcript_of_all([("", b"{}"), ("y", b"[")], limit_chars) is None
