"""Runner: owns the weights, the device state and the compiled programs; turns packed steps into outputs."""

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.config import ScheduleConfig
from jaxserve.engine.batch import AdmissionLayout, BatchLayout, BatchPacker
from jaxserve.engine.executor import StepResult
from jaxserve.engine.plan import StepPlan
from jaxserve.engine.programs import ProgramStore, compile_counter
from jaxserve.engine.step import (
    Program,
    ServeState,
    StepOutput,
    abstract_slot_row,
    abstract_state,
    make_admit,
    make_serve_step,
    make_set_slot,
    step_options,
)
from jaxserve.engine.xla_cache import Scope
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, device_bytes, step_bytes
from jaxserve.models.registry import flop_counts
from jaxserve.sampling import LogprobLayout
from jaxserve.sharding import over_devices, replicated, specs_of

logger = logging.getLogger(__name__)

Compiled = Any  # jax.stages.Compiled
_Buckets = tuple[Iterable[int], Iterable[int]]  # programs of one round and of several


_POLL_S = 0.01
COMPILE_THREADS = 2  # threads while the caller waits: Python traces, and XLA mostly uses one core


@dataclass
class RunningStep:
    """A launched step. `output` becomes ready later; `result` waits for it."""

    output: StepOutput
    layout: LogprobLayout
    wants_logprobs: bool
    wants_prompt_logprobs: bool
    num_compiles: int
    launched_s: float

    def is_ready(self) -> bool:
        """Return whether `result` need not wait."""
        return bool(self.output.sampled.is_ready())  # type: ignore[attr-defined]  # not in the stubs of jax.Array

    def result(self) -> StepResult:
        """Wait for the step and download what it was asked for."""
        out, unpack = self.output, self.layout.unpack
        sampled = np.asarray(out.sampled)
        return StepResult(
            sampled[:, 1:],
            sampled[:, 0],
            time.monotonic(),
            unpack(np.asarray(out.logprobs).reshape(-1, self.layout.num_words)) if self.wants_logprobs else None,
            unpack(np.asarray(out.prompt_logprobs)) if self.wants_prompt_logprobs else None,
        )

    def start_download(self) -> None:
        """Let what is wanted of the output come to the host as soon as it is there."""
        out = self.output
        wanted = [(out.logprobs, self.wants_logprobs), (out.prompt_logprobs, self.wants_prompt_logprobs)]
        for array in (out.sampled, *(array for array, is_wanted in wanted if is_wanted)):
            array.copy_to_host_async()


