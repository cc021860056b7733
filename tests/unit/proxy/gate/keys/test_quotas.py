"""The quotas of a key: turns and tokens wait for their minute, a program too many is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from prometheus_client import CollectorRegistry

from thunderagent.errors import KeyHeldLimitError, KeyNeededError, KeyProgramsLimitError, RateLimitedError
from thunderagent.programs.messages import Grant, Reason, Reject, Tick, TurnAsk, TurnEnd, TurnProgressed, TurnUnverified
from thunderagent.proxy.gate.guard import Guard, GuardSettings
from thunderagent.proxy.gate.held import NO_LIMITS as NO_HELD_LIMITS
from thunderagent.proxy.gate.held import HeldTurns
from thunderagent.proxy.gate.keys import Key, KeyLimits, Keyring, check_key
from thunderagent.proxy.gate.keys.keyring import digest_of
from thunderagent.proxy.gate.keys.quotas import UNSAID_TOKENS, Quotas
from thunderagent.proxy.gate.login import Logins
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.wire.aiohttp_request import TARGET

if TYPE_CHECKING:
    from collections.abc import Coroutine


class World:
    """Quotas on a clock that a test moves, and the live programs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.live: set[str] = set()
        self.registry = CollectorRegistry()
        self.quotas = Quotas(
            self.registry,
            self.live.__contains__,
            lambda key: key.limits.held_turns_count or 100,
            clock=lambda: self.now_s,
        )

    def limited(self, limit: str) -> float:
        return self.registry.get_sample_value("thunderagent_key_limited_total", {"limit": limit}) or 0.0

    async def begins(self, key: Key) -> bool:
        """Begin a turn; return whether it may begin at once."""
        waiting = asyncio.create_task(self.quotas.wait(key))
        await asyncio.sleep(0)
        begun = waiting.done()
        waiting.cancel()
        return begun

    def opens(self, key: Key, program_id: str) -> None:
        check_key(key, Keyring(), for_admin=False)  # the guard does this for the request
        self.quotas.open_program(program_id)
        self.live.add(program_id)


def key(name: str = "ci", **limits: float) -> Key:
    return Key(name, b"", is_admin=False, limits=KeyLimits(**limits))  # type: ignore[arg-type]


async def test_turns_of_a_minute_begin_at_once_and_then_one_after_the_other() -> None:
    """Another key has its own turns, and a client that gives up leaves no debt."""
    world, ours = World(), key(turns_per_min=6)
    assert [await world.begins(ours) for _ in range(8)] == [True] * 6 + [False] * 2
    assert await world.begins(key("other", turns_per_min=6))
    assert world.limited("turns") == 2
    world.now_s += 9.9
    assert not await world.begins(ours)
    world.now_s += 0.2
    assert [await world.begins(ours), await world.begins(ours)] == [True, False]


async def test_waiting_turns_go_on_in_the_order_in_which_they_came() -> None:
    """On a real clock 1,200 a minute are one each 50 ms."""
    quotas, order = Quotas(CollectorRegistry(), lambda _: False, lambda _: 100), []
    ours = key(turns_per_min=1200)
    for _ in range(1200):
        await quotas.wait(ours)

    async def begin(number: int) -> None:
        await quotas.wait(ours)
        order.append(number)

    await asyncio.gather(*(begin(number) for number in range(3)))
    assert order == [0, 1, 2]


