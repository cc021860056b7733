"""Clients' requests for sandboxes, as received."""

from __future__ import annotations

from functools import partial

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from thunderagent.errors import RequestError
from thunderagent.faults import faults_of, fields_at
from thunderagent.tools.template import DriverKind, Template

MOST_SANDBOXES_COUNT = 1000
"""Of one program at a time, those that it waits for included: each is looked at for every plan."""


class SandboxRequest(BaseModel):
    """A client's request: a template by name, its own template, or its own sandbox to take over."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str | None = Field(None, description="name of a template in the configuration")
    spec: Template | None = Field(None, description="a template of its own")
    handle: str | None = Field(None, description="a sandbox that is there already: the engine's name or id of it")
    driver: DriverKind = Field("docker", description="with handle: whose name that is")
    reclaim_url: str = Field("", description="with handle, for one that runs elsewhere: gets a POST at the end")
    share: str = Field("", max_length=256, description="programs that ask with the same word share one sandbox")

    @model_validator(mode="after")
    def _asks_for_one_thing(self) -> SandboxRequest:
        if sum(each is not None for each in (self.template, self.spec, self.handle)) != 1:
            raise ValueError("give one of template, spec and handle")
        return self


class _Several(BaseModel):
    sandboxes: tuple[SandboxRequest, ...] = Field(max_length=MOST_SANDBOXES_COUNT)


def read_requests(body: bytes) -> tuple[SandboxRequest, ...]:
    """Parse one request or a list of them. Raises `RequestError` with the first error."""
    text = body.strip()
    several = text.startswith(b"[")
    try:
        if several:
            return _Several.model_validate_json(b'{"sandboxes":' + text + b"}").sandboxes
        return (SandboxRequest.model_validate_json(text),)
    except ValidationError as error:
        known = partial(fields_at, _Several if several else SandboxRequest)
        raise RequestError(faults_of(error, known=known)[0]) from error
