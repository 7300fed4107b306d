"""Programs: a model's compiled programs, made before and while it serves."""

import atexit
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxserve.execution.lowering import Lower, Lowering, known_options
from jaxserve.execution.program_store import ProgramStore
from jaxserve.execution.state import ServeState
from jaxserve.execution.xla_cache import Scope
from jaxserve.scheduling.step_plan import StepShape, cheapest

logger = logging.getLogger(__name__)

Compiled = Any  # jax.stages.Compiled
Shapes = Sequence[StepShape]

# programs that allocate the state or write to it
_WRITERS = (
    *("new_state", "admit", "set_adapter", "copy_pages", "set_slot", "set_masks", "set_history", "take_sampled"),
    *("gather_pages", "scatter_pages", "gather_states", "scatter_states", "keep_state"),
)
_POLL_S = 0.01
_REPORT_S = 5.0  # time between log lines while the caller waits
# A short run compiles nothing in the background: it would not use it, and exit waits for running compilations.
_SHORT_RUN_S = 5.0  # minimum run time before background compilation
_SHORT_RUN_STEPS = 8  # or minimum steps with more padding than needed, for lack of a program
COMPILE_THREADS = 2  # threads while the caller waits: Python traces, and XLA mostly uses one core


class Programs:
    """Table of a runner's compiled programs.

    Args:
        lowering: defines the programs, and traces and lowers them.
        directory: directory of compiled programs; None stores none.
        cache_scope: context entered during compilation: XLA's cache, if whole programs are not stored.

    Attributes:
        lowering: defines the programs, and traces and lowers them.
        table: compiled programs by step shape; two, model and sampling, for a shape that samples late.
        writers: programs that write to slot tables, by their names in `Lowering.writers`.
        encoders: programs of the vision tower, by their names in `Lowering.encoders`.
    """

    def __init__(self, lowering: Lowering, *, directory: Path | None, cache_scope: Scope) -> None:
        self.lowering, self._shapes = lowering, lowering.schedule.shapes(lowering.max_steps)
        self.table: dict[StepShape, tuple[Compiled, ...]] = {}
        self.writers: dict[str, Compiled] = {}
        self._make_state: Compiled = None
        self._fits: dict[StepShape, StepShape | None] = {}  # answers of `fit`; replaced when the table grows
        self._closing = threading.Event()
        self._is_long = threading.Event()  # set if the run is not short, or someone waits for programs
        self._num_padded = 0  # steps for which a program was missing
        # An event instead of the thread: in Python 3.11 and 3.12 an interrupted join takes it for ended (cpython issue
        # 90882).
        self.encoders: dict[str, Compiled] = {}
        self._compiled = threading.Event()
        self._compiled.set()
        self._compile_error: Exception | None = None
        self._progress = (0, 0)  # compiled steps, out of those begun together
        self._cache_scope = cache_scope
        devices = None if lowering.mesh is None else list(lowering.mesh.devices.flat)
        # Engines share identical programs: only the host knows stop tokens, names distinguish numbers of rounds, and
        # writers do not depend on weights.
        steps = replace(lowering, arch=replace(lowering.arch, eos_ids=frozenset()), max_steps=1)
        reads_weights = lowering.adapters is not None and lowering.adapters.reads_weights
        param_shapes = lowering.param_shapes if reads_weights else {}
        writers = replace(steps, param_shapes=param_shapes, draft_shapes={}, linear_backend="auto")
        self._steps, self._writers = (ProgramStore(directory, each.key_parts, devices) for each in (steps, writers))
        self._is_cpu = (devices or jax.devices())[0].platform == "cpu"

    def new_state(self) -> ServeState:
        """Allocate an empty state on the devices, by a program that is compiled at the first call."""
        if self._make_state is None:
            self._make_state = self._get("new_state", self.lowering.new_state)
        state: ServeState = self._make_state()
        return state

    def warm_up(self, compile_ahead: str, after: "Programs | None" = None) -> None:
        """Compile the programs needed before the first request, and start on the rest (EngineConfig.compile_ahead).

        Stored programs are loaded immediately; the others are compiled unless the run is short. They wait until `after`
        has compiled all of its own, because XLA's cache may then serve them here too.

        A separate thread compiles: an interrupt of a compiling caller would leave XLA working for nobody, and exit
        would destroy its client.
        """
        batches = compile_order(
            self._shapes, compile_ahead, self.lowering.schedule.max_num_seqs, one_first=self._is_cpu
        )
        ready = threading.Event()
        self._compiled.clear()
        atexit.register(self._stop)
        threading.Thread(target=self._compile_ahead, args=(batches, ready, after), daemon=True).start()
        while not ready.wait(_REPORT_S):
            done, total = self._progress
            logger.info("compile_ahead=%r: %d of %d steps are compiled, and requests wait", compile_ahead, done, total)
        if self._compile_error is not None:
            raise self._compile_error

    def _compile_ahead(self, batches: Sequence[Shapes], ready: threading.Event, after: "Programs | None") -> None:
        """Compile in the background: programs for the first request, then those that are stored, then all others.

        Args:
            batches: shapes in batches: for the first request, for the steps after it, and all others. The last are
                compiled, if they are not stored, once the run is no longer short.
            ready: event that lets requests begin.
            after: other programs that must be compiled before the last batches; None to begin immediately.
        """
        first, soon, *later = batches
        try:
            self._compile(first, num_threads=COMPILE_THREADS, with_writers=True)
            ready.set()
            self._compile(soon)
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

    def _compile(
        self, wanted: Shapes, num_threads: int = 1, *, stored_only: bool = False, with_writers: bool = False
    ) -> bool:
        """Load or compile the missing programs of `wanted` shapes, in order, in `num_threads` threads.

        With `stored_only`, only load stored programs; `with_writers`, make those that write to slot tables too. Returns
        whether there was a program for every shape.
        """
        lowers = {shape: self.lowering.programs(shape) for shape in dict.fromkeys(wanted)}
        chosen = [shape for shape, parts in lowers.items() if not stored_only or all(map(self._steps.has, parts))]
        num_done, self._progress = itertools.count(1), (0, len(chosen))

        def compile_shape(shape: StepShape) -> None:
            if shape not in self.table:
                self.table[shape] = tuple(self._get(name, lower) for name, lower in lowers[shape].items())
                self._fits = {}
            self._progress = next(num_done), len(chosen)

        def compile_writer(name: str, lower: Lower) -> None:
            self.writers[name] = self._get(name, lower)

        def compile_encoder(name: str, lower: Lower) -> None:
            self.encoders[name] = self._get(name, lower)

        jobs = [partial(compile_shape, shape) for shape in chosen]
        if with_writers:
            jobs += [partial(compile_encoder, *each) for each in self.lowering.encoders().items()]
            jobs += [partial(compile_writer, *each) for each in self.lowering.writers().items()]
        run_all(jobs, num_threads, self._closing)
        logger.debug("compiled programs: %s", ", ".join(shape.name for shape in sorted(self.table)))
        return len(chosen) == len(lowers)

    def compile_page_movers(self) -> dict[str, Compiled]:
        """Return the compiled programs of `Lowering.page_movers`, by name."""
        return {name: self._get(name, lower) for name, lower in self.lowering.page_movers().items()}

    def _get(self, name: str, lower: Lower) -> Compiled:
        """Load the program called `name`, or lower, compile and store it."""
        is_writer = name.split(maxsplit=1)[0] in _WRITERS

        def compile_now() -> Compiled:
            # On a CPU, XLA's newer code generator takes one and a half times as long for writers, too.
            options = known_options(self.lowering.compiler_options) if is_writer and self._is_cpu else None
            with self._cache_scope():
                return lower().compile(options)

        return (self._writers if is_writer else self._steps).get(name, compile_now)

    def fit(self, step: StepShape) -> StepShape | None:
        """Return the shape of the cheapest compiled program that can run a step of shape `step`; None if none can.

        The largest program for prompts is always compiled.
        """
        fits = self._fits
        if step not in fits:  # the search is slow, and requested several times per step
            fits[step] = cheapest(tuple(self.table), step)
        return fits[step]

    def take(self, program: StepShape, step: StepShape) -> tuple[Compiled, ...]:
        """Return the compiled program of shape `program` for running `step`; wait if it is not compiled yet.

        Counts the steps for which a cheaper program is not compiled yet: after several, it is compiled too.
        """
        if program not in self.table:  # a leading process has it
            self.wait_for(program)
        if not self._is_long.is_set() and program != cheapest(self._shapes, step):
            self._num_padded += 1
            if self._num_padded >= _SHORT_RUN_STEPS:
                self._is_long.set()
        return self.table[program]

    def wait_for(self, program: StepShape) -> None:
        """Block until the program of a shape is compiled; RuntimeError if it never will be."""
        self._is_long.set()
        while program not in self.table:
            if self._compiled.wait(_POLL_S) and program not in self.table:
                raise self._compile_error or RuntimeError(f"there is no program {program.name!r} here")

    @property
    def is_warm(self) -> bool:
        """True once every program is compiled."""
        return self._compiled.is_set() and self._compile_error is None

    def wait_until_warm(self) -> None:
        """Block until every program is compiled; raise the error if a compilation failed."""
        self._is_long.set()
        self._compiled.wait()
        if self._compile_error is not None:
            raise self._compile_error

    def close(self) -> None:
        """Drop all programs, and stop compiling after the current one, without waiting for it."""
        self._closing.set()
        self.table.clear()
        self.writers, self.encoders, self._fits = {}, {}, {}

    def _stop(self) -> None:
        """Stop compiling before jax's clean-up at exit, which crashes while XLA compiles."""
        self._closing.set()
        self._compiled.wait()


