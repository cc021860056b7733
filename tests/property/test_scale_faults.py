"""The faults of `tests/real/test_faults.py` in virtual time, each over seeds, on cells that may keep 100,000 programs.

A seed draws when its fault comes and whom it strikes. SCALE_SEEDS says how many seeds, SCALE_MANY_SEEDS how many of
them, the first ones, begin with SCALE_PROGRAMS programs that a leader before left in the log.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.property.test_scale_leaders import (
    END_S,
    LOCK_S,
    SEEDS_COUNT,
    Carrier,
    Cell,
    Member,
    check_answers,
    check_counts,
    check_log,
)
from tests.property.test_scale_links import TURNS_COUNT
from thunderagent.programs.model.kept import ProgramRecord
from thunderagent.scale.carried import CarriedTurns
from thunderagent.scale.kept import At, Begins, Record, Whole, encode_record, entry_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MANY_SEEDS_COUNT = int(os.environ.get("SCALE_MANY_SEEDS", "1"))
PROGRAMS_COUNT = int(os.environ.get("SCALE_PROGRAMS", "2000"))


class KeptUsage(Counter[str]):
    """What programs used, which knows whose that changed: very many are not looked at for that."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: dict[str, None] = {}

    def __setitem__(self, name: str, tokens: int) -> None:
        super().__setitem__(name, tokens)
        self.changed[name] = None


class Scheduler(Member):
    """A member with a clock of its own, in a cell with very many programs."""

    def lead(self) -> None:
        super().lead()
        assert self.ledger is not None
        usage = KeptUsage()
        usage.update(self.ledger.usage)
        usage.changed.clear()
        self.ledger.usage = usage

    def changes(self) -> list[Record]:
        assert self.ledger is not None
        usage = self.ledger.usage
        assert isinstance(usage, KeptUsage)
        changed, usage.changed = usage.changed, {}
        return [At("", ProgramRecord(name, output_tokens_total=usage[name])) for name in changed]


class Gateway(Carrier):
    """A gateway that may be killed, and is started anew; clients try again what it had not ended."""

    is_paused = False

    def die(self, for_s: float) -> None:
        """Lose all that it knows; begin with nothing `for_s` later, and be asked anew for what had no answer."""
        self.cut()
        self.is_paused = True
        asks = [row.ask for row in self.turns.rows.values() if row.end is None]
        self.untold.update(turn_id for turn_id, row in self.turns.rows.items() if row.end is not None)
        self.turns = CarriedTurns(self.turns.gateway_id, boot_id=self.world.random.getrandbits(30))
        self.epochs = []

        def back() -> None:
            self.is_paused = False
            for ask in asks:
                self.started.pop(ask.turn_id, None)  # its upstream was closed with the process
                self.turns.asked(ask, self.world.time.now_s)
            self.flush()

        self.world.time.after(for_s, back)
