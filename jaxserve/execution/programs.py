"""Programs: the compiled programs of a model, made before and while it serves."""

import atexit
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxserve.execution.lowering import Lower, Lowering, _known
from jaxserve.execution.program_store import ProgramStore
from jaxserve.execution.state import ServeState
from jaxserve.execution.xla_cache import Scope
from jaxserve.scheduling.plan import PlanKind

logger = logging.getLogger(__name__)

Compiled = Any  # jax.stages.Compiled
_NONE: tuple[int, ...] = ()


class Buckets(NamedTuple):
    """Buckets to compile, by the kind of program."""

    steps: Iterable[int] = _NONE
    multi_steps: Iterable[int] = _NONE
    speculative: Iterable[int] = _NONE
    split: Iterable[int] = _NONE


_WRITERS = ("new_state", "admit", "copy_pages", "set_slot", "set_masks")  # they allocate the state or write to it
_POLL_S = 0.01
_REPORT_S = 5.0  # time between lines of the log while the caller waits
# A short run compiles nothing in the background: nobody would use it, and the exit waits for what was begun.
_SHORT_RUN_S = 5.0  # time that a run lasts at least in which some program is compiled in the background
_SHORT_RUN_STEPS = 8  # or steps with more padding than needed, for want of a program
COMPILE_THREADS = 2  # threads while the caller waits: Python traces, and XLA mostly uses one core


