"""Priority class and tenant of a request, from the headers of a gateway."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxserve.api.reuse_hint import ReuseHint
from jaxserve.errors import ConfigError, brief
from jaxserve.openai.errors import BadRequestError

if TYPE_CHECKING:
    from jaxserve.openai.format import ParsedRequest
    from jaxserve.server.http import Headers
    from jaxserve.server.rate_limits import Limits

# llm-d's names, and the Gateway API extension's.
OBJECTIVE = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
FAIRNESS_ID = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
SESSION_ID = (b"x-session-id",)  # vLLM's
MAX_NAME_LEN = 256


def read_objectives(entries: Sequence[str]) -> dict[str, int]:
    """Return priorities by objective; ConfigError for an entry that is not NAME=PRIORITY."""
    objectives: dict[str, int] = {}
    for entry in entries:
        name, _, number = entry.rpartition("=")
        try:
            objectives[name] = int(number)
        except ValueError:
            raise ConfigError(f"objectives must be NAME=PRIORITY with an integer, got {entry!r}") from None
        if not name:
            raise ConfigError(f"objectives must have a name before =, got {entry!r}")
    return objectives


def in_class(request: ParsedRequest, headers: Headers, tenant: str, objectives: Mapping[str, int]) -> ParsedRequest:
    """Return a request with the tenant and priority that its key and headers give it.

    The key's owner is the tenant; without keys the header names it, and a client may choose any. A priority in the
    body counts more than an objective. An unknown objective is named as ignored.

    Args:
        request: request in the body.
        headers: HTTP headers.
        tenant: owner of the key; empty without keys.
        objectives: priority by objective.
    """
    named = _header(headers, OBJECTIVE)
    tenant = named_tenant(headers, tenant)
    if tenant != request.tenant:
        request = replace(request, tenant=tenant)
    if named is None or request.priority is not None:
        return request
    if named not in objectives:
        return replace(request, ignored=(*request.ignored, OBJECTIVE[0].decode()))
    return replace(request, priority=objectives[named])


def named_tenant(headers: Headers, owner: str) -> str:
    """Return the tenant of a request: the key's owner, or the one that a header names if there is none."""
    return owner or (_header(headers, FAIRNESS_ID) or "")[:MAX_NAME_LEN]


def in_session(request: ParsedRequest, headers: Headers) -> ParsedRequest:
    """Return a request with the conversation that a header names, unless its body names one."""
    name = (_header(headers, SESSION_ID) or "")[:MAX_NAME_LEN]
    if not name or (request.reuse is not None and request.reuse.group):
        return request
    return replace(request, reuse=(request.reuse or ReuseHint())._replace(group=name))


def tenant_salt(tenant: str, cache_salt: str | None) -> str:
    """Return the prefix cache salt for a tenant, which hides its prompts from others."""
    return json.dumps([tenant, cache_salt])


def allowed_priority(priority: int | None, limits: Limits) -> int | None:
    """Return a request's priority if its key may have it; None is the value in the key's range closest to 0.

    Raises:
        BadRequestError: it gives one that its key may not have. Whoever chooses any goes before all others.
    """
    least, largest = limits.min_priority, limits.max_priority
    if priority is None:
        return min(max(0, least), largest) or None
    if not least <= priority <= largest:
        message = f"priority must be in [{least}, {largest}] for this key, got {brief(priority)}; the operator sets "
        raise BadRequestError(message + "the range in the key file", "priority", "priority_not_allowed", 403)
    return priority


def early_priority(body: Mapping[str, object], headers: Headers, objectives: Mapping[str, int]) -> int:
    """Return a request's priority, as `in_class` does, from a body that is not checked yet; 0 by default."""
    priority = body.get("priority")
    if type(priority) is int:
        return priority
    return objectives.get(_header(headers, OBJECTIVE) or "", 0)


def _header(headers: Headers, names: Sequence[bytes]) -> str | None:
    """Return the value of the first given header among `names`."""
    given = {name: value for name, value in reversed(headers) if name in names}
    return next((given[name].decode("latin-1") for name in names if name in given), None)
