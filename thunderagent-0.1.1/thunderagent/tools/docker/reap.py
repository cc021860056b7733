"""Leftovers of Docker sandboxes when the proxy dies: starting the reaper, and its removals.

All of this blocks.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from docker import errors  # type: ignore[import-untyped]

from thunderagent.tools.base import OWNER_LABEL, RUN_LABEL, Owner
from thunderagent.tools.docker.answers import expires_s, labels_of, list_all
from thunderagent.tools.docker.connection import connect, try_to_remove
from thunderagent.tools.docker.engine import LIBRARY_ERRORS, mapped
from thunderagent.tools.docker.images import Marks
from thunderagent.tools.docker.networks import remove_network
from thunderagent.tools.docker.setups import kept_images, remove_kept

_TIMEOUT_S = 60.0
# What an engine has not removed for this long after it expired will not be removed.
_GIVE_UP_S = 3600.0


def spawn_reaper(
    owner: Owner, url: str, reading: int, images_bytes: int | None = None, keep_images: Sequence[str] = ()
) -> None:
    """Start it in its own process group, so that what ends us does not end it; only the pipe's end does."""
    arguments = ["--owner", owner.owner_id, "--run", owner.run_id, "--url", url]
    if images_bytes is not None:
        arguments += ["--images-bytes", str(images_bytes), *(f"--keep-image={name}" for name in keep_images)]
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "thunderagent.tools.reaper", *arguments],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, here, there) for here, there in ((reading, 0), (null, 1), (null, 2))],
            setsid=True,
        )
    finally:
        os.close(null)


def reap(
    url: str, of: Owner, now_s: float, images_bytes: int | None = None, keep_images: Sequence[str] = ()
) -> float | None:
    """Remove what has expired of one run: containers, networks without containers; then images.

    Of other images only those beyond the limit go. Returns when the next remaining object expires, in Unix time as
    `now_s` is; None if nothing is left. Raises `SandboxError`.
    """
    ours = {"label": [f"{OWNER_LABEL}={of.owner_id}", f"{RUN_LABEL}={of.run_id}"]}
    left_s: list[float] = []
    try:
        with contextlib.closing(connect(url, _TIMEOUT_S)) as client:
            for each in list_all(client, ours):
                end_s = expires_s(labels_of(each))
                if _is_left(end_s, now_s, partial(try_to_remove, client, each.id)):
                    left_s.append(end_s)
            for network in client.networks(filters=ours):
                end_s = expires_s(network["Labels"] or {})
                if _is_left(end_s, now_s, partial(remove_network, client, network["Name"])):
                    left_s.append(end_s)
            for image in () if left_s else kept_images(client, ours):
                with contextlib.suppress(errors.APIError):  # the engine answers: the others may go
                    remove_kept(client, image)
            if not left_s and images_bytes is not None:
                Marks(of.owner_id).prune(client, images_bytes, frozenset(keep_images).__contains__)
    except LIBRARY_ERRORS as error:
        raise mapped(error) from error
    return min(left_s, default=None)


def _is_left(end_s: float, now_s: float, remove: Callable[[], bool]) -> bool:
    """Remove an object that has expired; return whether to look at it again."""
    if end_s > now_s:
        return True
    with contextlib.suppress(errors.APIError):  # the engine answers: the others may go
        if remove():
            return False
    return end_s > now_s - _GIVE_UP_S
