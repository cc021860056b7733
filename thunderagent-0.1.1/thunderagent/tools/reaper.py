"""The reaper: a process that waits for the proxy to die, and then removes what that proxy's sandboxes leave.

Containers end by themselves when their time to live is over; networks and images do not, and an engine may have failed
to remove a container that ended. The proxy holds the other end of our standard input for as long as it lives, however
it dies. From then on this looks now and then for what bears the labels of that proxy and of that run, removes what has
expired, and ends when nothing is left. An engine that does not answer, or is restarted meanwhile, is asked again.

    python -m thunderagent.tools.reaper --owner OWNER --run RUN [--url URL] < PIPE

Until the proxy dies it holds little: the library is imported only then.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

from thunderagent.errors import SandboxError

LOOK_S = 2.0
"""Time between two looks."""
LONGEST_LOOK_S = 60.0
"""Time between two looks while nothing is about to expire."""
GIVE_UP_S = 3600.0
"""An engine that has not answered for this long will not."""


class Reap(Protocol):
    """Removes what has expired."""

    def __call__(self, now_s: float) -> float | None:
        """Return when the next remaining object expires, in Unix time as `now_s` is; None if nothing is left.

        Raises `SandboxError` if the engine cannot be asked.
        """


def wait_for_the_end(file_descriptor_id: int) -> None:
    """Return once nobody holds the other end of a pipe."""
    while os.read(file_descriptor_id, 4096):
        pass


def reap_until_nothing_is_left(
    reap: Reap, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.time
) -> bool:
    """Repeat until nothing is left; return False if the engine has not answered for `GIVE_UP_S`."""
    answered_s = clock()
    while True:
        now_s = clock()
        try:
            next_s = reap(now_s)
        except SandboxError:
            if now_s - answered_s > GIVE_UP_S:
                return False
            sleep(min(max(LOOK_S, (now_s - answered_s) / 2), LONGEST_LOOK_S))
            continue
        if next_s is None:
            return True
        answered_s = now_s
        sleep(min(max(next_s - now_s, LOOK_S), LONGEST_LOOK_S))


def main() -> int:
    """Wait for the proxy's end, then reap."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--owner", required=True, help="whose sandboxes")
    parser.add_argument("--run", required=True, help="of which run of it")
    parser.add_argument("--url", default="", help="the engine's; by default what DOCKER_HOST says")
    parser.add_argument("--images-bytes", type=int, help="how much of the images that it pulled stays; all by default")
    parser.add_argument("--keep-image", action="append", default=[], help="an image that is never removed")
    arguments = parser.parse_args()
    wait_for_the_end(sys.stdin.fileno())

    from thunderagent.tools.base import Owner  # noqa: PLC0415 - with the library some 40 MB, perhaps never needed
    from thunderagent.tools.docker.reap import reap  # noqa: PLC0415

    of = Owner(arguments.owner, arguments.run)

    def look(now_s: float) -> float | None:
        return reap(arguments.url, of, now_s, arguments.images_bytes, arguments.keep_image)

    return 0 if reap_until_nothing_is_left(look) else 1


if __name__ == "__main__":
    sys.exit(main())
