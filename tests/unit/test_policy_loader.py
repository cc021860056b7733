"""Policies by name, and an operator's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.builders import Driver
from thunderagent.errors import ConfigurationError
from thunderagent.policy_loader import PRESETS, Setting, load_policy, parse_setting
from thunderagent.programs.policies import PARTS, POLICIES
from thunderagent.programs.policies.composed import Composed
from thunderagent.programs.policies.papers.mars import Mars
from thunderagent.programs.policies.papers.mars_admission import MarsAdmission

OWN_POLICY = '''
from dataclasses import dataclass
from math import inf

from thunderagent.programs.messages import Reason
from thunderagent.programs.policy import ClaimRules, Placement, Policy
from thunderagent.programs.policies.breakeven import BreakEven
from thunderagent.programs.policies.helpers import restore_waiting


@dataclass(frozen=True)
class LastReplica(Policy):
    """Everybody goes to the replica that was added last."""

    limit_tokens: int = 1000
    name: str = "last_replica"
    claim_rules: ClaimRules = ClaimRules()
    tick_s: float = 0.5

    def hold_s(self, view, program):
        return inf

    def pause_rank(self, program):
        return 0.0

    def restore_rank(self, program):
        return program.opened_s

    def place(self, view, program, candidates):
        fits = program.claim_tokens <= self.limit_tokens
        return Placement(candidates[-1] if fits else None, Reason.POLICY if fits else Reason.NO_ROOM)

    def balance(self, view, moment):
        restore_waiting(view, self)


class Patient(BreakEven):
    """As ours, but nobody is held longer than a second."""

    name = "patient"

    def hold_s(self, view, program):
        return min(1.0, super().hold_s(view, program))
'''


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of an operator on the import path."""
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "scheduling.py").write_text(OWN_POLICY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_package.scheduling"
    for name in [name for name in sys.modules if name.startswith("own_package")]:
        del sys.modules[name]


def test_an_operators_own_policy_schedules(own_module: str) -> None:
    """`package.module:Class` with a setting is loaded, asked, and obeyed, in a dozen lines of the operator's."""
    policy = load_policy(f"{own_module}:LastReplica", {"limit_tokens": 500})
    driver = Driver(policy, replicas={"r0": 1000, "r1": 1000})
    assert driver.granted_on[driver.arrives("a", 500)] == "r1"
    assert driver.held(driver.arrives("b", 501))
    assert driver.scheduler.policy.name == "last_replica"


def test_an_operators_policy_may_go_on_from_one_of_ours(own_module: str) -> None:
    """An interpreted class that derives from ours is asked as ours are, compiled or not."""
    driver = Driver(load_policy(f"{own_module}:Patient", {}), replicas={"r0": 1000})
    assert driver.scheduler.policy.name == "patient"
    driver.finishes(driver.arrives("a", 900), 900)
    driver.passes(1.5)
    driver.ticks()
    assert driver.arrives("b", 900) in driver.granted_on


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_a_name_that_loads_it(name: str) -> None:
    """The name on the command line is the name in logs and metrics."""
    assert load_policy(name, {}).name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "fastest",
            "no policy 'fastest'; there are autellix, .*, ttl, concur, .*, thunderagent-ports, or package.module:Class",
        ),
        ("no_such_module:Policy", "cannot be loaded: No module named 'no_such_module'"),
        ("thunderagent.programs.policies.baselines.cap:Cup", "cannot be loaded.*Cup"),
    ],
)
def test_a_policy_that_does_not_exist_is_named_with_those_that_do(name: str, message: str) -> None:
    """A typing error is found at the start, and the message helps."""
    with pytest.raises(ConfigurationError, match=message):
        load_policy(name, {})


def test_a_setting_that_does_not_exist_is_named_with_those_that_do() -> None:
    """The policy's name itself is not a setting."""
    with pytest.raises(ConfigurationError, match=r"policy cap has no setting 'm'; it has: n"):
        load_policy("cap", {"m": 3})
    with pytest.raises(ConfigurationError, match="no setting 'name'"):
        load_policy("cap", {"name": "x"})


