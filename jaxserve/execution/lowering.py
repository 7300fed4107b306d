"""Lowering: defines a model's programs, and traces and lowers them for the devices; `programs` compiles them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxserve.execution.batch import (
    BatchLayout,
    BlobLayout,
    CompactionLayout,
    admission_layout,
    mask_layout,
    num_copies,
)
from jaxserve.execution.compaction import Compact, make_compact
from jaxserve.execution.encoder_program import (
    abstract_inputs,
    encoder_buckets,
    make_encode,
    make_parts,
    outer,
    tower_layers,
)
from jaxserve.execution.moved_pools import kv_pools, state_pools
from jaxserve.execution.page_programs import MOVED_STATES, KVLayout, PageProgram, PagePrograms
from jaxserve.execution.pooling_program import make_pooling_step
from jaxserve.execution.proposer import Observer, Proposer, ReadsFeatures
from jaxserve.execution.round import Model
from jaxserve.execution.stage_step import (
    LastStep,
    StageStep,
    make_last_step,
    make_speculative_last_step,
    make_speculative_stage_step,
    make_stage_step,
    make_take_sampled,
    num_sampled_rows,
    set_history,
    stage_state_arrays,
)
from jaxserve.execution.state import (
    ServeState,
    abstract_slot_row,
    abstract_state,
    copy_pages,
    copy_state,
    new_state,
)
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
from jaxserve.layers.sharding import MODEL, over_devices, replicated, specs_of, tensor_size
from jaxserve.models.adapted_params import make_set_adapter
from jaxserve.models.adapter_layout import AdapterLayout
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import VISION, Params, without_tower
from jaxserve.pallas_kernels.deviceless import Chip
from jaxserve.pallas_kernels.grouped_matmul import using_matmul_backend
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.step_plan import StepShape

logger = logging.getLogger(__name__)

Options = dict[str, str | bool]  # compiler options
Lower = Callable[[], jax.stages.Lowered]  # traces and lowers one program


@dataclass(frozen=True, eq=False)
class Lowering:
    """The programs of a model on some devices. It holds neither weights nor state, so that a thread can keep it.

    Attributes:
        arch: sizes of the whole model.
        param_shapes: shapes, dtypes and shardings of its weights.
        schedule: sizes of steps and page pool.
        kv_dtype: pool dtype.
        backend: attention backend.
        linear_backend: matmul backend, see `EngineConfig.linear_backend`.
        max_steps: maximum rounds per dispatch.
        mesh: mesh over which the model is split; None if the first device holds all of it.
        proposer: proposer for speculative decoding; None without it.
        draft_shapes: shapes, dtypes and shardings of the proposer's parameters.
        adapters: stacks of LoRA adapters; None without adapters.
        chip: chip to lower for without the hardware; None for attached devices.
        encoder_dtype: dtype of images' embeddings.
    """

    arch: ArchConfig
    param_shapes: Params
    schedule: ScheduleConfig
    kv_dtype: jnp.dtype
    backend: str
    linear_backend: str
    max_steps: int
    mesh: Mesh | None = None
    proposer: Proposer | None = None
    draft_shapes: Params = field(default_factory=dict)
    adapters: AdapterLayout | None = None
    chip: Chip | None = None
    encoder_dtype: DTypeLike = jnp.float32

    @property
    def key_parts(self) -> tuple[object, ...]:
        """Everything that determines the programs except the devices; distinguished by `repr`."""
        arrays = (self.param_shapes, self.abstract_state, self.draft_shapes)
        shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), arrays)
        options = (self.backend, self.linear_backend, self.max_steps, self.compiler_options)
        return self.arch, self.sizes, *options, self.proposer, self.adapters, shapes

    @cached_property
    def sizes(self) -> ScheduleConfig:
        """Schedule with only the fields that affect programs."""
        return self.schedule.program_config

    @cached_property
    def compiler_options(self) -> Options:
        """XLA's compiler options for step programs on these devices."""
        device = self.chip or (self.mesh.devices.flat[0] if self.mesh else jax.devices()[0])
        return step_options(device.device_kind)

    @property
    def num_devices(self) -> int:
        """Number of devices that the model is split over."""
        return tensor_size(self.mesh)

    @cached_property
    def observer(self) -> Observer | None:
        """Proposer that takes part in plain steps; None without one. The check takes 20 us."""
        return self.proposer if isinstance(self.proposer, Observer) else None

    @cached_property
    def model(self) -> Model:
        """Static parameters of the programs, for one device's shard."""
        num_adapters = 0 if self.adapters is None else self.adapters.num_slots
        sizes: dict[str, Any] = {"num_devices": self.num_devices, "max_logprobs": self.sizes.max_logprobs}
        sizes |= {"sparsity": self.sizes.sparsity, "num_adapters": num_adapters}
        if isinstance(self.proposer, ReadsFeatures):
            sizes["features"] = self.proposer.feature_layers
        return Model.from_arch(self.arch, backend=self.backend, observer=self.observer, **sizes)

    @cached_property
    def abstract_state(self) -> ServeState:
        """Shapes and dtypes of the device state; with a mesh, shardings too."""
        options: dict[str, Any] = {"kv_dtype": self.kv_dtype, "backend": self.backend, "new_draft": self._new_draft}
        options["encoder_dtype"] = self.encoder_dtype
        adapters = None if self.adapters is None else self.adapters.abstract(self.arch, self.mesh)
        return abstract_state(self.arch, self.sizes, mesh=self.mesh, adapters=adapters, **options)

    def _new_draft(self) -> Any:
        """Return the proposer's initial state; None without one."""
        return None if self.proposer is None else self.proposer.new_state()

    def _new_adapters(self) -> Any:
        """Return empty stacks of adapters on a device; None without adapters."""
        return None if self.adapters is None else self.adapters.new(self.arch, self.mesh)

    def new_state(self) -> jax.stages.Lowered:
        """Trace and lower the program that allocates an empty state on the devices."""
        program: Callable[[], ServeState] = partial(
            new_state,
            self.model.arch,
            self.sizes,
            kv_dtype=self.kv_dtype,
            backend=self.backend,
            new_draft=self._new_draft,
            new_adapters=self._new_adapters,
            encoder_dtype=self.encoder_dtype,
        )
        if self.mesh is not None:
            program = over_devices(program, self.mesh, (), specs_of(self.abstract_state))
        return jax.jit(program).lower()

    def programs(self, shape: StepShape) -> dict[str, Lower]:
        """Return functions that trace and lower the programs of a step shape, by name.

        A shape that samples late has two, for model and sampling, others have one.
        """
        if shape.samples_late:
            compute, sample = self.split(shape.num_tokens)
            return {f"compute {shape.num_tokens}": compute, f"sample {shape.num_tokens}": sample}
        lower = self.speculative if shape.has_drafts else self.step
        return {shape.name: partial(lower, shape.num_tokens, shape.num_rounds)}

    def step(self, bucket: int, num_rounds: int = 1) -> jax.stages.Lowered:
        """Trace and lower the step for up to `bucket` tokens and `num_rounds` rounds."""
        layout = BatchLayout.from_config(self.sizes, bucket)
        if self.arch.pooler is not None:
            program: Any = make_pooling_step(self.model, layout)
            return self._lower(program, layout, self._text_shapes, *self._hidden(bucket))
        if not self.arch.stage.is_whole:
            if self.arch.stage.is_last:
                program = make_last_step(self.model, layout, self.sizes.max_drafts)
            else:
                program = make_stage_step(self.model, layout)
            return self._lower(program, layout, self._observed_shapes, *self._hidden(bucket))
        return self._lower(make_serve_step(self.model, layout, num_rounds), layout, self._observed_shapes)

    def _hidden(self, num_tokens: int) -> list[jax.ShapeDtypeStruct]:
        """Return the shape of the hidden states and features that a stage takes from the previous one, if any."""
        dtype = jax.tree.leaves(self.param_shapes["final_norm"])[0].dtype
        width = (1 + self.model.num_carried) * self.arch.hidden_size
        return [] if self.arch.stage.is_first else [self._operand((num_tokens, width), dtype)]

    def split(self, bucket: int) -> tuple[Lower, Lower]:
        """Return functions that trace and lower both programs for split plans with `bucket` rows."""
        layout = BatchLayout.from_config(self.sizes, bucket)
        masks = mask_layout(self.sizes, self.arch.vocab_size)
        compute, sample = make_split_step(self.model, layout, masks)
        part = PartitionSpec(None, MODEL) if self.mesh else PartitionSpec()
        shape = (layout.num_rows, self.model.arch.vocab_size * self.num_devices)
        sharding = NamedSharding(self.mesh, part) if self.mesh else None
        logits = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        return (
            partial(self._lower, compute, layout, self._observed_shapes, output=part),
            partial(self._lower, sample, layout, logits, masks),
        )

    @property
    def _observed_shapes(self) -> Any:
        """Shapes of the parameters of programs that a proposer may observe."""
        return (self._text_shapes, self.draft_shapes) if self.observer else self._text_shapes

    @property
    def _text_shapes(self) -> Params:
        """Parameter shapes that steps read: all but the vision tower's."""
        return without_tower(self.param_shapes)

    def speculative(self, bucket: int, num_rounds: int) -> jax.stages.Lowered:
        """Trace and lower the speculative step for up to `bucket` rows and `num_rounds` rounds."""
        assert self.proposer is not None, "a speculative step has a proposer"
        layout = BatchLayout.from_config(self.sizes, bucket, is_speculative=True)
        shapes, stage = (self._text_shapes, self.draft_shapes), self.arch.stage
        if stage.is_whole:
            return self._lower(make_speculative_step(self.model, layout, self.proposer, num_rounds), layout, shapes)
        assert num_rounds == 1, "stages run one round"
        if stage.is_last:
            program = make_speculative_last_step(self.model, layout, self.proposer, self.sizes.page_size)
        else:
            program = make_speculative_stage_step(self.model, layout, self.proposer)
        before = self._hidden(layout.num_rows * (self.proposer.max_nodes + 1))
        if before:
            sizes = (layout.num_rows, self.proposer.max_nodes), (layout.num_rows,)
            before += [self._operand(size, jnp.int32) for size in sizes]
        return self._lower(program, layout, shapes, *before)

    @property
    def _adapted_weights(self) -> Params:
        """Shapes of the parameters that the program for adapters reads."""
        if self.adapters is None or not self.adapters.reads_weights:
            return {}
        if self.mesh is not None:
            return self.param_shapes
        shapes: Params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.param_shapes)
        return shapes

    def _compaction(self, layout: CompactionLayout) -> jax.stages.Lowered:
        """Trace and lower the program that compacts a row's prompt."""
        return self._lower(make_compact(self.model, layout), layout, self._observed_shapes)

    def writers(self) -> dict[str, Lower]:
        """Return functions that trace and lower the programs that write to slot tables or compact prompts, by name."""
        state, model = self.abstract_state, self.model
        admissions = admission_layout(self.sizes)
        masks = mask_layout(self.sizes, self.arch.vocab_size)
        row = jax.tree.map(
            lambda s: self._operand(s.shape, s.dtype), abstract_slot_row(self.sizes, self.arch.vocab_size)
        )

        def writer(program: Callable[..., Any], *args: Any) -> Lower:
            if self.mesh is not None:
                program = over_devices(program, self.mesh, args, specs_of(args[0]))
            return partial(self._trace, program, args, donated=0)

        index, blob, words = (self._operand(shape, jnp.int32) for shape in ((), (admissions.size,), (masks.size,)))
        admit = {"admit": writer(make_admit(admissions, self.proposer), state, blob)}
        if self.adapters is not None:
            new = replace(self.adapters, num_slots=1).abstract(self.arch, self.mesh)
            program = make_set_adapter(self.adapters, self.arch, self.mesh)
            admit["set_adapter"] = writer(program, state.adapters, index, new, self._adapted_weights)
        if self.arch.pooler is not None:
            return admit
        copies = self._operand((2, num_copies(self.sizes)), jnp.int32)
        copy = partial(copy_pages, axis=model.arch.token_axis)
        if not self.arch.stage.is_last:
            sampled = self._operand((num_sampled_rows(self.sizes.max_drafts), self.sizes.max_num_seqs), jnp.int32)
            history, takes = state.slots.token_history, make_take_sampled(self.proposer)
            return {
                **admit,
                "copy_pages": writer(copy, state.kv_pages, copies),
                "set_history": writer(set_history, history, index, self._operand(history.shape[1:], jnp.int32)),
                "take_sampled": writer(takes, stage_state_arrays(state), sampled),
            }
        layout = CompactionLayout.from_config(self.sizes)
        compact: dict[str, Lower] = {} if layout is None else {"compact": partial(self._compaction, layout)}
        return compact | {
            **admit,
            "copy_pages": writer(copy, state.kv_pages, copies),
            "set_slot": writer(make_set_slot(model.split), state, index, row),
            "set_masks": writer(make_set_masks(model, masks), state.slots.allowed, words),
        }

    def encoders(self) -> dict[str, Lower]:
        """Return functions that trace and lower the vision tower programs, by name; none without images."""
        if self.arch.tower is None:
            return {}
        max_embeddings = min(self.schedule.num_encoder_rows, self.schedule.max_model_len)
        sizes = encoder_buckets(self.arch.tower, max_embeddings)
        in_parts = set(self.schedule.sizes_in_parts)
        programs: dict[str, Lower] = {}
        for size in sizes:
            programs |= self._parts(size) if size in in_parts else {encoder_name(size): partial(self._encoder, size)}
        return programs

    def _parts(self, num_patches: int) -> dict[str, Lower]:
        """Return functions that trace and lower the programs that encode an image in parts, by name."""
        assert self.model.arch.images is not None, "a model with a vision tower takes images"
        tower, cache = self.model.arch.images.tower, self.abstract_state.encoder_cache
        own = partial(jax.tree.map, lambda x: self._operand(x.shape, x.dtype))
        inputs, rows = map(own, abstract_inputs(tower, num_patches))
        params, later, programs = self.param_shapes[VISION], inputs._replace(patches=None), make_parts(tower)
        with using_matmul_backend(self.linear_backend):
            begin = self._over_devices(programs.begin, (outer(params), inputs), PartitionSpec())
            state = own(jax.eval_shape(begin, outer(params), inputs))
        finish = programs.finish, (outer(params), cache, state, later, rows), specs_of(cache) if self.mesh else None, 1
        found: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any, int | None]] = {
            encoder_name(num_patches, "begin"): (programs.begin, (outer(params), inputs), PartitionSpec(), None),
            encoder_name(num_patches, "finish"): finish,
        }
        for each in tower_layers(params):
            layer = make_parts(tower, is_stacked=each.is_stacked).layer
            args = each.params, state, self._operand((3,), jnp.int32)
            found[encoder_name(num_patches, f"layer {each.kind}")] = layer, args, PartitionSpec(), 1
        return {name: partial(self._tower_program, *each) for name, each in found.items()}

    def _tower_program(
        self, program: Callable[..., Any], args: tuple[Any, ...], specs: Any, donated: int | None
    ) -> jax.stages.Lowered:
        """Trace and lower a program that encodes a part."""
        program = self._over_devices(program, args, specs)
        if self.mesh is None:
            args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        with using_matmul_backend(self.linear_backend):
            return self._trace(program, args, donated=donated, options=self.compiler_options)

    def _over_devices(self, program: Callable[..., Any], args: tuple[Any, ...], specs: Any) -> Callable[..., Any]:
        """Return a program of one device's shards as one of global arrays."""
        return program if self.mesh is None else over_devices(program, self.mesh, args, specs)

    def _encoder(self, num_patches: int) -> jax.stages.Lowered:
        """Trace and lower the program that encodes an image with up to `num_patches` patches."""
        assert self.model.arch.images is not None, "a model with a vision tower takes images"
        tower, cache = self.model.arch.images.tower, self.abstract_state.encoder_cache
        own = partial(jax.tree.map, lambda x: self._operand(x.shape, x.dtype))
        inputs, rows = map(own, abstract_inputs(tower, num_patches))
        params, program = self.param_shapes[VISION], make_encode(tower)
        if self.mesh is not None:
            program = over_devices(program, self.mesh, (params, cache, inputs, rows), specs_of(cache))
        else:
            params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        with using_matmul_backend(self.linear_backend):
            return self._trace(program, (params, cache, inputs, rows), donated=1, options=self.compiler_options)

    def page_movers(self) -> dict[str, Lower]:
        """Return functions that trace and lower the programs that copy pages from and to the pool, by name."""
        programs = self.page_programs.by_name()
        if self.state_programs is not None:
            programs |= self.state_programs.by_name() | {"keep_state": self._keep_state()}
        return {
            name: partial(self._trace, each.program, each.args, donated=each.donated, out_shardings=each.results)
            for name, each in programs.items()
        }

    @property
    def page_programs(self) -> PagePrograms:
        """The programs that copy KV pages from and to their pools."""
        layout = KVLayout(self.backend, self.arch.local(tensor_size(self.mesh)).kv_layout.pool.kind)
        pools = kv_pools(self.abstract_state, layout, self.proposer)
        return PagePrograms("pages", pools, self.mesh, chip=self.chip)

    @property
    def state_programs(self) -> PagePrograms | None:
        """The programs that copy state snapshots from and to their pool; None without recurrent layers."""
        if self.arch.state is None:
            return None
        return PagePrograms("states", state_pools(self.abstract_state), self.mesh, MOVED_STATES, self.chip)

    def _keep_state(self) -> PageProgram:
        """Return the program that copies a state in the pool to another entry."""
        states, program = self.abstract_state.states, copy_state
        args = states, self._operand((2,), jnp.int32)
        if self.mesh is not None:
            program = over_devices(program, self.mesh, args, specs_of(states))
        return PageProgram(program, args, 0, None)

    def _lower(
        self,
        program: Program | Compute | Sample | Compact | StageStep | LastStep,
        layout: BatchLayout | CompactionLayout,
        params: Any,
        *more: BlobLayout | jax.ShapeDtypeStruct,
        output: PartitionSpec | None = None,
    ) -> jax.stages.Lowered:
        """Trace and lower a program over parameters, state and blobs.

        Args:
            program: returns the state and an output.
            layout: layout of the blob.
            params: shapes, dtypes and shardings of its first argument.
            more: shapes of further arguments, or layouts if they are blobs.
            output: axes over which its output is split; None if every device has all of it.
        """
        state = self.abstract_state
        blobs = [
            self._operand((each.size,), jnp.int32) if isinstance(each, BlobLayout) else each
            for each in (layout.blob, *more)
        ]
        if self.mesh is not None:
            specs = (specs_of(state), output or PartitionSpec())
            program = over_devices(program, self.mesh, (params, state, *blobs), specs)
        else:
            params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        with using_matmul_backend(self.linear_backend):
            return self._trace(program, (params, state, *blobs), donated=1, options=self.compiler_options)

    def _trace(
        self,
        program: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        donated: int | None,
        options: Options | None = None,
        out_shardings: Any = None,
    ) -> jax.stages.Lowered:
        """Trace and lower a program with `args`, at most one of them donated.

        Args:
            program: function of `args`.
            args: shapes, dtypes and shardings of its arguments.
            donated: index of the donated argument.
            options: XLA's compiler options.
            out_shardings: shardings of the results; None leaves them to XLA.
        """
        donate_argnums = () if donated is None else (donated,)
        if self.chip is not None:
            return self.chip.lower(program, args, donate_argnums, self.mesh, options, out_shardings)
        known = known_options(options) if options else None
        results = {} if out_shardings is None else {"out_shardings": out_shardings}
        return jax.jit(program, donate_argnums=donate_argnums, compiler_options=known, **results).lower(*args)

    def _operand(self, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        """Return the abstract array for a host input, replicated on every device in the mesh."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh) if self.mesh else None)


def encoder_name(num_patches: int, part: str = "") -> str:
    """Return the encoder program's name for images with up to `num_patches` patches, or the name for a part of it."""
    return f"encode {num_patches} {part}".rstrip()


def known_options(options: Options) -> Options:
    """Return the compiler options that this XLA version has: they come and go."""
    return {name: value for name, value in options.items() if _is_known(name, value)}


@cache
def _is_known(name: str, value: str | bool) -> bool:
    """Return whether XLA accepts this option; warn if not, unless it only shortens compilation, as on CPUs."""
    own = os.getpid()  # makes the program unique, since another process may be storing the same one in XLA's cache
    try:
        jax.jit(lambda: own, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        level = logging.INFO if name.startswith("xla_cpu_") else logging.WARNING
        logger.log(level, "jax %s has no option %s=%s and compiles without it: %s", jax.__version__, name, value, error)
        return False
    return True
