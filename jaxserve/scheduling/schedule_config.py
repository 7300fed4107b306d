"""ScheduleConfig: sizes of steps and pool, and the bucket sizes of the programs of steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from jaxserve.api.config import DEFAULT_LONG_PREFILLS, DEFAULT_PARTIAL_PREFILLS, EngineConfig
from jaxserve.api.option_values import read_targets, read_tenant_weights
from jaxserve.api.sampling_params import DEFAULT_MAX_LOGPROBS
from jaxserve.errors import ConfigError
from jaxserve.scheduling.kv_cache.groups import KVGroups
from jaxserve.scheduling.policy import Policy, reserved_prefill_tokens
from jaxserve.scheduling.step_plan import StepShape

MAX_STEP_TOKENS = 1024  # most tokens sampled in one dispatch, over all rows: the program holds their log probabilities
MULTI_STEP_ROWS = 16  # largest bucket of the only multi-step program on accelerators
SPECULATIVE_ROWS = 64  # most rows of a step with drafted tokens
MIN_FEW_TOKENS = 16  # smallest bucket on accelerators: the rows of a bfloat16 tile
FREE_TOKENS = 256  # smaller steps are hardly faster on an accelerator, as they are bound by reading weights


@dataclass(frozen=True)
class ScheduleConfig:
    """Resolved sizes that the scheduler, packing and compiled programs share.

    Where rows are divided among shards, each with pages of its own, slots, tokens and pages are those of all shards.
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
    windows: tuple[int | None, ...] = (None,)  # sliding window of each KV group
    num_snapshots: int | None = None  # most snapshots of states; None where all layers have attention
    tenant_weights: tuple[tuple[str, float], ...] = ()  # weights of tenants, where these are not 1
    targets: tuple[tuple[int | None, float, float], ...] = ()  # targets of classes: see `Policy`
    max_drafts: int = 0  # most tokens that a row accepts in a round; 0 without speculative decoding
    num_spare_drafts: int = 0  # tokens drafted for a row beyond those that it may accept, if they are a tree
    has_split_steps: bool = False  # True if there are split plans, for rows that wait for tokens
    pools: bool = False  # True if requests end with their prompts
    count_expert_tokens: bool = False  # True if steps count the tokens of each expert
    num_data_shards: int = 1  # shards among which slots, pages and each step's tokens are divided equally

    def __post_init__(self) -> None:
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
        """The same without the choice and number of buckets, kinds of plans and policy, on which no program depends.

        Engines that differ in these alone share their compiled programs.
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
        )

    @property
    def num_shard_pages(self) -> int:
        """Pages of one shard, those of a device's pool."""
        return self.num_pages // self.num_data_shards

    @property
    def max_total_tokens(self) -> int:
        """Limit of a request's prompt and output, where a vector counts as a token of output."""
        return self.max_model_len + self.pools

    @property
    def max_nodes(self) -> int:
        """Most tokens drafted for a row in a round."""
        return self.max_drafts + self.num_spare_drafts

    @property
    def policy(self) -> Policy:
        """Scheduling policy: the order of requests and the division of a step's tokens."""
        return Policy.from_options(
            self.max_num_batched_tokens,
            self.max_num_partial_prefills,
            self.max_long_partial_prefills,
            self.long_prefill_token_threshold,
            self.tenant_weights,
            self.targets,
        )

    @cached_property
    def kv_groups(self) -> KVGroups:
        """Groups of layers with pages of their own."""
        return KVGroups(self.page_size, self.windows, self.num_snapshots)

    @property
    def num_state_entries(self) -> int:
        """Entries of the pool of states: one for each slot, then those of snapshots."""
        return self.max_num_seqs + (self.num_snapshots or 0)

    @property
    def max_pages_per_row(self) -> int:
        """M, width of the page table of a KV group."""
        return self.kv_groups.num_blocks(self.max_model_len)

    def num_rows(self, num_tokens: int) -> int:
        """Return R, the rows of a step whose token bucket is `num_tokens`: every row has at least one token."""
        return min(num_tokens, self.max_num_seqs)

    def buckets(self) -> tuple[int, ...]:
        """Return the token-axis sizes of the compiled programs, ascending: all up to 8, then at most a quarter padding.

        On accelerators: 16, 64 and 256, with up to 15 tokens or three quarters of padding; then two sizes per doubling,
        with at most a third.

        The criterion is the time after which compiling a further size pays off. A size that saves a share s of the time
        of the steps that use it pays off after compile_s / s seconds of such steps. On a CPU a program takes about a
        second to compile and the time of a step grows with its tokens: a size that saves an eighth on average, as those
        above 8 do, pays off after 8 s of steps of its size. For an accelerator, a program takes 10 to 30 s to compile.
        Up to FREE_TOKENS, less padding saves no time, so that more sizes would never pay off; above, a size that saves
        a sixth pays off after one to three minutes, and sizes in between would cost as much for half the gain.

        Where tokens are divided among shards, each has one of these sizes, the same for all.
        """
        count = self.num_data_shards
        top, next_size = self.max_num_batched_tokens // count, _next_of_few if self.few_programs else _next_of_many
        sizes = [min(MIN_FEW_TOKENS, top)] if self.few_programs else list(range(1, min(8, top) + 1))
        while sizes[-1] < top:
            sizes.append(min(next_size(sizes[-1]), top))
        return tuple(count * size for size in sizes)

    def max_steps(self, bucket: int, limit: int) -> int:
        """Return the most decode steps in one dispatch of a bucket's program, at most `limit`."""
        return max(1, min(limit, MAX_STEP_TOKENS // self.num_rows(bucket)))

    def shapes(self, max_steps: int = 1) -> tuple[StepShape, ...]:
        """Return the shapes of all programs: plain ones, those with drafts, those that sample late; each ascending.

        A plain program of no more tokens than rows goes several rounds if `max_steps` allows it. On CPUs it also runs
        single steps, as its loop has no measurable cost; an accelerator may have to synchronise with the host before
        each iteration, and has one of a single round beside it. Above SPECULATIVE_ROWS rows a step computes so many
        tokens that drafts do not pay.
        """
        plain, sizes = list[StepShape](), self.buckets()
        most = max(min(self.max_num_seqs, MULTI_STEP_ROWS) if self.few_programs else self.max_num_seqs, sizes[0])
        for size in sizes:
            num_rounds = self.max_steps(size, max_steps) if size <= most else 1
            if self.few_programs and num_rounds > 1:
                plain.append(StepShape(size))
            plain.append(StepShape(size, num_rounds))
        drafting = self._numbers_of_rows(min(self.max_num_seqs, SPECULATIVE_ROWS)) if self.max_drafts else ()
        late = self._numbers_of_rows(self.max_num_seqs) if self.has_split_steps else ()
        return (
            *plain,
            *(StepShape(size, self.max_rounds(size, max_steps), has_drafts=True) for size in drafting),
            *(StepShape(size, samples_late=True) for size in late),
        )

    def _numbers_of_rows(self, most: int) -> tuple[int, ...]:
        """Return numbers of rows, the last of them `most`, that are few: each holds the smaller ones' rows as well."""
        count = self.num_data_shards
        sizes = [count * (MIN_FEW_TOKENS if self.few_programs else 1)]
        while sizes[-1] < most:
            sizes.append(sizes[-1] * (4 if self.few_programs else 2))
        return tuple(min(size, most) for size in sizes)

    def max_rounds(self, bucket: int, max_steps: int) -> int:
        """Return the most rounds in one dispatch of a speculative program, which yield up to `max_steps` tokens."""
        return max(1, self.max_steps(bucket, max_steps) // (self.max_drafts + 1))

    def num_programs(self, max_steps: int) -> int:
        """Return the number of programs: those of steps, and the two that admit requests and set a slot.

        Those that set masks and copy pages, for forms and beams alone, are not counted.
        """
        return 2 + sum(1 + shape.samples_late for shape in self.shapes(max_steps))


def _next_of_many(size: int) -> int:
    limit = (size + 1) * 4 // 3
    grain = 4 if limit < 64 else 16 if limit < 512 else 64
    return max(limit // grain * grain, size + 1)


def _next_of_few(size: int) -> int:
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
) -> ScheduleConfig:
    """Resolve all defaults for a jax platform; ConfigError if the model does not support the options.

    Args:
        config: options of the engine.
        max_position: longest sequence of the model.
        platform: platform of jax.
        page_size: tokens per page.
        num_pages: pages in the pool of a device.
        windows: sliding window of each KV group.
        has_states: True if some layers have a state instead of attention.
        pools: True if the model pools.
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
        tenant_weights=read_tenant_weights(config.tenant_weights),
        targets=read_targets(config.target_ttft_ms, config.target_itl_ms),
        max_drafts=config.speculation.max_drafts if config.speculation else 0,
        num_spare_drafts=config.speculation.num_spare_drafts if config.speculation else 0,
        pools=pools,
        count_expert_tokens=config.count_expert_tokens,
        num_data_shards=config.num_data_shards,
    )


def default_snapshots(config: EngineConfig, max_num_seqs: int) -> int:
    """Return how many snapshots of states are kept: one for every other sequence; none without prefix caching."""
    return max(1, max_num_seqs // 2) if config.enable_prefix_caching else 0


def default_batch(config: EngineConfig, *, on_cpu: bool) -> tuple[int, int]:
    """Return max_num_seqs and max_num_batched_tokens, with defaults that are consistent with the given values.

    Options are those of each shard of the rows, results those of all shards.
    """
    seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None:
        seqs = 64 if on_cpu else 256
        if budget is not None:
            seqs = max(1, min(seqs, budget - reserved_prefill_tokens(budget)))
    if budget is None:
        budget = max(512 if on_cpu else 2048, 2 * seqs)
    return seqs * config.num_data_shards, budget * config.num_data_shards
