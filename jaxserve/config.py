"""EngineConfig: everything that can be set, every check, and the one bucket function.

No other file reads or sets the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, no_type_check

from jaxserve.errors import ConfigError
from jaxserve.policy import DEFAULT_LONG_PREFILLS, DEFAULT_PARTIAL_PREFILLS, Policy, prefill_share
from jaxserve.request import DEFAULT_MAX_LOGPROBS

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8",)
KV_DTYPES = (*DTYPES, "int8", "float8_e4m3fn")
_DTYPE_ALIASES = {"float": "float32", "half": "float16"}
_KV_DTYPE_ALIASES = {**_DTYPE_ALIASES, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
LARGEST_MAX_LOGPROBS = 1024  # a TPU finds them one by one; in the order of their ids, a whole vocabulary is no work
DEFAULT_MODEL = "default"  # the checkpoint shipped in weights/default
MAX_STEPS = 64  # of one dispatch, where the number is chosen by measurement
MAX_FIXED_STEPS = 1024
MAX_STEP_TOKENS = 1024  # that one dispatch may sample, of all rows: a program holds their log probabilities
MULTI_STEP_ROWS = 16  # of the one program of several rounds where programs are few
MIN_FEW_TOKENS = 16  # of the smallest step where programs are few: a tile of bfloat16 has as many rows
FREE_TOKENS = 256  # a step of fewer takes an accelerator hardly less time: it waits for the weights


DEFAULT_GPU_MEMORY_FRACTION = 0.75  # that XLA's client takes where nobody tells it
_MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@no_type_check  # it checks itself, and a wrong type must be a ConfigError in tests too
@dataclass(frozen=True)
class EngineConfig:
    """How to run a model. Names and meanings are vLLM's where it has them.

    Attributes:
        model: directory of a Hugging Face checkpoint; None loads the embedded default.
        tokenizer: directory of the tokenizer; None takes the model's.
        skip_tokenizer_init: work on token ids alone.
        dtype: dtype of weights and activations; "auto" is float32 on CPU and the checkpoint's on accelerators, where a
            float32 checkpoint is served in bfloat16.
        quantization: "int8" keeps the matrices as int8 with a float32 scale per 64 numbers or so, a quarter of the
            float32 memory; None as the numbers they are.
        kv_cache_dtype: keys and values in the pool; "auto" is `dtype`. "int8" and "fp8" (e4m3) have a float32 scale for
            every token and head.
        tensor_parallel_size: devices the model is split over, the first of those there are; it must divide the heads
            and the width of the feed-forward layers.
        data_parallel_size: replicas of the model, each on `tensor_parallel_size` devices of its own and with a pool of
            its own; a request goes to one that has room for it, best to one that has its prefix cached.
        max_model_len: longest prompt plus output; None is the model's own.
        max_num_seqs: most requests in one step, of each replica; None is 64 on CPU, 256 elsewhere, or as many as leave
            prompts their share of `max_num_batched_tokens`.
        max_num_batched_tokens: token budget of one step, of each replica; None is 512 on CPU, 2048 elsewhere, and at
            least twice `max_num_seqs`. While there is a prompt to compute, an eighth of it is kept for prompts: with
            fewer than 8/7 of `max_num_seqs`, rows in decode then take turns to miss a step.
        max_num_partial_prefills: most prompts that are computed in part at a time. While there are so many, a request
            starts only if all its tokens fit the step.
        max_long_partial_prefills: most long ones among them, at most `max_num_partial_prefills`. Requests with shorter
            prompts go past a long one that has to wait.
        long_prefill_token_threshold: a prompt with more tokens left to compute is long; while rows decode, a step
            computes no more than so many of it. 0 or None: more than `max_num_batched_tokens`, of which a step then
            computes half at most. Where no row decodes, a long prompt gets all that others leave.
        max_logprobs: most log probabilities per token that a request may ask for, at most 1024, or -1 for those of the
            whole vocabulary. Steps reserve room for so many: those of a whole vocabulary take much memory, and where a
            running request asks for any, each dispatch is then a single step.
        page_size: tokens per page of the KV pool; None is 16, on TPUs 16 to 128, the more the fewer bytes a token has
            on a device. Only full pages are shared.
        num_pages: size of the pool, of each replica; None sizes it from free memory.
        gpu_memory_utilization: share of the whole memory of each accelerator for weights, temporaries and the pool. On
            a GPU, XLA is told to take so much when jax starts; where jax runs already, or XLA_CLIENT_MEM_FRACTION says
            less, the pool gets less, and a warning says so.
        enable_prefix_caching: share pages between requests that begin alike.
        seed: seed of the weights where they are random, and of requests that bring none; None is 0.
        attention_backend: "auto", or the name of one backend of ragged_paged_attention.
        step_ahead: plan and dispatch a step before the tokens of the one before are read.
        multi_step: most decode steps in one dispatch, while no request waits that could join; 1 is off. "auto" measures
            whether several are faster, and lets no dispatch take longer than some 10 ms, of which a new request may
            have to wait for two; it is off with compile_ahead="minimal".
        compile_ahead: "all" compiles every bucket before the first request; "background" the smallest and the largest
            before, the others while serving; "minimal" only those two. A request uses the next larger bucket that is
            ready: it never compiles. On accelerators, where each takes long to compile, buckets are few: 16, 64 and 256
            tokens, then two for each doubling.
        forbid_compiles: raise if a step compiles anything (tests); otherwise it is counted.
        compilation_cache_dir: compiled programs between starts; "auto" is jaxserve/compiled in the user's cache
            directory, None is off. Whole programs take at most 1 GiB there, and each start cuts XLA's own files beside
            them to 1 GiB (but for a directory of your own). With many processes "auto" is off.
        event_log: file to record what decides all plans in, prompts included: at most 1 GiB of JSON lines, for each
            further replica one more. `python -m jaxserve.engine.event_log FILE` makes the plans again. None records
            nothing.

    Raises:
        ConfigError: a value is out of range or two do not fit together.
    """

    model: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_partial_prefills: int = DEFAULT_PARTIAL_PREFILLS
    max_long_partial_prefills: int = DEFAULT_LONG_PREFILLS
    long_prefill_token_threshold: int = 0
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    page_size: int | None = None
    num_pages: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    seed: int = 0
    attention_backend: str = "auto"
    step_ahead: bool = True
    multi_step: str | int = "auto"
    compile_ahead: str = "background"
    forbid_compiles: bool = False
    compilation_cache_dir: str | None = "auto"
    event_log: str | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> EngineConfig:
        """Refuse unknown names with the error that bad values get."""
        names = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(kwargs.keys() - names):
            raise ConfigError(f"unsupported engine options {unknown}; supported are {sorted(names)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "compilation_cache_dir", "event_log"):
            if not isinstance(getattr(self, name), str | os.PathLike | None):
                raise ConfigError(f"{name} must be a path, got {getattr(self, name)!r}")
            if getattr(self, name) is not None:
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        for name, aliases, dtypes in (
            ("dtype", _DTYPE_ALIASES, DTYPES),
            ("kv_cache_dtype", _KV_DTYPE_ALIASES, KV_DTYPES),
        ):
            object.__setattr__(self, name, aliases.get(getattr(self, name), getattr(self, name)))
            _check_choice(name, getattr(self, name), ("auto", *dtypes))
        _check_choice("quantization", self.quantization, (None, *QUANTIZATIONS))
        _check_choice("compile_ahead", self.compile_ahead, ("all", "background", "minimal"))
        object.__setattr__(self, "multi_step", _read_multi_step(self.multi_step))
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        for name in (
            "tensor_parallel_size",
            "data_parallel_size",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
        ):
            _check_positive(name, getattr(self, name))
        _check_max_logprobs(self.max_logprobs)
        for name in ("skip_tokenizer_init", "enable_prefix_caching", "step_ahead", "forbid_compiles"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be a bool, got {getattr(self, name)!r}")
        for name in ("seed", "long_prefill_token_threshold"):
            if getattr(self, name) is None:  # what vLLM takes for 0 too
                object.__setattr__(self, name, 0)
        _check_long_prefills(self)
        _check_seed(self.seed)
        if not isinstance(self.gpu_memory_utilization, int | float) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}")

    @property
    def max_steps(self) -> int:
        """Decode steps that one dispatch may have; 1 is off."""
        if self.multi_step == "auto":
            return 1 if self.compile_ahead == "minimal" else MAX_STEPS
        return int(self.multi_step)

    @property
    def model_path(self) -> Path:
        """Directory of the checkpoint."""
        return Path(self.model) if self.model is not None else embedded_model(DEFAULT_MODEL)

    @property
    def tokenizer_path(self) -> Path:
        """Directory of the tokenizer."""
        return Path(self.tokenizer) if self.tokenizer is not None else self.model_path

    @property
    def cache_dir(self) -> Path | None:
        """Where compiled programs are kept between starts."""
        if self.compilation_cache_dir == "auto":
            return user_cache_dir() / "compiled"
        return Path(self.compilation_cache_dir) if self.compilation_cache_dir else None


def user_cache_dir() -> Path:
    """Where what is expensive to compute or measure is kept between processes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve"