async def test_only_so_many_turns_of_a_key_wait() -> None:
    """The limit of held turns also limits this line; a client that leaves makes room."""
    world, ours = World(), key(turns_per_min=1, held_turns_count=2)
    assert await world.begins(ours)
    waiting = [asyncio.create_task(world.quotas.wait(ours)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(KeyHeldLimitError, match="2 turns of this key wait"):
        await world.quotas.wait(ours)
    waiting[1].cancel()
    await asyncio.gather(waiting[1], return_exceptions=True)
    assert not await world.begins(ours)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)


async def test_tokens_are_counted_at_the_end_of_a_turn_and_may_be_overdrawn() -> None:
    """The next turn waits until the debt is gone; a turn that was abandoned while it was held took none."""
    world, ours = World(), key(tokens_per_min=600)
    check_key(ours, Keyring(), for_admin=False)
    assert await world.begins(ours)
    for turn_id in (1, 2):
        world.quotas.heard(TurnAsk(now_s=0.0, turn_id=turn_id, program_id="p"), [])
    world.quotas.heard(
        TurnAsk(now_s=0.0, turn_id=3, program_id="p"), [Reject(3, "p", Reason.TOO_MANY_PROGRAMS)]
    )  # it has no end
    world.quotas.heard(TurnEnd(now_s=0.0, turn_id=1, prompt_tokens=700, output_tokens=200), [])
    world.quotas.heard(TurnEnd(now_s=0.0, turn_id=2, outcome="abandoned"), [])
    assert world.quotas._turns == {}
    assert not await world.begins(ours)
    assert world.limited("tokens") == 1
    world.now_s += 30.0  # 300 tokens, the debt of the bucket
    assert not await world.begins(ours)
    world.now_s += 0.2
    assert await world.begins(ours)


@pytest.mark.parametrize("end", [TurnEnd(now_s=0.0, turn_id=1), TurnEnd(now_s=0.0, turn_id=1, outcome="abandoned")])
async def test_a_turn_that_reports_no_usage_counts_by_its_sizes(end: TurnEnd) -> None:
    world, ours = World(), key(tokens_per_min=600)
    check_key(ours, Keyring(), for_admin=False)
    assert await world.begins(ours)
    granted = {number: [Grant(number, "p", "r", Reason.FITS)] for number in (1, 2)}
    for event, decisions in (
        (TurnAsk(now_s=0.0, turn_id=1, program_id="p", prompt_bytes=2000), []),
        (Tick(0.0), granted[1]),
        (TurnProgressed(0.0, 1, 60), []),
        (TurnProgressed(0.0, 1, 130), []),
        (end, []),
        (TurnAsk(now_s=0.0, turn_id=2, program_id="p", prompt_bytes=2000), granted[2]),
        (TurnEnd(now_s=0.0, turn_id=2, outcome="failed"), []),
    ):
        world.quotas.heard(event, decisions)
    assert not await world.begins(ours)
    world.now_s += 2.9  # 500 and 130 tokens of 600: a debt of 30, which is 3 s
    assert not await world.begins(ours)
    world.now_s += 0.3
    assert await world.begins(ours)


@pytest.mark.parametrize(
    ("end", "is_trusted", "used_tokens"),
    [
        (TurnEnd(now_s=0.0, turn_id=1, prompt_tokens=0, output_tokens=0), False, 700),
        (TurnEnd(now_s=0.0, turn_id=1, prompt_tokens=700, output_tokens=50), False, 750),
        (TurnEnd(now_s=0.0, turn_id=1, outcome="failed"), False, 700),
        (TurnEnd(now_s=0.0, turn_id=1, outcome="abandoned"), False, 700),
        (TurnEnd(now_s=0.0, turn_id=1, prompt_tokens=650, output_tokens=0), True, 650),
        (TurnEnd(now_s=0.0, turn_id=1, outcome="failed"), True, 0),
    ],
)
async def test_granted_tokens_count_until_a_trusted_report_corrects_them(
    end: TurnEnd, is_trusted: bool, used_tokens: int
) -> None:
    """A stranger's report of less is not believed, and one of more is."""
    world, ours = World(), key(tokens_per_min=600)
    check_key(ours, Keyring(), for_admin=False)
    assert await world.begins(ours)
    world.quotas.heard(
        TurnAsk(now_s=0.0, turn_id=1, program_id="p", prompt_bytes=2800), [Grant(1, "p", "r", Reason.FITS)]
    )
    assert not await world.begins(ours)  # 700 of 600 tokens, before it has ended
    if not is_trusted:
        world.quotas.heard(TurnUnverified(0.0, 1), [])
    world.quotas.heard(end, [])
    debt_s = max(0, used_tokens - 600) / 10
    world.now_s += max(0.0, debt_s)
    assert await world.begins(ours) is (debt_s == 0)
    world.now_s += 0.2
    assert await world.begins(ours)


async def test_a_turn_of_no_size_counts_as_one_of_some() -> None:
    world, ours = World(), key(tokens_per_min=UNSAID_TOKENS)
    check_key(ours, Keyring(), for_admin=False)
    assert await world.begins(ours)
    world.quotas.heard(TurnAsk(now_s=0.0, turn_id=1, program_id=None), [Grant(1, None, "r", Reason.FITS)])
    assert not await world.begins(ours)
    world.quotas.heard(
        TurnEnd(now_s=0.0, turn_id=1, prompt_tokens=5, output_tokens=5), []
    )  # its engine says that it was small
    assert await world.begins(ours)


async def test_bytes_count_as_they_flow() -> None:
    world, ours = World(), key(tokens_per_min=600)
    for limits, is_counted in ((key(), False), (ours, True)):
        check_key(limits, Keyring(), for_admin=False)
        assert (world.quotas.bytes_counter() is not None) is is_counted
    count = world.quotas.bytes_counter()
    assert count is not None
    assert await world.begins(ours)
    count(4 * 600)
    assert not await world.begins(ours)


async def test_a_program_that_a_request_names_counts_before_it_lives_and_after() -> None:
    world, ours = World(), key(programs_count=1)
    check_key(ours, Keyring(), for_admin=False)
    with world.quotas.naming("a"):
        with pytest.raises(KeyProgramsLimitError), world.quotas.naming("b"):
            pass
        with world.quotas.naming("a"):
            pass
        with pytest.raises(KeyProgramsLimitError):
            world.quotas.open_program("b")
        assert world.quotas.programs_count("ci") == 1
    world.quotas.open_program("b")


async def test_a_program_too_many_is_refused_until_another_has_ended() -> None:
    """A known program continues, whatever key began it; programs of another key do not count."""
    world, ours = World(), key(programs_count=2)
    world.opens(ours, "a")
    world.opens(key("other", programs_count=2), "x")
    world.opens(ours, "b")
    world.opens(ours, "a")
    with pytest.raises(KeyProgramsLimitError, match="this key has 2 programs"):
        world.opens(ours, "c")
    assert world.limited("programs") == 1
    assert world.quotas.programs_count("ci") == 2
    world.opens(ours, "x")
    world.live.remove("a")
    world.opens(ours, "c")
    assert world.quotas.programs_count("ci") == 2


async def test_changed_limits_hold_from_the_next_turn_on() -> None:
    """This is as after a change of the key file; programs stay counted."""
    world = World()
    world.opens(key(programs_count=1), "a")
    assert await world.begins(key(turns_per_min=6))
    assert [await world.begins(key(turns_per_min=60)) for _ in range(20)] == [True] * 20
    with pytest.raises(KeyProgramsLimitError):
        world.opens(key(programs_count=1), "b")


@pytest.mark.parametrize("waits_for", ["tokens", "rate"])
async def test_a_turn_whose_key_is_revoked_while_it_waits_is_refused(waits_for: str) -> None:
    """One whose key is still there goes on."""
    registry, revoked, kept = CollectorRegistry(), key("revoked", tokens_per_min=60_000), key("kept", turns_per_min=60)
    keyring = Keyring(has_file=True)
    keyring.set_filed([replace(revoked, digest=digest_of("revoked")), replace(kept, digest=digest_of("kept"))])
    quotas = Quotas(registry, lambda _: False, lambda _: 100)
    settings = GuardSettings(rate_limit_per_s=2, rate_limit_burst_count=1)
    guard = Guard(settings, keyring, registry, Logins(), HeldTurns(NO_HELD_LIMITS, registry), quotas)
    served: list[str] = []

    async def serve(request: web.Request) -> web.Response:
        served.append(request.headers["X-ThunderAgent-Key"])
        return web.Response()

    handle = guard.before(serve, "POST", "/v1/chat/completions")

    def asked(name: str) -> Coroutine[Any, Any, web.StreamResponse]:
        request = make_mocked_request("POST", "/v1/chat/completions", headers={"X-ThunderAgent-Key": name})
        request[TARGET] = Target.parse("/v1/chat/completions", "")
        return handle(request)

    if waits_for == "tokens":
        check_key(revoked, keyring, for_admin=False)
        await quotas.wait(revoked)
        quotas.heard(TurnAsk(now_s=0.0, turn_id=1, program_id="p"), [])
        quotas.heard(TurnEnd(now_s=0.0, turn_id=1, prompt_tokens=60_500, output_tokens=0), [])
    else:
        await asyncio.gather(asked("revoked"), asked("kept"))
        served.clear()
    waiting = asyncio.create_task(asked("revoked"))
    going_on = asyncio.create_task(asked("kept"))
    await asyncio.sleep(0)
    assert not waiting.done()
    keyring.set_filed(key for key in keyring.filed if key.name == "kept")
    with pytest.raises(KeyNeededError):
        await waiting
    await going_on
    assert served == ["kept"]


@pytest.mark.parametrize("is_revoked", [False, True])
@pytest.mark.parametrize("waits_for", ["tokens", "rate"])
async def test_a_lease_waits_for_a_rate_as_long_as_its_patience(waits_for: str, *, is_revoked: bool) -> None:
    """Then it is refused; one whose key is revoked meanwhile gets nothing."""
    registry, own = CollectorRegistry(), replace(key("ci", tokens_per_min=60_000), digest=digest_of("ci"))
    rate: dict[str, Any] = {"rate_limit_per_s": 1.0, "rate_limit_burst_count": 1} if waits_for == "rate" else {}
    keyring = Keyring(has_file=True)
    keyring.set_filed([own])
    quotas = Quotas(registry, lambda _: False, lambda _: 100)
    guard = Guard(GuardSettings(**rate), keyring, registry, Logins(), HeldTurns(NO_HELD_LIMITS, registry), quotas)
    request = make_mocked_request("POST", "/leases")
    check_key(own, keyring, for_admin=False)
    assert await guard.wait_for_rate(request, 0.01) == 0.0
    if waits_for == "tokens":
        quotas.heard(TurnAsk(now_s=0.0, turn_id=1, program_id="p"), [])
        quotas.heard(TurnEnd(now_s=0.0, turn_id=1, prompt_tokens=61_000, output_tokens=0), [])
    with pytest.raises(RateLimitedError, match=r"patience of 0.01 s") as refused:
        await guard.wait_for_rate(request, 0.01)
    assert refused.value.retry_after_s >= 1
    waiting = asyncio.create_task(guard.wait_for_rate(request, None))
    await asyncio.sleep(0)
    if is_revoked:
        keyring.set_filed([])
        with pytest.raises(KeyNeededError):
            await waiting
    else:
        assert await waiting > 0


async def test_a_key_without_limits_is_never_asked() -> None:
    world = World()
    for number in range(100):
        world.opens(key(), f"p{number}")
    assert world.quotas._accounts == {}
