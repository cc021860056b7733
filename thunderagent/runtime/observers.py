"""Observers of events and their decisions. One that waits for something rare costs turns nothing."""

# compiled: each turn passes here, four times

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from operator import itemgetter

from thunderagent.programs.model.decisions import Decision
from thunderagent.programs.model.events import Event

Observer = Callable[[Event, Sequence[Decision]], None]
Numbered = tuple[int, Observer]


class Observers:
    """The observers by number, in order of registration."""

    def __init__(self) -> None:
        """Start without observers."""
        self._numbers = count()
        self._all: dict[int, tuple[Observer, frozenset[type] | None]] = {}
        """By number, with the kinds of events and decisions that each is about; None is all."""
        self._by_kind: dict[type, tuple[Numbered, ...]] = {}
        """Observers of a kind; computed when one first comes."""

    def __len__(self) -> int:
        return len(self._all)

    def add(self, observer: Observer, about: Sequence[type]) -> Callable[[], None]:
        """Call `observer` with what it is `about`; return an idempotent function that ends that."""
        number = next(self._numbers)
        self._all[number] = observer, frozenset(about) or None
        self._by_kind.clear()

        def stop() -> None:
            self._all.pop(number, None)
            self._by_kind.clear()

        return stop

    def tell(self, event: Event, decisions: Sequence[Decision]) -> None:
        """Tell an event and its decisions to all observers of one of these kinds, once each."""
        by_kind = self._by_kind
        found: Sequence[Numbered] | None = by_kind.get(type(event))
        if found is None:
            found = self._about(type(event))
        for decision in decisions:
            more = by_kind.get(type(decision))
            if more is None:
                more = self._about(type(decision))
            if more and more is not found:
                found = sorted({*found, *more}, key=itemgetter(0)) if found else more
        for _, observer in found:
            observer(event, decisions)

    def _about(self, kind: type) -> tuple[Numbered, ...]:
        about = tuple(
            (number, observer) for number, (observer, kinds) in self._all.items() if kinds is None or kind in kinds
        )
        self._by_kind[kind] = about
        return about
