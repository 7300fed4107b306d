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


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Join the other processes of this run; before anything else asks jax for its devices.

    Args:
        coordinator_address: host:port of process 0, where the others reach it; the port must be free there.
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


def connect() -> Leader | Follower | None:
    """The connection of this process to the others; None where there are none.

    Raises:
        ConfigError: a run has had its engine already: the followers end with it.
    """
    num_processes, client = jax.process_count(), global_state.client
    if num_processes == 1 or client is None:
        return None
    if jax.process_index():
        host, port, key = client.blocking_key_value_get(_ADDRESS, int(CONNECT_S * 1e3)).split()
        return Follower((host, int(port)), bytes.fromhex(key), jax.process_index(), socket.gethostname())
    host, key = str(global_state.coordinator_address).rsplit(":", 1)[0].strip("[]"), secrets.token_bytes(32)
    listener = listen(host, key)
    try:
        client.key_value_set(_ADDRESS, f"{host} {listener.address[1]} {key.hex()}")
    except Exception as error:
        raise ConfigError("a run over many processes has one LLM; start another run for another one") from error
    return Leader(listener, num_processes - 1)
