"""Who has which slot of the KV cache, and what programs left in theirs between turns.

Theory of operation
-------------------
The scheduler lets at most `slots` requests hold one. `keep` more exist where programs keep theirs, so a request that
waits with its program's slot never takes one that the scheduler counts on: used <= slots + keep at any time. What a
slot holds is the prompt and every token but the last, which was never fed back. A later prompt may use the part that is
the same, and never half an image.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

from thunderagent_nova.messages import Prompt


@dataclass(frozen=True, slots=True)
class Kept:
    """A program's leftover: its slot, and the tokens and images in it."""

    slot: int
    token_ids: tuple[int, ...]
    digests: tuple[str, ...]


class Slots:
    """The slots of a cache. Lowest first, so that few empty rows are decoded."""

    def __init__(self, slots: int, keep: int) -> None:
        self.total = slots + keep
        self._keep = keep
        self._free = list(range(self.total))
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bound = 0  # taken up again by turns that have not started

    @property
    def used(self) -> int:
        """Slots that requests hold."""
        return self.total - len(self._free) - len(self._kept)

    @property
    def kept(self) -> int:
        """Slots that programs keep between turns."""
        return len(self._kept)

    def take(self) -> int:
        """Take a free slot. The one kept longest goes, if there is no other."""
        if not self._free:
            self._evict()
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        """Free a slot."""
        heapq.heappush(self._free, slot)

    def keep(self, program_id: str, kept: Kept) -> None:
        """Keep a slot for a program, or free it if no more may be kept."""
        self.release(program_id)
        if self._keep and len(self._kept) + self._bound >= self._keep and self._kept:
            self._evict()
        if len(self._kept) + self._bound < self._keep:
            self._kept[program_id] = kept
        else:
            self.give_back(kept.slot)

    def bind(self, program_id: str | None, prompt: Prompt, image_token_id: int) -> tuple[int, int] | None:
        """Reuse a program's slot: (slot, tokens of the prompt in it). None: nothing to use."""
        kept = self._kept.get(program_id) if program_id is not None else None
        if kept is None or program_id is None:
            return None
        common = common_prefix(kept, prompt, image_token_id)
        del self._kept[program_id]
        if not common:
            self.give_back(kept.slot)
            return None
        self._bound += 1
        return kept.slot, common

    def started(self) -> None:
        """Say that a turn with a bound slot starts or ends: the scheduler counts it from now on."""
        self._bound -= 1

    def release(self, program_id: str) -> bool:
        """Free a program's slot."""
        kept = self._kept.pop(program_id, None)
        if kept is not None:
            self.give_back(kept.slot)
        return kept is not None

    def _evict(self) -> None:
        _program_id, kept = self._kept.popitem(last=False)
        self.give_back(kept.slot)


def common_prefix(kept: Kept, prompt: Prompt, image_token_id: int) -> int:
    """Return how many tokens of a prompt a slot already holds: never all, never half an image."""
    is_image = [token == image_token_id for token in prompt.token_ids]
    runs = sum(here and not before for here, before in zip(is_image, [False, *is_image], strict=False))
    if runs != len(prompt.images):
        return 0  # images side by side: their borders do not show
    images, inside, begin = 0, False, 0
    limit = min(len(kept.token_ids), len(prompt.token_ids) - 1)
    for index in range(limit):
        token = prompt.token_ids[index]
        if token != kept.token_ids[index]:
            return begin if inside else index
        if is_image[index]:
            if not inside:
                inside, begin = True, index
                if not _same_image(kept, prompt, images):
                    return begin
                images += 1
        else:
            inside = False
    ends_inside = inside and is_image[limit]
    return begin if ends_inside else limit


def _same_image(kept: Kept, prompt: Prompt, index: int) -> bool:
    digest = prompt.images[index].digest
    return bool(digest) and index < len(kept.digests) and kept.digests[index] == digest
