"""The parts that a policy can be composed of, each chosen separately.

Theory of operation
===================
A policy (`policy.py`) says who may hold memory where. Parts can answer some of its questions instead:

- **admission**: may this program begin at all? A program that is not admitted waits *unadmitted*, where the policy does
  not see it. The part is asked for the next program to admit whenever something may have changed, until it names none.
  A program stays admitted until it ends, until the idle limit takes its claim, or until the part calls
  `propose_dismiss`, which makes it wait unadmitted again from its next turn on.
- **order**: which program of the paused queue is restored first (`restore_rank`).
- **victims**: which program on a replica is paused or marked first (`pause_rank`).
- **global policy**: periodically, what should be changed by the operations of `Operations`: where programs go, which
  come first, which move, which replicas are started and ended. It is asked on a tick, after the policy balanced. Its
  changes apply to every later event, and it does not slow these down.
- **engine priority**: the number that an engine with priorities gets with a granted turn; lower comes first, as in
  vLLM. If an engine has the other polarity its backend converts.

A part has a `name`, is created with its settings, and may keep state of its own, which belongs to one scheduler: the
same events always send it the same signals (`messages.py`). It receives them by `observe`, where it only takes notes:
proposals belong in `next` and `balance`. Ranks must not change while a program stays in its phase; a part that must
change one calls `view.rank_anew` from there.

A policy whose parts belong together, like MARS, has an attribute for each itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunderagent.programs.policy import (
    Admission,
    ClaimRules,
    EnginePriority,
    GlobalPolicy,
    Learner,
    Moment,
    Observe,
    Order,
    Placement,
    Policy,
    ProgramView,
    ReplicaView,
    Victims,
    View,
)
from thunderagent.programs.state.ranked_set import Rank


class ControlChain(GlobalPolicy):
    """Several global policies: each is asked in its own period, in the given order.

    Later ones see what earlier ones changed.
    """

    def __init__(self, policies: Sequence[GlobalPolicy]) -> None:
        """Chain `policies`, at least one."""
        self.policies = tuple(policies)

    def __repr__(self) -> str:
        return f"<ControlChain {self.name}>"

    @property
    def name(self) -> str:
        """Return their names."""
        return "+".join(policy.name for policy in self.policies)

    @property
    def period_s(self) -> float:
        """Return the shortest of their periods."""
        return min(policy.period_s for policy in self.policies)

    def chained(self) -> Sequence[GlobalPolicy]:
        """Return them."""
        return self.policies

    def observers(self) -> Sequence[Observe]:
        """Return none: they look at the view when they are asked."""
        return ()

    def decide(self, view: View) -> None:
        """Ask all of them now."""
        for policy in self.policies:
            policy.decide(view)


class Composed(Policy):
    """A policy that leaves some of its questions to parts."""

    def __init__(
        self,
        base: Policy,
        *,
        admission: Admission | None = None,
        order: Order | None = None,
        victims: Victims | None = None,
        priority: EnginePriority | None = None,
        global_policy: GlobalPolicy | None = None,
    ) -> None:
        """Ask `base` whatever no part answers."""
        self.base = base
        self._admission = admission or base.admission
        self._order = order or base.order
        self._victims = victims
        self._priority = priority or base.priority
        self._global_policy = global_policy or base.global_policy
        self._restores_by: Policy | Order = order or base
        given = {
            "admission": admission,
            "order": order,
            "victims": victims,
            "priority": priority,
            "global_policy": global_policy,
        }
        self._name = "+".join([base.name, *(f"{kind}={part.name}" for kind, part in given.items() if part is not None)])
        parts = [part for part in given.values() if part is not None]
        replaced = None if order is None else base.order
        observers, learners = base.observers(), base.learners()
        if replaced is not None and observers == replaced.observers():
            observers = ()  # it observed only for its own order, which gets no signals once another replaces it
        if replaced is not None and learners == replaced.learners():
            learners = ()
        self._observers = tuple(dict.fromkeys((*observers, *(each for part in parts for each in part.observers()))))
        """Each once: one part may be chosen for two kinds."""
        self._learners = tuple(dict.fromkeys((*learners, *(each for part in parts for each in part.learners()))))

    def __repr__(self) -> str:
        return f"<Composed {self.name}>"

    @property
    def name(self) -> str:
        """Return the name of the base, with those of its parts."""
        return self._name

    @property
    def admission(self) -> Admission | None:
        """Return the chosen one, or that of the base."""
        return self._admission

    @property
    def order(self) -> Order | None:
        """Return the chosen one, or that of the base."""
        return self._order

    @property
    def priority(self) -> EnginePriority | None:
        """Return the chosen one, or that of the base."""
        return self._priority

    @property
    def global_policy(self) -> GlobalPolicy | None:
        """Return the chosen one, or that of the base."""
        return self._global_policy

    @property
    def claim_rules(self) -> ClaimRules:
        """Return those of the base."""
        return self.base.claim_rules

    @property
    def tick_s(self) -> float:
        """Return the shortest of those of the base and its parts."""
        parts = (self.base, self.admission, self.priority)
        tick_s = min(part.tick_s for part in parts if part is not None)
        return tick_s if self.global_policy is None else min(tick_s, self.global_policy.period_s)

    @property
    def stays_home(self) -> bool:
        """Return whether the base does."""
        return self.base.stays_home

    @property
    def decider(self) -> Any:
        """Return that of the base."""
        return self.base.decider

    @property
    def holds_nobody(self) -> bool:
        """Return whether the base does."""
        return self.base.holds_nobody

    @property
    def holds_by_cost(self) -> bool:
        """Return whether the base does."""
        return self.base.holds_by_cost

    @property
    def hint_ratio(self) -> float:
        """Return that of the base."""
        return self.base.hint_ratio

    def observers(self) -> Sequence[Observe]:
        """Return those of the base and of its chosen parts."""
        return self._observers

    def learners(self) -> Sequence[Learner]:
        """Return those of the base and of its chosen parts."""
        return self._learners

    def restore_rank(self, program: ProgramView) -> Rank:
        """Rank as the chosen order does, or the base."""
        return self._restores_by.restore_rank(program)

    def pause_rank(self, program: ProgramView) -> Rank:
        """Rank as the chosen victims do, or the base."""
        return (self._victims or self.base).pause_rank(program)

    def hold_s(self, view: View, program: ProgramView) -> float:
        """Hold for as long as the base does."""
        return self.base.hold_s(view, program)

    def hold_threshold_s(self, view: View, program: ProgramView) -> float:
        """Return that of the base."""
        return self.base.hold_threshold_s(view, program)

    def kept_tokens(self, view: View, program: ProgramView, replica: ReplicaView) -> float:
        """Return what the base would."""
        return self.base.kept_tokens(view, program, replica)

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Place as the base does."""
        return self.base.place(view, program, candidates)

    def balance(self, view: View, moment: Moment) -> None:
        """Balance as the base does."""
        self.base.balance(view, moment)
