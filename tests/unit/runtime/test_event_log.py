"""The event log: a replay reads what was written, and a broken line is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.builders import Driver
from thunderagent.errors import ConfigurationError, EventLogError
from thunderagent.programs.messages import (
    BranchRecord,
    KnowledgeLoaded,
    ProgramCrowdedOut,
    ProgramHinted,
    ProgramLimits,
    ProgramRecord,
    ProgramsAdopted,
    ProvisionAsked,
    ReplicaJudged,
    ReplicaKilled,
    SchedulerSettings,
    TierPolled,
    TurnAdopted,
    TurnAsk,
    TurnDue,
    TurnJudged,
    TurnUnverified,
    WorkPolled,
)
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.scheduler import Scheduler
from thunderagent.runtime.event_log import EVENTS, EventLogWriter, read_events, replay

SETTINGS = SchedulerSettings(idle_limit_s=7.5)
HEADER = b'{"format":"thunderagent-events/1","policy":"cap","policy_settings":{"n":"2"},"settings":{}}\n'


def a_log(path: Path, driver: Driver) -> Path:
    log = EventLogWriter(path, policy="cap", policy_settings={"n": 1}, settings=SETTINGS)
    for event, decisions in driver.events:
        log.write(event, decisions)
    log.close()
    return path


def every_event() -> Driver:  # noqa: PLR0915 - a line for each kind
    """A driver that handled each kind of event, with ids that JSON must escape."""
    driver = Driver(Cap(n=1), settings=SETTINGS)
    turn = driver.arrives(
        'a "quoted" \u2028 日本', 100, branch="sub", parent_branch="agent", limits=ProgramLimits(9, deadline_s=1e6)
    )
    driver.starts(turn)
    driver.progresses(turn, 5)
    driver.finishes(turn, 120, 8, 64)
    driver.fails(driver.arrives("b"))
    driver.is_abandoned(driver.arrives(None, avoid="r0"))
    driver.releases("b", 2)
    driver.releases_all("never-was", "b")
    driver.reports("r0", b=50)
    driver.has_to_encode("r0", 2)
    driver.send(TurnUnverified(driver.now_s, turn))
    driver.send(
        TurnAdopted(
            driver.now_s,
            7000,
            "r0",
            TurnAsk(now_s=driver.now_s, turn_id=7000, program_id="adopted", media=(("image", 9),)),
        )
    )
    driver.opens("c", group="g")
    driver.is_hinted("c", 2.5, 0.5, keep="offload")
    driver.tool_starts("c", "make")
    driver.tool_ends("c")
    driver.tool_ends("c", inferred=True)
    driver.is_judged("c", will_succeed=False)
    driver.sandbox_is_ready("c")
    driver.sandbox_fails("c", "it exited with 1")
    driver.sandboxes_take(1, 20_000)
    driver.suspends(replica_id="r0")
    driver.arrives_pinned("r0")
    driver.is_flushed()
    driver.goes_on(replica_id="r0")
    driver.routes("all", "", r0=2.5)
    driver.gives_priority("c", -3)
    driver.migrates("c", "r0")
    driver.kills("c")
    driver.send(KnowledgeLoaded(driver.now_s, "r0", driver.scheduler.knowledge.export()))
    branches = (BranchRecord("", 300, 200, 0.25), BranchRecord("side", 40))
    records = ProgramRecord("d", "t", "g", "c", "", "active", "r0", 300, branches, 9.0, 2.0, "bash", True, True)
    driver.send(ProgramsAdopted(driver.now_s, "r0", (records, ProgramRecord("e"))))
    driver.send(ReplicaKilled(driver.now_s, "r0"))
    driver.send(ProvisionAsked(driver.now_s))
    driver.send(ProgramCrowdedOut(driver.now_s, ""))
    driver.send(ProgramHinted(driver.now_s, "c", 1.0))
    driver.send(TierPolled(driver.now_s, "r0", 100, 50))
    driver.send(WorkPolled(driver.now_s, "r0", 100, 50, 20))
    driver.serve("lora", "r0")
    driver.arrives("f", 100, model="lora")
    driver.send(ReplicaJudged(driver.now_s, "r0", "failing", "it answered 500"))
    driver.send(TurnJudged(driver.now_s, turn, "infrastructure_failed", "replica_lost"))
    driver.trips("r0")
    driver.drains("r0")
    driver.goes_down("r0")
    driver.is_removed("r0")
    driver.send(TurnDue(driver.now_s, turn))
    driver.ticks(100.0)
    return driver


def test_every_event_survives_the_way_through_the_file(tmp_path: Path) -> None:
    """It has every kind of event, with None and odd ids: the replay decides the same with the same settings."""
    driver = every_event()
    assert {type(event).__name__ for event, _ in driver.events} == set(EVENTS)
    with a_log(tmp_path / "log", driver).open("rb") as lines:
        report = replay(lines)
    assert (report.difference, report.policy) == (None, "cap")
    assert report.events_count == len(driver.events)
    assert report.decisions_count == sum(len(decisions) for _, decisions in driver.events)


def test_a_log_of_an_earlier_version_is_still_read() -> None:
    """Without later fields and settings, every recorded incident is decided as it was."""
    later = {
        "deadline_s",
        "supersedes_id",
        "waiting_since_s",
        "parent_id",
        "tenant",
        "kv_used_ratio",
        "engine_waiting_count",
        "role",
        "outcome",
        "parent_branch_id",
    }
    for path in Path(__file__).parents[1].joinpath("replay").glob("[!h]*.jsonl"):  # histories have all later fields
        header, *lines = map(msgspec.json.decode, path.read_bytes().splitlines())
        for name in [name for name in header["settings"] if name.startswith(("patience", "judge"))]:
            del header["settings"][name]
        for _, fields, decisions in lines:
            for name in later & set(fields):
                del fields[name]
            for decided in (decision for kind, decision in decisions if kind == "Grant"):
                if decided["engine_priority"] is None:  # priorities of policies came later, too
                    del decided["engine_priority"]
        report = replay(msgspec.json.encode(line) + b"\n" for line in (header, *lines))
        assert report.difference is None
        assert report.events_count == len(lines)


def test_the_header_carries_the_settings_that_decisions_depend_on(tmp_path: Path) -> None:
    """Cap 1 and an idle limit of 7.5 s are the log's, not today's defaults."""
    seen: list[Scheduler] = []
    with a_log(tmp_path / "log", every_event()).open("rb") as lines:
        replay(lines, after_event=seen.append)
    assert seen[0].policy == Cap(n=1)
    assert seen[0].settings == SETTINGS


def test_a_replay_stops_at_the_first_difference(tmp_path: Path) -> None:
    """Later differences follow from it, and explain nothing."""
    driver = every_event()
    number = next(number for number, (_, decisions) in enumerate(driver.events) if decisions)
    driver.events[number] = (driver.events[number][0], [])
    with a_log(tmp_path / "log", driver).open("rb") as lines:
        report = replay(lines)
    assert report.events_count == number + 1
    assert report.difference is not None
    assert report.difference.startswith(f"line {number + 2}: TurnAsk(")
    assert "logged:  []" in report.difference


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"5",
        b"[]",
        b'["Tick",{"now_s":1.0}]',
        b'["Tock",{"now_s":1.0},[]]',
        b'["Tick",{},[]]',
        b'["Tick",[],[]]',
        b'["Tick",{"now_s":"x"},[]]',
        b'["Tick",{"now_s":null},[]]',
        b'["Tick",{"now_s":1.0,"more":1},[]]',
        b'["TurnArrived",{"now_s":1.0,"turn_id":"x","program_id":null},[]]',
        b'["TurnArrived",{"now_s":1.0,"turn_id":1,"program_id":null,"prefix":[["x",2]]},[]]',
        b'["TurnArrived",{"now_s":1.0,"turn_id":1,"program_id":null,"media":[["a"]]},[]]',
        b'["TurnAsk",{"now_s":1.0,"turn_id":"x"},[]]',
        b'["TurnAsk",{"now_s":1.0,"turn_id":1,"more":1},[]]',
        b'["TurnEnd",{"now_s":1.0,"turn_id":1,"outcome":"x"},[]]',
        b'["ProgramsReleased",{"now_s":1.0,"program_ids":[["a"]]},[]]',
        b'[["Tick"],{"now_s":1.0},[]]',
        b'["Tick",{"now_s":1.0},[]',
        b'["\xff",{"now_s":1.0},[]]',
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: bytes) -> None:
    """Cut off, of an unknown kind, with a missing, wrong or extra field: our own error has its number."""
    with pytest.raises(EventLogError, match="line 3: not an event"):
        replay([HEADER, b'["Tick",{"now_s":1.0},[]]\n', line + b"\n"])


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"5",
        b"null",
        b"{}",
        b'{"format":"\xff"}',
        HEADER.replace(b'"settings":{}', b'"settings":{"unknown":1}'),
        HEADER.replace(b'"settings":{}', b'"settings":null'),
        HEADER.replace(b'{"n":"2"}', b"5"),
    ],
)
def test_a_file_that_is_no_event_log_is_refused(header: bytes) -> None:
    """Its first line shows that."""
    with pytest.raises(EventLogError, match="line 1: not the header" if header else "it is empty"):
        replay([header])


def test_a_log_of_a_policy_that_is_not_here_is_refused() -> None:
    """A start of the proxy would refuse it, too."""
    with pytest.raises(ConfigurationError, match="no policy 'gone'"):
        replay([HEADER.replace(b'"cap"', b'"gone"')])


def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    """The error comes before anything is started, with the path."""
    with pytest.raises(EventLogError, match=r"cannot write the event log .*/none/log: No such file or directory"):
        EventLogWriter(tmp_path / "none" / "log", policy="cap", policy_settings={}, settings=SETTINGS)


def test_flushed_log_can_be_read_while_it_is_open(tmp_path: Path) -> None:
    """Operators look at an incident while the proxy runs."""
    path = tmp_path / "log"
    log = EventLogWriter(path, policy="cap", policy_settings={"n": 1}, settings=SETTINGS)
    driver = every_event()
    for event, decisions in driver.events[:4]:
        log.write(event, decisions)
    log.flush()
    with path.open("rb") as lines:
        assert replay(lines).events_count == 4
    log.close()


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """A killed process leaves half a line; everything before it is replayed."""
    path = a_log(tmp_path / "log", every_event())
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with path.open("rb") as lines:
        report = replay(lines)
    assert report.difference is None
    assert report.events_count == whole.count(b"\n") - 2


def test_an_older_log_is_kept(tmp_path: Path) -> None:
    """A restart does not overwrite the log of the previous run."""
    first = a_log(tmp_path / "log", every_event()).read_bytes()
    second = a_log(tmp_path / "log", Driver(Cap(n=1), settings=SETTINGS)).read_bytes()
    assert (tmp_path / "log.1").read_bytes() == first
    assert (tmp_path / "log").read_bytes() == second


def test_only_a_file_is_moved_out_of_the_way(tmp_path: Path) -> None:
    """A folder is refused, and a device is written to."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(EventLogError, match="Is a directory"):
        EventLogWriter(tmp_path / "folder", policy="cap", policy_settings={}, settings=SETTINGS)
    (tmp_path / "device").symlink_to("/dev/null")
    EventLogWriter(tmp_path / "device", policy="cap", policy_settings={}, settings=SETTINGS).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device", "folder"]


def test_a_log_on_a_full_disk_is_closed(tmp_path: Path) -> None:
    """The end of the process is as clean as without it."""
    (tmp_path / "log").symlink_to("/dev/full")
    log = EventLogWriter(tmp_path / "log", policy="cap", policy_settings={}, settings=SETTINGS)
    with pytest.raises(OSError, match="No space left"):
        log.flush()
    log.close()
    assert log._file.closed


def test_the_events_of_a_log_can_be_read_without_its_policy(tmp_path: Path) -> None:
    """They come as written, up to a cut-off line; other files are refused as by a replay."""
    driver = every_event()
    lines = a_log(tmp_path / "log", driver).read_bytes().replace(b'"cap"', b'"gone.module:Policy"').splitlines(True)
    assert list(read_events(lines)) == [event for event, _ in driver.events]
    assert list(read_events([*lines[:2], lines[2][:-1]])) == [driver.events[0][0]]
    for broken, message in (([], "it is empty"), ([lines[0], b"[]\n"], "line 2: not an event")):
        with pytest.raises(EventLogError, match=message):
            list(read_events(broken))
