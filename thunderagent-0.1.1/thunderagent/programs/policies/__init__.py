"""Policies and the parts that they can be composed of, and their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.policies.baselines.sticky import Sticky
from thunderagent.programs.policies.baselines.ttl import Ttl
from thunderagent.programs.policies.breakeven import BreakEven
from thunderagent.programs.policies.global_policies.balance import Balance
from thunderagent.programs.policies.global_policies.migrate import Migrate
from thunderagent.programs.policies.global_policies.reassign import Reassign
from thunderagent.programs.policies.papers.autellix import Autellix
from thunderagent.programs.policies.papers.concur import Concur
from thunderagent.programs.policies.papers.continuum import Continuum
from thunderagent.programs.policies.papers.infercept import InferCept
from thunderagent.programs.policies.papers.mars import Mars
from thunderagent.programs.policies.papers.mars_admission import FEW_LONG, MarsAdmission
from thunderagent.programs.policies.papers.mars_priority import MarsOrder, MarsPriority
from thunderagent.programs.policies.papers.orbit import OrbitJudge, OrbitStep
from thunderagent.programs.policies.papers.plas import Atlas, Plas
from thunderagent.programs.policies.papers.thunderagent import ThunderAgent
from thunderagent.programs.policies.papers.thunderagent_released import ThunderAgentReleased
from thunderagent.programs.policies.parts.least_area import LeastArea
from thunderagent.programs.policies.parts.simple import Fcfs, Largest, ProgramAge, ShortestFirst, Window, Youngest
from thunderagent.programs.policy import (
    Admission,
    EnginePriority,
    GlobalPolicy,
    Order,
    Policy,
    Victims,
)

POLICIES: dict[str, Callable[..., Policy]] = {
    "autellix": Autellix,
    "breakeven": BreakEven,
    "cap": Cap,
    "continuum": Continuum,
    "infercept": InferCept,
    "mars": Mars,
    "passthrough": Passthrough,
    "sticky": Sticky,
    "thunderagent": ThunderAgent,
    "thunderagent-released": ThunderAgentReleased,
    "ttl": Ttl,
}

ADMISSIONS: dict[str, Callable[..., Admission]] = {
    "concur": Concur,
    "mars": MarsAdmission,
    "mars-few-long": partial(MarsAdmission, packing=FEW_LONG),
    "window": Window,
}
ORDERS: dict[str, Callable[..., Order]] = {
    "atlas": Atlas,
    "fcfs": Fcfs,
    "least-area": LeastArea,
    "mars": MarsOrder,
    "orbit-judge": OrbitJudge,
    "orbit-step": OrbitStep,
    "plas": Plas,
    "shortest": ShortestFirst,
}
VICTIMS: dict[str, Callable[..., Victims]] = {"largest": Largest, "youngest": Youngest}
PRIORITIES: dict[str, Callable[..., EnginePriority]] = {
    "age": ProgramAge,
    "atlas": Atlas,
    "mars": MarsPriority,
    "orbit-judge": OrbitJudge,
    "orbit-step": OrbitStep,
    "plas": Plas,
}
GLOBAL_POLICIES: dict[str, Callable[..., GlobalPolicy]] = {"balance": Balance, "migrate": Migrate, "reassign": Reassign}

PARTS: Mapping[str, Mapping[str, Callable[..., object]]] = {
    "admission": ADMISSIONS,
    "order": ORDERS,
    "victims": VICTIMS,
    "priority": PRIORITIES,
    "global_policy": GLOBAL_POLICIES,
}
"""The parts by kind, which is also the name of the setting that chooses one."""
