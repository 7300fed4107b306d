"""Programs: the compiled programs of a model, made before and while it serves."""

import atexit
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.execution.batch import AdmissionLayout, BatchLayout, BlobLayout, CopyLayout, MaskLayout
from jaxserve.execution.pooling import make_pooling_step
from jaxserve.execution.program_store import ProgramStore
from jaxserve.execution.proposer import Observer, Proposer
from jaxserve.execution.state import ServeState, abstract_slot_row, abstract_state, copy_pages, new_state
from jaxserve.execution.step import (
    Compute,
    Program,
    Sample,
    make_admit,
    make_serve_step,
    make_set_masks,
    make_set_slot,
    make_split_step,
    step_options,
)
from jaxserve.execution.verification import make_speculative_step
from jaxserve.execution.xla_cache import Scope
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from jaxserve.pallas_kernels.dispatch import products_by
from jaxserve.schedule_config import ScheduleConfig
from jaxserve.scheduling.plan import PlanKind
from jaxserve.sharding import MODEL, over_devices, replicated, specs_of, tensor_size

logger = logging.getLogger(__name__)

Compiled = Any  # jax.stages.Compiled
_NONE: tuple[int, ...] = ()


class Buckets(NamedTuple):
    """Buckets to compile, by the kind of program."""

    steps: Iterable[int] = _NONE
    multi_steps: Iterable[int] = _NONE
    speculative: Iterable[int] = _NONE
    split: Iterable[int] = _NONE


_POLL_S = 0.01
_REPORT_S = 5.0  # time between lines of the log while the caller waits
COMPILE_THREADS = 2  # threads while the caller waits: Python traces, and XLA mostly uses one core