def compile_order(shapes: Shapes, compile_ahead: str, max_num_seqs: int, *, one_first: bool) -> list[list[StepShape]]:
    """Return step shapes in batches, in compilation order; requests wait only for the first batch.

    Args:
        shapes: all shapes; batches may repeat some.
        compile_ahead: see `EngineConfig`.
        max_num_seqs: maximum rows per step; the program for that many is the first of the last batch.
        one_first: True if the first batch may be the program that can run every step, in place of the smallest as well:
            two programs take longer to compile than one, and the largest runs a small step fast enough until then.
    """
    plain = [shape for shape in shapes if not (shape.has_drafts or shape.samples_late)]
    drafting = [shape for shape in shapes if shape.has_drafts]
    by_size = {shape.num_tokens: shape for shape in reversed(plain)}  # the one with fewer rounds
    ends = [by_size[min(by_size)], by_size[max(by_size)]]
    draft_ends = [*drafting[:1], *drafting[-1:]]
    if compile_ahead == "all":
        return [[*shapes], []]
    if compile_ahead == "minimal":
        return [[*ends, *[shape for shape in plain if shape.num_rounds > 1][-1:], *draft_ends], []]
    full_batch = min(size for size in by_size if size >= max_num_seqs)  # needed first
    rest = sorted(by_size.values(), key=lambda shape: (shape.num_tokens != full_batch, shape))
    first, soon = (ends[1:], ends[:1]) if one_first else (ends, [])
    return [first, soon, draft_ends, [*rest, *shapes]]


def run_all(jobs: Iterable[Callable[[], None]], num_threads: int, stop: threading.Event) -> None:
    """Run jobs in several threads until all are done, one fails or `stop` is set.

    The caller's thread is one of them. The others are daemons, for which exit does not wait, so that exit handlers can
    set `stop`.
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
