"""ServeState: the state that lives on the device between steps, and its shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxserve.api.pooling_params import PoolingKind
from jaxserve.api.sampling_params import MAX_BAD_SEQUENCE_TOKENS, MAX_BAD_SEQUENCES, MAX_LOGIT_BIAS
from jaxserve.execution.batch import MAX_STOP_IDS, PageEntries
from jaxserve.execution.sampling import RECORD_WORDS, SlotRow, SlotTable, mask_size, padded_to_lanes
from jaxserve.layers.pools import Pool
from jaxserve.layers.sharding import DATA, MODEL, TENSOR, MeshAxes, joined, tensor_size
from jaxserve.models.arch import ArchConfig
from jaxserve.scheduling.schedule_config import ScheduleConfig

# Options for reads and writes by slot, row or token in every step: indices out of range are padding, and none is
# negative, which XLA would have to check.
CLIPPED: dict[str, Any] = {"mode": "clip", "wrap_negative_indices": False}
DROPPED: dict[str, Any] = {"mode": "drop", "wrap_negative_indices": False}
MANY = 1024  # factor on heads or tokens that certainly enlarges an array, whatever its padding


class Lengths(NamedTuple):
    """Three sequence lengths up to a token; each computed token increases all of them by one.

    They are equal unless an admission sets offsets: if tokens were dropped from the pool, fewer are cached than the
    history has; positions differ from both if they do not count tokens.
    """

    history: Int[Array, "*R"]
    """Tokens before: index in the token history, by which random draws, penalties and minimum lengths go."""
    position: Int[Array, "*R"]
    """Position: by it tokens are rotated, and sequences end."""
    cached: Int[Array, "*R"]
    """Tokens before with keys and values in the pool: where those of the token lie in the row's pages."""

    def plus(self, count: Int[Array, "*R"] | int) -> Lengths:
        """Return the lengths `count` tokens later."""
        return Lengths(*(length + count for length in self))


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sequences:
    """S sequences by slot; a request keeps its slot while it runs.

    Attributes:
        length: number of tokens computed so far.
        admitted: values per slot, set by its admission: the `length` at which the sequence ends, position minus
            `length`, number of cached tokens minus `length` (see `Lengths`), number of prompt tokens, the adapter's
            slot, and the first token with the adapter. One array, because each array costs a microsecond per dispatch.
        stopped: True after the sequence has ended.
        page_table: up to M pages in each of G KV groups; row `slot * G + g` belongs to group g.
        records: packed sampling parameters, with the fields of SAMPLING_RECORD.
    """

    length: Int[Array, " S"]
    admitted: Int[Array, "6 S"]
    stopped: Bool[Array, " S"]
    page_table: Int[Array, "SG M"]
    records: Int[Array, "S words"]

    def table_rows(self, slot: Int[Array, " R"]) -> list[Int[Array, " R"]]:
        """Return the page table rows of some sequences, per KV group."""
        num_groups = self.page_table.shape[0] // self.length.shape[0]
        return [slot * num_groups + group for group in range(num_groups)]

    def lengths(self, slot: Int[Array, " R"]) -> Lengths:
        """Return the lengths of some sequences before their next token."""
        history = self.length.at[slot].get(**CLIPPED)
        position, cached = (history + self.admitted.at[row, slot].get(**CLIPPED) for row in (1, 2))
        return Lengths(history, position, cached)

    def max_len(self, slot: Int[Array, " R"]) -> Int[Array, " R"]:
        """Return the history lengths at which some sequences reach their last position."""
        return self.admitted.at[0, slot].get(**CLIPPED)

    def num_prompt(self, slot: Int[Array, " R"]) -> Int[Array, " R"]:
        """Return some sequences' prompt lengths."""
        return self.admitted.at[3, slot].get(**CLIPPED)

    def adapter(self, slot: Int[Array, " T"], history: Int[Array, " T"]) -> Int[Array, " T"]:
        """Return the adapter slots of some sequences' tokens, given their indices; 0 for the base model."""
        adapter, start = (self.admitted.at[row, slot].get(**CLIPPED) for row in (4, 5))
        return jnp.where(history >= start, adapter, 0)


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ServeState:
    """State that lives on the device between steps; donated to every step and returned by it."""

    kv_pages: Any  # `Pool` in the attention backend's layout
    sequences: Sequences
    slots: SlotTable  # sampling inputs: tokens, their counts, biases and stop ids
    states: Any = None  # state pool of recurrent layers; None without them
    draft: Any = None  # state of the proposer; None without one
    pooled: Float[Array, "S D"] | None = None  # sums over earlier prompt chunks: see `pooling_program.pool`
    expert_tokens: Int[Array, "L E"] | None = None  # tokens per expert in the last step; None if not counted
    adapters: Any = None  # stacked LoRA factors: see `AdapterLayout`; None without adapters
    encoder_cache: Float[Array, "E features"] | None = None  # images' embeddings; None without images


