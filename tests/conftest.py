"""What all tests share."""

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

# How long an example takes is the machine's business: a pause of it must fail no test. Where CI=true hypothesis would
# try the same examples each time: they differ here too, and `scripts/test` says by which seed.
settings.register_profile(
    "any_machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=False,
    print_blob=True,
    max_examples=int(os.environ.get("EXAMPLES", "50")),  # scripts/nightly has many more
)
settings.load_profile("any_machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background: tests of Ctrl-C would wait in vain
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Say on which build the tests run, and on how many processors; not on one that is not what its sources say."""
    kind, wanted = build_kind(), os.environ.get("WANTED_BUILD")
    if kind == "stale":
        pytest.exit(STALE, returncode=4)
    if wanted and kind != wanted:
        pytest.exit(f"the build is {kind}, and WANTED_BUILD={wanted}", returncode=4)
    usable_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"build: {kind}; may use {usable_count} of the machine's {os.cpu_count()} processors"


@pytest.fixture(autouse=True, scope="session")
def loggers_are_not_kept() -> Iterator[None]:
    """Have a command that a test runs in this process keep no logger: those after it would hear nothing."""
    configure = structlog.configure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structlog, "configure", lambda **more: configure(**{**more, "cache_logger_on_first_use": False}))
        yield


@pytest.hookimpl(tryfirst=True)  # before the groups are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the real parts in groups that run side by side: tests of each kind of engine, of Docker, and all else."""
    for item in items:
        if "tests/real/" in item.path.as_posix() or "tests/e2e/" in item.path.as_posix():
            kinds = [kind for kind in ("vllm", "sglang", "docker_engine") if kind in getattr(item, "fixturenames", ())]
            item.add_marker(pytest.mark.xdist_group(kinds[0] if kinds else "beside"))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays to the end: modules, tests and their parameters, half a million objects.

    A whole collection, which tests of what is left behind make again and again, takes a second otherwise.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # with Python's 700 it took a tenth of all tests' time


@pytest.fixture(scope="session")
def require_real() -> Callable[[str], NoReturn]:
    """Give up a test for want of a real part: `if shutil.which("docker") is None: require_real("no Docker")`.

    Skips with the reason; fails with it where REQUIRE_REAL_PARTS=1 says that every part must be there.
    """

    def give_up(reason: str) -> NoReturn:
        if os.environ.get("REQUIRE_REAL_PARTS") == "1":
            pytest.fail(f"a real part is missing: {reason}", pytrace=False)
        pytest.skip(reason)

    return give_up
