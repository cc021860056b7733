"""A judge model that reads what programs did so far and predicts whether they will succeed."""

from thunderagent.proxy.judge.asking import Asker, ReplicaAsker, open_url
from thunderagent.proxy.judge.judge import Judge, JudgeSettings
from thunderagent.proxy.judge.metrics import JudgeCollector
from thunderagent.proxy.judge.prompt import DEFAULT_PROMPT, read_prompt

__all__ = [
    "DEFAULT_PROMPT",
    "Asker",
    "Judge",
    "JudgeCollector",
    "JudgeSettings",
    "ReplicaAsker",
    "open_url",
    "read_prompt",
]
