"""Trainers' calls to engines, what they mean for grants and for caches, and how to read them.

Paths and defaults are those of vLLM 0.32 and 0.33 (`vllm/entrypoints/rl`, `vllm/entrypoints/serve/dev`), of SGLang
0.5.23 (`sglang/srt/entrypoints/http_server.py`, `sglang/srt/managers/io_struct.py`), and the additions of prime-rl and
SkyRL to vLLM. `scripts/nightly routes` compares them with the newest versions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from multidict import MultiMapping

CALL = "call"
"""A call that changes an engine is under way."""
PAUSED = "pause"
OBSERVED = "observed"
"""The engine itself reports that it is paused; nobody told us to pause it."""
ASLEEP = "sleep"
WITHOUT_MEMORY = "memory"
NEW_WEIGHTS = "weights"
WEIGHT_SYNC = "weight_sync"
"""A trainer that calls the engines itself reported that it changes their weights."""
UNANSWERED = "unanswered"
"""The engine was told something and never answered: nobody knows whether it did that, or still does."""

KV_CACHE_TAG = "kv_cache"


class _Fields(msgspec.Struct):
    """The fields of a control call's body that are read; everything else is skipped, not built."""

    mode: Any = None
    clear_cache: Any = None
    flush_cache: Any = None
    abort_all: Any = None
    abort_all_requests: Any = None
    rid: Any = None
    request_ids: Any = None
    update_info: msgspec.Raw = msgspec.Raw()
    tags: Any = None
    level: Any = None
    weight_version: Any = None
    new_version: Any = None
    wait_for_inflight_requests: Any = None
    wait_for_inflight_request: Any = None


_ENGINES_PREFIX = re.compile(r"(?:chatcmpl|cmpl|generate-tokens)-")

_RawFields = msgspec.defstruct("_RawFields", [(name, msgspec.Raw, msgspec.Raw()) for name in _Fields.__struct_fields__])
_decode_raw_fields = msgspec.json.Decoder(_RawFields).decode

MAX_VALUE_BYTES = 256 * 1024
"""A larger value of a control call is not built, and counts as a true one that says nothing."""


def _decode_fields(body: bytes) -> _Fields:
    raw = _decode_raw_fields(body)
    fields = _Fields()
    for name in _Fields.__struct_fields__:
        value = getattr(raw, name)
        if name == "update_info":
            fields.update_info = value  # only its presence matters
        elif value:
            setattr(fields, name, msgspec.json.decode(value) if len(value) <= MAX_VALUE_BYTES else True)
    return fields


