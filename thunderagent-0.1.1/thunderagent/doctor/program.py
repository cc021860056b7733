"""Two turns of one program through a proxy: their program, their replicas, and whether the second hit the cache."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from thunderagent.doctor.asking import NO_ANSWER, Answer, Asker
from thunderagent.doctor.findings import Finding, fault, ok, warning
from thunderagent.doctor.probes import Message, send, text_of, usage_of, words

DEFAULT_HEADER = "X-Program-ID"
SUBJECT = "two turns"
MAX_TOKENS = 16
HIT_RATIO = 0.5
"""Of the first turn's prompt, with which the second begins: only whole blocks are cached, and chat templates may change
the last message."""


@dataclass(slots=True)
class Trial:
    """The two turns' result. `by_path`: the same with the program's id in the path, if the header named nobody."""

    program_id: str
    header: str
    first: Answer = NO_ANSWER
    second: Answer = NO_ANSWER
    by_path: Answer | None = None
    released: Answer = NO_ANSWER


async def try_program(asker: Asker, model: str, limit_tokens: int | None, header: str, key: dict[str, str]) -> Trial:
    """Send two turns of a program like a client that names it in `header`, and release it. `key` is sent, too."""
    trial = Trial(f"doctor-{secrets.token_hex(6)}", header)
    headers = {header: trial.program_id, **key}
    messages: list[Message] = [
        {"role": "system", "content": words(limit_tokens)},
        {"role": "user", "content": "Say one word."},
    ]
    try:
        trial.first = await send(asker, model, messages, max_tokens=MAX_TOKENS, headers=headers)
        if not trial.first.is_good:
            return trial
        messages += [{"role": "assistant", "content": text_of(trial.first)}, {"role": "user", "content": "Go on."}]
        trial.second = await send(asker, model, messages, max_tokens=MAX_TOKENS, headers=headers)
        if _named(trial.second) != trial.program_id:
            path = f"/p/{quote(trial.program_id)}"
            trial.by_path = await send(asker, model, messages[:1], max_tokens=1, prefix=path, headers=key)
    finally:
        trial.released = await asker.post("/programs/release", {"program_id": trial.program_id}, key)
    return trial


def findings_of(trial: Trial) -> Iterator[Finding]:
    """Yield findings on the two turns."""
    for number, answer in (("first", trial.first), ("second", trial.second)):
        if not answer.is_good:
            yield fault(
                "turns_answered",
                SUBJECT,
                f"The {number} turn through the proxy failed: {answer.told()}.",
                "see the proxy's log for this program, and the findings above on its engines",
            )
            return
    yield from _whose(trial)
    yield from _hit(trial)
    if _named(trial.second) == trial.program_id and not trial.released.json().get("released"):
        yield warning(
            "release",
            SUBJECT,
            f"The program was not released: {trial.released.told()}.",
            "let POST /programs/release through to the proxy, and send it with the key of the turns",
        )


def _named(answer: Answer) -> str:
    return answer.headers.get("X-Program-ID", "")


def _whose(trial: Trial) -> Iterator[Finding]:
    named, source = _named(trial.second), trial.second.headers.get("X-Program-ID-Source", "")
    if named == trial.program_id:
        yield ok("identity", SUBJECT, f"They were counted as program {named}, by {source}.")
        return
    whose = f"as program {named}, by {source}" if named else "as nobody's"
    text = f"{trial.header} names their program, and they were counted {whose}."
    reached_by_path = trial.by_path is not None and _named(trial.by_path) == trial.program_id
    if trial.header.lower() != DEFAULT_HEADER.lower():
        remedy = f"have the proxy read it (--program-headers {trial.header}), or send {DEFAULT_HEADER}"
    elif reached_by_path:
        remedy = (
            "something before the proxy drops the header: let it through, or put the id into the base URL, as /p/ID/v1"
        )
    else:
        remedy = (
            "this address is not the proxy's, or something before it drops the header and the path: go to the proxy"
        )
    yield fault("identity", SUBJECT, text, remedy)


def _hit(trial: Trial) -> Iterator[Finding]:
    places = [answer.headers.get("X-Replica-ID", "") for answer in (trial.first, trial.second)]
    if places[0] != places[1]:
        yield warning(
            "same_replica",
            SUBJECT,
            f"The first ran on {places[0]}, the second on {places[1]}.",
            "turns of one program stay together unless it was paused or the replica left: check the program's id and "
            "the policy (passthrough keeps no program together)",
        )
    first, second = usage_of(trial.first), usage_of(trial.second)
    if first is None or second is None or second.cached_tokens is None:
        yield warning(
            "second_turn_hit",
            SUBJECT,
            f"The second ran on {places[1]}; whether it hit is unknown: its engine does not say what was cached.",
            "start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report",
        )
        return
    share = f"{second.cached_tokens:,} of its {second.prompt_tokens:,} prompt tokens"
    if second.cached_tokens >= HIT_RATIO * first.prompt_tokens:
        yield ok("second_turn_hit", SUBJECT, f"The second hit on {places[1]}: {share} came from the prefix cache.")
        return
    yield fault(
        "second_turn_hit",
        SUBJECT,
        f"The second missed on {places[1]}: {share} came from the prefix cache.",
        "see above whether prefix caching is on and each address is one engine; if so, the chat template may change "
        "earlier messages, or other programs use the memory",
    )
