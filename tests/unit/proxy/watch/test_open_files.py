"""The end of the file descriptors is counted and said."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from thunderagent.proxy.watch.open_files import OpenFiles

NAME = "thunderagent_file_descriptors_ended_total"


def test_no_descriptor_left_is_counted_each_time_and_said_once_a_minute() -> None:
    registry, left = CollectorRegistry(), iter([True, False, False, False, True, False])
    files = OpenFiles(registry, lambda: next(left))
    with capture_logs() as logs:
        for now_s in (0.0, 1.0, 2.0, 61.0, 62.0, 63.0):
            files.look(now_s)
    assert registry.get_sample_value(NAME) == 4
    ended, back = "file_descriptors_ended", "file_descriptors_are_back"
    assert [line["event"] for line in logs] == [ended, ended, back, ended]
    assert logs[0]["limit_count"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_real_end_is_seen() -> None:
    registry, before = CollectorRegistry(), resource.getrlimit(resource.RLIMIT_NOFILE)
    files, taken = OpenFiles(registry), []
    files.look(0.0)
    assert registry.get_sample_value(NAME) == 0
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 8, before[1]))
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            files.look(1.0)
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert registry.get_sample_value(NAME) == 1
