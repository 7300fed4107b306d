"""Fleet on Ray: each engine runs in an actor, a separate process on any machine in the cluster that it fits on.

Ray places the actors, transports calls and reports deaths. The fleet (`fleet.py`) recovers the requests itself, so
Ray's restarts and retries are off.
"""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxserve.api.config import EngineConfig
from jaxserve.errors import ConfigError, install_extra
from jaxserve.fleet.fleet import Died, Ended, Fleet, NewRequest, Server, Started
from jaxserve.system.environment import ray_address

_ACCELERATORS = ("GPU", "TPU")  # Ray's names
_OBJECT_STORE_BYTES = 2**28  # object store of a local Ray: outputs pass through it and spill to disk if they do not fit


@contextlib.contextmanager
def ray_fleet(num_actors: int | None = None, **options: Any) -> Iterator[Fleet]:
    """Yield a fleet for `run_batch`. On exit its actors end, and Ray ends if it was started here.

    Args:
        num_actors: number of engines; None for as many as fit on the cluster's accelerators, or one if it has none.
        options: fields of EngineConfig for each engine. Its directories must exist on every machine.

    Raises:
        ConfigError: Ray is missing or cannot be reached, the cluster is too small, or an engine cannot start.
    """
    config = EngineConfig(**options)
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size must be 1 on Ray, where each actor has one replica, got {config.data_parallel_size}; "
            f"have more actors"
        )
    if num_actors is not None and num_actors < 1:
        raise ConfigError(f"the number of actors must be positive, got {num_actors}")
    with _connected() as ray:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        count, resources = plan_actors(nodes, config.tensor_parallel_size, num_actors)
        actors = _RayActors(ray, count, resources, options | absolute(options))
        try:
            yield Fleet(config, actors)
        finally:
            for index in range(count):
                actors.stop(index)


def absolute(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the directories among the options as absolute paths, since actors have another working directory."""
    given = {name: options.get(name) for name in ("model", "tokenizer", "compilation_cache_dir")}
    return {name: os.path.abspath(path) for name, path in given.items() if path not in (None, "auto")}


def plan_actors(
    nodes: Sequence[Mapping[str, float]], num_devices: int, wanted: int | None
) -> tuple[int, dict[str, Any]]:
    """Return the number of actors and the resources that each requests from Ray.

    Args:
        nodes: resources of each machine, by Ray's names.
        num_devices: number of devices per engine, all on one machine.
        wanted: number of actors; None for as many as fit on the accelerators.

    Raises:
        ConfigError: they do not fit on the cluster.
    """
    device = next((name for name in _ACCELERATORS if any(node.get(name) for node in nodes)), "CPU")
    max_count = sum(int(node.get(device, 0) // num_devices) for node in nodes)
    count = wanted or (1 if device == "CPU" else max_count)
    if not 0 < count <= max_count:
        raise ConfigError(
            f"--ray-actors must fit on the cluster, each with tensor_parallel_size {device}s on one machine, got "
            f"{count} with {num_devices} each, and {max_count} fit; lower one of them or add machines"
        )
    if device == "TPU":
        return count, {"resources": {"TPU": num_devices}, "num_cpus": 0}
    return count, {"num_gpus": num_devices, "num_cpus": 0} if device == "GPU" else {"num_cpus": num_devices}


@contextlib.contextmanager
def _connected() -> Iterator[Any]:
    """Yield the ray module, connected as before, to the environment's cluster or to a new one on this machine."""
    address = ray_address()
    try:
        import ray  # noqa: PLC0415 - an extra, and slow
    except ModuleNotFoundError as error:
        raise ConfigError(f"a fleet needs Ray; {install_extra('ray')}") from error
    if ray.is_initialized():
        yield ray
        return
    local = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, RuntimeError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(f"cannot connect to the Ray cluster {address}; is RAY_ADDRESS right? {cause}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


class _RayActors:
    """`Actors` on Ray."""

    def __init__(self, ray: Any, count: int, resources: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.count = count
        self._ray, self._options = ray, dict(options)
        self._actor_class = ray.remote(_EngineActor).options(scheduling_strategy="SPREAD", **resources)
        self._actors: dict[int, Any] = {}  # live actors by index
        self._calls: dict[Any, int] = {}  # actor index of each outstanding call, oldest first
        self._answered: deque[Any] = deque()  # outstanding calls that Ray has reported as ready

    def start(self, index: int) -> None:
        """Create an actor in a new process and make it load its engine."""
        self._actors[index] = actor = self._actor_class.remote()
        self._calls[actor.start.remote(self._options)] = index

    def serve(self, index: int, aborted: Sequence[str], added: Sequence[NewRequest]) -> None:
        """Queue a call to `Server.serve` in an actor."""
        self._calls[self._actors[index].serve.remote(aborted, added)] = index

    def wait(self) -> tuple[int, Started | Ended | Died]:
        """Wait for the next answer from any actor; return the actor's index and the answer."""
        while (index := self._calls.pop(call := self._next_answered(), None)) is None:
            pass  # the actor was stopped after this call
        try:
            return index, self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            self.stop(index)  # an actor that raised or is unreachable may still be alive
            cause = getattr(error, "cause", None)
            if isinstance(cause, ConfigError):
                raise cause from None
            return index, Died(_brief(error) if cause is None else repr(cause))

    def _next_answered(self) -> Any:
        """Return a call that is ready. Ray is queried only when all calls found ready earlier have been returned."""
        if not self._answered:
            calls = list(self._calls)
            self._ray.wait(calls, num_returns=1)
            ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
            self._answered.extend(ready)
        return self._answered.popleft()

    def stop(self, index: int) -> None:
        """Kill an actor and forget its calls."""
        self._calls = {call: i for call, i in self._calls.items() if i != index}
        if (actor := self._actors.pop(index, None)) is not None:
            self._ray.kill(actor)


def _brief(error: Exception) -> str:
    """Return Ray's death message without ids and advice."""
    return str(error).splitlines()[-1].partition(" Some common causes")[0]


class _EngineActor:
    """Ray actor that serves an engine."""

    def start(self, options: dict[str, Any]) -> Started:
        """Load the engine with these fields of EngineConfig."""
        from jaxserve.offline.llm import LLM  # noqa: PLC0415 - imports jax, which the fleet's process does not need

        self._server = Server(LLM(**options).batch_engine())
        return self._server.started()

    def serve(self, aborted: Sequence[str], added: Sequence[NewRequest]) -> Ended:
        """Serve for one call; see `Server.serve`."""
        return self._server.serve(aborted, added)
