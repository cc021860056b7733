"""Which gateway polls which replica, and when a result counts.

Theory of operation
===================
A scheduler polls no replica while gateways do. Each URL is polled by the linked gateway that ranks first by its hash
with it (rendezvous hashing), so a gateway that comes or goes moves only its own share. The scheduler's poller processes
a gateway's results like its own: the core hears the same, whoever polled.

A gateway may be cut off from an engine that others reach. So a failed poll counts once a second gateway, the next by
the hash, has failed too, or if there is no other; otherwise the second one's result counts.

A silent gateway loses nothing: the poller itself polls what nobody reports (`Poller`).
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

from thunderagent.backends.asking import Watch
from thunderagent.backends.poller import Poller
from thunderagent.scale.messages import Look, Polled, PollShare
from thunderagent.scale.scheduler.gateway import Gateway
from thunderagent.scale.scheduler.gateways import Gateways

WITNESSES_COUNT = 2


class PollShares:
    """Lets gateways poll instead of a poller. All methods belong to one event loop."""

    def __init__(self, poller: Poller, gateways: Gateways) -> None:
        """Share out what `poller` watches, from now on."""
        self._poller = poller
        self._gateways = gateways
        self._watches = {watch.number: watch for watch in poller.watches}
        self._polling: dict[str, Gateway] = {}
        """Gateways that poll, by id."""
        self._of: dict[int, str] = {}
        """Which gateway polls a URL."""
        self._witnesses: dict[int, set[str]] = {}
        """Gateways whose poll of a URL failed, until one more reports."""
        self._changed_ids: set[str] = set()
        """Gateways whose new share must be sent."""
        poller.elsewhere = self
        gateways.on_polled = self.polled

    def __repr__(self) -> str:
        return f"<PollShares: {len(self._watches)} of {len(self._polling)} gateways>"

    @property
    def shared_count(self) -> int:
        """Number of URLs that gateways poll."""
        return len(self._of)

    # --- gateways come and go

    def came(self, gateway: Gateway) -> None:
        """Give a gateway its share: what it ranks first for; it may have come before, by another link."""
        gateway_id = gateway.gateway_id
        self._polling[gateway_id] = gateway
        self._change(gateway_id)
        for watch in self._watches.values():
            before_id = self._of.get(watch.number)
            if before_id is None or _rank(gateway_id, watch) > _rank(before_id, watch):
                self._entrust(watch, gateway_id)

    def went(self, gateway: Gateway) -> None:
        """Let others poll what a gateway polled."""
        gateway_id = gateway.gateway_id
        if self._polling.get(gateway_id) is not gateway:
            return
        del self._polling[gateway_id]
        for number in [number for number, of_id in self._of.items() if of_id == gateway_id]:
            self._entrust(self._watches[number], self._first_of(self._watches[number]))
        for number, witnesses in list(self._witnesses.items()):
            witnesses.discard(gateway_id)
            if not witnesses:
                del self._witnesses[number]

    def _first_of(self, watch: Watch, without: frozenset[str] | set[str] = frozenset()) -> str | None:
        able = (each for each in self._polling if each not in without)
        return max(able, key=lambda gateway_id: _rank(gateway_id, watch), default=None)

    def _entrust(self, watch: Watch, gateway_id: str | None) -> None:
        before_id = self._of.pop(watch.number, None)
        if gateway_id is not None:
            self._of[watch.number] = gateway_id
        for each in (before_id, gateway_id):
            if each is not None:
                self._change(each)
        self._poller.entrusted(watch.number, elsewhere=gateway_id is not None)

    def _change(self, gateway_id: str) -> None:
        """Send a gateway its share, after all current changes."""
        if not self._changed_ids:
            asyncio.get_running_loop().call_soon(self._tell)
        self._changed_ids.add(gateway_id)

    def _tell(self) -> None:
        changed_ids, self._changed_ids = self._changed_ids & self._polling.keys(), set()
        shares: dict[str, list[Watch]] = {gateway_id: [] for gateway_id in changed_ids}
        for number, gateway_id in self._of.items():
            if gateway_id in shares:
                shares[gateway_id].append(self._watches[number])
        settings = self._poller.settings
        for gateway_id, share in shares.items():
            word = PollShare(tuple(share), settings.interval_s, settings.deadline_s, settings.max_bytes)
            self._gateways.say(self._polling[gateway_id], word)

    # --- what the poller says

    def watch(self, watch: Watch) -> None:
        """Poll a URL, or apply its changes."""
        self._watches[watch.number] = watch
        if (of_id := self._of.get(watch.number)) is not None:
            self._change(of_id)
        elif (first_id := self._first_of(watch)) is not None:
            self._entrust(watch, first_id)

    def unwatch(self, number: int) -> None:
        """Stop polling a URL."""
        self._watches.pop(number, None)
        self._witnesses.pop(number, None)
        if (of_id := self._of.pop(number, None)) is not None:
            self._change(of_id)

    def look(self, number: int) -> None:
        """Poll a URL at once, by its gateway."""
        of_id = self._of.get(number)
        if of_id is not None:
            self._gateways.say(self._polling[of_id], Look(self._watches[number]))

    # --- what gateways find

    def polled(self, gateway: Gateway, word: Polled) -> None:
        """Report a gateway's result to the poller; after a failure, ask another one first."""
        watch = self._watches.get(word.number)
        if watch is None or self._polling.get(gateway.gateway_id) is not gateway:
            return
        witnesses = self._witnesses.get(word.number, set())
        asked_ids = (self._of.get(word.number), self._first_of(watch, witnesses) if witnesses else None)
        if gateway.gateway_id not in asked_ids:  # its share changed before this came
            return
        if word.found.is_bad:
            witnesses = self._witnesses.setdefault(word.number, witnesses)
            witnesses.add(gateway.gateway_id)
            other_id = self._first_of(watch, witnesses)
            if len(witnesses) < WITNESSES_COUNT and other_id is not None:
                self._gateways.say(self._polling[other_id], Look(watch))
                return
        self._witnesses.pop(word.number, None)
        self._poller.told(word.number, word.found)


def _rank(gateway_id: str, watch: Watch) -> bytes:
    return blake2b(f"{gateway_id}\0{watch.url}\0{watch.rank_ids}".encode(), digest_size=8).digest()