def new_pool(arch: ArchConfig, num_pages: int, page_size: int, *, kv_dtype: DTypeLike, backend: str) -> Any:
    """Return an empty KV pool of `num_pages` pages, each with `page_size` tokens in the layers of any one KV group."""
    sizes = {"num_layers": arch.kv_layout.num_pool_layers, "num_pages": num_pages, "page_size": page_size}
    return arch.kv_layout.pool.new_pages(backend, **sizes, dtype=jnp.dtype(kv_dtype))


def new_states(arch: ArchConfig, num_entries: int) -> Any:
    """Return an empty pool of `num_entries` states for all recurrent layers of `arch`; None if it has none."""
    return None if arch.state is None else arch.state.new(arch.num_layers - len(arch.attention_layers), num_entries)


def new_slots(vocab_size: int, max_num_seqs: int, max_model_len: int) -> SlotTable:
    """Return the initial slot tables, all zero, for `max_num_seqs` slots and a (shard of a) vocabulary."""
    S = max_num_seqs
    return SlotTable(
        token_history=jnp.zeros((S, max_model_len), jnp.int32),
        token_counts=jnp.zeros((S, padded_to_lanes(vocab_size)), jnp.int32),
        prompt_len=jnp.zeros(S, jnp.int32),
        allowed=jnp.zeros((S, mask_size(vocab_size)), jnp.uint32),
        bad_words=jnp.zeros((S, MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE_TOKENS), jnp.int32),
        bias_ids=jnp.zeros((S, MAX_LOGIT_BIAS), jnp.int32),
        bias_values=jnp.zeros((S, MAX_LOGIT_BIAS), jnp.float32),
        stop_ids=jnp.zeros((S, MAX_STOP_IDS), jnp.int32),
    )


def new_encoder_cache(arch: ArchConfig, num_rows: int, dtype: DTypeLike) -> Array | None:
    """Return an empty encoder cache for `num_rows` embeddings; None without a vision tower."""
    if arch.tower is None:
        return None
    return jnp.zeros((num_rows, arch.tower.row_size), jnp.dtype(dtype))


def new_sequences(schedule: ScheduleConfig) -> Sequences:
    """Return the initial sequences: slots whose rows compute nothing."""
    S = schedule.max_num_seqs
    return Sequences(
        length=jnp.zeros(S, jnp.int32),
        admitted=jnp.zeros((6, S), jnp.int32),
        stopped=jnp.ones(S, bool),
        page_table=jnp.zeros((S * schedule.kv_groups.size, schedule.max_pages_per_row), jnp.int32),
        records=jnp.zeros((S, RECORD_WORDS), jnp.int32),
    )


def new_state(
    arch: ArchConfig,
    schedule: ScheduleConfig,
    *,
    kv_dtype: DTypeLike,
    backend: str,
    new_draft: Callable[[], Any] = lambda: None,
    new_adapters: Callable[[], Any] = lambda: None,
    encoder_dtype: DTypeLike = jnp.float32,
) -> ServeState:
    """Return the state before the first step: an empty pool, and slots whose rows compute nothing.

    Args:
        arch: sizes of a device's shard.
        schedule: sizes of steps and page pool.
        kv_dtype: pool dtype.
        backend: attention backend.
        new_draft: returns the initial state of a proposer.
        new_adapters: returns the initial stacks of adapters.
        encoder_dtype: dtype of images' embeddings.
    """
    counts = None
    if schedule.count_expert_tokens and arch.experts is not None:
        counts = jnp.zeros((arch.num_moe_layers, arch.experts.num_experts), jnp.int32)
    pool = new_pool(arch, schedule.num_shard_pages, schedule.page_size, kv_dtype=kv_dtype, backend=backend)
    states = new_states(arch, schedule.num_state_entries)
    sequences, S = new_sequences(schedule), schedule.max_num_seqs
    if (pooler := arch.pooler) is None:
        vocab_size = arch.vocab_size if arch.stage.is_last else 1  # only the last stage samples
        slots = new_slots(vocab_size, S, schedule.max_model_len)
        images = new_encoder_cache(arch, schedule.num_encoder_rows, encoder_dtype)
        own = {"draft": new_draft(), "adapters": new_adapters(), "encoder_cache": images}
        return ServeState(pool, sequences, slots, states, expert_tokens=counts, **own)
    kept = None if pooler.kind is PoolingKind.LAST else jnp.zeros((S, arch.hidden_size))
    slots = new_slots(1, S, 1)  # nothing reads them
    return ServeState(pool, sequences, slots, states, pooled=kept, expert_tokens=counts, adapters=new_adapters())


