"""What a caller may do, and whose runs and prefixes it shares. Pure: knows no token and no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gateway.errors import GatewayError
from gateway.flow.classes import FlowClass

Scope = Literal["read", "control", "approve", "admin"]
"""read: look at models, runs and figures. control: start calls and runs of one's own and steer them.
approve: respond where a run asks for input. admin: all of it, for the runs of all tenants: each by its id,
and sessions and lists where `?tenant=` names whose."""

SCOPES: tuple[Scope, ...] = get_args(Scope)

USUAL_SCOPES: tuple[Scope, ...] = ("read", "control", "approve")
"""Those of a token, and of a call without one, unless told otherwise: whoever reaches this machine's loopback
has the latter, so that they hold no key to other tenants."""

LOCAL = "local"
"""How settings name the calls of this machine without a token."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who calls, as far as access goes. The default is nobody."""

    name: str = ""  # the token's; "" without one
    tenant: str = ""  # whose runs it sees
    namespace: str = ""  # whose prefixes it shares; as in Submit
    scopes: frozenset[Scope] = frozenset()
    flow_class: FlowClass = "default"  # of calls that name none

    def may(self, scope: Scope) -> bool:
        """Whether it has that scope. admin has all."""
        return scope in self.scopes or "admin" in self.scopes

    def class_of(self, told: FlowClass | None) -> FlowClass:
        """The class of a call that tells one, or none. `system` goes before all others, so that it is for
        the operator: admins, tokens made with it, and whoever calls from this machine without a token.
        Raises GatewayError `forbidden`.
        """
        if told != "system" or self.flow_class == "system" or not self.name or self.may("admin"):
            return told or self.flow_class
        raise GatewayError(
            "forbidden",
            f"The token '{self.name}' may not use the class 'system': choose 'interactive', or send a token "
            "with the scope 'admin'.",
        )

    def sees(self, tenant: str) -> bool:
        """Whether that tenant's runs are there for it."""
        return tenant == self.tenant or "admin" in self.scopes


def namespace_of(tenant: str, shared: Sequence[str]) -> str:
    """Who shares prefixes with the tenant: "" for nobody, else a name that no tenant can have.

    `shared`: the tenants that share with each other; LOCAL is the one without a name.
    """
    return "\0".join(("shared", *sorted(set(shared)))) if (tenant or LOCAL) in shared else ""