def test_a_setting_of_a_part_that_was_chosen_is_named_with_its_kind() -> None:
    """The message helps where the kind was forgotten."""
    with pytest.raises(ConfigurationError, match=r"policy breakeven has no setting 'n'; did you mean admission\.n\?"):
        load_policy("breakeven", {"admission": "window", "n": 3})


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("cap", {"n": "six"}, "policy cap: n must be a number, not 'six'"),
        ("breakeven", {"hold_ratio": "abc"}, "policy breakeven: hold_ratio must be a number, not 'abc'"),
        ("breakeven", {"hold_ratio": True}, "policy breakeven: hold_ratio must be a number, not True"),
        ("breakeven", {"share_prefixes": "yes"}, "policy breakeven: share_prefixes must be true or false, not 'yes'"),
        ("thunderagent", {"restore_ratio": "x"}, "policy thunderagent: restore_ratio must be a number, not 'x'"),
        ("mars", {"tool_cpu_count": "x"}, "policy mars: tool_cpu_count must be a number, not 'x'"),
        (
            "cap",
            {"global_policy": "balance", "global_policy.gap_ratio": "x"},
            "global_policy balance: gap_ratio must be a number",
        ),
        (
            "cap",
            {"global_policy": "balance+migrate", "global_policy.wait_s": "x"},
            "global_policy migrate: wait_s must be a number",
        ),
        ("cap", {"order": "least-area", "order.bound_ratio": "x"}, "order least-area: bound_ratio must be a number"),
        ("cap", {"order": "atlas", "order.level_count": "x"}, "order atlas: level_count must be a number, not 'x'"),
        ("breakeven", {"pass_count": 1.5}, "policy breakeven: pass_count must be a whole number, not 1.5"),
        (
            "cap",
            {"global_policy": "balance", "global_policy.moves_count": 2.5},
            "global_policy balance: moves_count must be a whole number",
        ),
        ("continuum", {"reserve_tokens": float("inf")}, "reserve_tokens must be a whole number, not inf"),
        ("own_package.scheduling:LastReplica", {"limit_tokens": "x"}, "limit_tokens must be a number, not 'x'"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_a_setting_of_the_wrong_kind_is_refused(name: str, settings: dict[str, Setting], message: str) -> None:
    """A word for a number is refused in a policy, in a part, and in an operator's own class."""
    with pytest.raises(ConfigurationError, match=message):
        load_policy(name, settings)


ONLY_A_CONTROL = """
from dataclasses import dataclass

from thunderagent.programs.policy import GlobalPolicy, Policy


class Nothing(Policy):
    pass


@dataclass(frozen=True)
class Srtf(GlobalPolicy):
    period_s: float = 1.0
    name: str = "srtf"

    def decide(self, view):
        pass
"""


@pytest.mark.parametrize(
    ("policy", "parts", "message"),
    [
        (
            "srtf:Srtf",
            {},
            "srtf:Srtf cannot be the policy: its class is no subclass of Policy of thunderagent.programs.policy$",
        ),
        ("srtf:Nothing", {}, "srtf:Nothing cannot be the policy: it has no balance, place$"),
        (
            "cap",
            {"admission": "srtf:Srtf"},
            "srtf:Srtf cannot be the admission: its class is no subclass of Admission ",
        ),
        ("cap", {"order": "srtf:Srtf"}, "srtf:Srtf cannot be the order: its class is no subclass of Order "),
        ("cap", {"victims": "srtf:Srtf"}, "srtf:Srtf cannot be the victims: its class is no subclass of Victims "),
        ("cap", {"priority": "srtf:Srtf"}, "srtf:Srtf cannot be the priority: its class is no subclass of Engine"),
        (
            "cap",
            {"global_policy": "own_package.scheduling:LastReplica"},
            "LastReplica cannot be the global_policy: its class is no subclass of GlobalPolicy ",
        ),
        (
            "cap",
            {"global_policy": "balance+own_package.scheduling:LastReplica"},
            "scheduling:LastReplica cannot be the global_policy: its class is no subclass",
        ),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_a_class_of_another_kind_is_refused(
    policy: str, parts: dict[str, Setting], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes at the start, before any turn; it names the missing members."""
    (tmp_path / "srtf.py").write_text(ONLY_A_CONTROL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "srtf", raising=False)
    with pytest.raises(ConfigurationError, match=message):
        load_policy(policy, parts)
    assert load_policy("cap", {"global_policy": "srtf:Srtf"}).name == "cap+global_policy=srtf"
    monkeypatch.delitem(sys.modules, "srtf")


@pytest.mark.parametrize(
    ("text", "setting"), [("6", 6), ("-1", -1), ("0.5", 0.5), ("1e3", 1000.0), ("inf", float("inf")), ("fast", "fast")]
)
def test_settings_are_read_as_whole_numbers_numbers_or_words(text: str, setting: object) -> None:
    """A whole number stays whole: `n=6` is not 6.0."""
    assert parse_setting(text) == setting
    assert type(parse_setting(text)) is type(setting)


def test_a_whole_number_may_be_written_as_any_number() -> None:
    assert repr(load_policy("ttl", {"reserve_tokens": 1e3})) == repr(load_policy("ttl", {"reserve_tokens": 1000}))


def test_a_preset_is_a_policy_with_settings_that_can_still_be_given() -> None:
    """A given setting wins."""
    preset = load_policy("thunderagent-ports", {"delta_s": 1})
    assert preset == load_policy("thunderagent", PRESETS["thunderagent-ports"][1] | {"delta_s": 1})
    assert load_policy("thunderagent-ports", {"reserve_tokens": 7}).reserve_tokens == 7


def test_a_setting_that_was_for_the_policy_s_own_part_is_for_the_one_in_its_place() -> None:
    """If the same part is named separately, it is the policy's part; its own setting wins."""
    settings = {"tool_cpu_count": 6, "window_max_count": 9}
    whole = load_policy("mars", settings)
    apart = load_policy("mars", {**settings, "admission": "mars-few-long", "admission.long_count": 3})
    own = load_policy("mars", {**settings, "admission": "mars", "admission.tool_cpu_count": 7})
    assert isinstance(whole, Mars)
    assert isinstance(apart, Composed)
    assert isinstance(own, Composed)
    admissions = [policy.admission for policy in (whole, apart, own)]
    counts = [(each.tool_cpu_count, each.window_max_count) for each in admissions if isinstance(each, MarsAdmission)]
    assert counts == [(6, 9), (6, 9), (7, 9)]


def test_a_setting_that_would_be_without_effect_is_refused() -> None:
    """The chosen part has no setting of that name; a setting of the policy itself goes with any part."""
    with pytest.raises(
        ConfigurationError, match="'tool_cpu_count' of policy mars is for its own admission; window, wh"
    ):
        load_policy("mars", {"tool_cpu_count": 6, "admission": "window"})
    assert load_policy("mars", {"warm_ratio": 2.0, "admission": "window"}).name == "mars+admission=window"
    assert load_policy("mars", {"tool_cpu_count": 6, "order": "fcfs"}).name == "mars+order=fcfs"


@pytest.mark.parametrize("name", POLICIES)
def test_policy_has_the_attributes_that_it_passes_on(name: str) -> None:
    """Each is a setting of the policy, and of an existing kind of part."""
    factory = POLICIES[name]
    for key, kind in factory.part_settings.items():
        assert kind in PARTS
        load_policy(name, {key: 0})
