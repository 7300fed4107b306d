"""Many processes, each with devices of its own, as one engine (jax's multi-controller model).

Every process runs the same command or script. `initialize` comes first; then the process 0 goes on, and in the others
`LLM(...)` follows it until it ends, and ends the process.
"""

import secrets
import socket

import jax
from jax._src.distributed import global_state  # jax shows neither the address nor the store in its public interface

from jaxserve.errors import ConfigError
from jaxserve.peers import CONNECT_S, Follower, Leader, listen

SHUTDOWN_S = 30  # that a process waits at its end for the others

_ADDRESS = "jaxserve/leader"  # in jax's key-value store
_peers: list[Leader | Follower] = []  # one at most: jax too joins one run


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Join the other processes of this run; before anything else asks jax for its devices.

    Args:
        coordinator_address: host:port of process 0, where the others reach it; the port must be free there. It opens a
            further one there, for those alone who join this run.
        num_processes: how many there are.
        process_id: of this one, from 0. What is None is found out where jax can: under SLURM or Open MPI, and on the
            hosts of a TPU pod.

    Raises:
        ConfigError: it cannot be found out, or the others cannot be reached.
    """
    try:
        jax.distributed.initialize(coordinator_address, num_processes, process_id, shutdown_timeout_seconds=SHUTDOWN_S)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"coordinator_address, num_processes and process_id must describe this run, got {coordinator_address}, "
            f"{num_processes} and {process_id}: {error}"
        ) from error
    if global_state.num_processes > 1:
        _peers.append(_connect())


def peers() -> Leader | Follower | None:
    """The connection of this process to the others; None where there are none.

    Raises:
        ConfigError: there are others that it has no connection to.
    """
    if jax.process_count() > 1 and not _peers:
        raise ConfigError("many processes must be joined by jaxserve.distributed.initialize, got jax's own; call that")
    return _peers[0] if _peers else None


def _connect() -> Leader | Follower:
    client, process_id = global_state.client, global_state.process_id
    assert client is not None, "jax has joined"
    if process_id:
        host, port, key = client.blocking_key_value_get(_ADDRESS, int(CONNECT_S * 1e3)).split()
        return Follower((host, int(port)), bytes.fromhex(key), process_id, socket.gethostname())
    host, secret = str(global_state.coordinator_address).rsplit(":", 1)[0].strip("[]"), secrets.token_bytes(32)
    listener = listen(host, secret)
    client.key_value_set(_ADDRESS, f"{host} {listener.address[1]} {secret.hex()}")
    return Leader(listener, global_state.num_processes - 1)
