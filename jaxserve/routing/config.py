"""Options of the router."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from jaxserve.api.schema import Schema, integer, number
from jaxserve.errors import ConfigError


@dataclass(frozen=True)
class RouterConfig:
    """Options of the router.

    Attributes:
        replicas: URLs of the servers, such as `http://10.0.0.5:8000`, or `unix:PATH` for a server with a Unix socket.
        host: address to listen at.
        port: port to listen at; 0 takes a free one.
        uds: path of a Unix domain socket to listen at instead of host and port.
        poll_interval_s: time between two questions to a replica whether it is ready and how loaded it is.
        poll_timeout_s: time after which a replica that has not answered gets no more requests; its unfinished requests
            continue on others.
        connect_timeout_s: maximum time to connect to a replica.
        silence_timeout_s: time without a byte of a reply after which its replica loses the request to another one, and
            gets no more for as long while others are ready. A whole reply comes at its end: longer than the longest.
        failover_timeout_s: time that a request whose replica has died waits for another one to become ready.
        max_deaths: number of replicas that may die while they serve a request; after these the request fails, as it
            may be what kills them.
        max_body_bytes: maximum size of a request body.
        min_transfer_tokens: estimated length from which a prompt is computed by a server with the role "kv_producer",
            if there is one, before another server continues.
    """

    replicas: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    poll_interval_s: float = 1.0
    poll_timeout_s: float = 5.0
    connect_timeout_s: float = 3.0
    silence_timeout_s: float = 600.0
    failover_timeout_s: float = 30.0
    max_deaths: int = 3
    max_body_bytes: int = 8 * 2**20
    min_transfer_tokens: int = 512

    def __post_init__(self) -> None:
        _SCHEMA.check(self)
        if not self.replicas:
            raise ConfigError("replicas must have at least one URL, got none")
        for url in self.replicas:
            _check_url(url)
        if len({*self.replicas}) < len(self.replicas):
            raise ConfigError(f"replicas must be different URLs, got {list(self.replicas)}")


def _check_url(url: str) -> None:
    """Raise ConfigError for a URL that is no server's."""
    try:
        parts = urlsplit(url)
        is_socket = parts.scheme == "unix" and bool(parts.path) and not parts.netloc
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        is_right = is_socket or (is_server and parts.path in ("", "/") and not parts.query and not parts.username)
    except ValueError:  # a port that is none
        is_right = False
    if not is_right:
        raise ConfigError(f"replicas must be URLs as http://HOST:PORT or unix:PATH, got {url!r}")


_TIMES = ("poll_interval_s", "poll_timeout_s", "connect_timeout_s", "silence_timeout_s")
_SCHEMA = Schema(
    ConfigError,
    RouterConfig,
    {
        **dict.fromkeys(_TIMES, number(0, math.inf, excludes_low=True)),
        "failover_timeout_s": number(0),
        **dict.fromkeys(("max_deaths", "max_body_bytes", "min_transfer_tokens"), integer(1)),
        "port": integer(0, 2**16 - 1),
    },
)
