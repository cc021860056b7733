"""The configuration, in slices: each file has related options."""

from thunderagent.config.config import ENVIRONMENT_PREFIX, ServeConfig, unknown_variables
from thunderagent.config.engines import HOST_FIELD, KV_EVENTS_FOUND
from thunderagent.config.scheduling import JUDGE_ON_REPLICAS

__all__ = [
    "ENVIRONMENT_PREFIX",
    "HOST_FIELD",
    "JUDGE_ON_REPLICAS",
    "KV_EVENTS_FOUND",
    "ServeConfig",
    "unknown_variables",
]
