"""What of others' a request may touch: where data keys name tenants, its own tenant's programs, and nobody's turn.

A program id is a word that any client may say. So whoever has a data key is told of another tenant's program that there
is none, and a turn of such a program is refused.

An engine has one order for all, so a `priority` that a stranger gives takes from whoever gave less or none.
"""

from __future__ import annotations

from typing import Literal, Protocol

from multidict import CIMultiDict, istr

from thunderagent.backends.priority_field import PRIORITY_HEADER
from thunderagent.errors import OtherTenantError
from thunderagent.proxy.gate.keys import caller_key
from thunderagent.proxy.gate.keys.quotas import Quotas
from thunderagent.proxy.reading.identity import IdentityRules

ClientPriority = Literal["keep", "drop"]

_PRIORITY_HEADER = istr(PRIORITY_HEADER)


class Tenants(Protocol):
    """Who knows whose programs are."""

    def tenant_of(self, program_id: str) -> str | None:
        """Return whose a live program is; None if there is none."""


class Tenancy:
    """Knows whose a request is, and whose a program."""

    def __init__(
        self,
        tenants: Tenants,
        *,
        from_key: bool,
        quotas: Quotas | None = None,
        client_priority: ClientPriority | None = None,
    ) -> None:
        """Ask `tenants`; where not `from_key`, clients say their tenant themselves.

        `quotas` says how many programs a key may have; `client_priority`, what becomes of priorities that clients give
        engines, but for admin keys, which keep them. None drops those that come with data keys.
        """
        self._client_priority = client_priority
        self._tenants = tenants
        self._quotas = quotas
        self._from_key = from_key
        self._judges_all = quotas is not None or client_priority == "drop"

    @property
    def applies(self) -> bool:
        """Whether anything here may matter to this request; if not, nothing of it need be asked."""
        return self._judges_all or caller_key() is not None

    @property
    def own(self) -> str | None:
        """The only tenant whose programs this request may touch; None if it may touch all."""
        key = caller_key() if self._from_key else None
        return key.tenant if key is not None and not key.is_admin else None

    @property
    def drops_priority(self) -> bool:
        """Whether engines are not told which priority this request's client gave it."""
        key = caller_key()
        if self._client_priority == "keep" or (key is not None and key.is_admin):
            return False
        return key is not None or self._client_priority == "drop"

    def rules(self, rules: IdentityRules) -> IdentityRules:
        """Return by which rules the body of this request is read."""
        return rules._replace(drops_priority=True) if self.drops_priority else rules

    def mend(self, headers: CIMultiDict[str]) -> None:
        """Take out of the headers that go to an engine what this request's client has no say in."""
        if _PRIORITY_HEADER in headers and self.drops_priority:
            headers.popall(_PRIORITY_HEADER)

    def named(self, said: str) -> str:
        """Return the tenant of a program that this request opens; what its client `said` counts without a data key."""
        own = self.own
        return said if own is None else own

    def may_touch(self, program_id: str | None) -> bool:
        """Say whether there is no such program, or one that this request may touch."""
        own = self.own
        if own is None or program_id is None:
            return True
        return self._tenants.tenant_of(program_id) in (None, own)

    def has(self, program_id: str) -> bool:
        """Say whether this request may be told of a program; with a data key that must live."""
        if self.own is None:
            return True
        return self._tenants.tenant_of(program_id) is not None and self.may_touch(program_id)

    def check(self, program_id: str | None) -> None:
        """Check that a request may begin a program, or go on with it.

        Raises `OtherTenantError` if it is another tenant's, `KeyProgramsLimitError` if its key has too many.
        """
        if not self.may_touch(program_id):
            raise OtherTenantError(f"program {program_id!r} belongs to another tenant; use another id")
        if self._quotas is not None and program_id is not None:
            self._quotas.open_program(program_id)
