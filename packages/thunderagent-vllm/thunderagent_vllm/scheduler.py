"""The scheduler for `--scheduler-cls thunderagent_vllm.scheduler.Scheduler`.

Theory of operation
-------------------
`Scheduler(...)` is a factory: it makes a subclass of the scheduler that vLLM would take, so that asynchronous
scheduling stays on. On a version of vLLM that was not tried it makes vLLM's own, and says so in the log.

The subclass is thin: each hook calls vLLM's method as it is, and `Agents` before or after it. vLLM's `schedule` is
never copied. Ours runs inside `_guarded`: an exception there would end the engine, so it turns the plugin off instead.
Then all pins are let go, priorities are as they came, and what waits is ordered as by the stock scheduler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from thunderagent_vllm import PROTOCOL, __version__, surface
from thunderagent_vllm.agents import Agents
from thunderagent_vllm.queue import ProgramQueue
from thunderagent_vllm.settings import Settings, read_settings

log = logging.getLogger("vllm.thunderagent")

MOST_LISTED = 1000
"""Pins that a report lists."""

_GOES_FIRST = 1 << 62
"""The priority of a victim, while vLLM looks for one."""


def Scheduler(*args: Any, **kwargs: Any) -> Any:  # noqa: N802 - vLLM calls what it is told is a class
    """Return a scheduler that knows programs, or vLLM's own where that cannot be."""
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    _add_utility()
    base, why_not = _base_of(vllm_config)
    settings = read_settings((getattr(vllm_config, "additional_config", None) or {}).get("thunderagent"))
    version = surface.vllm_version()
    if settings.mode == "off":
        why_not = "its mode is off"
    elif why_not is None and settings.mode != "force" and version[:2] not in surface.TRIED:
        why_not = f"vLLM {'.'.join(map(str, version))} was not tried; the mode `force` takes it nevertheless"
    elif why_not is None and (missing := surface.missing_names(base)):
        why_not = f"vLLM has no {', '.join(missing)}"
    if why_not is not None:
        log.warning("thunderagent: vLLM's own scheduler runs: %s", why_not)
        made = base(*args, **kwargs)
        made.thunderagent_why_not = why_not
        return made
    log.info("thunderagent: the scheduler knows programs: %s", settings)
    return programs_class(base)(*args, thunderagent_settings=settings, **kwargs)


