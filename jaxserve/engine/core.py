"""EngineCore: one replica of the model, from requests to token ids. It knows neither texts nor users."""

from __future__ import annotations

import logging
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.engine.accounts import Accounts, InFlight
from jaxserve.engine.batch import BatchPacker
from jaxserve.engine.lockstep import Added, CacheReset, Event, Finished, Scheduled, Updated
from jaxserve.engine.pacer import Pacer
from jaxserve.engine.programs import compile_counter
from jaxserve.engine.runner import StepResult
from jaxserve.engine.scheduler import Scheduler
from jaxserve.metrics import EngineStats
from jaxserve.request import FinishReason, Request, RequestStatus

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine.plan import StepPlan
    from jaxserve.engine.runner import Runner
    from jaxserve.models.arch import ArchConfig
    from jaxserve.models.params import Params

logger = logging.getLogger(__name__)

_STEPS_BETWEEN_DIGESTS = 16


@dataclass(slots=True)
class Progress:
    """A step that was read: the scheduler knows its tokens, the user does not."""

    plan: StepPlan
    result: StepResult
    progressed: dict[Request, int]  # new tokens of each


class EngineCore:
    """Scheduler, packer and runner of one replica, and the steps it has in flight.

    Args:
        config: what to serve and how.
        arch: of the whole model.
        runner: the devices.
        stats: totals, to which those of this replica are added.
        tell: called with everything that happens, where other processes repeat it.

    Attributes:
        scheduler: who computes what next.
        packer: from plans to arrays.
        runner: as given.
        pacer: chooses how many decode steps go in one dispatch.
        accounts: what each step cost.
        in_flight: steps that were dispatched and not read, oldest first.
    """

    def __init__(
        self,
        config: EngineConfig,
        arch: ArchConfig,
        runner: Runner,
        stats: EngineStats,
        tell: Callable[[Event], None] | None = None,
    ) -> None:
        s = runner.schedule
        self.runner = runner
        self.scheduler = Scheduler(
            max_num_seqs=s.max_num_seqs,
            max_num_batched_tokens=s.max_num_batched_tokens,
            page_size=s.page_size,
            num_pages=s.num_pages,
            max_model_len=s.max_model_len,
            policy=s.policy,
        )
        self.packer = BatchPacker(s, config.seed, arch.vocab_size)
        self.pacer = Pacer(config.multi_step, lambda bucket: s.max_steps(bucket, config.max_steps))
        self.accounts = Accounts(arch.local(config.tensor_parallel_size), self.packer, runner, stats)
        self.in_flight: deque[InFlight] = deque()
        self._stats = stats
        self._most_in_flight = 2 if config.step_ahead else 1
        self._forbid_compiles = config.forbid_compiles
        self._tell = tell
        self._digest = 0  # of all that was packed
        self._is_stuck = False  # nothing can be planned before a step in flight is read
        self._has_dropped = False  # steps that may have failed without anybody having read it

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request; RequestError where it could not run to its end even alone."""
        self.scheduler.add(request)
        self._is_stuck = False
        self._note(Added(request))

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request if it has not ended already."""
        if self.scheduler.finish(request_id, reason) is not None:
            self._is_stuck = False
            self._note(Finished(request_id, reason))

    def reset_prefix_cache(self) -> None:
        """Forget all cached pages."""
        self.scheduler.reset_prefix_cache()
        self._note(CacheReset())

    def withdraw(self) -> list[Request]:
        """Hand back the requests that wait here, as far as all their tokens are known, in their order."""
        return self.scheduler.withdraw()

    def replace_weights(self, params: Params) -> None:
        """Go on with other weights, with nothing cached."""
        self.runner.params = params
        self.scheduler.reset_prefix_cache()

    def has_work(self) -> bool:
        """Whether a request is unfinished or a step was not read."""
        return bool(self.in_flight) or self.scheduler.has_unfinished()

    # Steps

    def is_ready(self) -> bool:
        """Whether a step would get on without waiting for the device."""
        if self.in_flight and self.in_flight[0].handle.is_ready():
            return True
        return self._may_dispatch() and not self._is_stuck

    def dispatch(self) -> StepPlan | None:
        """Plan and start the next step; None where there is none, or where enough are in flight."""
        self._settle_dropped()
        if not self._may_dispatch():
            return None
        started, max_steps = time.monotonic(), self._max_steps()
        plan = self.scheduler.schedule(max_steps)
        self._is_stuck = plan is None
        bucket = None if plan is None else self._bucket(plan)
        digest = self._digest if plan is not None and plan.step_id % _STEPS_BETWEEN_DIGESTS == 0 else None
        self._note(Scheduled(max_steps, bucket, digest))
        if plan is not None and bucket is not None:
            self._launch(plan, bucket, started)
        return plan

    def repeat(self, event: Scheduled) -> None:
        """Plan and start what another process did.

        Raises:
            RuntimeError: the plan is another one here.
        """
        plan = self.scheduler.schedule(event.max_steps)
        if event.digest not in (None, self._digest) or (plan is None) != (event.bucket is None):
            where = f"at {plan}" if event.digest is None else f"after {self._digest:x}, not {event.digest:x}"
            raise RuntimeError(
                f"its plans differ {where}; all processes must run the same versions with the same options"
            )
        if plan is not None and event.bucket is not None:
            self.runner.programs.wait_for(event.bucket, multi_step=plan.num_steps > 1)
            self._launch(plan, event.bucket, time.monotonic())

    def wait(self) -> StepResult:
        """Wait for the oldest step in flight. Interrupted, nothing is lost: it can be waited for again."""
        return self.in_flight[0].handle.fetch()

    @property
    def num_running_steps(self) -> int:
        """Steps in flight that have not ended."""
        return sum(not step.handle.is_ready() for step in self.in_flight)

    def update(self, result: StepResult) -> Progress:
        """Let the scheduler know the tokens of the oldest step in flight."""
        step, now_s = self.in_flight[0], time.monotonic()
        sampled = result.sampled(step.plan.num_rows)
        num_tokens = result.num_tokens[: step.plan.num_rows]
        self.accounts.ended(step, num_tokens, now_s)
        if not step.plan.num_prefill_tokens:
            bucket = self._multi_step_bucket(step.plan.num_rows)
            self.pacer.ended(bucket, step.plan.num_steps, int(num_tokens.max()), now_s)
        else:
            self.pacer.pause()
        return Progress(step.plan, result, self.take(sampled))

    def take(self, sampled: list[list[int]]) -> dict[Request, int]:
        """Let the scheduler know what each row of the oldest step in flight has sampled."""
        self._note(Updated(sampled))
        wasted = self.scheduler.num_wasted_tokens
        progressed = self.scheduler.update(self.in_flight.popleft().plan, sampled)
        self._stats.num_wasted_tokens += self.scheduler.num_wasted_tokens - wasted
        self._is_stuck = False
        return progressed

    def drop_in_flight(self) -> None:
        """Forget steps whose requests have all ended: nobody waits for their tokens, or for how long they take."""
        while self.in_flight:
            step = self.in_flight[0]
            self.accounts.ended(step, np.array(step.plan.max_new), time.monotonic())
            self.take([[0] * most for most in step.plan.max_new])
            self._has_dropped = True
        self.pacer.pause()

    def recover(self) -> None:
        """Go on after a step that broke off, whose requests have all been ended, with nothing cached."""
        self.in_flight.clear()
        self.pacer.pause()
        self._has_dropped = True  # until the state is known to be sound: waiting for it may be interrupted
        self.scheduler.reset_prefix_cache()
        self.runner.restore_state()
        self._has_dropped = False

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the devices' memory until `Runner.wake_weights` and `wake_state`. All requests have been ended."""
        self.drop_in_flight()
        self.scheduler.reset_prefix_cache()
        self.runner.sleep(keep_weights=keep_weights)

    def close(self) -> None:
        """Free the devices' memory. Steps in flight are of requests that have all been ended."""
        self.in_flight.clear()
        self.runner.close()

    # Parts

    def _settle_dropped(self) -> None:
        """Before the next request's first step: find out whether a step failed that was dropped unread."""
        if self.in_flight and all(r.status is RequestStatus.FINISHED for s in self.in_flight for r in s.plan.requests):
            self.drop_in_flight()
        if not (self._has_dropped and self.scheduler.has_unfinished()):
            return
        self._has_dropped = False
        if not self.runner.restore_state():
            return
        if self.scheduler.num_running:
            raise RuntimeError("a step has failed on the device, and the pages of running requests are lost")
        if self._tell is not None:
            raise RuntimeError("a step that no request waited for has failed on the devices of several processes")
        logger.warning("a step that no request waited for has failed on the device; its cached pages are lost")
        self.scheduler.reset_prefix_cache()

    def _may_dispatch(self) -> bool:
        return len(self.in_flight) < self._most_in_flight

    def _multi_step_bucket(self, num_rows: int) -> int | None:
        return self.runner.programs.multi_step_bucket_for(num_rows)

    def _max_steps(self) -> int:
        """Steps that the next dispatch may have, as far as programs and their speed go."""
        bucket = self._multi_step_bucket(self.scheduler.num_running)
        if bucket is None or (self.runner.schedule.max_logprobs < 0 and self.scheduler.wants_logprobs):
            return 1
        return self.pacer.max_steps(bucket)

    def _bucket(self, plan: StepPlan) -> int:
        programs = self.runner.programs
        bucket = self._multi_step_bucket(plan.num_rows) if plan.num_steps > 1 else programs.bucket_for(plan.num_tokens)
        assert bucket is not None, "several steps are planned where there is a program for them"
        return bucket

    def _launch(self, plan: StepPlan, bucket: int, started: float) -> None:
        compiles = compile_counter.count
        upload = self.packer.pack(plan, bucket)
        handle = self.runner.run(
            upload,
            bucket,
            wants_logprobs=plan.wants_logprobs,
            wants_prompt_logprobs=plan.wants_prompt_logprobs,
            multi_step=plan.num_steps > 1,
        )
        if self._tell is not None:
            for blob in (*upload.admissions, upload.blob):
                self._digest = zlib.crc32(blob.data, self._digest)
        self._count_compiles(compile_counter.count - compiles)
        now = time.monotonic()
        self.in_flight.append(InFlight(plan, handle, bucket, now - started, now))

    def _count_compiles(self, count: int) -> None:
        self._stats.num_compiles += count
        if count and self._forbid_compiles:
            raise RuntimeError(f"a step compiled {count} programs after warm-up; every shape must be known beforehand")

    def _note(self, event: Event) -> None:
        if self._tell is not None:
            self._tell(event)
