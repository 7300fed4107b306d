"""Runs of an engine over many processes, each with its devices (jax's multi-controller model).

Every process runs the same command or script, and calls `initialize` first. Process 0 then continues; in the others,
`LLM(...)` follows process 0 until that ends, and then ends the process.
"""

import contextlib
import socket
from multiprocessing import AuthenticationError

import jax
from jax._src.distributed import global_state  # jax has no public interface to them

from jaxserve.distributed.peers import CONNECT_S, Follower, Leader, listen
from jaxserve.distributed.run_key import check_reachable, given_key, is_loopback, key_file, read_key
from jaxserve.errors import ConfigError

SHUTDOWN_S = 30  # timeout of a process that waits for the others before it ends

_ADDRESS = "jaxserve/leader"  # key in jax's key-value store
_roles: list[Leader | Follower] = []  # at most one: jax, too, can join only one run


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    key: str | None = None,
) -> None:
    """Join the other processes of this run. Call this before anything initialises jax's devices.

    Args:
        coordinator_address: host:port at which the others reach process 0; the port must be free there. Process 0
            listens at this address only, and opens a second port there, which accepts only processes of this run.
        num_processes: number of processes.
        process_id: index of this process, from 0. jax detects arguments that are None under SLURM or Open MPI, and on
            TPU pod hosts.
        key: secret that all processes share, of at least 16 characters; None takes the environment variable
            JAXSERVE_RUN_KEY. Without one, all processes must be of one user and machine, at a loopback address.

    Raises:
        ConfigError: an argument cannot be detected, a key is missing, or the other processes cannot be reached.
    """
    if coordinator_address is not None:
        check_reachable(_host(coordinator_address))
    secret = given_key(key, None if coordinator_address is None else _host(coordinator_address))
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            shutdown_timeout_seconds=SHUTDOWN_S,
            coordinator_bind_address=coordinator_address,  # jax would listen at all addresses
        )
        if global_state.num_processes > 1:
            _roles.append(_connect(secret))
    except (ValueError, RuntimeError, OSError, AuthenticationError) as error:
        raise ConfigError(
            f"coordinator_address, num_processes and process_id must describe this run, got {coordinator_address}, "
            f"{num_processes} and {process_id}: {error}"
        ) from error


def is_joined() -> bool:
    """Return whether this process belongs to a run with others, without starting a jax backend."""
    return bool(_roles) or (global_state.num_processes or 1) > 1


def joined_role() -> Leader | Follower | None:
    """Return this process's role among the others; None if it is the only one.

    Raises:
        ConfigError: there are other processes, but no connection to them.
    """
    if jax.process_count() > 1 and not _roles:
        raise ConfigError("many processes must be joined by jaxserve.distributed.initialize, got jax's own; call that")
    return _roles[0] if _roles else None


def _connect(key: bytes | None) -> Leader | Follower:
    """Connect to the other processes of a run that jax has joined, and return this process's role.

    Without a `key`, process 0 writes one to a file and publishes the file's name.
    """
    client, process_id = global_state.client, global_state.process_id
    assert client is not None, "jax has joined"
    host = _host(str(global_state.coordinator_address))
    if key is None and not is_loopback(host):  # the address was detected
        key = given_key(None, host)
    if process_id:
        leader_host, port, name = client.blocking_key_value_get(_ADDRESS, int(CONNECT_S * 1e3)).split()
        return Follower((leader_host, int(port)), key or read_key(name), process_id, socket.gethostname())
    listener = listen(host)
    with contextlib.nullcontext(("-", key)) if key is not None else key_file() as (name, secret):
        client.key_value_set(_ADDRESS, f"{host} {listener.getsockname()[1]} {name}")
        return Leader(listener, secret, global_state.num_processes - 1)


def _host(address: str) -> str:
    """Return the host in "host:port", without the brackets of an IPv6 address."""
    return address.rsplit(":", 1)[0].strip("[]")
