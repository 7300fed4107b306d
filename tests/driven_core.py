"""A core over simulated devices, whose deltas are taken as a frontend would take them."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from simulation import SeenTokens, SimulatedExecutor, generate_alone, make_request
from slow_mover import SlowMover

from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import EngineStats
from jaxserve.core.core import EngineCore
from jaxserve.core.deltas import Delta
from jaxserve.core.events import Cancelled, Record, Submitted
from jaxserve.core.replica import Replica
from jaxserve.core.step_chooser import StepChooser
from jaxserve.layers.kv_forms import HeadVectors
from jaxserve.models.arch import ArchConfig
from jaxserve.models.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from jaxserve.scheduling.request import FinishReason, Request
from jaxserve.scheduling.schedule_config import ScheduleConfig

ARCH = ArchConfig(
    "Fake",
    vocab_size=100,
    hidden_size=8,
    layers=(LayerSpec(AttentionSpec(1, HeadVectors(1, 8)), MlpSpec(8)),),
    max_position=256,
    norm_eps=1e-6,
)
SIZES = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, page_size=4, num_pages=24)
LARGER = replace(SIZES, max_num_seqs=6, max_num_batched_tokens=32)  # several prompts start in a step
DRAFTING = replace(SIZES, max_drafts=3, targets=((0, 5.0, 1.0), (3, 9.0, 2.0)))
FEW_PROGRAMS = replace(SIZES, max_num_seqs=24, max_num_batched_tokens=32, num_pages=40, few_programs=True)
FAILURE = RuntimeError("the device has failed")


def pass_on(error: BaseException) -> None:
    """Stand in for the leader of several processes, which tells the others."""


def end_at_assertions(error: BaseException) -> None:
    """Stand in likewise, but end the test if it is not the device that has failed."""
    if isinstance(error, AssertionError):
        raise error


class Driven:
    """A core with replicas over simulated devices, and what has become of each request."""

    def __init__(
        self,
        num_replicas: int = 1,
        *,
        sizes: ScheduleConfig = SIZES,
        max_steps: int = 1,
        step_ahead: bool = True,
        records: Sequence[Record] = (),
        on_failure: Callable[[BaseException], None] = pass_on,
        new_chooser: type[StepChooser] = StepChooser,
        movers: Sequence[SlowMover] = (),
    ) -> None:
        config = EngineConfig("none", multi_step=max_steps, step_ahead=step_ahead)
        self.executors = [SimulatedExecutor(sizes, max_steps) for _ in range(num_replicas)]
        self.replicas = [
            Replica(config, ARCH, executor, EngineStats(), record, new_chooser, mover)
            for executor, record, mover in zip_longest(self.executors, records, movers)
        ]
        for mover, executor in zip(movers, self.executors, strict=False):
            mover.device = executor.device
        self.core = EngineCore(self.replicas, step_ahead=step_ahead, on_failure=on_failure)
        self.requests: list[Request] = []  # the index is the key
        self.unfinished: dict[Request, list[int]] = {}
        self.ended: dict[Request, tuple[list[int], FinishReason]] = {}
        self.errors: list[BaseException] = []
        self.num_added = 0

    def submit(self, **kwargs: Any) -> Request:
        request = make_request(f"{self.num_added}#0", arrival=self.num_added, **kwargs)
        self.num_added += 1
        request.key = len(self.requests)
        self.requests.append(request)
        request.constraint = SeenTokens() if request.waits_for_tokens else None
        self.unfinished[request] = []
        self.core.inbox.append(Submitted([request]))
        return request

    def cancel(self, request: Request) -> None:
        self.core.inbox.append(Cancelled([request.key], FinishReason.ABORT))

    def end_moves(self, mover: SlowMover) -> None:
        while mover.moves:
            mover.end_all()
            self.step()

    def step(self) -> None:
        self.core.step(0.0)
        self.take()
        self.core.check_integrity()

    def take(self) -> None:
        """Check each delta as a frontend would see it."""
        while self.core.outbox:
            delta = pickle.loads(pickle.dumps(self.core.outbox.popleft()))  # values: they could go to another process
            assert isinstance(delta, Delta)
            self.errors += [] if delta.error is None else [delta.error]
            if delta.step is not None:
                for key, token_ids in zip(delta.step.keys, delta.step.token_ids, strict=True):
                    if token_ids:
                        self.unfinished[self.requests[key]] += token_ids
                for ended in delta.step.ended.values():
                    self._end(self.requests[ended.key], ended.reason)
            for ended in delta.ended:
                if self.requests[ended.key] in self.unfinished:
                    self._end(self.requests[ended.key], ended.reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        token_ids = self.unfinished.pop(request)
        expected, expected_reason = generate_alone(request)
        if reason is FinishReason.ABORT:
            assert token_ids == expected[: len(token_ids)]
        else:
            assert (token_ids, reason) == (expected, expected_reason)
        self.ended[request] = token_ids, reason

    def drain(self) -> None:
        while self.core.has_work():
            self.step()
        assert not self.unfinished
        assert all(replica.scheduler.num_pages_used == 0 for replica in self.replicas)
