"""KVEventsConfig: where changes of the prefix cache are published, for routers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxserve.api.option_values import read_options
from jaxserve.api.schema import SWITCH, TEXT, FieldType, Schema, integer, one_of
from jaxserve.errors import ConfigError

_OWNER = " of kv_events_config"
_ENDPOINT = FieldType(
    "a ZeroMQ address such as tcp://*:5557 or ipc:///run/kv",
    lambda value: (
        isinstance(value, str) and re.fullmatch(r"(tcp://.+:\d{1,5}|ipc://.+|inproc://.+)", value) is not None
    ),
)


@dataclass(frozen=True)
class KVEventsConfig:
    """Publication of prefix cache changes, under the names in vLLM's `kv_events_config`.

    Attributes:
        enable_kv_cache_events: True to publish them.
        publisher: "zmq", or "null" to publish none; None is "zmq" if they are enabled.
        endpoint: address to publish on, bound if it has a `*`, else connected. The ports of further replicas follow.
        replay_endpoint: address that answers requests for earlier batches; None for none.
        buffer_steps: number of batches kept for replay.
        hwm: ZeroMQ's limit of unsent messages per subscriber.
        max_queue_size: batches that wait to be sent; with more, batches are dropped, which sequence numbers show.
        topic: topic of all messages.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        _SCHEMA.check(self)

    @property
    def is_on(self) -> bool:
        """True if events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def from_value(cls, value: object) -> KVEventsConfig | None:
        """Return the configuration from a dict or JSON, or the one given; None for None and "null".

        Raises:
            ConfigError: a key is not supported, or a value is invalid.
        """
        return read_options("kv_events_config", cls, value)


_SCHEMA = Schema(
    ConfigError,
    KVEventsConfig,
    {
        "enable_kv_cache_events": SWITCH,
        "publisher": one_of(("zmq", "null")).optional(),
        "endpoint": _ENDPOINT,
        "replay_endpoint": _ENDPOINT.optional(),
        "buffer_steps": integer(0),
        "hwm": integer(0),
        "max_queue_size": integer(1),
        "topic": TEXT,
    },
    _OWNER,
)
