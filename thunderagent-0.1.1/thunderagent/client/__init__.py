"""The SDK for authors of agents: a block of code is a program, released when it ends, however it ends.

    from thunderagent.client import program

    with program() as p:                      # or `async with`
        client = p.openai()                   # every request is a turn of this program
        ...

It needs nothing but Python's own library; a helper such as `Program.openai` imports its library when it is called.
"""

from thunderagent.client.branch import Branch
from thunderagent.client.decorator import as_program
from thunderagent.client.errors import (
    ClientError,
    ProxyRefusedError,
    ProxyUnreachableError,
    SandboxFailedError,
    SandboxTimeoutError,
)
from thunderagent.client.program import Program, Sandbox, current_program, program

__all__ = [
    "Branch",
    "ClientError",
    "Program",
    "ProxyRefusedError",
    "ProxyUnreachableError",
    "Sandbox",
    "SandboxFailedError",
    "SandboxTimeoutError",
    "as_program",
    "current_program",
    "program",
]