def abstract_state(
    arch: ArchConfig,
    schedule: ScheduleConfig,
    *,
    kv_dtype: DTypeLike,
    backend: str,
    mesh: Mesh | None = None,
    new_draft: Callable[[], Any] = lambda: None,
    adapters: Any = None,
    encoder_dtype: DTypeLike = jnp.float32,
) -> ServeState:
    """Return shapes and dtypes of the state; with a mesh, shardings too.

    The pool is split by KV heads, recurrent states by their heads, token counts and masks by the vocabulary; a
    proposer's state and the encoder cache are replicated. Data-parallel attention shards have separate pages.
    `adapters` are the shapes of the adapters' stacks.
    """

    def shapes(arch: ArchConfig, schedule: ScheduleConfig = schedule) -> ServeState:
        options: dict[str, Any] = {"kv_dtype": kv_dtype, "backend": backend, "encoder_dtype": encoder_dtype}
        make = partial(new_state, arch, schedule, new_draft=new_draft, **options)
        return jax.eval_shape(make)

    if mesh is None:
        return dataclasses.replace(shapes(arch), adapters=adapters)
    local = arch.local(tensor_size(mesh))
    # A backend may pad each device's heads, so global shapes follow from one device's.
    larger: dict[MeshAxes, Any] = {
        TENSOR: shapes(local.times(MANY)),
        MODEL: shapes(dataclasses.replace(local, vocab_size=MANY * local.vocab_size)),
        DATA: shapes(local, dataclasses.replace(schedule, num_pages=MANY * schedule.num_pages)),
    }
    return dataclasses.replace(joined(mesh, shapes(local), larger), adapters=adapters)


def abstract_slot_row(schedule: ScheduleConfig, vocab_size: int) -> SlotRow:
    """Return shapes and dtypes of a slot row; `vocab_size` is the whole model's."""
    table = jax.eval_shape(partial(new_slots, vocab_size, 1, schedule.max_model_len))
    row: dict[str, Any] = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in vars(table).items()}
    del row["token_counts"]  # the device counts the tokens
    return SlotRow(token_ids=row.pop("token_history"), **row)


def copy_pages(kv_pages: Pool, blob: Int[Array, "2 E"], axis: str | None = None) -> Pool:
    """Return the pool with some pages copied to others; every layout has its pages on axis 1.

    Args:
        kv_pages: pool, to be donated.
        blob: source page and target page of each copy; targets out of range are padding.
        axis: mesh axis over whose devices the page ids are divided equally, in order; None if each device has all.
            Source and target must be on the same device.
    """
    source, target = blob
    if axis is not None:
        num_pages = jax.tree.leaves(kv_pages)[0].shape[1]
        source, target = blob - lax.axis_index(axis) * num_pages
        target = jnp.where(target < 0, num_pages, target)  # out of range, dropped
    return jax.tree.map(lambda x: x.at[:, target].set(x.at[:, source].get(mode="clip"), mode="drop"), kv_pages)


def copy_state(states: Any, entries: Int[Array, "2"]) -> Any:
    """Return a pool of recurrent states, to be donated, with the first entry copied to the second one."""
    source, target = entries

    def copy(leaf: Array) -> Array:
        entry = lax.dynamic_index_in_dim(leaf, source, axis=1)
        return lax.dynamic_update_slice_in_dim(leaf, entry, target, axis=1)

    return jax.tree.map(copy, states)


def set_pages(sequences: Sequences, entries: PageEntries) -> Sequences:
    """Return the sequences with new page table entries."""
    table = sequences.page_table.at[entries.row, entries.column].set(entries.page, **DROPPED)
    return dataclasses.replace(sequences, page_table=table)
