"""Which pass starts when: Algorithm 1 of the paper, and the policies that it is compared with, in one loop.

Theory of operation
-------------------
A request waits for its encoding, is encoded, prefilled, and decoded token by token until its end; a request without an
image to encode begins at its prefill. Each event is booked first: requests move from stage to stage, and finished
ones are freed. Then the policy starts what may start. `Scheduler` holds the books; a policy is a function that reads
them and calls `start_…`. It is pure: the time of an event is only carried.

- `nova` (Algorithm 1): each stage serves first come first served. Decoding waits only for the batch in flight, and
  takes along all requests that are ready. Encoding and prefill never run beside each other; one request at a time,
  prefill first. Beside decoding they share the units by a split. A stage that runs alone gets the whole device: no
  request becomes ready for decoding while another is encoded, because only a prefill makes it ready.
- `multi_stream`: the same, and every pass has the whole device.
- `pf_limit`: one pass at a time; encoding and prefill first, decoding once `decode_limit` wait for it or nothing else
  does.
- `chunked`: one encoding at a time, alone; else a step is a chunk of a prefill plus one token for each request that
  is decoded, together at most `budget_tokens`. The next step begins when both are through.

A split changes with the load. A prefill keeps its own from begin to end, and decoding beside it uses the same. The
encoder changes between two groups of layers (`Resplit`), and decoding follows with its next batch.

A request that is cancelled while a worker has it is freed when the worker answers, else at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from thunderagent_nova.messages import (
    Arrived,
    Cancelled,
    Decision,
    DecodeDone,
    EncodeDone,
    Event,
    Failed,
    Free,
    PrefillDone,
    Resplit,
    Split,
    StartDecode,
    StartEncode,
    StartPrefill,
)
from thunderagent_nova.policy import SplitPolicy, Whole


class SchedulingError(RuntimeError):
    """An impossible event: a stage answered for a request that it does not have, or an id came twice."""


@dataclass(slots=True, eq=False)
class _Request:
    request_id: str
    prompt_tokens: int
    prefilled_tokens: int = 0
    has_slot: bool = False
    is_cancelled: bool = False


class Scheduler:
    """The state of all requests, and one policy."""

    def __init__(
        self,
        policy_name: str = "nova",
        *,
        slots: int,
        split_policy: SplitPolicy | None = None,
        decode_limit: int = 5,
        budget_tokens: int = 128,
    ) -> None:
        """Start without requests; ValueError for an unknown policy, or invalid numbers."""
        if policy_name not in POLICIES:
            raise ValueError(f"unknown policy {policy_name!r}; known are: {', '.join(POLICIES)}")
        if min(slots, decode_limit, budget_tokens) < 1:
            raise ValueError("slots, decode_limit and budget_tokens are 1 at least")
        self.policy_name = policy_name
        self.decode_limit = decode_limit
        self.budget_tokens = budget_tokens
        self._start_what_may: Callable[[Scheduler], None] = POLICIES[policy_name]
        self._split_policy = split_policy if split_policy is not None and policy_name == "nova" else Whole()
        self._free_slots = slots
        self._requests: dict[str, _Request] = {}
        # Requests of each stage, in order of arrival, including those that a worker has.
        self.encode: dict[str, _Request] = {}
        self.prefill: dict[str, _Request] = {}
        self.decode: dict[str, _Request] = {}
        # What the workers have.
        self.encoding: str | None = None
        self.prefilling: str | None = None
        self.batch: tuple[str, ...] = ()
        self._front_split: Split = None
        self._decisions: list[Decision] = []

    def __repr__(self) -> str:
        return (
            f"<Scheduler {self.policy_name}: {len(self.encode)} to encode, {len(self.prefill)} to prefill, "
            f"{len(self.decode)} decoding, split {self.split}>"
        )

    @property
    def split(self) -> Split:
        """The split in force: None while nothing runs beside decoding, or nothing is partitioned."""
        return self._front_split if self.is_front_busy else None

    @property
    def pending(self) -> int:
        """N_pend: requests that are in encoding or prefill, or wait for them."""
        return len(self.encode) + len(self.prefill)

    @property
    def is_front_busy(self) -> bool:
        """Whether a request is encoded or prefilled now."""
        return self.encoding is not None or self.prefilling is not None

    def handle(self, event: Event) -> list[Decision]:
        """Book one event and return what starts now, in order; SchedulingError for an impossible one. O(requests)."""
        self._decisions = []
        match event:
            case Arrived():
                self._arrived(event)
            case Cancelled(_, request_id):
                self._cancelled(request_id)
            case EncodeDone(_, request_id):
                self._encoded(request_id)
            case PrefillDone():
                self._prefilled(event)
            case DecodeDone(_, request_ids, finished):
                self._decoded(request_ids, finished)
            case Failed(_, stage, request_ids):
                self._failed(stage, request_ids)
        self._start_what_may(self)
        return self._decisions

    # --- booking ------------------------------------------------------------------------------------------------

    def _arrived(self, event: Arrived) -> None:
        if event.request_id in self._requests:
            raise SchedulingError(f"request {event.request_id!r} came twice")
        request = _Request(event.request_id, event.prompt_tokens)
        self._requests[event.request_id] = request
        stage = self.encode if event.images else self.prefill
        stage[event.request_id] = request

    def _cancelled(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        if request_id in (self.encoding, self.prefilling) or request_id in self.batch:
            request.is_cancelled = True
        else:
            self._end(request_id)

    def _encoded(self, request_id: str) -> None:
        self._encoder_answers((request_id,))
        request = self.encode.pop(request_id)
        self.prefill[request_id] = request
        if request.is_cancelled:
            self._end(request_id)

    def _prefilled(self, event: PrefillDone) -> None:
        self._prefill_answers((event.request_id,))
        request = self._requests[event.request_id]
        request.prefilled_tokens = event.end
        if request.is_cancelled or event.finished:
            self._end(event.request_id)
        elif event.end >= request.prompt_tokens:
            self.decode[event.request_id] = self.prefill.pop(event.request_id)

    def _decoded(self, request_ids: tuple[str, ...], finished: tuple[str, ...]) -> None:
        self._decoder_answers(request_ids)
        for request_id in request_ids:
            if request_id in finished or self._requests[request_id].is_cancelled:
                self._end(request_id)

    def _failed(self, stage: str, request_ids: tuple[str, ...]) -> None:
        answers = {"encode": self._encoder_answers, "prefill": self._prefill_answers, "decode": self._decoder_answers}
        answers[stage](request_ids)
        for request_id in request_ids:
            self._end(request_id)

    def _encoder_answers(self, request_ids: tuple[str, ...]) -> None:
        _check_answer("encode", request_ids, (self.encoding,))
        self.encoding = None

    def _prefill_answers(self, request_ids: tuple[str, ...]) -> None:
        _check_answer("prefill", request_ids, (self.prefilling,))
        self.prefilling = None

    def _decoder_answers(self, request_ids: tuple[str, ...]) -> None:
        _check_answer("decode", request_ids, self.batch)
        self.batch = ()

    def _end(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        self._free_slots += request.has_slot
        for stage in (self.encode, self.prefill, self.decode):
            stage.pop(request_id, None)
        self._decisions.append(Free(request_id))

    # --- what a policy may do -----------------------------------------------------------------------------------

    def start_encode(self) -> bool:
        """Encode the first request with a slot; return whether there is one."""
        request = self._first_with_slot(self.encode.values())
        if request is None:
            return False
        self.encoding = request.request_id
        self._front_split = self._split_for("encode")
        self._decisions.append(StartEncode(request.request_id, self._front_split))
        return True

    def start_prefill(self, most_tokens: int | None = None) -> bool:
        """Prefill the first request with a slot, or its next `most_tokens` tokens; return whether there is one.

        An encoded one has its slot, and is not blocked by an earlier one that waits for a slot.
        """
        request = self._first_with_slot(self.prefill.values())
        if request is None:
            return False
        begin, end = request.prefilled_tokens, request.prompt_tokens
        if most_tokens is not None:
            end = min(end, begin + most_tokens)
        self.prefilling = request.request_id
        self._front_split = self._split_for("prefill")
        self._decisions.append(StartPrefill(request.request_id, begin, end, self._front_split))
        return True

    def start_decode(self) -> bool:
        """Decode a token for all that are ready; return whether any is."""
        self.batch = tuple(self.decode)
        if self.batch:
            self._decisions.append(StartDecode(self.batch, self.split))
        return bool(self.batch)

    def resplit(self) -> None:
        """Adapt the running encoder to the load."""
        if self.encoding is None or (split := self._split_for("encode")) == self._front_split:
            return
        self._front_split = split
        self._decisions.append(Resplit(split))

    def _split_for(self, stage: str) -> Split:
        return self._split_policy.split(stage, self.pending) if self.decode else None

    def _first_with_slot(self, waiting: Iterable[_Request]) -> _Request | None:
        for request in waiting:
            if request.has_slot or self._free_slots:
                self._free_slots -= not request.has_slot
                request.has_slot = True
                return request
        return None


def _check_answer(stage: str, request_ids: tuple[str, ...], given: tuple[str | None, ...]) -> None:
    if request_ids != given or not request_ids:
        raise SchedulingError(f"{stage} answered for {request_ids}, and was given {given}")


# --- policies ---------------------------------------------------------------------------------------------------


def _pipelined(books: Scheduler) -> None:
    if not books.is_front_busy and not books.start_prefill():
        books.start_encode()
    books.resplit()
    if not books.batch:
        books.start_decode()


def _decode_limited(books: Scheduler) -> None:
    if books.is_front_busy or books.batch:
        return
    if len(books.decode) >= books.decode_limit and books.start_decode():
        return
    if not (books.start_prefill() or books.start_encode()):
        books.start_decode()


def _chunked(books: Scheduler) -> None:
    if books.is_front_busy or books.batch:
        return
    chunk_tokens = max(1, books.budget_tokens - len(books.decode))
    if books.start_prefill(chunk_tokens) or not books.start_encode():
        books.start_decode()


POLICIES: Final[dict[str, Callable[[Scheduler], None]]] = {
    "nova": _pipelined,
    "multi_stream": _pipelined,
    "pf_limit": _decode_limited,
    "chunked": _chunked,
}
"""Each starts what may start now. Static splits are `nova` with a `Static` split policy."""