def _base_of(vllm_config: Any) -> tuple[type, str | None]:
    """Return the class that vLLM would take, and why it must be that, if it must."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler

    is_async = bool(vllm_config.scheduler_config.async_scheduling)
    if getattr(vllm_config, "diffusion_config", None) is not None:
        from vllm.v1.core.sched import diffusion_scheduler

        name = "DiffusionAsyncScheduler" if is_async else "DiffusionScheduler"
        return getattr(diffusion_scheduler, name), "the model is a diffusion model"
    return (AsyncScheduler if is_async else SyncScheduler), None


def _add_utility() -> None:
    """Let the API server call `EngineCore.thunderagent_programs`."""
    from vllm.v1.engine.core import EngineCore

    def thunderagent_programs(self: Any, ops: list[Any]) -> dict[str, Any]:
        scheduler = self.scheduler
        if hasattr(scheduler, "thunderagent_tell"):
            answer: dict[str, Any] = scheduler.thunderagent_tell(ops)
            return answer
        why_not = getattr(scheduler, "thunderagent_why_not", "vLLM's own scheduler runs")
        return {**_versions(), "on": False, "why_not": why_not}

    EngineCore.thunderagent_programs = thunderagent_programs


def _versions() -> dict[str, Any]:
    return {"protocol": PROTOCOL, "version": __version__, "vllm": ".".join(map(str, surface.vllm_version()))}


@cache
def programs_class(base: Any) -> Any:  # noqa: C901 - one class, whose base is known when vLLM runs
    """Return the subclass of one of vLLM's schedulers."""

    class ProgramScheduler(base):  # type: ignore[misc]
        """vLLM's scheduler, with `Agents` beside it."""

        def __init__(
            self,
            *args: Any,
            thunderagent_settings: Settings,
            thunderagent_clock: Callable[[], float] = time.monotonic,
            **kwargs: Any,
        ) -> None:
            super().__init__(*args, **kwargs)
            self._clock = thunderagent_clock
            self._stock_policy = self.policy
            self._has_priorities = self.policy.name == "PRIORITY"
            self._on = self._is_set_up = self._acts = self._bounds = False
            self._looks_at = (False, False)
            self._victim: tuple[Any, int] | None = None
            self._failure_count = self._step_count = 0
            self._why_not = ""
            self._hook_s = 0.0
            self._now_s = self._clock()
            self._guarded(self._set_up, thunderagent_settings)

        def _set_up(self, settings: Settings) -> None:
            self._surface = seen = surface.Surface(self)
            self.agents = Agents(
                settings,
                seen,
                pool_blocks=seen.pool_blocks,
                block_tokens=seen.block_tokens,
                budget_tokens=seen.budget_tokens,
            )
            self._is_set_up = True
            self._acts = settings.mode != "watch"
            self._bounds = self._acts and seen.can_bound and (settings.order or settings.shrink)
            self._small_tokens = seen.generated_tokens
            self._allocate = self.kv_cache_manager.allocate_slots
            if self._acts and settings.order:
                self._stock_queue = type(self.waiting)
                self.waiting = ProgramQueue(self._waiting_key)
                self.policy = type(self.policy).PRIORITY
            self._on = True

        # --- vLLM's methods

        def add_request(self, request: Any) -> None:
            if self._on and request.request_id not in self.requests:
                self._guarded(self._arrived, request)
            super().add_request(request)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            if self._on:
                begun_s = time.perf_counter()
                self._guarded(self._begin_step)
                self._hook_s += time.perf_counter() - begun_s
            elif isinstance(self.waiting, ProgramQueue):
                self._give_queue_back()
            output = super().schedule(*args, **kwargs)
            if self._victim is not None:
                self._restore_victim()
            return output

        def _bounded_chunk(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
            """Stand in for `_reserve_prefill_lookahead`."""
            if num_new_tokens > self._small_tokens and self._on:
                tokens = self._guarded(self._chunk_tokens, request, num_computed_tokens, num_new_tokens)
                if tokens is not None:
                    num_new_tokens = tokens
            bounded: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
            return bounded

        def _update_after_schedule(self, scheduler_output: Any) -> None:
            super()._update_after_schedule(scheduler_output)
            if self._on:
                begun_s = time.perf_counter()
                self._guarded(self._count_step, scheduler_output)
                self._hook_s += time.perf_counter() - begun_s

        def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
            if self._victim is not None:
                self._restore_victim()
            if self._on:
                self._guarded(self.agents.preempted, request.request_id)
            super()._preempt_request(request, *args, **kwargs)

        def _free_request_blocks(self, request: Any) -> None:
            if self._on and request.is_finished():
                self._guarded(self._ended, request)
            super()._free_request_blocks(request)

        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
            if self._on:  # vLLM declines while anybody holds a block
                self._guarded(self.agents.pins.drop_all)
            done: bool = super().reset_prefix_cache(*args, **kwargs)
            return done

        # --- ours, each inside _guarded

        def _arrived(self, request: Any) -> None:
            seen = self._surface
            tokens = seen.uncached_tokens(request)
            session_id = getattr(request, "session_id", None)
            self.agents.arrived(request.request_id, session_id, tokens, seen.hint(request), self._clock())

        def _begin_step(self) -> None:
            agents = self.agents
            now_s = self._now_s = self._clock()
            self._step_count += 1
            agents.pins.expire(now_s)
            is_reading = bool(agents.reading)
            here_count = self._waiting_here_count()
            is_short = not self._surface.has_room(is_reading=is_reading, waiting_here_count=here_count)
            self._look_at(chunks=is_reading or is_short, memory=is_short)
            if not self._acts or not agents.settings.order:
                agents.begin_step(now_s, None, head_fits=False)
                return
            if not is_reading:  # nobody who runs gives way, so who waits is put in order when vLLM looks there
                agents.begin_step(now_s, None, head_fits=False)
                self.waiting.before_peek = self._peeks
                return
            head_call, head_fits = None, False
            if self.waiting:
                self._sort_waiting()
                head = self.waiting.head()
                head_call = agents.calls.get(head.request_id)
                head_fits = head_call is not None and self._surface.head_fits(head, head_call.uncached_tokens)
                self.waiting.before_peek = self._peeks
            agents.begin_step(now_s, head_call, head_fits)
            if len(self.running) > 1:
                self.running.sort(key=self._running_key)

        def _peeks(self) -> None:
            """Prepare for the requests that wait, at which vLLM looks only now, if at all."""
            if self._on:
                self._look_at(chunks=True, memory=True)
                self._guarded(self._sort_waiting)

        def _sort_waiting(self) -> None:
            self.agents.look(self._now_s)
            self.waiting.sort(self._now_s)

        def _waiting_here_count(self) -> int:
            """Return how many wait where we are told when vLLM looks at them."""
            return len(self.waiting) if isinstance(self.waiting, ProgramQueue) else 0

        def _look_at(self, *, chunks: bool, memory: bool) -> None:
            """Stand in for vLLM's methods that choose chunks and allocate blocks, or let it call its own.

            vLLM calls both for each request that runs; with many that generate, and blocks for all, that is most of
            what we cost.
            """
            looks_at = (chunks and self._bounds, memory and self._acts)
            if looks_at == self._looks_at:
                return
            self._looks_at = looks_at
            own_chunks = super()._reserve_prefill_lookahead
            self._reserve_prefill_lookahead = self._bounded_chunk if looks_at[0] else own_chunks
            self.kv_cache_manager.allocate_slots = self._allocate_slots if looks_at[1] else self._allocate

        def _running_key(self, request: Any) -> tuple[int, float]:
            return self.agents.running_key(request.request_id)

        def _waiting_key(self, request: Any, now_s: float) -> tuple[Any, ...]:
            priority = request.priority if self._has_priorities else 0
            return self.agents.waiting_key(request.request_id, priority, request.arrival_time, now_s)

        def _chunk_tokens(self, request: Any, computed_tokens: int, wanted_tokens: int) -> int:
            if request.has_encoder_inputs:
                return wanted_tokens
            seen = self._surface
            is_running = seen.is_running(request)
            return self.agents.chunk_tokens(
                request.request_id,
                wanted_tokens,
                seen.fitting_tokens(request, computed_tokens) if is_running else None,
                is_alone=seen.is_alone(),
                generating_count=max(0, len(self.running) - len(self.agents.reading)),
            )

        def _count_step(self, output: Any) -> None:
            agents, now_s = self.agents, self._now_s
            pinned_count = len(agents.pins)
            for request_id in self._surface.admitted_ids(output):
                agents.started(request_id, now_s, is_reading=True)
            if agents.reading:
                scheduled_tokens = output.num_scheduled_tokens
                for request_id in list(agents.reading):
                    tokens = scheduled_tokens.get(request_id)
                    if tokens is not None:
                        is_through = not self.requests[request_id].is_prefill_chunk
                        agents.read(request_id, tokens, now_s, is_through=is_through)
            if len(agents.pins) != pinned_count:
                self._order_changed()

        def _ended(self, request: Any) -> None:
            seen = self._surface
            blocks = None
            if self._acts and seen.can_pin and getattr(request, "session_id", None) and seen.is_kept(request):
                blocks = seen.cached_blocks(request)
            self.agents.ended(request.request_id, request.num_output_tokens, blocks, self._clock())
            self._order_changed()

        def _order_changed(self) -> None:
            if isinstance(self.waiting, ProgramQueue):
                self.waiting.changed()

        # --- memory

        def _allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            """Allocate as vLLM does; if that fails, let pins go, and choose whom vLLM preempts."""
            call = self.agents.calls.get(request.request_id)
            is_new = self._on and call is not None and not call.was_started and not request.num_computed_tokens
            if is_new and self._guarded(self._must_wait, request, kwargs):
                return None
            blocks = self._allocate(request, *args, **kwargs)
            if blocks is not None or not self._on:
                return blocks
            is_running = self._guarded(self._surface.is_running, request)
            for program_id in self._guarded(self._pins_to_take, request, is_running, kwargs) or ():
                self._guarded(self.agents.pins.drop, program_id, "given_back")
                blocks = self._allocate(request, *args, **kwargs)
                if blocks is not None or not self._on:
                    return blocks
            if is_running and self.agents.settings.order:
                self._guarded(self._choose_victim)
            return None

        def _must_wait(self, request: Any, arguments: dict[str, Any]) -> bool:
            """Return whether a waiting request fits, if at all, only into room that others will need to grow."""
            agents = self.agents
            running_count = len(self.running)
            room_count = agents.room_blocks(request.request_id, running_count, self._now_s)
            if not room_count:
                return False
            missing_count = self._surface.missing_block_count(request, arguments) + room_count
            if missing_count <= 0:
                return False
            found = agents.pins_to_take(request.request_id, self._now_s, is_running=False, runs_any=True)
            if sum(map(agents.pins.block_count_of, found)) < missing_count:
                return True
            for program_id in found:
                if missing_count <= 0:
                    break
                missing_count -= agents.pins.block_count_of(program_id)
                agents.pins.drop(program_id, "given_back")
            return False

        def _pins_to_take(self, request: Any, is_running: bool, arguments: dict[str, Any]) -> list[str]:
            pins = self.agents.pins
            if not pins:
                return []
            found = self.agents.pins_to_take(
                request.request_id, self._now_s, is_running=is_running, runs_any=bool(self.running)
            )
            if not is_running and found and self.running:
                # Not in vain: a pin that goes helps nobody if the request does not fit even so.
                there_count = sum(map(pins.block_count_of, found))
                if there_count < self._surface.missing_block_count(request, arguments):
                    return []
            return found

        def _choose_victim(self) -> None:
            """Have vLLM preempt the lowest level, and of equals who holds most: its own rule takes the priority."""
            if self._victim is not None:
                self._restore_victim()
            victim = max(self.running, key=self._victim_key)
            self._victim = victim, victim.priority
            victim.priority = _GOES_FIRST

        def _victim_key(self, request: Any) -> tuple[Any, ...]:
            held_count = self._surface.held_block_count(request)
            priority = request.priority if self._has_priorities else 0
            return self.agents.victim_key(request.request_id, priority, held_count, request.arrival_time)

        def _restore_victim(self) -> None:
            if self._victim is not None:
                request, request.priority = self._victim[0], self._victim[1]
                self._victim = None

        # --- the other half

        def thunderagent_tell(self, ops: list[Any]) -> dict[str, Any]:
            """Carry out the proxy's messages, and report. Never raises."""
            done_count = self._guarded(self._tell, ops) if self._on else 0
            report = self._guarded(self._report) if self._is_set_up else {"failures_total": self._failure_count}
            said = {**_versions(), "on": self._on, "done": done_count or 0, **(report or {})}
            return {**said, "why_not": self._why_not} if self._why_not else said

        def _tell(self, ops: list[Any]) -> int:
            now_s = self._clock()
            self.agents.pins.expire(now_s)
            done_count = self.agents.tell(ops, now_s)
            self._order_changed()
            return done_count

        def _report(self) -> dict[str, Any]:
            agents, now_s = self.agents, self._clock()
            pins = agents.pins.items()
            return {
                "mode": agents.settings.mode,
                "blocks": {
                    "tokens": self._surface.capacity_tokens,
                    "total": self._surface.pool_blocks,
                    "free": self._surface.free_block_count(),
                    "pinned": agents.pins.block_count,
                },
                "programs": agents.program_count,
                "pins": {
                    program_id: [len(pin.blocks), round(pin.until_s - now_s, 3)]
                    for program_id, pin in pins[:MOST_LISTED]
                },
                "pins_total": dict(agents.pins.counts),
                "turns_total": {"warm": agents.counts["turns_warm"], "cold": agents.counts["turns_cold"]},
                "chunks_total": {kind: agents.counts[f"chunks_{kind}"] for kind in ("whole", "bounded", "shrunk")},
                "preemptions_total": {str(level): count for level, count in agents.preemptions.items()},
                "steps_total": self._step_count,
                "hook_seconds_total": self._hook_s,
                "failures_total": self._failure_count,
            }

        # --- the breaker

        def _guarded(self, hook: Callable[..., Any], *args: Any) -> Any:
            """Return what a hook returns; if it raises, turn off for good and return None."""
            try:
                return hook(*args)
            except Exception as error:
                self._failure_count += 1
                self._why_not = f"{hook.__name__.lstrip('_')} raised {type(error).__name__}"
                log.exception("thunderagent: a hook failed; vLLM's own order applies from here on")
                self._turn_off()
                return None

        def _turn_off(self) -> None:
            self._on = False
            with suppress(Exception):
                self._restore_victim()
            self._victim = None
            self.policy = self._stock_policy
            self._look_at(chunks=False, memory=False)
            if not self._is_set_up:
                return
            for program_id in [each for each, _ in self.agents.pins.items()]:
                with suppress(Exception):
                    self.agents.pins.drop(program_id, "dropped")

        def _give_queue_back(self) -> None:
            """Put what waits into a queue of vLLM's; not within an iteration, which peeks and then pops."""
            waiting = list(self.waiting)
            self.waiting = self._stock_queue()
            waiting.sort(key=lambda each: (not each.num_preemptions, each.arrival_time))
            for request in waiting:
                self.waiting.add_request(request)

    return ProgramScheduler