class Programs:
    """The compiled programs of a runner, by bucket.

    They have neither weights nor state, so that a thread which compiles keeps nothing large alive.

    Args:
        arch: sizes of the whole model.
        param_shapes: shapes, dtypes and places of its weights.
        schedule: sizes of steps and pool.
        kv_dtype: dtype of the pool.
        backend: backend of attention.
        max_steps: rounds that one dispatch may go.
        directory: directory of compiled programs; None keeps none.
        cache_scope: context entered while a program is compiled: XLA's cache, where whole programs are not kept.
        mesh: mesh of the devices that the model is split over; None where the first device has all of it.

    Attributes:
        steps: the compiled steps, by bucket.
        multi_steps: programs of several rounds, by bucket; some are in both tables.
        admit: the program that lets requests enter their slots.
        set_slot: the program that enters what else there is to know of a request.
        num_devices: number of devices that the model is split over.
    """

    def __init__(
        self,
        arch: ArchConfig,
        param_shapes: Params,
        schedule: ScheduleConfig,
        *,
        kv_dtype: jax.typing.DTypeLike,
        backend: str,
        max_steps: int,
        directory: Path | None,
        cache_scope: Scope,
        mesh: Mesh | None,
    ) -> None:
        self.arch, self.param_shapes, self.schedule, self.mesh = arch, param_shapes, schedule, mesh
        self._backend = backend
        self._kv_dtype = jnp.dtype(kv_dtype)
        self._max_steps = max_steps
        self.num_devices = 1 if mesh is None else mesh.size
        self.steps: dict[int, Compiled] = {}
        self.multi_steps: dict[int, Compiled] = {}
        self.admit: Compiled = None
        self.set_slot: Compiled = None
        self._make_state: Compiled = None
        self._closing = threading.Event()
        # Not the thread: in Python 3.11 and 3.12 a join that is interrupted takes it for ended (cpython issue 90882).
        self._compiled = threading.Event()
        self._compiled.set()
        self._compile_error: Exception | None = None
        shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), (param_shapes, self.abstract_state()))
        devices = None if mesh is None else list(mesh.devices.flat)
        self._cache_scope = cache_scope
        self._store = ProgramStore(directory, (arch, schedule, backend, max_steps, shapes), devices)

    def abstract_state(self) -> ServeState:
        """Shapes and dtypes of the device state; where there is a mesh, shardings too."""
        return abstract_state(self.arch, self.schedule, kv_dtype=self._kv_dtype, backend=self._backend, mesh=self.mesh)

    def new_state(self) -> ServeState:
        """Allocate an empty state on the devices."""
        if self._make_state is None:
            shapes = self.abstract_state()
            shardings = None if self.mesh is None else jax.tree.map(lambda leaf: leaf.sharding, shapes)

            def zeros() -> ServeState:
                state: ServeState = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
                return state

            self._make_state = self._get("new_state", jax.jit(zeros, out_shardings=shardings).lower)
        state: ServeState = self._make_state()
        return state

    def lower(self, bucket: int, *, multi_step: bool = False) -> jax.stages.Lowered:
        """Trace and lower the step of one bucket, of one round or of several."""
        layout = BatchLayout.of(self.schedule, bucket)
        step = make_serve_step(
            self.arch,
            layout,
            backend=self._backend,
            max_steps=self.schedule.max_steps(bucket, self._max_steps) if multi_step else 1,
            num_devices=self.num_devices,
        )
        return self._lower(step, layout)

    def _lower(self, program: Program, layout: BatchLayout) -> jax.stages.Lowered:
        params, state, blob = self.param_shapes, self.abstract_state(), self._operand((layout.blob_size,), jnp.int32)
        if self.mesh is not None:
            specs = (specs_of(state), PartitionSpec())
            program = over_devices(program, self.mesh, (params, state, blob), specs)
        else:
            params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        device = self.mesh.devices.flat[0] if self.mesh else jax.devices()[0]
        compiler_options = _known_options(device)
        return jax.jit(program, donate_argnums=1, compiler_options=compiler_options).lower(params, state, blob)

    def _operand(self, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        """Return the shape of an array of the host on every device."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh) if self.mesh else None)

    def warm_up(self, compile_ahead: str, after: "Programs | None" = None) -> None:
        """Compile what must be ready before the first request, and start on the rest (EngineConfig.compile_ahead).

        Where `after` has compiled all of its own: what it left in XLA's cache may serve this one too.

        All in a thread of its own: an interrupt while the caller's compiled would leave XLA at it with nobody to wait
        for it, and the exit would take its client away.
        """
        buckets = self.schedule.buckets()
        multi_steps = self.schedule.multi_step_buckets(self._max_steps)
        decode = min(b for b in buckets if b >= self.schedule.max_num_seqs)  # bucket of a full batch: wanted first
        rest = sorted(buckets[1:-1], key=lambda bucket: (bucket != decode, bucket))
        first, later = {
            "all": ((buckets, multi_steps), ((), ())),
            "background": (((buckets[0], buckets[-1]), ()), (rest, multi_steps)),
            "minimal": (((buckets[0], buckets[-1]), multi_steps[-1:]), ((), ())),
        }[compile_ahead]
        ready = threading.Event()
        self._compiled.clear()
        atexit.register(self._stop)
        threading.Thread(target=self._compile_ahead, args=(first, later, ready, after), daemon=True).start()
        ready.wait()
        if self._compile_error is not None:
            raise self._compile_error

    def _compile_ahead(
        self, first: _Buckets, later: _Buckets, ready: threading.Event, after: "Programs | None"
    ) -> None:
        try:
            self.admit, self.set_slot = self._compile_admit(), self._compile_set_slot()
            self._compile(*first, num_threads=COMPILE_THREADS)
            ready.set()
            while after is not None and not self._closing.is_set() and not after._compiled.wait(_POLL_S):
                pass
            self._compile(*later)
        except Exception as error:
            if ready.is_set():
                logger.exception("compiling in the background failed; steps go on with the programs that are ready")
            self._compile_error = error
        finally:
            atexit.unregister(self._stop)
            self._compiled.set()
            ready.set()

    def _compile(self, buckets: Iterable[int], multi_steps: Iterable[int], num_threads: int = 1) -> None:
        """Compile what is missing of some buckets, in order, several at a time."""
        single = self.schedule.step_buckets(self._max_steps)
        shared = [bucket for bucket in buckets if bucket not in single]
        jobs = [partial(self._compile_step, bucket) for bucket in buckets if bucket in single]
        jobs += [partial(self._compile_multi_step, bucket) for bucket in dict.fromkeys([*shared, *multi_steps])]
        run_all(jobs, num_threads, self._closing)
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

    def _compile_admit(self) -> Compiled:
        layout = AdmissionLayout.of(self.schedule)
        args = (self.abstract_state(), self._operand((layout.blob.size,), jnp.int32))
        program = make_admit(layout)
        if self.mesh is not None:
            program = over_devices(program, self.mesh, args, specs_of(args[0]))
        return self._get("admit", partial(jax.jit(program, donate_argnums=0).lower, *args))

    def _compile_set_slot(self) -> Compiled:
        state = self.abstract_state()
        row = jax.tree.map(
            lambda s: self._operand(s.shape, s.dtype), abstract_slot_row(self.schedule, self.arch.vocab_size)
        )
        args = (state, self._operand((), jnp.int32), row)
        program = make_set_slot(self.arch, num_devices=self.num_devices)
        if self.mesh is not None:
            program = over_devices(program, self.mesh, args, specs_of(state))
        return self._get("set_slot", partial(jax.jit(program, donate_argnums=0).lower, *args))

    def _get(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> Compiled:
        def compile_now() -> Compiled:
            with self._cache_scope():
                return lower().compile()

        return self._store.get(name, compile_now)

    def bucket_for(self, num_tokens: int) -> int:
        """The smallest compiled bucket that holds `num_tokens`; the largest one always is compiled."""
        return min(b for b in tuple(self.steps) if b >= num_tokens)

    def multi_step_bucket_for(self, num_rows: int) -> int | None:
        """The smallest compiled bucket in which `num_rows` rows in decode can go several rounds."""
        return min((b for b in tuple(self.multi_steps) if b >= num_rows), default=None)

    def wait_for(self, bucket: int, *, multi_step: bool) -> None:
        """Block until one bucket is compiled; RuntimeError if it never will be."""
        programs = self.multi_steps if multi_step else self.steps
        while bucket not in programs:
            if self._compiled.wait(_POLL_S) and bucket not in programs:
                raise self._compile_error or RuntimeError(f"there is no program for {bucket} tokens here")

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
        self.admit = self.set_slot = None

    def _stop(self) -> None:
        """Stop compiling ahead of jax's clean-up at exit, which ends badly while XLA compiles."""
        self._closing.set()
        self._compiled.wait()


class Runner:
    """Compiled programs by bucket over one donated state.

    Args:
        arch: sizes of the whole model.
        params: its weights, on the devices of `mesh` if there is one.
        schedule: sizes of steps and pool.
        kv_dtype: dtype of the pool.
        backend: backend of attention.
        seed: seed of requests, with which each one's own is mixed.
        max_steps: rounds that one dispatch may go.
        programs_dir: directory of compiled programs; None keeps none.
        cache_scope: context entered while a program is compiled: XLA's cache, where whole programs are not kept.
        mesh: mesh of the devices that the model is split over; None where the first device has all of it.

    Attributes:
        params: the weights in use.
        programs: model that it runs.
        packer: packer that turns plans into arrays.
        param_shapes: shapes, dtypes and places that they must have.
    """

    def __init__(
        self,
        arch: ArchConfig,
        params: Params,
        schedule: ScheduleConfig,
        *,
        kv_dtype: jax.typing.DTypeLike,
        backend: str,
        seed: int = 0,
        max_steps: int = 1,
        programs_dir: Path | None = None,
        cache_scope: Scope = contextlib.nullcontext,
        mesh: Mesh | None = None,
    ) -> None:
        self.arch, self.params, self.schedule, self.mesh = arch, params, schedule, mesh
        self.packer = BatchPacker(schedule, seed, arch.vocab_size)
        self._flop_counts = flop_counts(arch.local(1 if mesh is None else mesh.size))
        # For programs: they may be compiled while the weights are replaced.
        self.param_shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        self.programs = Programs(
            arch,
            self.param_shapes,
            schedule,
            kv_dtype=kv_dtype,
            backend=backend,
            max_steps=max_steps,
            directory=programs_dir,
            cache_scope=cache_scope,
            mesh=mesh,
        )
        devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
        self._logprob_layout = LogprobLayout.of(schedule.max_logprobs, arch.vocab_size)
        # XLA's CPU client lets 32 programs be in flight on a device. With more, it starts a step on some devices and
        # waits before it does on the others, for which the step's collectives wait; updates of slots make that many.
        self._one_at_a_time = len(devices) > 1 and devices[0].platform == "cpu"
        self._matrix_bytes = step_bytes(params)
        self._embedding_row_bytes = device_bytes(params["embed"]) // arch.local(len(devices)).vocab_size
        self.state: ServeState | None = self.programs.new_state()  # None while it sleeps, and once it is closed
        self._sleeping_params: Params | None = None  # copy in the host's memory
        self._kv_bytes = device_bytes(self.state.kv_pages)
        # Before finalizers are run at exit, as the first one registers: jax has some for the constants of what is being
        # traced.
        weakref.finalize(self, self.programs.close)
        _close_at_exit(self)

    def restore_state(self) -> bool:
        """Wait for the state; where it was lost with a step that failed, make an empty one. Returns whether it was."""
        if _is_sound(self.state):
            return False
        if jax.process_count() > 1:
            raise RuntimeError("a step has failed on the devices of several processes, and their state is lost")
        self.state = self.programs.new_state()
        return True

    def weight_bytes(self, num_tokens: int) -> int:
        """Bytes of weights that a step of `num_tokens` reads on a device: matrices, and an embedding row per token."""
        return self._matrix_bytes + num_tokens * self._embedding_row_bytes

    def step_flops(self, num_tokens: int, num_rows: int, num_scores: int) -> int:
        """Return the floating-point operations of a step on a device."""
        return self._flop_counts.step(num_tokens, num_rows, num_scores)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token in the pool of a device, all layers and what scales it has included."""
        num_tokens = self.schedule.num_pages * self.schedule.page_size
        return self._kv_bytes // num_tokens

    def close(self) -> None:
        """Wait for the steps in flight, whether they fail or not, and let go of weights, state and programs."""
        self.programs.close()
        _is_sound(self.state)
        self.params, self.state, self._sleeping_params = {}, None, None

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the device's memory; the weights are copied to the host's unless others will be given."""
        _is_sound(self.state)
        if keep_weights and self.params:
            self._sleeping_params = jax.device_get(self.params)
        elif not keep_weights:
            self._sleeping_params = None
        self.params, self.state = {}, None

    def wake_weights(self) -> None:
        """Copy the weights back to where they were, if they were kept."""
        if self._sleeping_params is not None:
            places = jax.tree.map(lambda shape: shape.sharding, self.param_shapes)
            self.params, self._sleeping_params = jax.device_put(self._sleeping_params, places), None

    def wake_state(self) -> None:
        """Make an empty pool."""
        if self.state is None:
            self.state = self.programs.new_state()

    # Steps

    def bucket_for(self, num_tokens: int) -> int:
        """Return the smallest compiled bucket that holds so many tokens."""
        return self.programs.bucket_for(num_tokens)

    def multi_step_bucket_for(self, num_rows: int) -> int | None:
        """Return the smallest compiled bucket in which so many rows in decode can go several rounds."""
        return self.programs.multi_step_bucket_for(num_rows)

    def wait_for(self, bucket: int, *, multi_step: bool) -> None:
        """Block until one bucket is compiled; RuntimeError if it never will be."""
        self.programs.wait_for(bucket, multi_step=multi_step)

    def launch(self, plan: StepPlan, bucket: int) -> RunningStep:
        """Dispatch one step: one upload, one program, and the download under way. Admissions go before it."""
        compiles, upload = compile_counter.count, self.packer.pack(plan, bucket)
        if self._one_at_a_time:
            jax.block_until_ready(self.state)
        for blob in upload.admissions:
            self.state = self.programs.admit(self.state, blob)
        for slot, row in upload.slot_rows:
            self.state = self.programs.set_slot(self.state, np.int32(slot), row)
        programs = self.programs.multi_steps if plan.num_steps > 1 else self.programs.steps
        self.state, output = programs[bucket](self.params, self.state, upload.blob)
        num_compiles = compile_counter.count - compiles
        wanted = plan.wants_logprobs, plan.wants_prompt_logprobs
        step = RunningStep(output, self._logprob_layout, *wanted, num_compiles, time.monotonic())
        step.start_download()
        return step


@cache
def _known_options(device: jax.Device) -> dict[str, str | bool]:
    """`step_options` of a device, without those that the XLA in use does not know: its options come and go."""

    def is_known(option: dict[str, str | bool]) -> bool:
        try:
            jax.jit(lambda: 0, compiler_options=option).lower().compile()
        except jax.errors.JaxRuntimeError as error:
            logger.warning("XLA compiles without an option that it does not know: %s", error)
            return False
        return True

    wanted = step_options(device.device_kind)
    return {name: value for name, value in wanted.items() if is_known({name: value})}


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


def _is_sound(state: ServeState | None) -> bool:
    """Wait for a state. It is lost if a step it was donated to never ran, or if a step that it comes from failed."""
    try:
        for leaf in jax.tree.leaves(state):  # each of them: the programs that made them may differ
            leaf.block_until_ready()
    except Exception as error:  # an array holds the error of its program; a deleted one raises too
        logger.debug("the device state is lost: %s", error)
        return False
    return True


_runners: weakref.WeakSet[Runner] = weakref.WeakSet()


def _close_at_exit(runner: Runner) -> None:
    """Have a runner closed ahead of jax's clean-up at exit, which ends badly while a step runs."""
    if not _runners:
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # anew: it must run before what jax has registered meanwhile
    _runners.add(runner)


def _close_all() -> None:
    for runner in list(_runners):
        runner.close()