class Asked:
    """What a control call asks for, in the query (vLLM) or in the body (SGLang)."""

    __slots__ = ("_fields", "_query", "kinds")

    def __init__(self, query: MultiMapping[str], body: bytes) -> None:
        """Read a call; a body that is not a JSON object counts as empty. Cost: one pass over the body."""
        self._query = query
        self.kinds: Collection[str] = ()
        """Kinds of the engines that are asked: the same path may mean more to one of them."""
        try:
            self._fields = _decode_fields(body) if body else _Fields()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._fields = _Fields()

    def text(self, name: str, default: str = "") -> str:
        """Return a value as text."""
        value = self._query.get(name)
        if value is None:
            value = getattr(self._fields, name)
        return default if value is None else str(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean."""
        text = self.text(name).lower()
        return default if not text else text in ("1", "true", "yes", "on")

    @property
    def tags(self) -> list[str]:
        """Return which parts of an engine are meant; empty is all of them."""
        tags = self._query.getall("tags", None) or self._fields.tags or []
        return [str(tag) for tag in tags] if isinstance(tags, list) else [str(tags)]

    @property
    def request_ids(self) -> list[str]:
        """Return the ids of the single requests that are meant, as SGLang or vLLM is told them."""
        named = self._fields.rid or self._fields.request_ids or []
        return [str(each) for each in named] if isinstance(named, list) else [str(named)]

    @property
    def client_ids(self) -> set[str]:
        """Return what clients call these requests: vLLM puts the API before that, and behind it a prompt's number.

        The number is only taken off if it is 0: a held turn has one id for all its prompts.
        """
        names = set(self.request_ids)
        for name in tuple(names):
            if (prefix := _ENGINES_PREFIX.match(name)) is not None:
                names |= {name[prefix.end() :], name[prefix.end() :].removesuffix("-0")}
        return names

    @property
    def is_of_vllm(self) -> bool:
        """Return whether an update of weights has the shape that vLLM's own API takes."""
        return bool(bytes(self._fields.update_info))

    @property
    def weight_version(self) -> str:
        """Return the version of the new weights; empty if the call does not say."""
        return self.text("weight_version") or self.text("new_version")


def _never(_: Asked) -> bool:
    return False


def _always(_: Asked) -> bool:
    return True


def _means_memory(asked: Asked) -> bool:
    return not asked.tags or KV_CACHE_TAG in asked.tags


def _is_abort_mode(asked: Asked) -> bool:
    """Return whether the call aborts: both engines do by default; `wait_for_inflight_requests` is vLLM's older name."""
    waits = asked.flag("wait_for_inflight_requests", default=False) or asked.flag(
        "wait_for_inflight_request", default=False
    )
    return asked.text("mode", "wait" if waits else "abort") == "abort"


def _pause_clears(asked: Asked) -> bool:
    """Return whether vLLM clears its cache: in every mode, as requests that it keeps are preempted for that."""
    return asked.flag("clear_cache", default=True)


def _aborts_all(asked: Asked) -> bool:
    """Return whether SGLang's updates of weights abort everything first: only if they are told to."""
    return asked.flag("abort_all_requests", default=False)


def _version_aborts(asked: Asked) -> bool:
    """Return whether a new name for the weights aborts everything: SGLang does so unless told otherwise; vLLM never."""
    return "sglang" in asked.kinds and asked.flag("abort_all_requests", default=True)


def _update_clears(asked: Asked) -> bool:
    """Return whether an update clears the cache: SGLang does unless told otherwise; vLLM's own API never does."""
    return not asked.is_of_vllm and asked.flag("flush_cache", default=True)


@dataclass(frozen=True, slots=True)
class Command:
    """What a control call means.

    A call that `reads` changes nothing, so it waits for no other. A call that `suspends` stops grants while it is under
    way. `leaves` is the cause for which grants stay stopped on each replica that did it; `ends` are the causes that
    then end there, unless only a part of an engine was meant. `harms_turns` says that no turn may run into it: then
    grants stay stopped on a replica that never answered. One that `renews` has changed the weights once it is answered.
    One that `loads` may have changed those of an adapter.
    """

    reads: bool = False
    suspends: bool = True
    leaves: str = ""
    ends: tuple[str, ...] = ()
    clears: Callable[[Asked], bool] = _never
    aborts: Callable[[Asked], bool] = _never
    is_abort: bool = False
    harms_turns: bool = False
    renews: bool = False
    loads: bool = False

    @property
    def may_renew(self) -> bool:
        """Return whether what a cache holds may be of other weights after it, also if it failed."""
        return self.loads or self.renews or self.harms_turns

    @property
    def cuts(self) -> bool:
        """Return whether an engine may abort turns for it: vLLM does so for `/sleep`, whatever its mode."""
        return self.is_abort or bool(self.leaves) or self.harms_turns

    @property
    def needs_answer(self) -> bool:
        """Return whether it matters what a replica made of it that did not answer."""
        return bool(self.leaves or self.ends) or self.harms_turns


_UPDATE = Command(clears=_update_clears, aborts=_aborts_all, harms_turns=True, renews=True)
_BESIDE_TURNS = Command(suspends=False)
"""What every replica must know, and turns need not wait for: adapters, sessions, and the like."""
_LOADS = Command(suspends=False, loads=True)
_READ = Command(reads=True, suspends=False)

COMMANDS: Mapping[str, Command] = {
    "/pause": Command(leaves=PAUSED, clears=_pause_clears, aborts=_is_abort_mode),
    "/resume": Command(ends=(PAUSED, OBSERVED)),
    "/is_paused": _READ,
    "/pause_generation": Command(leaves=PAUSED, aborts=_is_abort_mode),
    "/continue_generation": Command(ends=(PAUSED, OBSERVED)),
    "/flush_cache": Command(clears=_always),
    "/reset_prefix_cache": Command(clears=_always),
    "/sleep": Command(leaves=ASLEEP, clears=lambda asked: asked.text("level", "1") != "0"),
    "/wake_up": Command(ends=(ASLEEP, OBSERVED)),
    "/is_sleeping": _READ,
    "/release_kv_cache_memory": Command(leaves=ASLEEP, clears=_always),
    "/release_memory_occupation": Command(leaves=WITHOUT_MEMORY, clears=_means_memory),
    "/resume_memory_occupation": Command(ends=(WITHOUT_MEMORY,)),
    "/start_weight_update": Command(leaves=NEW_WEIGHTS),
    "/start_draft_weight_update": Command(leaves=NEW_WEIGHTS),
    # vLLM's: the cache keeps what the old weights computed
    "/finish_weight_update": Command(ends=(NEW_WEIGHTS,), renews=True),
    "/begin_weight_update": Command(leaves=NEW_WEIGHTS),
    "/end_weight_update": Command(ends=(NEW_WEIGHTS,), renews=True),  # SGLang's: nothing is flushed, either
    "/finalize_weight_update": _UPDATE,
    "/update_weight_version": Command(aborts=_version_aborts),
    "/destroy_weights_update_group": Command(),
    "/shutdown_weight_transfer_engine": Command(),
    "/register_transfer_engine_info": _BESIDE_TURNS,
    "/collective_rpc": Command(harms_turns=True),
    "/pd_role_switch": Command(harms_turns=True),
    "/open_session": _BESIDE_TURNS,
    "/close_session": _BESIDE_TURNS,
    "/add_external_corpus": _BESIDE_TURNS,
    "/remove_external_corpus": _BESIDE_TURNS,
    "/hicache/storage-backend": _BESIDE_TURNS,
    "/hicache/storage-backend/clear": _BESIDE_TURNS,
    "/reset_mm_cache": _BESIDE_TURNS,
    "/reset_encoder_cache": _BESIDE_TURNS,
    "/set_internal_state": _BESIDE_TURNS,
    "/slow_down": _BESIDE_TURNS,
    "/freeze_gc": _BESIDE_TURNS,
    "/configure_logging": _BESIDE_TURNS,
    "/set_trace_level": _BESIDE_TURNS,
    "/start_profile": _BESIDE_TURNS,
    "/stop_profile": _BESIDE_TURNS,
    "/start_expert_distribution_record": _BESIDE_TURNS,
    "/stop_expert_distribution_record": _BESIDE_TURNS,
    "/dump_expert_distribution_record": _BESIDE_TURNS,
    "/load_lora_adapter": _LOADS,
    "/load_lora_adapter_from_tensors": _LOADS,
    "/unload_lora_adapter": _BESIDE_TURNS,
    "/v1/load_lora_adapter": _LOADS,
    "/v1/unload_lora_adapter": _BESIDE_TURNS,
    "/skyrl/v1/load_lora_adapter": _LOADS,
    "/abort_request": Command(is_abort=True, aborts=lambda asked: asked.flag("abort_all", default=False)),
    "/abort_requests": Command(is_abort=True, aborts=lambda asked: not asked.request_ids),
    "/inference/v1/abort_requests": Command(is_abort=True),
}
"""Calls that go to every replica."""

UPDATE_PREFIX = "/update_weights"
"""All calls with this prefix do, too: from disk, from a tensor, distributed, over IPC."""

REPLICA_COMMANDS: Mapping[str, str] = {
    "/init_weights_update_group": "each replica joins the group at a rank offset of its own",
    "/init_weight_transfer_engine": "each replica joins the transfer at a rank offset of its own",
    "/init_weight_transfer": "each replica joins the transfer at a rank offset of its own",
    "/init_broadcaster": "each replica joins the broadcast at a rank offset of its own",
    "/init_weights_send_group_for_remote_instance": "each replica needs an address and ports of its own",
    "/send_weights_to_remote_instance": "each replica needs an address and ports of its own",
}
"""Calls that never go to every replica, with the reason."""


def command_of(path: str) -> Command | None:
    """Return what a call on `path` means for every replica; None if it is no such call."""
    command = COMMANDS.get(path)
    return _UPDATE if command is None and path.startswith(UPDATE_PREFIX) else command


class Question(NamedTuple):
    """Where an engine says whether a cause holds."""

    path: str
    field: str


QUESTIONS: Mapping[str, Question] = {
    PAUSED: Question("/is_paused", "is_paused"),
    ASLEEP: Question("/is_sleeping", "is_sleeping"),
}
"""By the cause. What else was told, no engine can be asked about."""