class Programs:
    """The compiled programs of a runner, by bucket.

    Args:
        lowering: description of the programs, which traces and lowers each.
        directory: directory of compiled programs; None keeps none.
        cache_scope: context entered while a program is compiled: XLA's cache, where whole programs are not kept.

    Attributes:
        lowering: description of the programs, which traces and lowers each.
        steps: the compiled steps, by bucket.
        multi_steps: programs of several rounds, by bucket; some are in both tables.
        speculative: programs of rounds with drafted tokens, by bucket.
        split: programs of the model and of sampling for split plans, by bucket.
        admit: the program that lets requests enter their slots.
        set_slot: the program that enters a request's other data.
        set_masks: the program that sets the masks of rows with a constraint.
        copy_pages: the program that copies pages of the pool.
    """

    def __init__(self, lowering: Lowering, *, directory: Path | None, cache_scope: Scope) -> None:
        self.lowering, self._schedule, self._max_steps = lowering, lowering.schedule, lowering.max_steps
        self.steps: dict[int, Compiled] = {}
        self.multi_steps: dict[int, Compiled] = {}
        self.speculative: dict[int, Compiled] = {}
        self.split: dict[int, tuple[Compiled, Compiled]] = {}
        self.admit: Compiled = None
        self.set_slot: Compiled = None
        self.set_masks: Compiled = None
        self.copy_pages: Compiled = None
        self._make_state: Compiled = None
        self._closing = threading.Event()
        self._is_long = threading.Event()  # the run is not a short one, or somebody waits for programs
        self._num_padded = 0  # steps for which a program was missing
        # Not the thread: in Python 3.11 and 3.12 a join that is interrupted takes it for ended (cpython issue 90882).
        self._compiled = threading.Event()
        self._compiled.set()
        self._compile_error: Exception | None = None
        self._progress = (0, 0)  # steps that are compiled, of those begun together
        self._cache_scope = cache_scope
        devices = None if lowering.mesh is None else list(lowering.mesh.devices.flat)
        # Engines share the programs that are the same in them: the host alone knows tokens that end an output, names
        # tell numbers of rounds apart, and writers follow from no weights.
        steps = replace(lowering, arch=replace(lowering.arch, eos_ids=frozenset()), max_steps=1)
        writers = replace(steps, param_shapes={}, draft_shapes={}, linear_backend="auto")
        self._steps, self._writers = (ProgramStore(directory, each.facts, devices) for each in (steps, writers))
        self._is_cpu = (devices or jax.devices())[0].platform == "cpu"

    def new_state(self) -> ServeState:
        """Allocate an empty state on the devices."""
        if self._make_state is None:
            self._make_state = self._get("new_state", self.lowering.new_state)
        state: ServeState = self._make_state()
        return state

    def warm_up(self, compile_ahead: str, after: "Programs | None" = None) -> None:
        """Compile what must be ready before the first request, and start on the rest (EngineConfig.compile_ahead).

        Of the rest, what is stored is loaded at once; the other programs are compiled unless the run is a short one.
        The rest waits until `after` has compiled all of its own: what it left in XLA's cache may serve here too.

        A thread of its own compiles: an interrupt of a caller that compiles would leave XLA working with nobody waiting
        for it, and the exit would take its client away.
        """
        buckets, drafting = self._schedule.buckets(), self._schedule.speculative_buckets()
        split = self._schedule.split_buckets()
        multi_steps = self._schedule.multi_step_buckets(self._max_steps)
        ends = dict.fromkeys((*drafting[:1], *drafting[-1:]))
        decode = min(b for b in buckets if b >= self._schedule.max_num_seqs)  # bucket of a full batch: wanted first
        rest = sorted(buckets[1:-1], key=lambda bucket: (bucket != decode, bucket))
        in_turn: dict[str, list[Buckets]] = {
            "all": [Buckets(buckets, multi_steps, drafting, split)],
            "background": [
                Buckets((buckets[0], buckets[-1])),
                Buckets(speculative=ends),
                Buckets(rest, multi_steps, drafting, split),
            ],
            "minimal": [Buckets((buckets[0], buckets[-1]), multi_steps[-1:], ends)],
        }
        first, *later = in_turn[compile_ahead]
        ready = threading.Event()
        self._compiled.clear()
        atexit.register(self._stop)
        threading.Thread(target=self._compile_ahead, args=(first, later, ready, after), daemon=True).start()
        while not ready.wait(_REPORT_S):
            done, total = self._progress
            logger.info("compile_ahead=%r: %d of %d steps are compiled, and requests wait", compile_ahead, done, total)
        if self._compile_error is not None:
            raise self._compile_error

    def _compile_ahead(
        self, first: Buckets, later: Sequence[Buckets], ready: threading.Event, after: "Programs | None"
    ) -> None:
        try:
            self._compile_writers()
            self._compile(first, num_threads=COMPILE_THREADS)
            ready.set()
            while after is not None and not self._closing.is_set() and not after._compiled.wait(_POLL_S):
                pass
            were_stored = [self._compile(rest, stored_only=True) for rest in later]
            if not all(were_stored):
                deadline_s = time.monotonic() + _SHORT_RUN_S
                while not (self._closing.is_set() or self._is_long.wait(_POLL_S) or time.monotonic() > deadline_s):
                    pass
                for rest in later:
                    self._compile(rest)
        except Exception as error:
            if ready.is_set():
                logger.exception("compiling in the background failed; steps go on with the programs that are ready")
            self._compile_error = error
        finally:
            atexit.unregister(self._stop)
            self._is_long.set()  # steps need not look for missing programs any more
            self._compiled.set()
            ready.set()

    def _compile(self, wanted: Buckets, num_threads: int = 1, *, stored_only: bool = False) -> bool:
        """Compile what is missing of some buckets, in order, several at a time.

        With `stored_only` only load what is stored; return whether that was all.
        """
        single = self._schedule.step_buckets(self._max_steps)
        steps = dict.fromkeys(wanted.steps)  # the smallest bucket may be the largest: two threads would compile it
        shared = [bucket for bucket in steps if bucket not in single]
        jobs = [(f"step {bucket}", partial(self._compile_step, bucket)) for bucket in steps if bucket in single]
        for bucket in dict.fromkeys([*shared, *wanted.multi_steps]):
            jobs.append((self._name_of_multi_step(bucket), partial(self._compile_multi_step, bucket)))
        for bucket in wanted.speculative:
            jobs.append((self._name_of_speculative(bucket), partial(self._compile_speculative, bucket)))
        jobs += [(f"sample {bucket}", partial(self._compile_split, bucket)) for bucket in wanted.split]
        chosen = [job for name, job in jobs if not stored_only or self._steps.has(name)]
        num_done, self._progress = itertools.count(1), (0, len(chosen))

        def counted(job: Callable[[], None]) -> None:
            job()
            self._progress = next(num_done), len(chosen)

        run_all([partial(counted, job) for job in chosen], num_threads, self._closing)
        logger.debug("compiled steps of %s tokens, of several rounds %s", sorted(self.steps), sorted(self.multi_steps))
        return len(chosen) == len(jobs)

    def _compile_step(self, bucket: int) -> None:
        if bucket not in self.steps:
            self.steps[bucket] = self._get(f"step {bucket}", partial(self.lowering.step, bucket))

    def _compile_multi_step(self, bucket: int) -> None:
        program = self.multi_steps.get(bucket)  # `close` may clear the table meanwhile
        if program is None:
            lower = partial(self.lowering.step, bucket, multi_step=True)
            program = self._get(self._name_of_multi_step(bucket), lower)
            self.multi_steps[bucket] = program
        if bucket not in self._schedule.step_buckets(self._max_steps):
            self.steps[bucket] = program

    def _compile_speculative(self, bucket: int) -> None:
        if bucket not in self.speculative:
            lower = partial(self.lowering.speculative, bucket)
            self.speculative[bucket] = self._get(self._name_of_speculative(bucket), lower)

    def _compile_split(self, bucket: int) -> None:
        if bucket not in self.split:
            compute, sample = self.lowering.split(bucket)
            self.split[bucket] = self._get(f"compute {bucket}", compute), self._get(f"sample {bucket}", sample)

    def _name_of_multi_step(self, bucket: int) -> str:
        return f"multi-step {bucket} of {self._schedule.max_steps(bucket, self._max_steps)}"

    def _name_of_speculative(self, bucket: int) -> str:
        return f"speculative {bucket} of {self._schedule.max_rounds(bucket, self._max_steps)}"

    def _compile_writers(self) -> None:
        made = {name: self._get(name, lower) for name, lower in self.lowering.writers().items()}
        self.admit, self.copy_pages = made["admit"], made.get("copy_pages")
        self.set_slot, self.set_masks = made.get("set_slot"), made.get("set_masks")

    def _get(self, name: str, lower: Lower) -> Compiled:
        is_writer = name in _WRITERS

        def compile_now() -> Compiled:
            # On a CPU, XLA's newer code generator takes one and a half times as long for writers, too.
            options = _known(self.lowering.compiler_options) if is_writer and self._is_cpu else None
            with self._cache_scope():
                return lower().compile(options)

        return (self._writers if is_writer else self._steps).get(name, compile_now)

    def bucket_for(self, num_tokens: int) -> int:
        """The smallest compiled bucket that holds `num_tokens`; the largest one always is compiled."""
        bucket = min(b for b in tuple(self.steps) if b >= num_tokens)
        if not self._is_long.is_set() and bucket > min(b for b in self._schedule.buckets() if b >= num_tokens):
            self._num_padded += 1
            if self._num_padded >= _SHORT_RUN_STEPS:
                self._is_long.set()
        return bucket

    def decode_bucket_for(self, kind: PlanKind, num_rows: int) -> int | None:
        """Return the smallest compiled bucket of a kind for `num_rows` rows in decode; None if there is none."""
        return min((b for b in tuple(self.of_kind(kind)) if b >= num_rows), default=None)

    def of_kind(self, kind: PlanKind) -> dict[int, Compiled]:
        """The compiled programs of a kind, by bucket; for split plans, pairs of them."""
        match kind:
            case PlanKind.STEP:
                return self.steps
            case PlanKind.MULTI_STEP:
                return self.multi_steps
            case PlanKind.SPECULATIVE:
                return self.speculative
            case PlanKind.SPLIT:
                return self.split

    def wait_for(self, bucket: int, kind: PlanKind) -> None:
        """Block until one bucket is compiled; RuntimeError if it never will be."""
        programs = self.of_kind(kind)
        self._is_long.set()
        while bucket not in programs:
            if self._compiled.wait(_POLL_S) and bucket not in programs:
                raise self._compile_error or RuntimeError(f"there is no program for {bucket} tokens here")

    @property
    def is_warm(self) -> bool:
        """True once every bucket is compiled."""
        return self._compiled.is_set() and self._compile_error is None

    def wait_until_warm(self) -> None:
        """Block until every bucket is compiled."""
        self._is_long.set()
        self._compiled.wait()
        if self._compile_error is not None:
            raise self._compile_error

    def close(self) -> None:
        """Let go of all programs, and compile none after the one at hand, for which nobody waits."""
        self._closing.set()
        self.steps.clear()
        self.multi_steps.clear()
        self.speculative.clear()
        self.split.clear()
        self.admit = self.set_slot = self.set_masks = self.copy_pages = None

    def _stop(self) -> None:
        """Stop compiling ahead of jax's clean-up at exit, which ends badly while XLA compiles."""
        self._closing.set()
        self._compiled.wait()


def run_all(jobs: Iterable[Callable[[], None]], num_threads: int, stop: threading.Event) -> None:
    """Run jobs in some threads, each taking the next one, until all are done, one fails or `stop` is set.

    The caller's thread is one of them. The others are daemons, for which nothing waits at exit, so that what sets
    `stop` there can run.
    """
    left, lock, errors = iter(list(jobs)), threading.Lock(), list[Exception]()

    def work() -> None:
        while not (stop.is_set() or errors):
            with lock:
                job = next(left, None)
            if job is None:
                return
            try:
                job()
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
