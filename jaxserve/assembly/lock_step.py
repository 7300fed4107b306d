"""Lock-step of several processes: the first one plans, and the others replay its events on their own devices."""

import dataclasses
import traceback
from importlib.metadata import version
from types import FunctionType

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.device_state import Devices
from jaxserve.assembly.peer_adapters import FollowerAdapters
from jaxserve.core.event_log import event_from_json
from jaxserve.core.events import DeviceEvent, WeightsRead, replay
from jaxserve.distributed.peers import Follower, Leader
from jaxserve.errors import ConfigError
from jaxserve.execution.program_store import source_digest
from jaxserve.scheduling.executor_protocol import Executor
from jaxserve.scheduling.scheduler import Scheduler

_OWN = {
    "model",
    "tokenizer",
    "compilation_cache_dir",
    "event_log",
    "kv_events_config",
}  # options that may differ between processes


def require_same_options(config: EngineConfig, peers: Leader | Follower) -> None:
    """Raise ConfigError, in all processes, unless they have the same options, versions and source files."""
    own = {f.name: _described(getattr(config, f.name)) for f in dataclasses.fields(config) if f.name not in _OWN}
    own["versions of jaxserve and jax"] = f"{version('jaxserve')}, {version('jax')}"
    own["files of jaxserve"] = source_digest("py", "json")
    first, *others = peers.exchange(own)
    for index, other in enumerate(others, start=1):
        for name, value in first.items():
            if other[name] != value:
                raise ConfigError(
                    f"all processes must have the same {name}, got {value} in process 0 and {other[name]} in "
                    f"another ({index} of those that came)"
                )


def _described(value: object) -> str:
    """Return the `repr` of an option, but for a function its module and name, which are the same in every process."""
    return f"function {value.__module__}.{value.__qualname__}" if isinstance(value, FunctionType) else repr(value)


def follow(
    peers: Follower, scheduler: Scheduler, executor: Executor, devices: Devices, adapters: FollowerAdapters | None
) -> None:
    """Replay the leading process's events on this process's devices until it ends; if that fails, end this process."""

    def take(event: DeviceEvent) -> None:
        if isinstance(event, WeightsRead):
            devices.replace(devices.prepare(event.path))
        else:
            assert adapters is not None, "the leading process has adapters only if this one has"
            adapters.take(event)

    try:
        replay(map(event_from_json, peers.events()), scheduler, executor.launch, take)
    except Exception as error:
        traceback.print_exc()
        peers.fail(repr(error))


def fail_others(peers: Leader | Follower | None, error: BaseException) -> None:
    """End the followers of a leading process after a failed step; PeerLostError if a lost process is the cause."""
    if isinstance(peers, Leader):
        peers.fail(repr(error))