class Programs:
    """The compiled programs of a runner, by bucket.

    They have neither weights nor state, so that a thread which compiles keeps nothing large alive.

    Args:
        arch: sizes of the whole model.
        param_shapes: shapes, dtypes and places of its weights.
        schedule: sizes of steps and pool.
        kv_dtype: dtype of the pool.
        backend: backend of attention.
        linear_backend: backend of products with matrices, see `EngineConfig.linear_backend`.
        max_steps: rounds that one dispatch may go.
        directory: directory of compiled programs; None keeps none.
        cache_scope: context entered while a program is compiled: XLA's cache, where whole programs are not kept.
        mesh: mesh of the devices that the model is split over; None where the first device has all of it.
        proposer: proposer of speculative decoding; None without it.
        draft_shapes: shapes, dtypes and places of the proposer's parameters.

    Attributes:
        steps: the compiled steps, by bucket.
        multi_steps: programs of several rounds, by bucket; some are in both tables.
        speculative: programs of rounds with drafted tokens, by bucket.
        split: programs of the model and of sampling for split plans, by bucket.
        admit: the program that lets requests enter their slots.
        set_slot: the program that enters a request's other data.
        set_masks: the program that sets the masks of rows with a constraint.
        copy_pages: the program that copies pages of the pool.
        num_devices: number of devices that the model is split over.
        observer: proposer that takes part in plain steps; None where there is none.
    """

    def __init__(
        self,
        arch: ArchConfig,
        param_shapes: Params,
        schedule: ScheduleConfig,
        *,
        kv_dtype: jax.typing.DTypeLike,
        backend: str,
        linear_backend: str,
        max_steps: int,
        directory: Path | None,
        cache_scope: Scope,
        mesh: Mesh | None,
        proposer: Proposer | None = None,
        draft_shapes: Params | None = None,
    ) -> None:
        self.proposer, self._draft_shapes = proposer, draft_shapes or {}
        self.observer = proposer if isinstance(proposer, Observer) else None  # asking takes 20 us
        self.arch, self.param_shapes, self.schedule, self.mesh = arch, param_shapes, schedule, mesh
        self._backend, self._linear_backend = backend, linear_backend
        self._kv_dtype = jnp.dtype(kv_dtype)
        self._max_steps = max_steps if arch.pooler is None else 1
        self.num_devices = tensor_size(mesh)
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
        # Not the thread: in Python 3.11 and 3.12 a join that is interrupted takes it for ended (cpython issue 90882).
        self._compiled = threading.Event()
        self._compiled.set()
        self._compile_error: Exception | None = None
        self._progress = (0, 0)  # steps that are compiled, of those begun together
        arrays = (param_shapes, self.abstract_state(), self._draft_shapes)
        shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), arrays)
        devices = None if mesh is None else list(mesh.devices.flat)
        self._cache_scope = cache_scope
        self._compiler_options = step_options((devices or jax.devices())[0].device_kind)
        options = (backend, linear_backend, max_steps, self._compiler_options)
        self._store = ProgramStore(directory, (arch, self._sizes, *options, proposer, shapes), devices)

    @property
    def _sizes(self) -> ScheduleConfig:
        """Sizes that programs follow from."""
        return self.schedule.of_programs

    def abstract_state(self) -> ServeState:
        """Shapes and dtypes of the device state; where there is a mesh, shardings too."""
        options: dict[str, Any] = {"kv_dtype": self._kv_dtype, "backend": self._backend, "new_draft": self._new_draft}
        return abstract_state(self.arch, self._sizes, mesh=self.mesh, **options)

    def _new_draft(self) -> Any:
        return None if self.proposer is None else self.proposer.new_state()

    def new_state(self) -> ServeState:
        """Allocate an empty state on the devices."""
        if self._make_state is None:
            program: Callable[[], ServeState] = partial(
                new_state,
                self.arch.local(self.num_devices),
                self._sizes,
                kv_dtype=self._kv_dtype,
                backend=self._backend,
                new_draft=self._new_draft,
            )
            if self.mesh is not None:
                program = over_devices(program, self.mesh, (), specs_of(self.abstract_state()))
            self._make_state = self._get("new_state", jax.jit(program).lower)
        state: ServeState = self._make_state()
        return state

    def lower(self, bucket: int, *, multi_step: bool = False) -> jax.stages.Lowered:
        """Trace and lower the step of one bucket, of one round or of several."""
        layout = BatchLayout.of(self._sizes, bucket)
        if self.arch.pooler is not None:
            pooling_step = make_pooling_step(self.arch, layout, backend=self._backend, num_devices=self.num_devices)
            return self._lower(pooling_step, layout, self.param_shapes)
        step = make_serve_step(
            self.arch,
            layout,
            backend=self._backend,
            max_steps=self.schedule.max_steps(bucket, self._max_steps) if multi_step else 1,
            num_devices=self.num_devices,
            observer=self.observer,
        )
        return self._lower(step, layout, self._observed_shapes)

    def lower_split(self, bucket: int) -> tuple[Callable[[], jax.stages.Lowered], Callable[[], jax.stages.Lowered]]:
        """Return what traces and lowers the two programs for split plans of a number of rows."""
        layout = BatchLayout.of(self._sizes, bucket)
        masks = MaskLayout.of(self._sizes, self.arch.vocab_size)
        options: dict[str, Any] = {"backend": self._backend, "num_devices": self.num_devices}
        compute, sample = make_split_step(self.arch, layout, masks, observer=self.observer, **options)
        part = PartitionSpec(None, MODEL) if self.mesh else PartitionSpec()
        shape = (layout.num_rows, self.arch.local(self.num_devices).vocab_size * self.num_devices)
        sharding = NamedSharding(self.mesh, part) if self.mesh else None
        logits = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        return (
            partial(self._lower, compute, layout, self._observed_shapes, output=part),
            partial(self._lower, sample, layout, logits, masks.blob),
        )

    @property
    def _observed_shapes(self) -> Any:
        """Shapes of the parameters of programs in which a proposer may observe."""
        return (self.param_shapes, self._draft_shapes) if self.observer else self.param_shapes

    def lower_speculative(self, bucket: int) -> jax.stages.Lowered:
        """Trace and lower the speculative step of a bucket, a number of rows."""
        assert self.proposer is not None, "a speculative step has a proposer"
        layout = BatchLayout.of(self._sizes, bucket, is_speculative=True)
        step = make_speculative_step(
            self.arch,
            layout,
            self.proposer,
            backend=self._backend,
            max_rounds=self.schedule.max_rounds(bucket, self._max_steps),
            num_devices=self.num_devices,
        )
        return self._lower(step, layout, (self.param_shapes, self._draft_shapes))

    def _lower(
        self,
        program: Program | Compute | Sample,
        layout: BatchLayout,
        params: Any,
        *more: BlobLayout,
        output: PartitionSpec | None = None,
    ) -> jax.stages.Lowered:
        """Trace and lower a program of parameters, state and blobs.

        Args:
            program: program that returns the state and an output.
            layout: layout of the blob.
            params: shapes, dtypes and places of its first argument.
            more: layouts of further blobs.
            output: axes over which its output is split; None where every device has the whole.
        """
        state = self.abstract_state()
        blobs = [self._operand((each.size,), jnp.int32) for each in (layout.blob, *more)]
        if self.mesh is not None:
            specs = (specs_of(state), output or PartitionSpec())
            program = over_devices(program, self.mesh, (params, state, *blobs), specs)
        else:
            params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        jitted = jax.jit(program, donate_argnums=1, compiler_options=_known(self._compiler_options))
        with products_by(self._linear_backend):
            return jitted.lower(params, state, *blobs)

    def _operand(self, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        """Return the shape of an array of the host on every device."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh) if self.mesh else None)

    def warm_up(self, compile_ahead: str, after: "Programs | None" = None) -> None:
        """Compile what must be ready before the first request, and start on the rest (EngineConfig.compile_ahead).

        The rest waits until `after` has compiled all of its own: what it left in XLA's cache may serve here too.

        A thread of its own compiles: an interrupt of a caller that compiles would leave XLA working with nobody waiting
        for it, and the exit would take its client away.
        """
        buckets, drafting = self.schedule.buckets(), self.schedule.speculative_buckets()
        split = self.schedule.split_buckets()
        multi_steps = self.schedule.multi_step_buckets(self._max_steps)
        ends = dict.fromkeys((*drafting[:1], *drafting[-1:]))
        decode = min(b for b in buckets if b >= self.schedule.max_num_seqs)  # bucket of a full batch: wanted first
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
            for rest in later:
                self._compile(rest)
        except Exception as error:
            if ready.is_set():
                logger.exception("compiling in the background failed; steps go on with the programs that are ready")
            self._compile_error = error
        finally:
            atexit.unregister(self._stop)
            self._compiled.set()
            ready.set()

    def _compile(self, wanted: Buckets, num_threads: int = 1) -> None:
        """Compile what is missing of some buckets, in order, several at a time."""
        single = self.schedule.step_buckets(self._max_steps)
        steps = dict.fromkeys(wanted.steps)  # the smallest bucket may be the largest: two threads would compile it
        shared = [bucket for bucket in steps if bucket not in single]
        jobs = [partial(self._compile_step, bucket) for bucket in steps if bucket in single]
        jobs += [partial(self._compile_multi_step, bucket) for bucket in dict.fromkeys([*shared, *wanted.multi_steps])]
        jobs += [partial(self._compile_speculative, bucket) for bucket in wanted.speculative]
        jobs += [partial(self._compile_split, bucket) for bucket in wanted.split]
        num_done, self._progress = itertools.count(1), (0, len(jobs))

        def counted(job: Callable[[], None]) -> None:
            job()
            self._progress = next(num_done), len(jobs)

        run_all([partial(counted, job) for job in jobs], num_threads, self._closing)
        logger.debug("compiled steps of %s tokens, of several rounds %s", sorted(self.steps), sorted(self.multi_steps))

    def _compile_step(self, bucket: int) -> None:
        if bucket not in self.steps:
            self.steps[bucket] = self._get(f"step {bucket}", partial(self.lower, bucket))

    def _compile_multi_step(self, bucket: int) -> None:
        program = self.multi_steps.get(bucket)  # `close` may clear the table meanwhile
        if program is None:
            program = self._get(f"multi-step {bucket}", partial(self.lower, bucket, multi_step=True))
            self.multi_steps[bucket] = program
        if bucket not in self.schedule.step_buckets(self._max_steps):
            self.steps[bucket] = program

    def _compile_speculative(self, bucket: int) -> None:
        if bucket not in self.speculative:
            lower = partial(self.lower_speculative, bucket)
            self.speculative[bucket] = self._get(f"speculative {bucket}", lower)

    def _compile_split(self, bucket: int) -> None:
        if bucket not in self.split:
            compute, sample = self.lower_split(bucket)
            self.split[bucket] = self._get(f"compute {bucket}", compute), self._get(f"sample {bucket}", sample)

    def _compile_writers(self) -> None:
        """Compile the programs that write to tables by slot, each given what it writes to first."""
        state, num_devices = self.abstract_state(), self.num_devices
        admissions = AdmissionLayout.of(self._sizes)
        masks = MaskLayout.of(self._sizes, self.arch.vocab_size)
        row = jax.tree.map(
            lambda s: self._operand(s.shape, s.dtype),
            abstract_slot_row(self._sizes, self.arch.vocab_size),
        )

        def get(name: str, program: Callable[..., Any], *args: Any) -> Compiled:
            if self.mesh is not None:
                program = over_devices(program, self.mesh, args, specs_of(args[0]))
            return self._get(name, partial(jax.jit(program, donate_argnums=0).lower, *args))

        index, blob, words = (
            self._operand(shape, jnp.int32) for shape in ((), (admissions.blob.size,), (masks.blob.size,))
        )
        self.admit = get("admit", make_admit(admissions, self.proposer), state, blob)
        if self.arch.pooler is not None:
            return
        copies = self._operand(CopyLayout.of(self._sizes).shape, jnp.int32)
        copy = partial(copy_pages, axis=self.arch.local(num_devices).token_axis)
        self.copy_pages = get("copy_pages", copy, state.kv_pages, copies)
        self.set_slot = get("set_slot", make_set_slot(self.arch, num_devices=num_devices), state, index, row)
        set_masks = make_set_masks(self.arch, masks, num_devices=num_devices)
        self.set_masks = get("set_masks", set_masks, state.slots.allowed, words)

    def _get(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> Compiled:
        def compile_now() -> Compiled:
            with self._cache_scope():
                return lower().compile()

        return self._store.get(name, compile_now)

    def bucket_for(self, num_tokens: int) -> int:
        """The smallest compiled bucket that holds `num_tokens`; the largest one always is compiled."""
        return min(b for b in tuple(self.steps) if b >= num_tokens)

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
        while bucket not in programs:
            if self._compiled.wait(_POLL_S) and bucket not in programs:
                raise self._compile_error or RuntimeError(f"there is no program for {bucket} tokens here")

    @property
    def is_warm(self) -> bool:
        """True once every bucket is compiled."""
        return self._compiled.is_set() and self._compile_error is None

    def wait_until_warm(self) -> None:
        """Block until every bucket is compiled."""
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


def _known(options: dict[str, str | bool]) -> dict[str, str | bool]:
    """Return the options that the XLA in use knows: they come and go."""
    return {name: value for name, value in options.items() if _is_known(name, value)}


@cache
def _is_known(name: str, value: str | bool) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        logger.warning("XLA compiles without an option that it does not know: %s", error)
        return False
    return True


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
