"""A gateway's share of the polls: it asks what its scheduler wants to know, and reports the results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from ssl import SSLContext

import structlog

from thunderagent.backends import backend_of
from thunderagent.backends.asking import MAX_POLL_BYTES, Asker, Watch, first_poll_after_s, next_poll_after_s
from thunderagent.errors import ConfigurationError
from thunderagent.scale.messages import Look, Polled, PollShare

log = structlog.get_logger("thunderagent.scale")


class SharedPolls:
    """Polls what its scheduler named last. All methods belong to one event loop."""

    def __init__(
        self,
        say: Callable[[Polled], None],
        group: asyncio.TaskGroup,
        *,
        authorization: str = "",
        ssl_context: SSLContext | None = None,
    ) -> None:
        """Report results by `say`, and run in `group` until closed.

        `authorization` and the trusted certificates are as for the poller.
        """
        self._say = say
        self._group = group
        self._authorization = authorization
        self._ssl_context = ssl_context
        self._interval_s, self._deadline_s, self._max_bytes = 1.0, 2.0, MAX_POLL_BYTES
        self._polled: dict[int, _PolledUrl] = {}
        self._looks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<SharedPolls of {len(self._polled)}>"

    @property
    def count(self) -> int:
        """Number of URLs that are polled from here."""
        return len(self._polled)

    def take(self, word: PollShare | Look | None) -> None:
        """Set this gateway's share, or what to poll at once; None: there is no scheduler now."""
        match word:
            case PollShare():
                self._interval_s, self._deadline_s, self._max_bytes = word.interval_s, word.deadline_s, word.max_bytes
                self._share({watch.number: watch for watch in word.watches})
            case Look():
                self._look(word.watch)
            case None:
                self._share({})

    def close(self) -> None:
        """Stop polling."""
        self._share({})
        for each in self._looks:
            each.cancel()

    def _share(self, watches: dict[int, Watch]) -> None:
        for number in [each for each in self._polled if each not in watches]:
            self._polled.pop(number).task.cancel()
        for number, watch in watches.items():
            if number in self._polled:
                self._polled[number].watch = watch
            else:
                with suppress(ConfigurationError):  # a newer kind: its scheduler polls it
                    polled = self._polled[number] = self._of(watch)
                    wait_s = first_poll_after_s(len(self._polled), self._interval_s)
                    polled.task = self._group.create_task(self._poll_on(polled, wait_s))

    def _of(self, watch: Watch) -> _PolledUrl:
        """Return the poller of a URL. Raises `ConfigurationError` for a kind or a URL unknown to this version."""
        return _PolledUrl(watch, Asker(watch.url, backend_of(watch.kind), self._deadline_s, self._max_bytes))

    def _look(self, watch: Watch) -> None:
        mine = self._polled.get(watch.number)
        if mine is not None:
            mine.suspected.set()
            return
        with suppress(ConfigurationError):
            look = self._group.create_task(self._poll_once(self._of(watch)))
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)

    async def _poll_on(self, polled: _PolledUrl, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        origin_s = loop.time() + wait_s
        async with polled.asker.client(self._authorization, self._ssl_context) as client:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await polled.suspected.wait()
                if polled.suspected.is_set():
                    polled.suspected.clear()
                    polled.asker.polls_to_models = 0
                answers = await polled.asker.ask(client)
                watch = polled.watch
                found = await polled.asker.found(answers, watch.rank_ids, finds_ranks=watch.finds_ranks)
                self._say(Polled(watch.number, found))
                wait_s = next_poll_after_s(origin_s, loop.time(), self._interval_s)

    async def _poll_once(self, polled: _PolledUrl) -> None:
        watch = polled.watch
        async with polled.asker.client(self._authorization, self._ssl_context) as client:
            answers = await polled.asker.ask(client)
        found = await polled.asker.found(answers, watch.rank_ids, finds_ranks=watch.finds_ranks)
        self._say(Polled(watch.number, found))


class _PolledUrl:
    """One URL of the share."""

    task: asyncio.Task[None]

    def __init__(self, watch: Watch, asker: Asker) -> None:
        self.watch = watch
        self.asker = asker
        self.suspected = asyncio.Event()
