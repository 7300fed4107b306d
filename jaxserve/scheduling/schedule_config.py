"""ScheduleConfig: sizes of steps and page pool, and bucket sizes of step programs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from jaxserve.api.config import DEFAULT_LONG_PREFILLS, DEFAULT_PARTIAL_PREFILLS, EngineConfig
from jaxserve.api.option_values import read_targets, read_tenant_weights
from jaxserve.api.sampling_params import DEFAULT_MAX_LOGPROBS
from jaxserve.api.sparsity_config import EvictionConfig
from jaxserve.errors import ConfigError
from jaxserve.scheduling.kv_cache.groups import KVGroups
from jaxserve.scheduling.kv_cache.sparsity import Sparsity, resolve_choice, resolve_eviction
from jaxserve.scheduling.policy import Policy, reserved_prefill_tokens
from jaxserve.scheduling.step_plan import StepShape

# maximum tokens sampled in one dispatch, over all rows: the program holds their log probabilities
MAX_STEP_TOKENS = 1024
MULTI_STEP_ROWS = 16  # largest bucket for the only multi-step program on accelerators
SPECULATIVE_ROWS = 64  # maximum rows in a step with drafted tokens
MIN_FEW_TOKENS = 16  # smallest bucket on accelerators: the rows of a bfloat16 tile
FREE_TOKENS = 256  # smaller steps are hardly faster on an accelerator, because reading weights limits them
SMALLEST_ON_CPU = 64  # the same on a CPU


@dataclass(frozen=True)
class ScheduleConfig:
    """Resolved sizes shared by scheduler, packer and compiled programs.

    With several data-parallel shards, slots, tokens and pages are totals over all shards.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    few_programs: bool = False
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    max_num_partial_prefills: int = DEFAULT_PARTIAL_PREFILLS
    max_long_partial_prefills: int = DEFAULT_LONG_PREFILLS
    long_prefill_token_threshold: int = 0
    windows: tuple[int | None, ...] = (None,)  # sliding window per KV group
    num_snapshots: int | None = None  # maximum state snapshots; None if no layer is recurrent
    eviction: EvictionConfig | None = None  # budget for a sequence's keys and values; None to keep all
    page_budget: int | None = None  # maximum tokens in the pages that an output token chooses; None if it sees all
    tenant_weights: tuple[tuple[str, float], ...] = ()  # tenants with weights other than 1
    targets: tuple[tuple[int | None, float, float], ...] = ()  # per-class targets: see `Policy`
    max_drafts: int = 0  # maximum tokens that a row accepts per round; 0 without speculative decoding
    num_spare_drafts: int = 0  # drafted tokens per row beyond those that it may accept, for token trees
    has_split_steps: bool = False  # True if plans may be split, for rows that wait for tokens
    pools: bool = False  # True if requests end after their prompts (pooling)
    count_expert_tokens: bool = False  # True if steps count the tokens per expert
    num_data_shards: int = 1  # equal data-parallel shards of slots, pages and step tokens
    max_loras: int = 0  # maximum LoRA adapters on the devices; 0 without adapters
    num_encoder_rows: int = 0  # capacity of the encoder cache in image embeddings; 0 without images
    encoder_costs: tuple[tuple[int, int], ...] = ()  # by encoder program: patches, and tokens with as many FLOPs
    num_encoder_layers: int = 1  # layers of the vision tower, between which encoding can stop
    sees_images: bool = False  # True if tokens of an image see the whole image, which one step computes
    has_position_axes: bool = False  # True if tokens of images have positions on several axes (M-RoPE)
    score_costs: tuple[tuple[int | None, float], ...] = ()  # by window: FLOPs per score in its layers, in tokens
    row_turns: int = 1  # plans in flight with different decoding rows; pipeline stages

    def __post_init__(self) -> None:
        _ = self.sparsity  # checks the budget
        if self.max_num_batched_tokens < self.max_num_seqs:
            own = [size // self.num_data_shards for size in (self.max_num_batched_tokens, self.max_num_seqs)]
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs so that all running requests fit one step, "
                f"got {own[0]} and {own[1]}; raise the first or lower the second"
            )

    @property
    def shard_config(self) -> ScheduleConfig:
        """Sizes of one shard."""
        count = self.num_data_shards
        return replace(
            self,
            max_num_seqs=self.max_num_seqs // count,
            max_num_batched_tokens=self.max_num_batched_tokens // count,
            num_pages=self.num_shard_pages,
            num_data_shards=1,
        )

    @property
    def program_config(self) -> ScheduleConfig:
        """The same config without options that affect no program: number of buckets, plan kinds, policy.

        Engines that differ only in these share their compiled programs.
        """
        return replace(
            self,
            max_num_batched_tokens=self.max_num_seqs,
            few_programs=False,
            has_split_steps=False,
            max_num_partial_prefills=DEFAULT_PARTIAL_PREFILLS,
            max_long_partial_prefills=DEFAULT_LONG_PREFILLS,
            long_prefill_token_threshold=0,
            tenant_weights=(),
            targets=(),
            max_loras=0,
            encoder_costs=(),
            num_encoder_layers=1,
            score_costs=(),
            row_turns=1,
        )

    @property
    def sizes_in_parts(self) -> tuple[int, ...]:
        """Patches of the vision tower's programs that cost more than a step's tokens, and are divided by layers."""
        if self.num_encoder_layers == 1:
            return ()
        budget = self.max_num_batched_tokens // self.num_data_shards
        return tuple(size for size, cost in self.encoder_costs if cost > budget)

    @property
    def smallest_chunk(self) -> int:
        """Time of a step, in prompt tokens, below which smaller steps are hardly faster."""
        return min(2 * FREE_TOKENS if self.few_programs else SMALLEST_ON_CPU, self.max_num_batched_tokens)

    @property
    def num_shard_pages(self) -> int:
        """Number of pages per shard, and thus in each device's pool."""
        return self.num_pages // self.num_data_shards

    @property
    def max_total_tokens(self) -> int:
        """Maximum prompt and output tokens per request; a pooled vector counts as one output token."""
        return self.max_model_len + self.pools

    @property
    def max_nodes(self) -> int:
        """Maximum tokens drafted for a row in a round."""
        return self.max_drafts + self.num_spare_drafts

    @property
    def policy(self) -> Policy:
        """Policy that orders requests and divides a step's tokens.

        Without a threshold, prompts longer than the token budget are long, and their chunks have half the budget.
        """
        budget, threshold = self.max_num_batched_tokens, self.long_prefill_token_threshold
        return Policy(
            reserved_prefill_tokens(budget),
            self.max_num_partial_prefills,
            self.max_long_partial_prefills,
            long_threshold=threshold or budget,
            long_chunk=threshold or max(budget // 2, 1),
            weights=self.tenant_weights,
            targets=self.targets,
        )

    @cached_property
    def sparsity(self) -> Sparsity | None:
        """Rule by which output tokens see fewer keys and values; None if they see all."""
        if self.eviction is not None:
            return resolve_eviction(self.eviction, self.page_size, self.max_model_len)
        if self.page_budget is not None:
            return resolve_choice(self.page_budget, self.page_size, self.max_model_len)
        return None

    @cached_property
    def kv_groups(self) -> KVGroups:
        """Layer groups that have pages of their own."""
        return KVGroups(self.page_size, self.windows, self.num_snapshots, self.sparsity)

    @property
    def num_state_entries(self) -> int:
        """Entries in the state pool: one per slot, followed by the snapshots."""
        return self.max_num_seqs + (self.num_snapshots or 0)

    @property
    def max_pages_per_row(self) -> int:
        """M, width of a KV group's page table."""
        return self.kv_groups.num_blocks(self.max_model_len)

    def num_rows(self, num_tokens: int) -> int:
        """Return R, the number of rows in a step with this token bucket: every row has at least one token."""
        return min(num_tokens, self.max_num_seqs)

    def buckets(self) -> tuple[int, ...]:
        """Return the token-axis sizes of the compiled programs, ascending: all up to 8, then with at most a quarter
        padding.

        On accelerators: 16, 64 and 256, with up to 15 tokens or three quarters padding; then two sizes per doubling,
        with at most a third.

        The criterion is how soon compiling a further size pays off. If it saves a fraction s of the step time, it pays
        off after compile_s / s seconds of steps that use it. On a CPU a program takes about a second to compile and
        step time grows with the number of tokens: a size that saves an eighth on average, like those above 8, pays off
        after 8 s. On an accelerator, compiling takes 10 to 30 s. Up to FREE_TOKENS, less padding saves no time, so more
        sizes would never pay off. Above, a size that saves a sixth pays off after one to three minutes, and further
        sizes would cost as much for half the gain.

        With several data-parallel shards, all shards have the same size.
        """
        count = self.num_data_shards
        top = self.max_num_batched_tokens // count
        next_size = _next_accelerator_size if self.few_programs else _next_cpu_size
        sizes = [min(MIN_FEW_TOKENS, top)] if self.few_programs else list(range(1, min(8, top) + 1))
        while sizes[-1] < top:
            sizes.append(min(next_size(sizes[-1]), top))
        return tuple(count * size for size in sizes)

    def max_steps(self, bucket: int, limit: int) -> int:
        """Return the maximum decode steps per dispatch, up to `limit`, of a program with `bucket` tokens per step."""
        return max(1, min(limit, MAX_STEP_TOKENS // self.num_rows(bucket)))

    def shapes(self, max_steps: int = 1) -> tuple[StepShape, ...]:
        """Return the shapes of all programs: plain, with drafts, and sampling late; each ascending.

        A plain program with at most one token per row runs several rounds if `max_steps` allows it. On CPUs it also
        runs single steps, because its loop has no measurable cost; an accelerator may synchronise with the host before
        each iteration, so it has a single-round program as well. Above SPECULATIVE_ROWS rows, a step computes so many
        tokens that drafts do not pay.
        """
        plain, sizes = list[StepShape](), self.buckets()
        max_rows = min(self.max_num_seqs, MULTI_STEP_ROWS) if self.few_programs else self.max_num_seqs
        for size in sizes:
            num_rounds = self.max_steps(size, max_steps) if size <= max(max_rows, sizes[0]) else 1
            if self.few_programs and num_rounds > 1:
                plain.append(StepShape(size))
            plain.append(StepShape(size, num_rounds))
        drafting = self._row_counts(min(self.max_num_seqs, SPECULATIVE_ROWS)) if self.max_drafts else ()
        late = self._row_counts(self.max_num_seqs) if self.has_split_steps else ()
        return (
            *plain,
            *(StepShape(size, self.max_rounds(size, max_steps), has_drafts=True) for size in drafting),
            *(StepShape(size, samples_late=True) for size in late),
        )

    def _row_counts(self, max_rows: int) -> tuple[int, ...]:
        """Return the row counts of programs for decoding rows, ascending; a program also runs fewer rows than that.

        Args:
            max_rows: last row count.
        """
        sizes = [self.num_data_shards * (MIN_FEW_TOKENS if self.few_programs else 1)]
        while sizes[-1] < max_rows:
            sizes.append(sizes[-1] * (4 if self.few_programs else 2))
        return tuple(min(size, max_rows) for size in sizes)

    def max_rounds(self, bucket: int, max_steps: int) -> int:
        """Return the maximum rounds per dispatch for a speculative program, which yield up to `max_steps` tokens."""
        return max(1, self.max_steps(bucket, max_steps) // (self.max_drafts + 1))

    def num_programs(self, max_steps: int) -> int:
        """Return the number of programs: one or two per shape, and two that admit requests and set a slot.

        Programs that set masks (structured output) and copy pages (beam search) are not counted.
        """
        return 2 + sum(1 + shape.samples_late for shape in self.shapes(max_steps))


def _next_cpu_size(size: int) -> int:
    """Return the bucket size after `size` on a CPU: at most a third larger, a multiple of 4, 16 or 64."""
    limit = (size + 1) * 4 // 3
    grain = 4 if limit < 64 else 16 if limit < 512 else 64
    return max(limit // grain * grain, size + 1)


def _next_accelerator_size(size: int) -> int:
    """Return the bucket size after `size` on an accelerator: four times as large, later 3/2 or 4/3 times."""
    if size < FREE_TOKENS:
        return 4 * size
    power = 1 << (size.bit_length() - 1)
    return 2 * power if size > power else 3 * power // 2


def resolve_schedule(
    config: EngineConfig,
    *,
    max_position: int,
    platform: str,
    page_size: int,
    num_pages: int,
    windows: tuple[int | None, ...] = (None,),
    has_states: bool = False,
    pools: bool = False,
    num_encoder_rows: int = 0,
    encoder_costs: tuple[tuple[int, int], ...] = (),
    num_encoder_layers: int = 1,
    score_costs: tuple[tuple[int | None, float], ...] = (),
    has_position_axes: bool = False,
    sees_images: bool = False,
) -> ScheduleConfig:
    """Return the sizes for a model and jax platform, with all defaults resolved.

    Args:
        config: engine options.
        max_position: longest sequence that the model supports.
        platform: jax platform.
        page_size: tokens per page.
        num_pages: pages in a device's pool.
        windows: sliding window per KV group.
        has_states: True if some layers are recurrent.
        pools: True if the model pools.
        num_encoder_rows: capacity of the encoder cache; 0 without images.
        encoder_costs: see `ScheduleConfig`.
        num_encoder_layers: see `ScheduleConfig`.
        score_costs: see `ScheduleConfig`.
        has_position_axes: True if tokens of images have positions on several axes.
        sees_images: True if tokens of an image see the whole image.

    Raises:
        ConfigError: the model does not support the options.
    """
    max_model_len = config.max_model_len or max_position
    if max_model_len > max_position:
        raise ConfigError(
            f"max_model_len must be at most the model's max_position_embeddings, got {max_model_len} and {max_position}"
        )
    max_num_seqs, budget = default_batch(config, on_cpu=platform == "cpu")
    sizes = (max_num_seqs, budget, max_model_len, page_size, num_pages * config.num_data_shards)
    return ScheduleConfig(
        *sizes,
        few_programs=platform != "cpu",
        max_logprobs=config.selected_logprobs,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        windows=windows,
        num_snapshots=default_snapshots(config, max_num_seqs) if has_states else None,
        eviction=config.eviction,
        page_budget=config.page_budget,
        tenant_weights=read_tenant_weights(config.tenant_weights),
        targets=read_targets(config.target_ttft_ms, config.target_itl_ms),
        max_drafts=config.speculation.max_drafts if config.speculation else 0,
        num_spare_drafts=config.speculation.num_spare_drafts if config.speculation else 0,
        pools=pools,
        count_expert_tokens=config.count_expert_tokens,
        num_data_shards=config.num_data_shards,
        score_costs=score_costs,
        row_turns=config.pipeline_parallel_size,
        max_loras=config.max_loras if config.enable_lora else 0,
        num_encoder_rows=num_encoder_rows,
        encoder_costs=encoder_costs,
        num_encoder_layers=num_encoder_layers,
        has_position_axes=has_position_axes,
        sees_images=sees_images,
    )


def default_snapshots(config: EngineConfig, max_num_seqs: int) -> int:
    """Return the number of state snapshots to keep: one per two sequences; none without prefix caching.

    With lower tiers, one per sequence, so that each row can be swapped out.
    """
    if not config.enable_prefix_caching:
        return 0
    return max_num_seqs if config.offloading_option else max(1, max_num_seqs // 2)


def default_batch(config: EngineConfig, *, on_cpu: bool) -> tuple[int, int]:
    """Return max_num_seqs and max_num_batched_tokens, summed over all data-parallel shards.

    The options count per shard. If only one is set, the other's default is chosen to suit it.
    """
    seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None:
        seqs = 64 if on_cpu else 256
        if budget is not None:
            seqs = max(1, min(seqs, budget - reserved_prefill_tokens(budget)))
    if budget is None:
        budget = max(512 if on_cpu else 2048, 2 * seqs)
    return seqs * config.num_data_shards, budget * config.num_data_shards