def xla_flags() -> str:
    """What the user tells XLA."""
    return os.environ.get("XLA_FLAGS", "")


def gpu_memory_fraction() -> float | None:
    """The share of a GPU's memory that the environment tells XLA's client to take; None where it does not."""
    name = next((name for name in _MEMORY_FRACTIONS if os.environ.get(name)), None)
    if name is None:
        return None
    value = os.environ[name]
    try:
        fraction = float(value)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise ConfigError(f"{name} must be a number in (0, 1], got {value!r}; unset it for gpu_memory_utilization")
    return fraction


@contextlib.contextmanager
def claiming_gpu_memory(fraction: float) -> Iterator[float]:
    """Have XLA's client take this share of a GPU's memory, if the environment does not say another; yields which.

    For the start of jax's backend, when XLA reads it for the rest of the process. Child processes do not inherit it.
    """
    told = gpu_memory_fraction()
    if told is not None:
        yield told
        return
    os.environ[_MEMORY_FRACTIONS[0]] = str(fraction)
    try:
        yield fraction
    finally:
        del os.environ[_MEMORY_FRACTIONS[0]]


def libtpu_args() -> str | None:
    """Return the user's options for libtpu."""
    return os.environ.get("LIBTPU_INIT_ARGS")


def leave_tpus_alone() -> None:
    """Have libtpu only compile: neither look for TPUs nor keep other processes from them. Before it is loaded."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def ray_address() -> str:
    """The Ray cluster that the environment names; else "local", for one on this machine that serves loopback alone.

    To be asked before Ray is imported: it reads what is set here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of calls to an actor that an earlier call has ended
    if address := os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # attempts to connect, of half a minute each; else 20
        return address
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # what keeps Ray to loopback, on Linux too
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # its own default, of which it warns where it is not said
    return "local"


