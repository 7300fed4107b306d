"""Core status, for observers in other threads or processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jaxserve.errors import RequestError

if TYPE_CHECKING:
    from jaxserve.api.metrics import Occupancy
    from jaxserve.scheduling.step_time import Rates

SLEEP_TAGS = ("weights", "kv_cache")  # memory that can be woken separately, by vLLM's names


class MemoryState(NamedTuple):
    """Which parts of an engine's device memory are allocated.

    Attributes:
        asleep: parts, out of SLEEP_TAGS, that are freed until woken.
        has_weights: False if the weights were dropped, or reading new ones failed.
    """

    is_closed: bool = False
    asleep: frozenset[str] = frozenset()
    has_weights: bool = True

    def check_open(self) -> None:
        """Raise RuntimeError if the engine is closed."""
        if self.is_closed:
            raise RuntimeError("this engine is closed: its weights and pools are freed; start another one")

    def check_serve(self) -> None:
        """Raise RequestError if no request can be served now, RuntimeError if the engine is closed."""
        self.check_open()
        if self.asleep:
            raise RequestError("the engine must be awake to serve requests; call wake_up first")
        if not self.has_weights:
            raise RequestError(
                "the engine has no weights: the last could not be read, or sleep(level=2) let them go; update_weights"
            )

    @property
    def is_sleeping(self) -> bool:
        """True while memory freed by `sleep` is not allocated again."""
        self.check_open()
        return bool(self.asleep)

    @property
    def sleep_state(self) -> str:
        """Memory state by vLLM's names: awake, weights_offloaded or discard_all."""
        if not self.asleep:
            return "awake"
        return "weights_offloaded" if self.has_weights else "discard_all"


class CoreStatus(NamedTuple):
    """Core status between two steps.

    Attributes:
        num_taken: number of events taken since the start.
        has_work: True if a step has anything to do.
        occupancy: requests and pages.
        num_waiting_tokens: tokens to compute in waiting requests.
        rates: step times; None before they were measured.
        memory: device memory.
        is_warm: True once every program is compiled.
    """

    num_taken: int
    has_work: bool
    occupancy: Occupancy
    num_waiting_tokens: int
    rates: Rates | None
    memory: MemoryState
    is_warm: bool
