"""What a request may touch: if data keys name tenants, only its own tenant's programs, and no other's turn.

Any client may name any program id. So a data key is told that another tenant's program does not exist, and a turn of
such a program is refused.

An engine has one order for all, so a stranger's `priority` takes from everybody with a lower one or none.
"""

# compiled: each turn passes here

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal, Protocol

from multidict import CIMultiDict, istr

from thunderagent.backends.priority_field import PRIORITY_HEADER
from thunderagent.errors import OtherTenantError
from thunderagent.programs.messages import ProgramLimits
from thunderagent.proxy.gate.keys import caller_key
from thunderagent.proxy.gate.keys.quotas import Quotas
from thunderagent.proxy.reading.identity import IdentityRules

ClientPriority = Literal["keep", "drop"]

_PRIORITY_HEADER = istr(PRIORITY_HEADER)
_NOTHING_NAMED: Final = nullcontext()


class Tenants(Protocol):
    """Knows whose programs are."""

    def tenant_of(self, program_id: str) -> str | None:
        """Return a live program's tenant; None if there is no such program."""


class Tenancy:
    """Knows a request's tenant, and a program's."""

    def __init__(
        self,
        tenants: Tenants,
        *,
        from_key: bool,
        quotas: Quotas | None = None,
        client_priority: ClientPriority | None = None,
    ) -> None:
        """Ask `tenants`; without `from_key`, clients name their tenant themselves.

        `quotas` limits the programs of a key. `client_priority` decides on the priorities that clients give engines,
        except with admin keys, which keep them. None drops those that come with data keys.
        """
        self._client_priority = client_priority
        self._tenants = tenants
        self._quotas = quotas
        self._from_key = from_key
        self.judges_all = quotas is not None or client_priority == "drop"
        """Whether anything here may matter to a request without a key; to one with a key it always may."""

    @property
    def own(self) -> str | None:
        """The only tenant whose programs this request may touch; None means all."""
        key = caller_key() if self._from_key else None
        return key.tenant if key is not None and not key.is_admin else None

    @property
    def drops_priority(self) -> bool:
        """Whether engines do not get the priority that this request's client gave."""
        key = caller_key()
        if self._client_priority == "keep" or (key is not None and key.is_admin):
            return False
        return key is not None or self._client_priority == "drop"

    def rules(self, rules: IdentityRules) -> IdentityRules:
        """Return the rules for reading this request's body."""
        return rules._replace(drops_priority=True) if self.drops_priority else rules

    def mend(self, headers: CIMultiDict[str]) -> None:
        """Remove from the headers to an engine what this request's client may not set."""
        if _PRIORITY_HEADER in headers and self.drops_priority:
            headers.popall(_PRIORITY_HEADER)

    @property
    def program_limits(self) -> ProgramLimits | None:
        """What each program of this request's key may use; None if nothing limits it."""
        key = caller_key()
        return None if key is None else key.limits.program

    def named(self, said: str) -> str:
        """Return the tenant of a program that this request opens; what its client `said` counts without a data key."""
        own = self.own
        return said if own is None else own

    def may_touch(self, program_id: str | None) -> bool:
        """Return whether there is no such program, or this request may touch it."""
        if not self._from_key or program_id is None or (own := self.own) is None:
            return True
        return self._tenants.tenant_of(program_id) in (None, own)

    def has(self, program_id: str) -> bool:
        """Return whether this request may see a program; with a data key it must be live."""
        if self.own is None:
            return True
        return self._tenants.tenant_of(program_id) is not None and self.may_touch(program_id)

    def check(self, program_id: str | None) -> None:
        """Check that a request may begin or continue a program.

        Raises `OtherTenantError` if it is another tenant's, `KeyProgramsLimitError` if its key has too many.
        """
        if not self.may_touch(program_id):
            raise OtherTenantError(f"program {program_id!r} belongs to another tenant; use another id")
        if self._quotas is not None and program_id is not None:
            self._quotas.open_program(program_id)

    def naming(self, program_id: str | None) -> AbstractContextManager[None]:
        """Return the block for which a request of a limited key names a program; entering it raises as `check` does."""
        if self._quotas is None or not program_id:
            return _NOTHING_NAMED
        return self._quotas.naming(program_id)

    def bytes_counter(self) -> Callable[[int], None] | None:
        """Return a function that counts bytes of this request's key as tokens; None if nothing is to be counted."""
        return None if self._quotas is None else self._quotas.bytes_counter()
