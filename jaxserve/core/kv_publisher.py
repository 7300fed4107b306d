"""KVPublisher: sends changes of the prefix cache to subscribers, in vLLM's messages over ZeroMQ.

A message has three frames: topic, sequence number (8 bytes, big endian) and a batch in MessagePack: time, events, index
of the replica. A subscriber that misses a number asks the replay address for all batches from a number on. A thread of
its own encodes and sends, so that a slow network delays no step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from queue import Empty, Full, Queue
from typing import Any, NamedTuple

from jaxserve.api.kv_events_config import KVEventsConfig
from jaxserve.core.prompt import USER_SALT
from jaxserve.errors import ConfigError, install_extra
from jaxserve.scheduling.kv_cache.page_events import AllCleared, BlocksRemoved, BlocksStored, PageEvent

logger = logging.getLogger(__name__)

MEDIUM = "GPU"  # vLLM's name for device memory, whatever the device
_POLL_S = 0.05  # time until a request for a replay is seen
_CLOSE_S = 5.0
_MAX_HWM = 2**31 - 1
_END = (-1).to_bytes(8, "big", signed=True)


class _Batch(NamedTuple):
    """Changes in one step."""

    number: int
    at_s: float
    events: Sequence[PageEvent]


class KVPublisher:
    """Publishes the changes of one replica's prefix cache. `publish` and `close` are for one thread at a time.

    Args:
        config: addresses and limits.
        page_size: tokens per block.
        windows: window of each KV group; None for full attention.
        rank: index of the replica.

    Attributes:
        endpoint: address that subscribers connect to.
        num_dropped: batches dropped because too many were waiting.

    Raises:
        ConfigError: an address cannot be used, or a package is missing.
    """

    def __init__(self, config: KVEventsConfig, page_size: int, windows: Sequence[int | None], rank: int = 0) -> None:
        try:
            import msgpack  # noqa: PLC0415 - an extra
            import zmq  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError(f"kv_events_config needs pyzmq and msgpack: {install_extra('events')}") from error
        self._pack, self._page_size, self._windows, self._rank = msgpack.packb, page_size, windows, rank
        self._error: type[Exception] = zmq.ZMQError
        self._queue: Queue[_Batch | None] = Queue(config.max_queue_size)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._topic, self._numbers = config.topic.encode(), count()
        self.num_dropped = 0
        context: Any = zmq.Context.instance()
        self._out, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._out.set_hwm(min(config.hwm, _MAX_HWM))
        # ZeroMQ drops messages beyond the limit: it must allow a whole replay and its end.
        self._replay.set_hwm(min(config.buffer_steps + 1, _MAX_HWM))
        try:
            _attach(self._out, _for_rank(config.endpoint, rank))
            if config.replay_endpoint is not None:
                self._replay.bind(_for_rank(config.replay_endpoint, rank))
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConfigError(
                f"the addresses of kv_events_config must be free and valid, got {config.endpoint!r} and "
                f"{config.replay_endpoint!r}: {error}"
            ) from error
        self.endpoint = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="jaxserve KV events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[PageEvent]) -> None:
        """Queue the changes of a step; they are dropped if too many wait."""
        try:
            self._queue.put_nowait(_Batch(next(self._numbers), time.time(), events))
        except Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                logger.warning("KV events are dropped: nobody takes them as fast as they come")

    def close(self) -> None:
        """Send the queued batches, and close the sockets; has no effect the second time."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        """Send batches and answer requests for replays, until `close`."""
        try:
            while True:
                try:
                    batch = self._queue.get(timeout=_POLL_S)
                except Empty:
                    batch = _NOTHING
                if batch is None:
                    return
                if batch.events:
                    payload = self._encode(batch)
                    self._sent.append((batch.number, payload))
                    self._out.send_multipart((self._topic, batch.number.to_bytes(8, "big"), payload))
                while self._replay.poll(0):
                    self._answer(self._replay.recv_multipart())
        except self._error:
            logger.exception("KV events are not published any more")
        finally:
            self._close_sockets()

    def _answer(self, frames: Sequence[bytes]) -> None:
        """Send the kept batches from a requested number on, and a last message that marks the end."""
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a request for a replay must have a number in 8 bytes, got %d frames", len(frames))
            return
        client, _, first = frames
        try:
            for number, payload in self._sent:
                if number >= int.from_bytes(first, "big"):
                    self._replay.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
            self._replay.send_multipart((client, b"", b"", _END, b""))
        except self._error as error:  # only this client lacks it
            logger.warning("a replay of KV events has failed: %s", error)

    def _encode(self, batch: _Batch) -> bytes:
        """Return a batch in vLLM's format."""
        packed: bytes = self._pack([batch.at_s, [self._event(event) for event in batch.events], self._rank])
        return packed

    def _event(self, event: PageEvent) -> dict[str, Any]:
        """Return an event's fields in vLLM's names."""
        match event:
            case BlocksStored(hashes, parent, token_ids, group, salt, session, adapter, images):
                window = self._windows[group]
                fields: dict[str, Any] = {
                    "type": "BlockStored",
                    "block_hashes": hashes,
                    "parent_block_hash": parent,
                    "token_ids": token_ids,
                    "block_size": self._page_size,
                    "lora_id": None,
                    "medium": MEDIUM,
                    "lora_name": adapter or None,  # a digest: its users' name for it is not known here
                    "group_idx": group,
                    "kv_cache_spec_kind": "full_attention" if window is None else "sliding_window",
                }
                by_block = images or [()] * len(hashes)
                keys: list[list[Any]] = [[(digest.hex(), offset) for digest, offset in each] for each in by_block]
                if salt is not None and salt != USER_SALT.encode():
                    # not the salt itself, which is a secret
                    keys[0].append(blake2b(salt, digest_size=16, person=b"kv events").hexdigest())
                if any(keys):
                    fields["extra_keys"] = [each or None for each in keys]
                if window is not None:
                    fields["kv_cache_spec_sliding_window"] = window
                return fields | ({"session_id": session} if session else {})
            case BlocksRemoved(hashes, group):
                return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM, "group_idx": group}
            case AllCleared():
                return {"type": "AllBlocksCleared"}

    def _close_sockets(self) -> None:
        self._out.close(linger=1000)
        self._replay.close(linger=0)


_NOTHING = _Batch(0, 0.0, ())


def _attach(socket: Any, endpoint: str) -> None:
    """Bind a socket to an address of this machine, or connect it to another one's, by vLLM's rule."""
    is_own = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    (socket.bind if is_own else socket.connect)(endpoint)


def _for_rank(endpoint: str, rank: int) -> str:
    """Return the address of a replica: the following ports, or a name of its own."""
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank if int(port) else 0}"
