"""Runs of one engine over many processes, each with its own devices (jax's multi-controller model).

Every process runs the same command or script, and calls `initialize` first. Process 0 then continues; in the others,
`LLM(...)` follows process 0 until that ends, and then ends the process.
"""

import socket
from multiprocessing import AuthenticationError

import jax
from jax._src.distributed import global_state  # jax has no public interface to the address and the store

from jaxserve.distributed.peers import (
    CONNECT_S,
    Follower,
    Leader,
    listen,
)
from jaxserve.distributed.run_key import (
    check_reachable,
    given_key,
    is_loopback,
    read_key,
    write_key,
)
from jaxserve.errors import ConfigError

SHUTDOWN_S = 30  # time that a process waits for the others before it ends

_ADDRESS = "jaxserve/leader"  # key in jax's key-value store
_roles: list[Leader | Follower] = []  # one entry at most: jax too can join only one run


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
            listens at this address only, and opens a second port at it, which accepts only processes of this run.
        num_processes: number of processes.
        process_id: index of this process, from 0. Arguments that are None are detected by jax under SLURM or Open MPI,
            and on the hosts of a TPU pod.
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
    """Return whether this process belongs to a run of several, without starting a jax backend."""
    return bool(_roles) or (global_state.num_processes or 1) > 1


def own_role() -> Leader | Follower | None:
    """Return this process as the leader or a follower of the others; None if it is the only one.

    Raises:
        ConfigError: there are other processes, but no connection to them.
    """
    if jax.process_count() > 1 and not _roles:
        raise ConfigError("many processes must be joined by jaxserve.distributed.initialize, got jax's own; call that")
    return _roles[0] if _roles else None


def _connect(key: bytes | None) -> Leader | Follower:
    """Connect to the other processes. Without a key, a file of this user's has one, whose name process 0 publishes."""
    client, process_id = global_state.client, global_state.process_id
    assert client is not None, "jax has joined"
    host = _host(str(global_state.coordinator_address))
    if key is None and not is_loopback(host):  # the address was detected
        key = given_key(None, host)
    if process_id:
        own_host, port, name = client.blocking_key_value_get(_ADDRESS, int(CONNECT_S * 1e3)).split()
        return Follower((own_host, int(port)), key or read_key(name), process_id, socket.gethostname())
    listener = listen(host)
    port = listener.getsockname()[1]
    if key is not None:
        client.key_value_set(_ADDRESS, f"{host} {port} -")
        return Leader(listener, key, global_state.num_processes - 1)
    name, secret, file = write_key()
    try:
        client.key_value_set(_ADDRESS, f"{host} {port} {name}")
        return Leader(listener, secret, global_state.num_processes - 1)
    finally:
        file.unlink(missing_ok=True)


def _host(address: str) -> str:
    return address.rsplit(":", 1)[0].strip("[]")
