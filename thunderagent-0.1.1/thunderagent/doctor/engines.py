"""Problems of single engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import pairwise

from thunderagent.backends import Backend, ReplicaReading
from thunderagent.backends.base import NOTHING_READ
from thunderagent.backends.exposition import STARTED, samples_of
from thunderagent.backends.ranks import rank_count_of
from thunderagent.backends.vllm import CACHE_CONFIG
from thunderagent.backends.vllm_plugin import read_reports, report_of
from thunderagent.doctor.asking import NO_ANSWER, Answer, Asker
from thunderagent.doctor.findings import Finding, fault, ok, warning
from thunderagent.doctor.probes import send, usage_of, words

MAX_SKEW_S = 5.0
"""Clocks that differ by more than this make logs, metrics and keys' expiry disagree."""

ON_FRESH_CONNECTION = {"Connection": "close"}
LOOKS_COUNT = 4
"""Number of looks at an engine's metrics, each on its own connection: a load balancer shows another engine by then."""

METRICS_REMEDY = {
    "sglang": "start SGLang with --enable-metrics",
    "vllm": "start vLLM without --disable-log-stats, and let GET /metrics through",
}


@dataclass(slots=True)
class Engine:
    """One engine's reports on itself, and its answers to two equal requests."""

    name: str
    health: Answer = NO_ANSWER
    metrics: Answer = NO_ANSWER
    models: Answer = NO_ANSWER
    info: Answer = NO_ANSWER
    plugin: Answer = NO_ANSWER
    """Its plugin's report; not asked of kinds that have none."""
    is_told: bool | None = None
    """Whether the proxy speaks with its plugin; None: no proxy runs already, or it does not know the engine."""
    kind: str = "auto"
    version: str = ""
    reading: ReplicaReading = NOTHING_READ
    capacity_tokens: int | None = None
    priority_polarity: int = 1
    start_times_s: list[float] = field(default_factory=list)
    readings: list[ReplicaReading] = field(default_factory=list)
    """Its metrics after the probes, one look after the other."""
    probes: list[Answer] = field(default_factory=list)
    priority_refused: bool | None = None
    """Whether it refused a request with a priority; None: none was sent."""

    @property
    def model_ids(self) -> tuple[str, ...]:
        """The models that it serves."""
        return tuple(str(each["id"]) for each in self._served() if "id" in each)

    @property
    def context_limit_tokens(self) -> int | None:
        """The longest prompt and answer together that it accepts."""
        limits = [limit for each in self._served() if isinstance(limit := each.get("max_model_len"), int)]
        return max(limits, default=None)

    @property
    def caches_prefixes(self) -> bool | None:
        """Whether its prefix cache is on; None if unknown."""
        if "disable_radix_cache" in (said := self.info.json()):
            return not said["disable_radix_cache"]
        labels = [sample.labels for sample in samples_of(self.metrics.text, (CACHE_CONFIG,)).get(CACHE_CONFIG, ())]
        said_words = {label.get("enable_prefix_caching") for label in labels} - {None, "None"}
        return "False" not in said_words if said_words else None

    @property
    def hits_grew(self) -> bool | None:
        """Whether its metrics count more cached tokens after the probes than before; None if unknown."""
        before = self.reading.cache_hit_tokens_total
        after = self.readings[-1].cache_hit_tokens_total if self.readings else None
        return None if before is None or after is None else after > before

    def _served(self) -> list[dict[str, object]]:
        data = self.models.json().get("data") if self.models.is_good else None
        return [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []


async def look_at(asker: Asker, name: str, backend: Backend, *, sends_turns: bool) -> Engine:
    """Ask an engine what it is and, if it may be sent turns, have it answer the same prompt twice."""
    engine = Engine(name, health=await asker.get(backend.health_path))
    if not engine.health.status:
        return engine
    engine.metrics = await asker.get(backend.metrics_path)
    engine.reading = backend.read_metrics(engine.metrics.text) if engine.metrics.is_good else NOTHING_READ
    engine.capacity_tokens = engine.reading.capacity_tokens
    for path in backend.info_paths:
        engine.info = await asker.get(path)
        if engine.info.is_good:
            engine.capacity_tokens = engine.capacity_tokens or backend.read_info(engine.info.text)
            break
    engine.kind = backend.kind
    engine.version = str((engine.info.json() or (await asker.get("/version")).json()).get("version", ""))
    engine.models = await asker.get("/v1/models")
    if backend.priorities is not None and backend.priorities.info_path:
        engine.priority_polarity = backend.priorities.read_polarity(engine.info.text.encode())
    if backend.plugin_path:
        engine.plugin = await asker.get(backend.plugin_path)
    if sends_turns and engine.model_ids:
        await _probe(asker, engine, backend)
    return engine


async def _probe(asker: Asker, engine: Engine, backend: Backend) -> None:
    model = engine.model_ids[0]
    prompt = [{"role": "user", "content": words(engine.context_limit_tokens)}]
    has_ranks = rank_count_of(engine.metrics.text, backend.rank_label) > 1
    headers = {backend.rank_header: "0"} if has_ranks else {}  # each rank has a cache of its own
    for _ in range(2):
        engine.probes.append(await send(asker, model, prompt, max_tokens=1, headers=headers))
    if engine.probes[-1].is_good and backend.priorities is not None and engine.priority_polarity:
        answer = await send(asker, model, prompt, max_tokens=1, headers=headers, priority=1)
        engine.priority_refused = answer.status == 400 and backend.priorities.is_refusal(answer.text.encode())
    for _ in range(LOOKS_COUNT):
        text = (await asker.get(backend.metrics_path, ON_FRESH_CONNECTION)).text
        engine.readings.append(backend.read_metrics(text))
        engine.start_times_s += [sample.value for sample in samples_of(text, (STARTED,)).get(STARTED, ())]


def findings_of(engine: Engine, *, wants_priorities: bool, capacity_override_tokens: int | None) -> Iterator[Finding]:
    """Yield findings on one engine."""
    if not engine.health.status:
        yield fault(
            "engine_reachable",
            engine.name,
            f"The engine cannot be reached: {engine.health.why}.",
            "start it, or correct its address: GET /health must answer 200 from the proxy's machine",
        )
        return
    if not engine.health.is_good:
        yield fault(
            "engine_reachable",
            engine.name,
            f"GET /health answers {engine.health.told()}.",
            "wait until the engine has loaded its model; if it has, give its root URL without a path, or another port",
        )
        return
    version = f" {engine.version}" if engine.version else ""
    yield ok("engine_reachable", engine.name, f"It answers: {engine.kind}{version}, {_of_models(engine)}.")
    yield from _key(engine)
    yield from _metrics(engine)
    yield from _prefix_caching(engine)
    yield from _capacity(engine, capacity_override_tokens)
    yield from clock(engine.name, engine.health)
    yield from _one_engine(engine)
    yield from _probes(engine)
    yield from _priorities(engine, wanted=wants_priorities)
    yield from _plugin(engine)


def _of_models(engine: Engine) -> str:
    return f"model {', '.join(engine.model_ids)}" if engine.model_ids else "no model is named"


def _key(engine: Engine) -> Iterator[Finding]:
    if engine.models.wants_key:
        yield fault(
            "engine_key",
            engine.name,
            f"GET /v1/models answers {engine.models.status}: the engine needs a key.",
            "set backend_api_key (THUNDERAGENT_BACKEND_API_KEY) to the key that the engine was started with",
        )
    elif not engine.model_ids:
        yield fault(
            "engine_models",
            engine.name,
            f"GET /v1/models names no model: {engine.models.told()}.",
            "point the proxy at an engine with OpenAI's API, or at the port that has it",
        )


def _metrics(engine: Engine) -> Iterator[Finding]:
    reading = engine.reading
    if engine.metrics.is_good and engine.kind != "auto" and reading.running_count is not None:
        yield ok("engine_metrics", engine.name, "Its metrics can be read.")
        return
    told = "hold none of vLLM's or SGLang's" if engine.metrics.is_good else f"answer {engine.metrics.told()}"
    remedies = [METRICS_REMEDY[engine.kind]] if engine.kind in METRICS_REMEDY else list(METRICS_REMEDY.values())
    yield fault(
        "engine_metrics",
        engine.name,
        f"GET /metrics: they {told}. Load, capacity and cache hits are not known.",
        "; ".join(remedies),
    )


def _prefix_caching(engine: Engine) -> Iterator[Finding]:
    if engine.caches_prefixes:
        yield ok("prefix_caching", engine.name, "Prefix caching is on.")
    elif engine.caches_prefixes is False:
        yield fault(
            "prefix_caching",
            engine.name,
            "Prefix caching is off: each turn computes its whole context again.",
            "start SGLang without --disable-radix-cache"
            if engine.kind == "sglang"
            else "start vLLM with --enable-prefix-caching, or without --no-enable-prefix-caching",
        )


def _capacity(engine: Engine, override_tokens: int | None) -> Iterator[Finding]:
    capacity_tokens, limit_tokens = override_tokens or engine.capacity_tokens, engine.context_limit_tokens
    if capacity_tokens is None:
        yield fault(
            "capacity",
            engine.name,
            "The size of its KV cache is unknown, so no turn is held for memory there.",
            "set capacity_tokens (--capacity-tokens N): the engine's log says it at its start, as "
            '"GPU KV cache size" (vLLM) or "max_total_num_tokens" (SGLang)',
        )
        return
    yield ok("capacity", engine.name, f"Its KV cache holds {capacity_tokens:,} tokens.")
    if limit_tokens is not None and limit_tokens > capacity_tokens:
        yield warning(
            "capacity",
            engine.name,
            f"It accepts contexts of {limit_tokens:,} tokens, more than its KV cache holds.",
            f"give it more memory, or start it with a context limit of at most {capacity_tokens:,} tokens "
            "(--max-model-len, SGLang: --context-length)",
        )


def clock(name: str, answer: Answer) -> Iterator[Finding]:
    """Yield findings on the other side's clock."""
    if answer.skew_s is None:
        return
    if abs(answer.skew_s) <= MAX_SKEW_S:
        yield ok("clock", name, "Its clock agrees with this machine's.")
        return
    way = "ahead of" if answer.skew_s > 0 else "behind"
    yield fault(
        "clock",
        name,
        f"Its clock is {abs(answer.skew_s):.0f} s {way} this machine's.",
        "keep the clocks of both machines by NTP (timedatectl set-ntp true): logs, metrics and the expiry of keys "
        "go by them",
    )


def _one_engine(engine: Engine) -> Iterator[Finding]:
    counts = [reading.cache_query_tokens_total for reading in engine.readings]
    falls = any(before is not None and after is not None and after < before for before, after in pairwise(counts))
    if len(set(engine.start_times_s)) > 1 or falls:
        yield fault(
            "one_engine",
            engine.name,
            "Several engines answer at this one address: it is a load balancer, or a Kubernetes Service.",
            "give each engine's own address in backends; for a Kubernetes Service use --kubernetes-replicas, for a "
            "name with several addresses dns+http://NAME:PORT",
        )


def _probes(engine: Engine) -> Iterator[Finding]:
    if not engine.probes:
        return
    second = engine.probes[-1]
    if not second.is_good:
        yield fault(
            "engine_answers",
            engine.name,
            f"It does not answer a prompt: {second.told()}.",
            "send it a prompt yourself (POST /v1/chat/completions), and see its log",
        )
        return
    usage = usage_of(second)
    if usage is not None and usage.cached_tokens:
        text = f"Of the same prompt twice, {usage.cached_tokens:,} of {usage.prompt_tokens:,} tokens were cached."
        yield ok("cached_token_details", engine.name, text)
    elif (usage is None or usage.cached_tokens is None) and engine.hits_grew is not False:
        yield warning(
            "cached_token_details",
            engine.name,
            "Its answers do not say how many tokens were cached, so hits of single turns are unknown.",
            "start SGLang with --enable-cache-report"
            if engine.kind == "sglang"
            else "start vLLM with --enable-prompt-tokens-details",
        )
    elif engine.caches_prefixes is not False:
        yield fault(
            "prefix_caching",
            engine.name,
            "The same prompt, sent twice, found nothing in the prefix cache.",
            "turn prefix caching on; if it is on, its KV cache is too full, or something clears it",
        )


def _priorities(engine: Engine, *, wanted: bool) -> Iterator[Finding]:
    has_none = engine.priority_refused or not engine.priority_polarity
    flag = "--enable-priority-scheduling" if engine.kind == "sglang" else "--scheduling-policy priority"
    if has_none and wanted:
        yield warning(
            "priorities", engine.name, "It ignores priorities, and the policy sends some.", f"start it with {flag}"
        )
    elif has_none:
        yield ok("priorities", engine.name, f"It ignores priorities, and the policy sends none; {flag} turns them on.")
    elif engine.priority_refused is False:
        yield ok("priorities", engine.name, "It takes priorities.")


def _plugin(engine: Engine) -> Iterator[Finding]:
    """Say which halves of in-engine scheduling by programs are there: none, the engine's, or both."""
    check, name, answer = "engine_plugin", engine.name, engine.plugin
    if answer.wants_key:
        text = "Its scheduler may know programs (thunderagent-vllm), but refuses to say so."
        remedy = "give it THUNDERAGENT_VLLM_KEY or --api-key, and the proxy the same key as --backend-api-key"
        yield warning(check, name, text, remedy)
        return
    reports = read_reports(answer.text.encode()) if answer.is_good else []
    if not reports:
        if engine.is_told:
            yield warning(check, name, "The proxy spoke with its plugin, which does not answer now.", "see its log")
        elif answer.status == HTTPStatus.NOT_IMPLEMENTED:
            text = "Only the route of thunderagent-vllm is there: vLLM's own scheduler runs."
            yield warning(check, name, text, "start it with --scheduler-cls thunderagent_vllm.scheduler.Scheduler")
        elif answer.status:
            yield ok(check, name, "It schedules by itself: the plugin thunderagent-vllm is not there, and not needed.")
        return
    said = report_of(reports, None)
    version = f"thunderagent-vllm {said.version}".strip()
    known = f"{version}, protocol {said.protocol}" + (f", vLLM {said.vllm_version}" if said.vllm_version else "")
    if not said.is_on:
        why = f": {said.why_not}" if said.why_not else ""
        text = f"Its half is there ({known}), but off: vLLM's own order applies{why}."
        yield warning(check, name, text, "see the engine's log for the reason; the setting mode turns it off, too")
    elif engine.is_told is False:
        remedy = "upgrade the proxy, or see its log for engine_plugin; `engine_plugin false` turns its half off"
        yield warning(check, name, f"Its half is there ({known}), but the proxy does not speak with it.", remedy)
    elif engine.is_told:
        yield ok(check, name, f"Both halves are there: the proxy, and {known}; it is on.")
    else:
        yield ok(check, name, f"Its half is there and on: {known}.")
