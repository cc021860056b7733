"""Sandboxes: what makes them, from what, and how many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from thunderagent.config.slices import Listed, Slice, split_list
from thunderagent.tools.template import DriverKind, Template


class Sandboxes(Slice):
    """Sandboxes."""

    sandboxes: Annotated[tuple[DriverKind, ...], NoDecode, BeforeValidator(split_list)] = Field(
        (),
        description="what makes programs' sandboxes: docker, kubernetes, agent-sandbox, callback, separated by commas; "
        "none: off",
    )
    sandbox_templates: dict[str, Template] = Field(
        {}, description="what sandboxes are made from, by name; in the file only, as [sandbox_templates.NAME]"
    )
    warm: int = Field(
        0, ge=0, description="how many sandboxes to keep ready of each template that is for a class of programs"
    )
    sandbox_specs: bool = Field(
        False,
        description="whether clients may send their own templates, which may mount any folder of the Docker host, and "
        "register any sandbox by name; for trusted clients only",
    )
    sandbox_callback_urls: Listed = Field(
        (),
        description="beginnings of the URLs that clients may give with sandbox_specs, as http://10.0.0.2:9000/v1, "
        "separated by commas; by default only those of the templates in the file",
    )
    sandbox_callback_networks: Listed = Field(
        (),
        description="networks that names in such URLs may lead to, as 10.1.0.0/16, separated by commas; others must "
        "lead to public addresses",
    )
    sandbox_owner: str = Field(
        "",
        max_length=128,
        description="name in the labels of all sandboxes; keep it the same after a restart, and different for each "
        "proxy; by default host and port",
    )
    sandbox_max_count: int = Field(64, ge=1, description="most sandboxes at a time")
    sandbox_max_memory_bytes: int | None = Field(
        None, gt=0, description="most memory that sandboxes may take together, in bytes"
    )
    sandbox_max_disk_bytes: int | None = Field(
        None, gt=0, description="most disk that sandboxes may use together, in bytes"
    )
    sandbox_hands_count: int = Field(4, ge=1, le=64, description="preparations of sandboxes at a time")
    sandbox_pulls_count: int = Field(2, ge=1, description="pulls of images at a time")
    sandbox_attempts_count: int = Field(3, ge=1, description="tries to prepare a sandbox before it has failed")
    sandbox_idle_limit_s: float | None = Field(
        None, gt=0, description="sandboxes of a program without a turn for this time are reclaimed, in seconds"
    )
    sandbox_reclaim_on_shutdown: bool = Field(
        True,
        description="whether a shutdown removes sandboxes; otherwise they stay until their time to live ends or this "
        "proxy starts again",
    )
    sandbox_reclaim_images: bool = Field(
        True,
        description="whether images that were pulled for sandboxes are removed, beyond sandbox_images_bytes, when no "
        "sandbox uses them",
    )
    sandbox_images_bytes: int = Field(
        20_000_000_000,
        ge=0,
        description="how much of such images stays for later sandboxes, in bytes; those used least recently go first",
    )
    sandbox_keep_images: Listed = Field((), description="images that are never removed, separated by commas")
    sandbox_callback_token: str = Field(
        "", description="bearer token to send with callbacks, only to the URLs of templates in the file"
    )
    sandbox_callback_timeout_s: float = Field(30.0, gt=0, description="time for a callback to answer, in seconds")
    docker_url: str = Field(
        "", description="address of the Docker engine, as unix:///var/run/docker.sock; by default as the docker command"
    )
    kubernetes_namespace: str = Field("default", description="namespace of sandboxes on Kubernetes")
    kubernetes_config: Path | None = Field(
        None, description="kubeconfig file; by default the pod's account, or else kubectl's file"
    )
    kubernetes_url: str = Field("", description="address of a Kubernetes API that needs no login, as kubectl proxy's")
