"""Scheduling: the policy with its parts, how long a turn may wait, and the judge."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from thunderagent.config.slices import Pairs, Slice, split_pairs

JUDGE_ON_REPLICAS = "replicas"
"""As judge_url: the judge is the replicas themselves."""

FAILS_OF_EACH_TURN_COUNT = 10
"""K_fail of a judge that is asked after each turn."""


class Scheduling(Slice):
    """Scheduling."""

    policy: str = Field(
        "breakeven",
        description="breakeven (this project's own), thunderagent (the paper's), thunderagent-released, cap, ttl, "
        "mars, continuum, infercept, autellix, sticky, passthrough, a preset (thunderagent-ports, continuum-fixed, "
        "concur, fcfs), or package.module:Class",
    )
    policy_args: Pairs = Field({}, description="settings of the policy, as name=value")
    admission: str = Field(
        "",
        description="part that says which programs may begin, before the policy places them",
    )
    order: str = Field("", description="part that says which program is restored first, instead of the policy")
    victims: str = Field("", description="part that says which program is paused first, instead of the policy")
    priority: str = Field(
        "", description="part that gives engines with priority scheduling the order in which they serve turns"
    )
    fair_tenants: bool = Field(
        False,
        description="serve tenants by the memory that they have had so far; within a tenant the policy decides",
    )
    tenant_weights: Annotated[dict[str, float], NoDecode, BeforeValidator(split_pairs)] = Field(
        {}, description="share of a tenant against others, as name=weight; 1 if not named"
    )
    global_policy: str = Field(
        "",
        description="global policy, which may route, prioritize, move, start and end things once in a period: balance, "
        "migrate, reassign, package.module:Class, or several with + between",
    )
    tick_s: float = Field(1.0, gt=0, description="longest time between two ticks of the scheduler, in seconds")
    idle_limit_s: float | None = Field(
        None,
        gt=0,
        description="a program whose tools run longer between two turns loses its claim on memory, in seconds; by "
        "default learned from the tool's times, at least 300 s",
    )
    forget_limit_s: float = Field(
        1800.0,
        gt=0,
        description="a program whose tool runs longer is forgotten, in seconds; its next turn opens it again",
    )
    no_replica_limit_s: float = Field(
        60.0, ge=0, description="how long turns wait while no replica is usable, before they get 503, in seconds"
    )
    patience_s: float | None = Field(
        None, gt=0, description="patience of clients that do not send theirs, in seconds; by default unlimited"
    )
    client_patience: bool = Field(True, description="let turns in before their clients time out, even without room")
    patience_margin_s: float = Field(
        1.0, ge=0, description="least time of a client's patience to reserve for the answer, in seconds"
    )
    patience_ratio: float = Field(
        0.25,
        ge=0,
        le=1,
        description="part of a client's patience to reserve for the answer, if more than patience_margin_s; at most "
        "half",
    )
    patience_overdraft_ratio: float = Field(
        0.5,
        ge=0,
        description="how far such turns, and children of programs, may exceed a replica's limit, as a part of that "
        "limit; one program may exceed even that; further turns get 503",
    )
    heartbeat_s: float | None = Field(
        None,
        gt=0,
        description="time between two comments on a held stream, in seconds; the first commits status 200; none: off",
    )
    state: Path | None = Field(
        None,
        description="file that keeps what is learned (tool times, growth, prices, capacities) for the next start; "
        "written each half minute and at the end",
    )

    @field_validator("tenant_weights")
    @classmethod
    def _check_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        for name, weight_ratio in weights.items():
            if not 0 < weight_ratio < inf:
                raise ValueError(f"the weight of tenant {name!r} must be a number over 0, not {weight_ratio}")
        return weights


class Judging(Slice):
    """Judge."""

    judge_url: str = Field(
        "",
        description="base URL of a judge model with OpenAI's chat API, as http://HOST:PORT/v1, or replicas for turns "
        "on the replicas; asked whether programs will succeed; none: off",
    )
    judge_model: str = Field(
        "",
        description="model of the judge; on replicas by default that of the program's turns",
    )
    judge_api_key: SecretStr | None = Field(None, description="key to send to the judge, as a bearer token")
    judge_api_key_file: Path | None = Field(None, description="file with that key")
    judge_prompt: Path | None = Field(
        None,
        description="file with the prompt, which must contain {task} and {transcript} once each, and may contain "
        "{step}, {round} and {budget}; there is a default",
    )
    judge_every_turns: int = Field(5, ge=1, description="turns of a program between two questions about it")
    judge_rate_per_s: float = Field(
        1.0,
        gt=0,
        description="most questions per second about all programs together; more wait, or are dropped; inf: no limit",
    )
    judge_asked_count: int = Field(16, ge=1, description="most open questions to the judge at a time")
    judge_max_prompt_tokens: int = Field(
        8000, ge=256, description="largest question, at 4 characters a token; what a program did is cut in the middle"
    )
    judge_max_tokens: int = Field(512, ge=16, description="largest answer, in tokens")
    judge_timeout_s: float = Field(30.0, gt=0, description="time for the judge to answer, in seconds")
    judge_rounds: int = Field(
        0, ge=0, description="rounds that agents have at most, which the judge is told as {budget}; 0: not known"
    )
    judge_fail_count: int | None = Field(
        None,
        ge=0,
        description="a program's level is the lowest after more failure verdicts than this: ORBIT's K_fail, which is "
        "10 for a verdict at each turn; by default that divided by judge_every_turns, at least 1",
    )
    judge_confidence_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="least confidence of a failure that counts; 0: each counts",
    )
    judge_ends_hopeless: bool = Field(
        False, description="end a program at the lowest level: its turns get 410 until it is released"
    )

    @property
    def judge_fails_count(self) -> int:
        """K_fail, as given or for how often the judge is asked."""
        if self.judge_fail_count is not None:
            return self.judge_fail_count
        return max(1, round(FAILS_OF_EACH_TURN_COUNT / self.judge_every_turns))

    @model_validator(mode="after")
    def _judge_can_be_asked(self) -> Self:
        if self.judge_api_key_file is not None and self.judge_api_key is not None:
            raise ValueError("set either judge_api_key or judge_api_key_file, not both")
        if self.judge_url in ("", JUDGE_ON_REPLICAS):
            return self
        url = urlsplit(self.judge_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"judge_url: {self.judge_url!r} is not a URL with http or https, nor {JUDGE_ON_REPLICAS}")
        if not self.judge_model:
            raise ValueError("judge_url needs judge_model")
        return self
