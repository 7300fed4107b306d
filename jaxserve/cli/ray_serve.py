"""Application for Ray Serve: `serve run jaxserve.cli.ray_serve:build model=DIR max-replicas=4`.

Arguments are flags as `jaxserve serve` has them, without dashes before them, and `RayServeConfig`'s fields.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from yarl import URL

from jaxserve.api.config import EngineConfig
from jaxserve.api.schema import Schema, integer, number
from jaxserve.api.vllm_options import SERVER_OPTIONS, server_options
from jaxserve.cli.config_flags import (
    add_config_flags,
    add_engine_flags,
    add_vllm_flags,
    config_options,
    engine_options,
    with_dashes,
)
from jaxserve.errors import ConfigError
from jaxserve.fleet.ray_fleet import absolute, plan_actors
from jaxserve.routing.ray_serve import WAIT, Front, Head, PrefixRouter, WaitPolicy, plain_headers
from jaxserve.server.app import App
from jaxserve.server.config import ServerConfig
from jaxserve.server.serve import new_server
from jaxserve.server.sockets import listen

_STARTED_S = 1800.0  # longest start of a server after its engine
_UNLIMITED = 10**6  # requests wait in the engines, which know how long


@dataclass(frozen=True)
class RayServeConfig:
    """Options of the application.

    Attributes:
        min_replicas: minimum number of engines.
        max_replicas: maximum number of engines.
        target_wait_s: mean time before a request starts, as the engines estimate it, above which engines are added.
        upscale_delay_s: time that this must last.
        downscale_delay_s: time that the wait must be short before an engine is removed.
        max_deaths: number of engines that may die while they serve a request; after these it fails, as it may be what
            kills them.
        silence_timeout_s: time without a part of a reply after which its engine loses the request to another one. A
            whole reply comes at its end: longer than the longest.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_wait_s: float = 1.0
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    max_deaths: int = 3
    silence_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _SCHEMA.check(self)
        if self.min_replicas > self.max_replicas:
            raise ConfigError(
                f"min_replicas must be at most max_replicas, got {self.min_replicas} and {self.max_replicas}"
            )


_SCHEMA = Schema(
    ConfigError,
    RayServeConfig,
    {
        **dict.fromkeys(("min_replicas", "max_replicas", "max_deaths"), integer(1)),
        **dict.fromkeys(("target_wait_s", "silence_timeout_s"), number(0, excludes_low=True)),
        **dict.fromkeys(("upscale_delay_s", "downscale_delay_s"), number(0)),
    },
)


class _Parser(ArgumentParser):
    """Parser that raises ConfigError."""

    def error(self, message: str) -> Any:
        """Raise ConfigError with argparse's message."""
        raise ConfigError(message)


def build(args: Mapping[str, str]) -> serve.Application:
    """Return the application, for `serve run` and Ray's configuration files.

    Args:
        args: values of flags by name, such as {"model": "/models/tiny", "page-size": "16"}; "true" and "false" for
            flags without a value.

    Raises:
        ConfigError: an option is unknown or has a wrong value, or an engine does not fit on the cluster.
    """
    parser = _Parser(prog="jaxserve.cli.ray_serve:build", add_help=False, allow_abbrev=False)
    add_config_flags(parser, "ray", RayServeConfig)
    add_config_flags(parser, "server", ServerConfig, leave_out=("host", "port", "uds", "batch_dir"))
    add_vllm_flags(parser, "server", SERVER_OPTIONS)
    add_engine_flags(parser)
    given = parser.parse_args(with_dashes([_flag(name, str(value)) for name, value in args.items()]))
    config = RayServeConfig(**config_options(given, "ray"))
    server, engine = server_options(config_options(given, "server")), engine_options(given)
    engine |= absolute(engine)
    checked = EngineConfig(**engine)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    _, resources = plan_actors(nodes, checked.num_devices, 1)
    scaling = AutoscalingConfig(
        min_replicas=config.min_replicas,
        max_replicas=config.max_replicas,
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        metrics_interval_s=1.0,
        look_back_period_s=5.0,
        policy=AutoscalingPolicy(policy_function=WaitPolicy, policy_kwargs={"target_wait_s": config.target_wait_s}),
    )
    engines = serve.deployment(
        _Engine,
        name="engines",
        ray_actor_options=resources,
        max_ongoing_requests=_UNLIMITED,
        autoscaling_config=scaling,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_routing_stats_period_s=1.0
        ),
        graceful_shutdown_timeout_s=ServerConfig(**server).shutdown_timeout_s,
    ).bind(engine, server)
    front = serve.deployment(_Ingress, name="front", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=_UNLIMITED)
    return front.bind(engines, server, config.max_deaths, config.silence_timeout_s)


def _flag(name: str, value: str) -> str:
    """Return a flag as a command line has it."""
    if value in ("true", "false"):
        return f"--{name}" if value == "true" else f"--no-{name}"
    return f"--{name}={value}"


class _Engine:
    """Replica: an engine and its HTTP server, at a Unix socket that only this process calls.

    Args:
        engine: EngineConfig's options.
        server: ServerConfig's options.
    """

    def __init__(self, engine: Mapping[str, Any], server: Mapping[str, Any]) -> None:
        from jaxserve.assembly.engine import Engine  # noqa: PLC0415 - imports jax, which only replicas need

        self._directory = tempfile.TemporaryDirectory(prefix="jaxserve-")
        path = os.path.join(self._directory.name, "socket")
        config = ServerConfig(**server, uds=path)
        self._app, started = App(Engine(EngineConfig(**engine)), config), threading.Event()
        sock = listen(config)
        self._server = new_server(self._app, config, sock, lambda _: started.set())
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [sock]}, daemon=True)
        self._thread.start()
        until_s = time.monotonic() + _STARTED_S
        while not started.wait(1.0):
            if not self._thread.is_alive() or time.monotonic() > until_s:
                raise RuntimeError("the server has not started; the log has the reason")
        self._path = path
        self._session: aiohttp.ClientSession | None = None

    def _request(self, head: Head, body: bytes) -> Any:
        """Send a request to the server."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._path, limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers]
        url = URL("http://localhost" + head.path, encoded=True)
        data = body if head.method == "POST" else None
        return self._session.request(head.method, url, headers=headers, data=data, allow_redirects=False)

    async def serve(self, head: Head, body: bytes) -> AsyncIterator[Any]:
        """Yield a reply's status and headers, then its bytes as they come."""
        async with self._request(head, body) as reply:
            yield reply.status, plain_headers(reply.headers)
            async for data in reply.content.iter_any():
                yield data

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the load, for `PrefixRouter`; Ray calls this."""
        return self._app.service.observer.load()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the wait, for `WaitPolicy`; Ray calls this."""
        return {WAIT: self._app.service.observer.estimated_wait_s()}

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine makes no progress; Ray then starts another one."""
        async with self._request(Head("GET", "/health", ()), b"") as reply:
            if reply.status != 200:
                raise RuntimeError((await reply.read()).decode(errors="replace"))


@serve.ingress()
class _Ingress:
    """Deployment before the engines."""

    def __init__(self, engines: Any, server: Mapping[str, Any], max_deaths: int, silence_timeout_s: float) -> None:
        serve_parts = engines.options(stream=True, method_name="serve").remote
        self._front = Front(serve_parts, ServerConfig(**server), max_deaths, silence_timeout_s)

    def __serve_build_asgi_app__(self) -> Front:
        return self._front
