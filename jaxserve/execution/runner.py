"""Runner: owns the weights and the device state; turns packed steps into outputs."""

import atexit
import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxserve.execution.encoder_runner import EncoderRunner
from jaxserve.execution.packer import BatchPacker, StepUpload
from jaxserve.execution.program_store import compile_counter
from jaxserve.execution.programs import Programs
from jaxserve.execution.round import StepOutput
from jaxserve.execution.sampling import LogprobLayout, SlotRow
from jaxserve.execution.state import ServeState
from jaxserve.layers.pools import read_pages
from jaxserve.layers.sharding import from_every_host
from jaxserve.models.params import VISION, Params, device_bytes, without_tower
from jaxserve.models.registry import flop_counts, param_specs
from jaxserve.models.weight_reads import WeightReads
from jaxserve.scheduling.executor_protocol import RoundCounts, StepResult
from jaxserve.scheduling.step_costs import Costs
from jaxserve.scheduling.step_plan import EncoderRun, StepPlan, StepShape

logger = logging.getLogger(__name__)


class Unsampled(NamedTuple):
    """Inputs for sampling a split plan, whose model has been dispatched."""

    plan: StepPlan
    program: StepShape
    blob: NDArray[np.int32]
    logits: jax.Array


@dataclass
class RunningStep:
    """A launched step. Its output becomes ready later, and `result` waits for it.

    Attributes:
        output: arrays on the device; for a split plan, inputs for sampling until `Runner.sample`.
        layout: layout of packed log probabilities.
        wants_logprobs: True to download log probabilities for sampled tokens.
        wants_prompt_logprobs: True to download log probabilities for prompt tokens.
        num_compiles: programs compiled for the launch.
        launched_s: monotonic time after the dispatch.
        max_drafts: maximum tokens drafted per row and round; None in a step without drafts.
    """

    output: StepOutput | Unsampled
    layout: LogprobLayout
    wants_logprobs: bool
    wants_prompt_logprobs: bool
    num_compiles: int
    launched_s: float
    max_drafts: int | None = None

    @property
    def _sampled(self) -> StepOutput:
        """Output of a step that has been sampled."""
        assert isinstance(self.output, StepOutput), "a split plan is sampled before it is read"
        return self.output

    def is_ready(self) -> bool:
        """Return whether `result` would return immediately."""
        if isinstance(self.output, Unsampled):
            return False
        return bool(self.output.sampled.is_ready())  # type: ignore[attr-defined]  # not in the stubs of jax.Array

    def result(self) -> StepResult:
        """Wait for the step and download the requested outputs."""
        out, unpack = self._sampled, self.layout.unpack
        sampled = np.asarray(out.sampled)
        num_tokens, token_ids, rounds = sampled[:, 0], sampled[:, 1:], None
        if self.max_drafts is not None:
            max_rounds = token_ids.shape[1] // (self.max_drafts + 2)
            rounds, token_ids = RoundCounts.unpack(token_ids[:, -max_rounds:]), token_ids[:, :-max_rounds]
        return StepResult(
            token_ids,
            num_tokens,
            time.monotonic(),
            unpack(np.asarray(out.logprobs).reshape(-1, self.layout.num_words)) if self.wants_logprobs else None,
            unpack(np.asarray(out.prompt_logprobs)) if self.wants_prompt_logprobs else None,
            rounds,
            None if out.pooled is None else np.asarray(out.pooled),
            None if out.expert_tokens is None else np.asarray(out.expert_tokens),
        )

    def start_download(self) -> None:
        """Start the download of the wanted outputs, each as soon as it is ready."""
        out = self._sampled
        wanted = [(out.logprobs, self.wants_logprobs), (out.prompt_logprobs, self.wants_prompt_logprobs)]
        optional = (array for array in (out.pooled, out.expert_tokens) if array is not None)
        for array in (out.sampled, *optional, *(array for array, is_wanted in wanted if is_wanted)):
            array.copy_to_host_async()


