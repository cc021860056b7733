"""Workflows: agents as futures, above the proxy.

    from stubs import planner, developer            # written by `thunderagent workflow stubs agents.yaml`
    from thunderagent_workflows import deploy

    def main(goal):
        parts = planner.split(goal)                  # a future: its length is waited for
        return [f.value() for f in [developer.build(part) for part in parts]]

    with deploy("agents.yaml") as app:
        print(app.run(main, "Enable OAuth login", session="user-7"))

The source is "Nalar: A Serving Framework for Agent Workflows". Nothing else of thunderagent imports this package, and
it reaches the proxy over HTTP alone. What it names a *session* the proxy names a program.
"""

from thunderagent_workflows.deploy import Deployment, deploy
from thunderagent_workflows.errors import (
    CallError,
    DeadlockError,
    DeclarationError,
    EndedError,
    LostError,
    Preempted,
    SessionEndedError,
    StateError,
    StoreError,
    WorkflowError,
)
from thunderagent_workflows.future import Future, settle, settle_async
from thunderagent_workflows.scope import checkpoint, current_session
from thunderagent_workflows.state import ManagedDict, ManagedList, managed_dict, managed_list
from thunderagent_workflows.view import Act, View

managedDict = managed_dict  # noqa: N816 - the paper's names of them
managedList = managed_list  # noqa: N816

__all__ = [
    "Act",
    "CallError",
    "DeadlockError",
    "DeclarationError",
    "Deployment",
    "EndedError",
    "Future",
    "LostError",
    "ManagedDict",
    "ManagedList",
    "Preempted",
    "SessionEndedError",
    "StateError",
    "StoreError",
    "View",
    "WorkflowError",
    "checkpoint",
    "current_session",
    "deploy",
    "managedDict",
    "managedList",
    "managed_dict",
    "managed_list",
    "settle",
    "settle_async",
]
