"""Keys: who may send requests, and as which tenant."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.server.rate_limits import Limits

MAX_DIGITS = 9


class Keys:
    """API keys, stored as hashes.

    Args:
        keys: (tenant, key) pairs.
        limits: limits by tenant; other tenants have the default limits.
    """

    def __init__(self, keys: Sequence[tuple[str, str]], limits: Mapping[str, Limits] | None = None) -> None:
        self.limits = dict(limits or {})
        self._tenants: list[tuple[bytes, str]] = []
        for tenant, key in keys:
            if not key.strip():
                raise ConfigError("an API key must not be empty, got one that is; leave the option out for no keys")
            self._tenants.append((hashlib.sha256(key.strip().encode()).digest(), tenant))

    @classmethod
    def read(cls, keys: Sequence[str], file: Path | None) -> Keys:
        """Return the keys from the option `api_key` and from `file`, which has a key per line.

        Blank lines and comments (#) in it do not count.
        """
        lines: list[str] = []
        if file is not None:
            try:
                lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"api_key_file must be a readable text file, but: {error}") from error
            lines = [line for line in lines if line and not line.startswith("#")]
            if not lines:
                raise ConfigError(f"api_key_file must have a key, got none in {file}")
        entries = [("", key, Limits()) for key in keys]
        for line in lines:
            text, *options = line.split()
            name, _, key = text.rpartition(":")
            entries.append((name, key, _limits(options)))
        pairs: list[tuple[str, str]] = []
        tenant_limits: dict[str, Limits] = {}
        for number, (name, key, limits) in enumerate(entries):
            tenant = name or f"#{number}"  # a name that no line can have
            pairs.append((tenant, key))
            if tenant_limits.setdefault(tenant, limits) != limits:
                raise ConfigError(f"all keys of a tenant must have the same limits, got others for {tenant}")
        return cls(pairs, {tenant: limits for tenant, limits in tenant_limits.items() if limits != Limits()})

    def __bool__(self) -> bool:
        """Return whether there are any keys, so that requests need one."""
        return bool(self._tenants)

    def tenant(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Return the tenant whose key is in a request's headers; None if there is none or it is unknown.

        All keys are compared, so that the time reveals nothing.
        """
        digest, found = hashlib.sha256(given_key(headers)).digest(), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def given_key(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the key in a request's headers; empty if there is none."""
    given = b""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            given = value[7:]
        elif name == b"x-api-key":
            given = value
    return given.strip()


def _limits(options: Sequence[str]) -> Limits:
    """Read the limits after a key in a key file, each as NAME=NUMBER, such as min_priority=-1."""
    values: dict[str, int] = {}
    names = [field.name for field in fields(Limits)]
    for option in options:
        name, _, value = option.partition("=")
        is_priority = name in ("min_priority", "max_priority")
        digits = value.removeprefix("-") if is_priority else value
        if name not in names or not digits.isdecimal() or not (is_priority or int(value)) or len(digits) > MAX_DIGITS:
            raise ConfigError(f"after a key there must be NAME=NUMBER with a name of {names}, got {option!r}")
        values[name] = int(value)
    limits = Limits(**values)
    if limits.min_priority > limits.max_priority:
        raise ConfigError(
            f"after a key min_priority must be at most max_priority, which are 0 unless given, got "
            f"{limits.min_priority} and {limits.max_priority}"
        )
    return limits