class Runner:
    """Compiled programs over weights and one donated state.

    Args:
        params: weights, on the devices of the mesh if there is one.
        draft_params: proposer parameters, replicated on each device; an MTP layer of the model is split like other
            layers.
        seed: engine seed, mixed with each request's own.

    Attributes:
        params: weights in use.
        draft_params: proposer parameters.
        packer: converts plans to arrays.
        param_shapes: shapes, dtypes and shardings that weights must have.
        adapter_arrays: function that returns an adapter's host arrays, given its digest.
    """

    def __init__(self, programs: Programs, params: Params, draft_params: Params, *, seed: int = 0) -> None:
        self.programs, self.params, self.draft_params = programs, params, draft_params
        lowering = programs.lowering
        self.arch, self.schedule, self.mesh = arch, schedule, mesh = lowering.arch, lowering.schedule, lowering.mesh
        self.param_shapes, self._draft_shapes = lowering.param_shapes, lowering.draft_shapes
        self.packer = BatchPacker(schedule, seed, arch.vocab_size)
        self.adapter_arrays: Callable[[str], Params] = _no_adapters
        self._encoder: EncoderRunner | None = None  # from the first image on
        devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
        self._logprob_layout = lowering.model.logprobs
        # XLA's CPU client allows 32 programs in flight per device. Beyond that, it starts a step on some devices and
        # waits before it starts the others, for which the step's collectives wait; slot updates can reach that number.
        self._one_at_a_time = len(devices) > 1 and devices[0].platform == "cpu"
        self.state: ServeState | None = self.programs.new_state()  # None while asleep or closed
        self._sleeping_params: Params | None = None  # copy in host memory
        self._sleeping_draft: Params = {}
        local, pool_bytes = lowering.model.arch, device_bytes(read_pages(self.state.kv_pages))
        num_layer_tokens = schedule.num_shard_pages * schedule.page_size * arch.kv_layout.num_pool_layers
        reads = WeightReads.from_params(
            without_tower(params),
            param_specs(local),
            device_bytes,
            has_logits=arch.pooler is None and arch.stage.is_last,
        )
        self.costs = Costs(
            int(pool_bytes * arch.kv_layout.num_layers_read // num_layer_tokens), reads.step, flop_counts(local).step
        )
        # Must run before finalizers at exit that the first one registers: jax has some for constants being traced.
        weakref.finalize(self, self.programs.close)
        _close_at_exit(self)

    @property
    def stages(self) -> tuple["Runner", ...]:
        """The only pipeline stage."""
        return (self,)

    def is_sound(self) -> bool:
        """Wait for the device state; return False if a failed step has destroyed it."""
        return _is_sound(self.state)

    def restore_state(self) -> bool:
        """Wait for the device state; if a failed step has destroyed it, create an empty one and return True."""
        if self.is_sound():
            return False
        if jax.process_count() > 1:
            raise RuntimeError("a step has failed on the devices of several processes, and their state is lost")
        self.state = self.programs.new_state()
        return True

    def close(self) -> None:
        """Wait for the steps in flight, failed or not, and drop weights, state and programs."""
        self.programs.close()
        _is_sound(self.state)
        self.params, self.draft_params, self.state, self._encoder = {}, {}, None, None
        self._sleeping_params, self._sleeping_draft = None, {}

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the device memory; the weights are copied to the host unless new ones will be given."""
        _is_sound(self.state)
        if keep_weights and self.params:
            self._sleeping_params = jax.device_get(self.params)
        elif not keep_weights:
            self._sleeping_params = None
        if self.draft_params:  # nobody will supply new ones
            self._sleeping_draft = jax.device_get(self.draft_params)
        self.params, self.draft_params, self.state, self._encoder = {}, {}, None, None

    def wake_weights(self) -> None:
        """Restore the weights with their shardings, if they were kept."""
        if self._sleeping_params is not None:
            self.params, self._sleeping_params = _placed(self._sleeping_params, self.param_shapes), None
        if self._sleeping_draft:
            self.draft_params, self._sleeping_draft = _placed(self._sleeping_draft, self._draft_shapes), {}

    def wake_state(self) -> None:
        """Allocate an empty state if `sleep` has freed it."""
        if self.state is None:
            self.state = self.programs.new_state()

    # Steps

    def fit(self, step: StepShape) -> StepShape | None:
        """Return the shape of the cheapest compiled program that can run a step of this shape; None if none can."""
        return self.programs.fit(step)

    def launch(self, plan: StepPlan, program: StepShape) -> RunningStep:
        """Dispatch a step by the compiled program of shape `program`, after its admissions, masks and page copies.

        Starts the download too, except for a split plan, which `sample` must follow.
        """
        compiles, upload = compile_counter.count, self.packer.pack(plan, program.num_tokens)
        output = self.run(plan, program, upload)
        if plan.is_split:
            output = Unsampled(plan, program, upload.blob, output)
        return self.started(plan, output, compiles)

    def run(self, plan: StepPlan, program: StepShape, upload: StepUpload, *before: jax.Array) -> Any:
        """Dispatch a step's programs, except for the sampling of a split plan; return their output on the device.

        Args:
            plan: the plan.
            program: shape of the program.
            upload: the plan's arrays.
            before: hidden states from the previous pipeline stage, if there is one.
        """
        if self._one_at_a_time:
            jax.block_until_ready(self.state)
        text = without_tower(self.params)
        both = text, self.draft_params
        observed: Any = text if self.programs.lowering.observer is None else both
        params: Any = both if plan.num_drafts else observed
        for blob in upload.compactions:
            self.state, _ = self.programs.writers["compact"](observed, self.state, blob)
        for slot, digest in plan.adapter_loads:
            self._load_adapter(slot, digest)
        for run in plan.encoder_runs if self.arch.stage.is_first else ():
            self._encode(run)
        for blob in upload.admissions:
            self.state = self.programs.writers["admit"](self.state, blob)
        for slot, row in upload.slot_rows:
            self._set_slot(slot, row)
        self._set_masks(upload.masks)
        for blob in upload.copies:
            self.state = self._copy_pages(self.state, blob)
        compute, *_ = self.programs.take(program, plan.shape)
        self.state, output = compute(params, self.state, upload.blob, *before)
        return output

    def _set_slot(self, slot: int, row: SlotRow) -> None:
        """Write a new request's tables; a stage before the last one has only its token history."""
        assert self.state is not None, "a state that sleeps gets no requests"
        if self.arch.stage.is_last:
            self.state = self.programs.writers["set_slot"](self.state, np.int32(slot), row)
            return
        slots = self.state.slots
        history = self.programs.writers["set_history"](slots.token_history, np.int32(slot), row.token_ids)
        self.state = dataclasses.replace(self.state, slots=dataclasses.replace(slots, token_history=history))

    def started(self, plan: StepPlan, output: StepOutput | Unsampled, compiles: int) -> RunningStep:
        """Return the handle of a dispatched step, after starting its download unless its plan is split.

        Args:
            plan: the plan.
            output: its output.
            compiles: number of programs compiled before the launch.
        """
        num_compiles = compile_counter.count - compiles
        wanted = plan.wants_logprobs, plan.wants_prompt_logprobs
        max_drafts = self.schedule.max_drafts if plan.num_drafts else None
        step = RunningStep(output, self._logprob_layout, *wanted, num_compiles, time.monotonic(), max_drafts)
        if not plan.is_split:
            step.start_download()
        return step

    def sample(self, step: RunningStep) -> int:
        """Dispatch the sampling of a split plan, after the masks of its rows, and start the download.

        Returns the number of programs compiled for it.
        """
        assert isinstance(step.output, Unsampled), "a split plan is sampled once"
        compiles, (plan, program, blob, logits) = compile_counter.count, step.output
        if self._one_at_a_time:
            jax.block_until_ready(self.state)
        last, *others = [*self.packer.masks(plan)] or [self.packer.no_masks()]
        self._set_masks(others)
        _, sample = self.programs.table[program]
        self.state, step.output = sample(logits, self.state, blob, last)
        step.start_download()
        return compile_counter.count - compiles

    def _load_adapter(self, slot: int, digest: str) -> None:
        """Write an adapter to its slot, from 1 on. Only the stacks of adapters pass through the program."""
        assert self.state is not None, "a state that sleeps gets no adapters"
        arrays, layout = self.adapter_arrays(digest), self.programs.lowering.adapters
        assert layout is not None, "an engine with adapters has their layout"
        if jax.process_count() > 1:  # programs take arrays of one process only if all devices have all of them
            shapes = dataclasses.replace(layout, num_slots=1).abstract(self.arch, self.mesh)
            arrays = jax.tree.map(lambda x, shape: from_every_host(x, shape.sharding), arrays, shapes)
        params = self.params if layout.reads_weights else {}
        stacks = self.programs.writers["set_adapter"](self.state.adapters, np.int32(slot - 1), arrays, params)
        self.state = dataclasses.replace(self.state, adapters=stacks)
        if self._one_at_a_time:
            jax.block_until_ready(stacks)

    def _encode(self, run: EncoderRun) -> None:
        """Encode an image, or a part. Of the state, only the encoder cache passes through the programs."""
        assert self.state is not None, "a state that sleeps gets no images"
        assert self.arch.images is not None, "a model without a vision tower gets no images"
        assert self.state.encoder_cache is not None, "a model that takes images has an encoder cache"
        if self._encoder is None:
            self._encoder = EncoderRunner(self.arch.images.tower, self.programs.encoders)
        cache = self._encoder.run(run, self.params[VISION], self.state.encoder_cache)
        self.state = dataclasses.replace(self.state, encoder_cache=cache)
        if self._one_at_a_time:
            jax.block_until_ready(cache)

    def _set_masks(self, blobs: Iterable[NDArray[np.int32]]) -> None:
        """Write blobs of allowed-token masks to the state. Only the mask array passes through the program."""
        for blob in blobs:
            assert self.state is not None, "a state that sleeps gets no masks"
            slots = self.state.slots
            slots = dataclasses.replace(slots, allowed=self.programs.writers["set_masks"](slots.allowed, blob))
            self.state = dataclasses.replace(self.state, slots=slots)

    def _copy_pages(self, state: ServeState | None, blob: NDArray[np.int32]) -> ServeState:
        """Return the state after the page copies in a blob. Only the pool passes through the program."""
        assert state is not None, "a state that sleeps has no pages"
        return dataclasses.replace(state, kv_pages=self.programs.writers["copy_pages"](state.kv_pages, blob))


def _no_adapters(digest: str) -> Params:
    """Raise an error: nobody has given the runner adapters."""
    raise AssertionError(f"there are no adapters, got {digest}")


def array_shapes(params: Params) -> Params:
    """Return shapes, dtypes and shardings of weights, which suffice to compile while the weights are replaced."""
    shapes: Params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    return shapes


def _placed(params: Params, shapes: Params) -> Params:
    """Copy arrays from the host to devices, with the shardings in `shapes`."""
    placed: Params = jax.device_put(params, jax.tree.map(lambda shape: shape.sharding, shapes))
    return placed


def _is_sound(state: ServeState | None) -> bool:
    """Wait for a state; return False if a step that received or produced it has failed."""
    try:
        for leaf in jax.tree.leaves(state):  # each one, because different programs may have produced them
            leaf.block_until_ready()
    except Exception as error:  # an array holds its program's error; a deleted one raises too
        logger.debug("the device state is lost: %s", error)
        return False
    return True


_runners: weakref.WeakSet[Runner] = weakref.WeakSet()


def _close_at_exit(runner: Runner) -> None:
    """Close a runner before jax's clean-up at exit, which crashes while a step runs."""
    if not _runners:
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # again, so that it runs before handlers that jax has registered meanwhile
    _runners.add(runner)


def _close_all() -> None:
    """Close all runners of this process."""
    for runner in list(_runners):
        runner.close()
