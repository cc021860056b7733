"""Remember the owners of KV blocks, as SGLang does with `--enable-session-radix-cache`."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class KvTags:
    """Tags the keys of blocks with names; closing a name returns the keys that no other name has.

    A reused name is a new incarnation: requests that still run for the old one are not tagged.
    """

    def __init__(self) -> None:
        self._keys: dict[str, dict[int, None]] = {}  # in the order of the contexts
        self._incarnations: dict[str, int] = {}
        self._references: Counter[int] = Counter()
        self._numbers = count(1)

    @property
    def tagged_count(self) -> int:
        """Return the number of tagged blocks."""
        return len(self._references)

    def is_open(self, name: str) -> bool:
        """Return whether a name was opened or used, and not closed."""
        return name in self._incarnations

    def open(self, name: str) -> int:
        """Return the incarnation of a name; a new one unless it is open."""
        if name not in self._incarnations:
            self._incarnations[name] = next(self._numbers)
            self._keys[name] = {}
        return self._incarnations[name]

    def add(self, name: str, incarnation: int, keys: Iterable[int]) -> None:
        """Tag blocks, unless that incarnation of the name was closed."""
        if self._incarnations.get(name) != incarnation:
            return
        known = self._keys[name]
        for key in keys:
            if key not in known:
                known[key] = None
                self._references[key] += 1

    def close(self, name: str) -> list[int]:
        """Forget a name; return the keys of blocks that no longer have a tag, each context's head first."""
        self._incarnations.pop(name, None)
        freed = []
        for key in self._keys.pop(name, {}):
            self._references[key] -= 1
            if not self._references[key]:
                del self._references[key]
                freed.append(key)
        return freed