def embedded_model(name: str) -> Path:
    """Directory of a checkpoint shipped with the package."""
    return Path(__file__).parent / "weights" / name


@dataclass(frozen=True)
class ScheduleConfig:
    """The numbers that scheduler, packing and compiled programs agree on; all resolved."""

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

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs so that all running requests fit one step, "
                f"got {self.max_num_batched_tokens} and {self.max_num_seqs}"
            )

    @property
    def policy(self) -> Policy:
        """Which request goes first, and how a step's tokens are shared."""
        return Policy.of(
            self.max_num_batched_tokens,
            self.max_num_partial_prefills,
            self.max_long_partial_prefills,
            self.long_prefill_token_threshold,
        )

    @property
    def max_pages_per_row(self) -> int:
        """M, width of the page table."""
        return -(-self.max_model_len // self.page_size)

    def num_rows(self, num_tokens: int) -> int:
        """R of a step whose token bucket is `num_tokens`: every row has a token."""
        return min(num_tokens, self.max_num_seqs)

    def buckets(self) -> tuple[int, ...]:
        """Token-axis sizes of the compiled programs, ascending: exact to 8, then at most a quarter of padding.

        Where programs are few: 16, 64 and 256, of which up to 15 tokens or three quarters are padding; then at most a
        third, by two sizes for each doubling.

        The criterion is how long a program must serve until it has paid for itself. One more size that saves a share s
        of the time of the steps that use it pays after compile_s / s seconds of such steps. On a CPU a program takes
        about a second to compile and a step's time grows with its tokens: a size that saves an eighth on average, as
        those beyond 8 do, pays after 8 s of steps of its size. An accelerator takes 10 to 30 s for a program, and up
        to FREE_TOKENS padding saves it nothing, so that more sizes would never pay; beyond, one that saves a sixth pays
        after one to three minutes, and those between would take as long again for half as much.
        """
        top, next_size = self.max_num_batched_tokens, _next_of_few if self.few_programs else _next_of_many
        sizes = [min(MIN_FEW_TOKENS, top)] if self.few_programs else list(range(1, min(8, top) + 1))
        while sizes[-1] < top:
            sizes.append(min(next_size(sizes[-1]), top))
        return tuple(sizes)

    def max_steps(self, bucket: int, limit: int) -> int:
        """Return the rounds that the program of a bucket may go, at most `limit`."""
        return max(1, min(limit, MAX_STEP_TOKENS // self.num_rows(bucket)))

    def multi_step_buckets(self, max_steps: int) -> tuple[int, ...]:
        """Return the buckets with a program for several rounds of decode: all that hold no more tokens than rows."""
        buckets = self.buckets()
        most = max(min(self.max_num_seqs, MULTI_STEP_ROWS) if self.few_programs else self.max_num_seqs, buckets[0])
        return tuple(size for size in buckets if size <= most and self.max_steps(size, max_steps) > 1)

    def step_buckets(self, max_steps: int) -> tuple[int, ...]:
        """Return the buckets that need a program of one round.

        Where programs are many, on CPUs, the program of several rounds runs single ones too: its loop costs them
        nothing that can be measured. An accelerator may have to ask the host before each round of a loop.
        """
        shared = () if self.few_programs else self.multi_step_buckets(max_steps)
        return tuple(size for size in self.buckets() if size not in shared)

    def num_programs(self, max_steps: int) -> int:
        """Return the number of programs: steps, and those that admit requests and set a slot."""
        return 2 + len(self.step_buckets(max_steps)) + len(self.multi_step_buckets(max_steps))


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
    config: EngineConfig, *, max_position: int, platform: str, page_size: int, num_pages: int
) -> ScheduleConfig:
    """Fill in what was left to default on a platform of jax; ConfigError where the model cannot do what was asked."""
    max_model_len = config.max_model_len or max_position
    if max_model_len > max_position:
        raise ConfigError(
            f"max_model_len must be at most the model's max_position_embeddings, got {max_model_len} and {max_position}"
        )
    max_num_seqs, budget = default_batch(config, on_cpu=platform == "cpu")
    sizes = (max_num_seqs, budget, max_model_len, page_size, num_pages)
    return ScheduleConfig(
        *sizes,
        few_programs=platform != "cpu",
        max_logprobs=config.max_logprobs,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
    )


def default_batch(config: EngineConfig, *, on_cpu: bool) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens, defaults filled in without contradicting what was given."""
    seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None:
        seqs = 64 if on_cpu else 256
        if budget is not None:
            seqs = max(1, min(seqs, budget - prefill_share(budget)))
    if budget is None:
        budget = max(512 if on_cpu else 2048, 2 * seqs)
    return seqs, budget


def _read_multi_step(value: object) -> str | int:
    if value == "auto":
        return "auto"
    steps = int(value) if isinstance(value, str) and value.isdecimal() else value  # a command line has strings
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MAX_FIXED_STEPS:
        raise ConfigError(f"multi_step must be 'auto' or an integer in [1, {MAX_FIXED_STEPS}], got {value!r}")
    return steps


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")


def _check_seed(seed: object) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be an integer in [0, 2**32), got {seed!r}")


def _check_long_prefills(config: EngineConfig) -> None:
    if config.max_long_partial_prefills > config.max_num_partial_prefills:
        raise ConfigError(
            "max_long_partial_prefills must be at most max_num_partial_prefills, "
            f"got {config.max_long_partial_prefills} and {config.max_num_partial_prefills}"
        )
    threshold = config.long_prefill_token_threshold
    if not isinstance(threshold, int) or isinstance(threshold, bool) or threshold < 0:
        raise ConfigError(f"long_prefill_token_threshold must be an integer of 0 or more, got {threshold!r}")


def _check_max_logprobs(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= LARGEST_MAX_LOGPROBS:
        raise ConfigError(
            f"max_logprobs must be an integer in [0, {LARGEST_MAX_LOGPROBS}], or -1 for the whole vocabulary, "
            f"got {value!r}"
        )


def _check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {list(choices)}, got {value!r}")
