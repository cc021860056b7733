"""The parts that a policy can be composed of, each chosen separately.

Theory of operation
===================
A policy (`model/policy.py`) says who may hold memory where. Parts can answer some of its questions instead:

- **admission**: may this program begin at all? A program that is not admitted waits *unadmitted*, where the policy does
  not see it. The part is asked for the next program to admit whenever something may have changed, until it names none.
  A program stays admitted until it ends, until the idle limit takes its claim, or until the part calls
  `propose_dismiss`, which makes it wait unadmitted again from its next turn on.
- **order**: which program of the paused queue is restored first (`restore_rank`).
- **victims**: which program on a replica is paused or marked first (`pause_rank`).
- **global policy**: periodically, what should be changed by the operations of `operations.py`: where programs go, which
  come first, which move, which replicas are started and ended. It is asked on a tick, after the policy balanced. Its
  changes apply to every later event, and it does not slow these down.
- **engine priority**: the number that an engine with priorities gets with a granted turn; lower comes first, as in
  vLLM. If an engine has the other polarity its backend converts.

A part has a `name`, is created with its settings, and may keep state of its own, which belongs to one scheduler: the
same events always send it the same signals. It receives signals (`signals.py`) by `observe`, where it only takes notes:
proposals belong in `next` and `balance`. Ranks must not change while a program stays in its phase; a part that must
change one calls `view.rank_anew` from there.

A policy whose parts belong together, like MARS, has an attribute for each itself. A policy that never holds a program
for lack of memory may set `holds_nobody = True`: orders and victims then have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence

from thunderagent.programs.model.policy import (
    HINT_RATIO,
    Admission,
    ClaimRules,
    EnginePriority,
    GlobalPolicy,
    Moment,
    Observe,
    Order,
    Placement,
    Policy,
    Victims,
)
from thunderagent.programs.model.records.signals import Signal
from thunderagent.programs.model.view import View
from thunderagent.programs.model.views import ProgramView, ReplicaView


def observers_of(*parts: object) -> Sequence[Observe]:
    """Return how the parts that want signals receive them, each once."""
    observing: list[object] = []
    for part in parts:
        if getattr(part, "observe", None) is not None and not any(part is other for other in observing):
            observing.append(part)
    return tuple(part.observe for part in observing)  # type: ignore[attr-defined]


def _hears_for_its_order_alone(base: Policy) -> bool:
    """Return whether a policy observes only for its own order, which gets no signals once another replaces it."""
    order, observe = getattr(base, "order", None), getattr(base, "observe", None)
    return observe is not None and observe == getattr(order, "observe", None)


class ControlChain:
    """Several global policies: each is asked in its own period, in the given order.

    Later ones see what earlier ones changed.
    """

    def __init__(self, policies: Sequence[GlobalPolicy]) -> None:
        """Chain `policies`, at least one."""
        self.policies = tuple(policies)
        self.name = "+".join(policy.name for policy in self.policies)
        self.period_s = min(policy.period_s for policy in self.policies)

    def __repr__(self) -> str:
        return f"<ControlChain {self.name}>"


class Composed:
    """A policy that leaves some of its questions to parts."""

    def __init__(
        self,
        base: Policy,
        *,
        admission: Admission | None = None,
        order: Order | None = None,
        victims: Victims | None = None,
        priority: EnginePriority | None = None,
        global_policy: GlobalPolicy | ControlChain | None = None,
    ) -> None:
        """Ask `base` whatever no part answers."""
        self.base = base
        self.order: Order | None = order or getattr(base, "order", None)
        self.admission: Admission | None = admission or getattr(base, "admission", None)
        self.priority: EnginePriority | None = priority or getattr(base, "priority", None)
        self.global_policy: GlobalPolicy | ControlChain | None = global_policy or getattr(base, "global_policy", None)
        given = {
            "admission": admission,
            "order": order,
            "victims": victims,
            "priority": priority,
            "global_policy": global_policy,
        }
        self.name = "+".join([base.name, *(f"{kind}={part.name}" for kind, part in given.items() if part is not None)])
        self.restore_rank = base.restore_rank if order is None else order.restore_rank
        self.pause_rank = base.pause_rank if victims is None else victims.pause_rank
        self.hold_s = base.hold_s
        self.stays_home: bool = getattr(base, "stays_home", False)
        self.hold_threshold_s = getattr(base, "hold_threshold_s", None)
        self.hint_ratio: float = getattr(base, "hint_ratio", HINT_RATIO)
        self._observers = observers_of(
            *(() if order is not None and _hears_for_its_order_alone(base) else (base,)),
            *(part for part in given.values() if part is not None),
        )
        if self._observers:
            self.observe = self._observe

    def __repr__(self) -> str:
        return f"<Composed {self.name}>"

    @property
    def claim_rules(self) -> ClaimRules:
        """Return those of the base."""
        return self.base.claim_rules

    @property
    def tick_s(self) -> float:
        """Return the shortest of those of the base and its parts."""
        parts = (self.base, self.admission, self.priority)
        tick_s = min(float(getattr(part, "tick_s", self.base.tick_s)) for part in parts if part is not None)
        return tick_s if self.global_policy is None else min(tick_s, self.global_policy.period_s)

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Place as the base does."""
        return self.base.place(view, program, candidates)

    def balance(self, view: View, moment: Moment) -> None:
        """Balance as the base does."""
        self.base.balance(view, moment)

    def _observe(self, view: View, signal: Signal) -> None:
        for observe in self._observers:
            observe(view, signal)
