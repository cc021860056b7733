"""Problems of a proxy: who can reach it, its replicas, and its programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from thunderagent.config import ServeConfig
from thunderagent.doctor.asking import NO_ANSWER, Answer, Asker
from thunderagent.doctor.engines import clock
from thunderagent.doctor.findings import Finding, fault, ok, warning
from thunderagent.errors import ConfigurationError
from thunderagent.serving.security import check_security, is_loopback

LONG_HELD_S = 60.0
"""A turn that is held for longer is worth a look."""
KEY_HEADER = "X-ThunderAgent-Key"
UNREACHABLE_REMEDY = (
    "make it reachable from the proxy's machine, at the same address; if it is not reachable from here either, start it"
)
NOT_UP: dict[str, tuple[str, str]] = {
    "frozen": ("It hangs", "see its log; restart it, unless it goes on by itself"),
    "failing": (
        "It failed several turns in a row, so the proxy sends it none for a while",
        "see its log; the proxy tries it again by itself",
    ),
    "draining": (
        "It is drained: its programs leave, and it gets none",
        "POST /replicas/ID/undrain takes it back, unless a source of replicas or a policy took it away",
    ),
    "suspended": ("Nothing is granted there", "end what suspends it (POST /resume, POST /weight_sync/end), or wait"),
    "collapsed": (
        "Its cache no longer keeps what it was given, so it gets no new programs for a while",
        "see its log; restart it if that stays",
    ),
    "backpressure": ("It says that it is full, so turns wait for it", "wait; more replicas or a lower load help"),
}
"""Verdicts on replicas that the proxy reaches: what each means, and what to do."""
CLOSED_REMEDY = "make one with `thunderagent key NAME --admin` and give it to doctor in THUNDERAGENT_KEY"


@dataclass(slots=True)
class Proxy:
    """A proxy's reports on itself: with our key, and without any."""

    name: str
    has_key: bool
    health: Answer = NO_ANSWER
    ready: Answer = NO_ANSWER
    summary: Answer = NO_ANSWER
    listed: Answer = NO_ANSWER
    listed_without_key: Answer = NO_ANSWER
    queue: Answer = NO_ANSWER
    models: Answer = NO_ANSWER
    models_without_key: Answer = NO_ANSWER

    @property
    def is_proxy(self) -> bool:
        """Whether it is one of ours: an engine answers at some of the same paths."""
        return "ready" in self.ready.json()

    @property
    def replicas(self) -> list[dict[str, Any]]:
        """Its reports on its replicas; empty if not permitted."""
        replicas = self.listed.json().get("replicas")
        return replicas if isinstance(replicas, list) else []

    @property
    def model_ids(self) -> list[str]:
        """The models of all its replicas."""
        data = self.models.json().get("data")
        return [str(each["id"]) for each in data if "id" in each] if isinstance(data, list) else []

    @property
    def has_usable_replica(self) -> bool:
        """Whether a turn would be served."""
        return self.ready.is_good


async def look_at(asker: Asker, name: str, key: dict[str, str]) -> Proxy:
    """Ask a proxy what it is and which replicas it has; `key` is the header with the key, if there is one."""
    proxy = Proxy(name, bool(key), health=await asker.get("/health"))
    if not proxy.health.status:
        return proxy
    proxy.ready = await asker.get("/ready")
    if not proxy.is_proxy:
        return proxy
    proxy.listed_without_key = await asker.get("/replicas")
    proxy.listed = await asker.get("/replicas", key) if key else proxy.listed_without_key
    proxy.summary = await asker.get("/summary", key)
    proxy.queue = await asker.get("/queue?limit=1", key)
    if proxy.has_usable_replica:
        proxy.models_without_key = await asker.get("/v1/models")
        proxy.models = await asker.get("/v1/models", key) if key else proxy.models_without_key
    return proxy


def findings_of(proxy: Proxy, url: str, *, is_own: bool) -> Iterator[Finding]:
    """Yield findings on a proxy; `is_own`: it was started for the examination, in front of the engines."""
    if not proxy.health.status:
        yield fault(
            "proxy_reachable",
            proxy.name,
            f"No proxy can be reached: {proxy.health.why}.",
            "start one (thunderagent serve), or give its address with --url",
        )
        return
    if not proxy.is_proxy:
        yield fault(
            "proxy_reachable",
            proxy.name,
            "What answers here is not thunderagent.",
            "give the proxy's address with --url, an engine's with --backends",
        )
        return
    if not is_own:
        yield ok("proxy_reachable", proxy.name, f"It answers: thunderagent {_version(proxy)}".rstrip() + ".")
        yield from clock(proxy.name, proxy.health)
        yield from _who_may(proxy, url)
        yield from _summary(proxy)
        yield from _held(proxy)
    yield from _replicas(proxy)


def _version(proxy: Proxy) -> str:
    return str(proxy.summary.json().get("version", ""))


