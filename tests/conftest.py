"""Fixtures and hooks shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
from typing import TYPE_CHECKING, NoReturn

import pytest
import structlog
from hypothesis import HealthCheck, settings

from thunderagent.compilation import STALE, build_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The time of an example depends on the machine; a pause of the machine must not fail a test. With CI=true hypothesis
# would try the same examples each time. Here they differ too, and `scripts/test` prints the seed.
settings.register_profile(
    "any_machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=False,
    print_blob=True,
    max_examples=int(os.environ.get("EXAMPLES", "50")),  # scripts/nightly has many more
)
settings.load_profile("any_machine")

os.environ.pop("COLUMNS", None)  # what is printed must not depend on the terminal of whoever started this

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background: tests of Ctrl-C would hang
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Make each worker beside others a session of its own.

    Linux shares processors among sessions first: in one with compilers and browsers, a worker would halt for seconds.
    """
    if hasattr(config, "workerinput") and hasattr(os, "setsid"):
        os.setsid()


def pytest_report_header() -> str:
    """Report the build under test and the number of processors; refuse a build that differs from its sources."""
    kind, wanted = build_kind(), os.environ.get("WANTED_BUILD")
    if kind == "stale":
        pytest.exit(STALE, returncode=4)
    if wanted and kind != wanted:
        pytest.exit(f"the build is {kind}, and WANTED_BUILD={wanted}", returncode=4)
    usable_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"build: {kind}; may use {usable_count} of the machine's {os.cpu_count()} processors"


@pytest.fixture(autouse=True, scope="session")
def loggers_are_not_kept() -> Iterator[None]:
    """Keep commands that tests run in this process from caching loggers: later tests would get no log lines."""
    configure = structlog.configure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structlog, "configure", lambda **more: configure(**{**more, "cache_logger_on_first_use": False}))
        yield


SHARED = ("engines", "publishing", "cacheless", "sglang", "clients")
"""Fixtures of real tests that take long to set up: tests that share one run in one process."""


@pytest.hookimpl(tryfirst=True)  # before the groups are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests of real parts to run in parallel: those that share an engine or clients, and else those of each file.

    Those of two engines, the longest group, come early, so that short ones are left for the end; but after the
    browser's: on a new machine their environment may still be installed.
    """
    places = {}
    for item in items:
        path, places[item] = item.path.as_posix(), 0
        if "tests/real/" in path or "tests/e2e/" in path:
            if item.get_closest_marker("xdist_group") is None:
                group = next((each for each in SHARED if each in getattr(item, "fixturenames", ())), item.path.stem)
                item.add_marker(pytest.mark.xdist_group(group))
            (group,) = (mark.args[0] for mark in item.iter_markers("xdist_group"))
            places[item] = 1 if group == "engines" else 2 if "tests/real/" in path else 0
    items.sort(key=places.__getitem__)


def pytest_collection_finish() -> None:
    """Exempt permanent objects from garbage collection: modules, tests and their parameters, half a million objects.

    Otherwise a full collection, which tests for leftovers make again and again, takes a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # with Python's default of 700 it took a tenth of all tests' time


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Collect no garbage while a failure is reported.

    Python 3.11 ends the run if garbage that is collected while sources are parsed parses some itself, as the traceback
    of a task that nobody awaited does (python/cpython, issue 106905).
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session")
def require_real() -> Callable[[str], NoReturn]:
    """Skip a test that lacks a real part: `if shutil.which("docker") is None: require_real("no Docker")`.

    Skips with the reason; fails with it if REQUIRE_REAL_PARTS=1, which means that every part must be available.
    """

    def give_up(reason: str) -> NoReturn:
        if os.environ.get("REQUIRE_REAL_PARTS") == "1":
            pytest.fail(f"a real part is missing: {reason}", pytrace=False)
        pytest.skip(reason)

    return give_up
