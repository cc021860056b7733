"""Converts the configuration to each part's settings."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from thunderagent.config import JUDGE_ON_REPLICAS, ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.policy_loader import load_policy, parse_setting
from thunderagent.programs.messages import NO_PROGRAM_LIMITS, ProgramLimits, SchedulerSettings
from thunderagent.programs.policies import PARTS
from thunderagent.programs.policy import Policy
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.fleet.client import ClientSettings, ReplicaClient
from thunderagent.proxy.gate.guard import Outgoing
from thunderagent.proxy.gate.keys import Keyring
from thunderagent.proxy.judge import Judge, JudgeSettings, ReplicaAsker, open_url, read_prompt
from thunderagent.proxy.reading.identity import IdentityRules
from thunderagent.proxy.turns.fence import FenceSettings, Staleness
from thunderagent.proxy.turns.flow import TurnSettings
from thunderagent.proxy.turns.forward import RetrySettings
from thunderagent.proxy.watch.rollouts import RolloutSettings
from thunderagent.runtime import Runtime, RuntimeSettings
from thunderagent.runtime.event_log import EventLogWriter
from thunderagent.serving.security import (
    backend_api_key,
    backend_ssl_context,
    held_limits,
    judge_api_key,
)

if TYPE_CHECKING:
    from thunderagent.proxy.watch.tracing import Tracing

log = structlog.get_logger("thunderagent")


def policy_settings_of(config: ServeConfig) -> dict[str, Any]:
    """Return the policy's settings, including its parts'."""
    settings = {name: parse_setting(text) for name, text in config.policy_args.items()}
    parts = {"admission": config.admission, "order": config.order, "victims": config.victims}
    parts |= {"priority": config.priority, "global_policy": config.global_policy}
    return {**settings, **{kind: name for kind, name in parts.items() if name}}


def policy_of(config: ServeConfig) -> Policy:
    """Create the policy. Raises `ConfigurationError`, with the lines of a file that say which."""
    try:
        return load_policy(config.policy, policy_settings_of(config))
    except ConfigurationError as error:
        if lines := config.lines_of("policy", "policy_args", *PARTS):
            raise ConfigurationError(f"{lines}: {error}") from error
        raise


def program_limits_of(config: ServeConfig) -> ProgramLimits | None:
    """Return what each program may use by these options; None if nothing is limited."""
    limits = ProgramLimits(
        config.program_max_turns, config.program_max_tokens, config.program_max_age_s, config.program_deadline_s
    )
    return limits._replace(ends=config.program_limit_end == "finish") if limits != NO_PROGRAM_LIMITS else None


def build_runtime(config: ServeConfig) -> tuple[Runtime, EventLogWriter | None]:
    """Create the scheduler with its policy, and its runtime."""
    policy_settings = policy_settings_of(config)
    settings = SchedulerSettings(
        idle_limit_s=config.idle_limit_s,
        forget_limit_s=config.forget_limit_s,
        no_replica_limit_s=config.no_replica_limit_s,
        patience_margin_s=config.patience_margin_s,
        patience_ratio=config.patience_ratio,
        patience_overdraft_ratio=config.patience_overdraft_ratio,
        max_programs_count=config.max_programs_count,
        tenant_max_programs_count=config.tenant_max_programs_count,
        fair_tenants=config.fair_tenants or bool(config.tenant_weights),
        tenant_weight_ratios=config.tenant_weights,
        judge_fail_count=config.judge_fails_count,
        judge_confidence_ratio=config.judge_confidence_ratio,
        judge_ends_hopeless=config.judge_ends_hopeless,
        provisions_replicas=bool(config.provision),
    )

    def make_scheduler() -> Scheduler:
        return Scheduler(policy_of(config), settings)

    policy = policy_of(config)
    if policy.holds_nobody:
        for kind in ("order", "victims"):
            if kind in policy_settings:
                log.warning(
                    "part_without_effect", part=f"{kind} {policy_settings[kind]}", why=f"{config.policy} holds nobody"
                )
    scheduler = Scheduler(policy, settings)
    event_log = None
    if config.event_log is not None:
        event_log = EventLogWriter(
            config.event_log, policy=config.policy, policy_settings=policy_settings, settings=settings
        )
    runtime = Runtime(
        scheduler,
        RuntimeSettings(config.tick_s, config.grace_s, program_limits_of(config)),
        event_log=event_log,
        make_scheduler=make_scheduler if config.model_pools else None,
    )
    return runtime, event_log


def engine_hold_s_of(config: ServeConfig) -> float | None:
    """Return how long engines hold a program's memory after a turn; None if they decide that.

    They do under a policy that holds nobody: nothing would end what is held for programs that are over.
    """
    if not config.engine_plugin or policy_of(config).holds_nobody:
        return None
    return config.engine_hold_s or None


def client_settings_of(config: ServeConfig, keyring: Keyring, tracing: Tracing | None = None) -> ClientSettings:
    """Return how engines are called. Raises `ConfigurationError`."""
    ssl_context, api_key = backend_ssl_context(config), backend_api_key(config)
    return ClientSettings(
        connect_timeout_s=config.connect_timeout_s,
        first_byte_timeout_s=config.first_byte_timeout_s,
        silence_timeout_s=config.silence_timeout_s,
        total_timeout_s=config.total_timeout_s,
        stall_limit_s=config.client_stall_limit_s,
        outgoing=Outgoing(keyring, api_key, tracing, forwards_authorization=not config.bearer_programs),
        ssl_context=ssl_context,
    )


def turn_settings_of(config: ServeConfig, identity: IdentityRules) -> TurnSettings:
    """Return how turns are forwarded."""
    return TurnSettings(
        retries=RetrySettings(config.retries_count, config.retry_budget_ratio),
        identity=identity,
        patience_s=config.patience_s,
        client_patience=config.client_patience,
        heartbeat_s=config.heartbeat_s,
        tenant_from_key=config.keys_name_tenants,
        client_priority=config.client_priority,
        held=held_limits(config),
        websocket_limit_s=config.websocket_limit_s,
        names_programs=bool(config.kv_events),
        no_replica_limit_s=config.no_replica_limit_s,
    )


def rollout_settings_of(config: ServeConfig) -> RolloutSettings | None:
    """Return what is recorded of turns; None if nothing is."""
    if config.rollouts is None:
        return None
    return RolloutSettings(
        logprobs=config.rollouts == "logprobs",
        folder=config.rollout_dir,
        memory_bytes=config.rollout_memory_bytes,
        disk_bytes=config.rollout_disk_bytes,
        keep_s=config.rollout_keep_s,
        turns_count=config.rollout_turns_count,
        prefix=config.rollout_prefix,
    )


def fence_settings_of(config: ServeConfig) -> FenceSettings | None:
    """Return how caches are salted, and how stale a program may be; None if there is no fence."""
    if config.fence is None:
        return None
    return FenceSettings(config.fence, Staleness(config.fence_max_lag_count, config.fence_when_stale))


def judge_of(config: ServeConfig, runtime: Runtime, client: ReplicaClient) -> Judge | None:
    """Return the judge, if one is configured. Raises `ConfigurationError`."""
    if not config.judge_url:
        return None
    settings = JudgeSettings(
        model=config.judge_model,
        prompt=read_prompt(config.judge_prompt),
        round_limit_count=config.judge_rounds,
        every_turns_count=config.judge_every_turns,
        asked_count=config.judge_asked_count,
        rate_per_s=config.judge_rate_per_s,
        max_prompt_tokens=config.judge_max_prompt_tokens,
        max_output_tokens=config.judge_max_tokens,
        timeout_s=config.judge_timeout_s,
    )
    if config.judge_url == JUDGE_ON_REPLICAS:
        asker = ReplicaAsker(runtime, client)
        return Judge(runtime, lambda: contextlib.nullcontext(asker), settings)
    return Judge(runtime, partial(open_url, config.judge_url, judge_api_key(config)), settings)


def tracing_of(config: ServeConfig) -> Tracing | None:
    """Return the tracing, if it is configured. Raises `ConfigurationError`."""
    if not config.otlp_endpoint:
        return None
    try:
        from thunderagent.proxy.watch.tracing import open_tracing  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        raise ConfigurationError("otlp_endpoint: install thunderagent with the extra `otel`") from error
    return open_tracing(config.otlp_endpoint, config.trace_sample_ratio)