def _who_may(proxy: Proxy, url: str) -> Iterator[Finding]:
    if proxy.listed.wants_key:
        told = "The key is not one of its admin keys" if proxy.has_key else "It wants an admin key"
        yield fault("proxy_key", proxy.name, f"{told}, so its replicas cannot be listed.", CLOSED_REMEDY)
    host = urlsplit(url).hostname or ""
    is_local = is_loopback(host)
    if proxy.models_without_key.is_good and not is_local:
        yield fault(
            "bind",
            proxy.name,
            f"Whoever reaches {host} may send turns: it asks for no key.",
            "set api_keys (`thunderagent key NAME` makes one), or let the proxy listen on loopback (--host 127.0.0.1)",
        )
    if proxy.listed_without_key.is_good and not is_local:
        yield fault(
            "keys",
            proxy.name,
            f"Whoever reaches {host} may control the engines and release programs.",
            "set admin_keys (`thunderagent key NAME --admin` makes one), or admin_port and a network policy",
        )
    if proxy.listed_without_key.is_good and is_local:
        yield ok("keys", proxy.name, "It needs no key; doctor reaches it on loopback.")
    elif not proxy.listed_without_key.is_good and not proxy.listed.wants_key:
        yield ok("keys", proxy.name, "It needs a key, and accepts this one.")


def _summary(proxy: Proxy) -> Iterator[Finding]:
    said = proxy.summary.json()
    if said.get("engines_are_simulated"):
        yield warning(
            "simulated",
            proxy.name,
            "Its engines are simulated: answers are made-up words.",
            "give real ones: thunderagent serve --backends http://HOST:8000",
        )

    if said.get("rates", {}).get("mostly_anonymous"):
        yield fault(
            "anonymous",
            proxy.name,
            f"Of the turns of the last minute {said['rates']['anonymous_ratio']:.0%} named no program, so nothing is "
            "scheduled for them.",
            "let clients send X-Program-ID, or the id in the base URL (/p/ID/v1); test the header that they send "
            "with doctor --program-header NAME",
        )


def _held(proxy: Proxy) -> Iterator[Finding]:
    """Say what the turn waits for that has waited longest of those that go next, if it is long."""
    queue, oldest_s = proxy.queue.json(), proxy.summary.json().get("longest_held_s") or 0.0
    count = queue.get("turns_held_count") or 0
    if not count:
        return
    held = f"{count} {'turn is' if count == 1 else 'turns are'} held, the oldest for {oldest_s:.0f} s"
    first = next(iter(queue.get("waiting") or ()), None)
    needs = "" if first is None else f"; next is {first['program_id']}: {queue.get('first_needs', '')}"
    if oldest_s < LONG_HELD_S:
        yield ok("held", proxy.name, f"{held}{needs}.")
    else:
        yield warning(
            "held",
            proxy.name,
            f"{held}{needs}.",
            "GET /programs/ID tells a program's story; more replicas or a lower load make waits shorter, and a program "
            "that ended and was not released keeps its memory",
        )


def _replicas(proxy: Proxy) -> Iterator[Finding]:
    if not proxy.has_usable_replica:
        why = proxy.ready.json().get("why", proxy.ready.told())
        yield fault("ready", proxy.name, f"It serves no turn: {why}.", "see the findings on its engines")
    for replica in proxy.replicas:
        subject = f"{replica['replica_id']}"
        verdict, why = replica["verdict"], replica["verdict_reason"]
        means, remedy = NOT_UP.get(verdict, ("", UNREACHABLE_REMEDY))
        if not replica["up"]:
            why_down = replica["why_down"]
            yield fault("replica_up", subject, f"For the proxy it is {verdict}: {why_down}.", remedy)
        elif verdict != "up":
            told = why or ", ".join(replica["suspended_for"])
            yield warning("replica_up", subject, f"{means}{f': {told}' if told else ''}.", remedy)
        if price := replica.get("price"):
            yield _price(subject, price)


def _price(subject: str, price: dict[str, Any]) -> Finding:
    """Say what a lost token costs a replica, and how closely that is known."""
    if price["source"] in ("guess", "siblings"):
        return ok("price", subject, "What a lost token costs is not measured yet: that takes some dozen turns.")
    low_us, token_us, high_us = (price[name] * 1e6 for name in ("low_token_s", "token_s", "high_token_s"))
    told = f"A lost token costs {token_us:.3g} µs ({low_us:.3g} to {high_us:.3g}), by {price['source']}"
    if low_us > 0:
        return ok("price", subject, f"{told}.")
    return warning(
        "price",
        subject,
        f"{told}: too uncertain to hold memory for a program whose tool runs.",
        "let clients stream, or let the engine say what it counts (/metrics) and what was cached",
    )


def configuration_findings(config: ServeConfig) -> Iterator[Finding]:
    """Yield what `thunderagent serve` would refuse of a configuration, or accept although it is open to strangers."""
    subject = f"{config.host}:{config.port}"
    try:
        check_security(config)
    except ConfigurationError as error:
        yield fault("bind", subject, f"thunderagent serve would not start: {error.message}.", "change that setting")
        return
    if is_loopback(config.host):
        yield ok("bind", subject, "Only this machine can reach the proxy.")
    elif not config.has_keys:
        yield warning(
            "bind",
            subject,
            "Whoever reaches this address may use the proxy: allow_open is set, and there are no api_keys.",
            "set api_keys (`thunderagent key NAME` makes one)",
        )
    elif not (config.admin_keys or config.keys_file):
        yield warning(
            "keys",
            subject,
            "There is no admin key, so nobody can list replicas, release all programs or use the dashboard.",
            "set admin_keys (`thunderagent key NAME --admin` makes one)",
        )
    else:
        yield ok("bind", subject, "Other machines can reach the proxy, with a key.")
