"""EngineConfig: all engine options, and their checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, no_type_check

from jaxserve.api.chat_options import ChatOptions, read_template
from jaxserve.api.embedded import embedded_model
from jaxserve.api.kv_events_config import KVEventsConfig
from jaxserve.api.kv_store_config import ROLES, KVStoreConfig
from jaxserve.api.lora_request import LORA_EXTRAS
from jaxserve.api.option_checks import check_combinations
from jaxserve.api.option_values import read_max_images, read_object, read_targets, read_tenant_weights
from jaxserve.api.pooling_params import CLASSIFY, EMBED, read_pooler_config
from jaxserve.api.sampling_params import DEFAULT_MAX_LOGPROBS
from jaxserve.api.schema import (
    FILLED_PATH,
    FILLED_TEXT,
    PATH,
    SWITCH,
    FieldType,
    Schema,
    integer,
    list_of,
    number,
    one_of,
    unknown_names_message,
)
from jaxserve.api.sparsity_config import EvictionConfig, SparseAttentionConfig, read_budget
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.errors import ConfigError
from jaxserve.system.environment import user_cache_dir
from jaxserve.system.meter import METERS

DTYPES = ("float32", "bfloat16", "float16")
# Module of each weight format, by its name in `quantization`; not imported, as host modules never import jax.
WEIGHT_FORMATS: dict[str | None, str] = {
    None: "jaxserve.layers.weight_formats.plain",
    "int8": "jaxserve.layers.weight_formats.int8",
    "int4": "jaxserve.layers.weight_formats.int4",
    "fp8": "jaxserve.layers.weight_formats.fp8",
}
# Values of a checkpoint's quant_method, which `quantization` may also name, as in vLLM.
CHECKPOINT_FORMATS = ("auto-round", "awq", "compressed-tensors", "fp8", "gguf", "gptq", "modelopt", "mxfp4")
KV_DTYPES = (*DTYPES, "int8", "float8_e4m3fn", "int4")
_DTYPE_ALIASES = {"float": "float32", "half": "float16"}
_KV_DTYPE_ALIASES = {**_DTYPE_ALIASES, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
LARGEST_SELECTION = 1024  # log probabilities; a TPU selects them one by one, a whole vocabulary needs no selection
DEFAULT_MODEL = "default"  # the checkpoint shipped in weights/default
DEFAULT_DRAFTS = {  # folder of weights/ with its draft, by the method of speculative_config
    "draft_model": "default-draft",
    "medusa": "default-medusa",
    "eagle3": "default-eagle3",
}
MAX_FIXED_STEPS = 1024
MAX_STEPS = 64  # maximum steps in one dispatch with multi_step="auto"
DEFAULT_PARTIAL_PREFILLS = 2  # a long prompt, and the short prompt that is cut at the end of a step's budget
DEFAULT_LONG_PREFILLS = 1


@no_type_check  # tests pass wrong types, which __post_init__ must reject with a ConfigError
@dataclass(frozen=True)
class EngineConfig:
    """Engine options. Names and meanings are vLLM's if it has the same option.

    Attributes:
        model: directory of a Hugging Face checkpoint, or a GGUF file; None loads the embedded default.
        runner: "generate" serves text, "pooling" one vector per prompt: an embedding, or a classification head's
            outputs. "auto" pools if `convert` requests it, with a ...ForSequenceClassification or a decoder without a
            head, and if there are sentence-transformers files.
        convert: "embed" makes embeddings with any model, "classify" reads the head `score`; "auto" and "none" follow
            the checkpoint.
        pooler_config: pooling under vLLM's names, as a dict or as JSON: `pooling_type` LAST, MEAN or CLS, `normalize`,
            `use_activation`. Missing values come from the checkpoint, otherwise LAST and True.
        tokenizer: directory of the tokenizer, or a GGUF file; None takes the model's.
        skip_tokenizer_init: load no tokenizer, and take only token ids.
        generation_config: source of the sampling parameters that requests omit: "auto" is the model's
            generation_config.json, "vllm" none, anything else a directory with such a file.
        override_generation_config: parameters that replace these, as a dict or as JSON. max_new_tokens here also limits
            requests to a server.
        hf_overrides: fields of config.json to replace, as a dict or as JSON; an object for a nested configuration, such
            as text_config, replaces some of its fields. Or a function from transformers' configuration to another.
        chat_template: template for all chats instead of the tokenizer's: a file, or the text of a Jinja template.
        chat_template_content_format: format of message contents for the template. "auto" keeps lists of parts if the
            template reads lists, and otherwise joins their texts by newlines; "string" always joins them; "openai"
            turns every content into a list.
        special_tokens_as_text: encode special tokens in chat messages, such as `<|endoftext|>`, as text, so that only
            the chat template writes special tokens; by default they become special tokens.
        dtype: dtype of weights and activations; "auto" is the checkpoint's on accelerators, where a float32 checkpoint
            is served in bfloat16. On CPU activations are then float32, and matrices keep the checkpoint's dtype.
        quantization: "int8" and "int4" round matrices to 8 or 4 bits with a float32 scale per group of about 64
            elements, 0.27 and 0.14 times the float32 memory; "fp8" rounds matrices to e4m3 with a scale per row, and
            their inputs with a scale per token. None keeps `dtype`, or a quantised checkpoint's own scheme; so does the
            checkpoint's own `quant_method`, such as "awq" or "fp8".
        activation_quantization: "int8" rounds the inputs of matmuls with integer or fp4 weights to 8 bits, with a scale
            per token and weight group, or per token if a matrix row has one scale. It needs a CPU and its native
            kernels, whose integer arithmetic makes prefill faster. A checkpoint that specifies its activations keeps
            its own scheme; so do the other matrices, which stay as they are, and a draft model. None rounds nothing
            else.
        kv_cache_dtype: dtype of keys and values in the pool; "auto" is the activations'. "int8" and "fp8" (e4m3) add a
            bfloat16 scale per token and head; "int4" takes 36 bytes per 64 elements.
        tensor_parallel_size: number of devices that the model is split over, the first ones available; it must divide
            the heads and the width of the feed-forward layers.
        expert_parallel_size: number of equal groups of experts in a MoE model, on separate devices. Each group has
            `tensor_parallel_size / expert_parallel_size` devices, which split its experts; all other layers are split
            over all devices. It must divide `tensor_parallel_size` and the number of experts.
        enable_dp_attention: make attention data parallel over these device groups, as in SGLang: each shard has its
            own requests, and caches only their keys and values. If each device would otherwise hold all of an MLA
            cache, the pool holds `expert_parallel_size` times as many tokens per byte, but has fewer bytes: attention
            and MLPs, but not routed experts, are whole on each shard. A request goes to the shard with the least work,
            preferably one with its prefix cached. `max_num_seqs`, `max_num_batched_tokens` and `num_pages` apply per
            shard.
        pipeline_parallel_size: number of stages that the layers are divided into, each on its own
            `tensor_parallel_size` devices. Up to `pipeline_parallel_size + 1` steps with different requests are in
            flight. It must be at most the number of layers with attention.
        data_parallel_size: number of model replicas, each on devices of its own with its own pool;
            a request goes to a replica that can start it, preferably one with its prefix cached.
        max_model_len: maximum length of prompt plus output; None is the model's own.
        max_num_seqs: maximum requests in one step of each replica; None is 64 on CPU, 256 elsewhere, or fewer so that
            prompts keep their part of `max_num_batched_tokens`.
        max_num_batched_tokens: token budget for one step of each replica; None is 512 on CPU, 2048 elsewhere, and at
            least twice `max_num_seqs`. While there are prompts to compute, an eighth is reserved for them: with fewer
            than 8/7 of `max_num_seqs`, decoding rows then take turns to skip a step.
        max_num_partial_prefills: maximum number of partly computed prompts. At the limit, a request starts only if all
            its tokens fit the step.
        max_long_partial_prefills: maximum number of long prompts among them, at most `max_num_partial_prefills`.
            Requests with shorter prompts overtake a waiting long one.
        long_prefill_token_threshold: a prompt with more uncomputed tokens is long; while rows decode, a step computes
            at most this many of its tokens. 0 or None: prompts with more than `max_num_batched_tokens` left are long,
            and chunks are at most half of that. If no row decodes, a long prompt gets the rest of the step.
        max_logprobs: maximum log probabilities per token that a request may ask for; -1 is the whole vocabulary. Steps
            reserve memory for this number, from 1025 on for the whole vocabulary. That takes much memory, and while a
            running request asks for any log probabilities, each dispatch is then a single step.
        page_size: tokens per page of the KV pool; None is 16, on TPUs 16 to 128, more if a token has fewer bytes on a
            device. Only full pages are shared.
        num_pages: number of pages in each replica's pool; None sizes it from free memory.
        scheduling_policy: "fcfs" serves requests in order of arrival. "priority" serves lower `priority` numbers first,
            preempts running requests with higher ones if slots or pages are full, and serves equal ones in order of
            arrival. With both, tenants that requests name get equal service.
        tenant_weights: service of each tenant relative to others in its class, by name, as a dict or as JSON; 1 for
            others. Not with `enable_dp_attention`, which serves tenants equally within each shard.
        target_ttft_ms: target time from a request's arrival to its first token: a number, or numbers by `priority`, as
            a dict or as JSON. It needs target_itl_ms; if only that is given, it is 0.
        target_itl_ms: target time from each token to the next, likewise. Steps compute no more prompt tokens than
            decoding rows can wait for, by measured step times, but at least the part reserved for prompts; classes
            without a target do not limit them. None sets no targets.
        gpu_memory_utilization: fraction of each accelerator's memory for weights, temporaries and the pool. On a GPU,
            XLA allocates it when jax starts; if jax is already running, or XLA_CLIENT_MEM_FRACTION is lower, the pool
            is smaller, and a warning reports this.
        enable_prefix_caching: share pages between requests with a common prefix.
        kv_offloading_size: host memory in GiB in which each replica keeps pages that device memory has no capacity
            for. Pages are copied there when they are complete, and back when a prompt begins with their tokens. None is
            8 on accelerators, less with many replicas or on a machine with less than 64 GiB of memory, and 0 if another
            option or the model supports no pages there; 0 keeps none. On a CPU None is 0, as a larger pool
            (`num_pages`) is better.
        kv_offloading_path: directory in which cached pages are kept on disk, with one file per engine. Pages are copied
            there, after host memory if both are used, and back when a prompt begins with their tokens, also after a
            crash or in a later engine with the same weights and page layout. It holds keys and values of users'
            prompts, readable only by this user. None keeps no pages on disk.
        kv_offloading_disk_size: maximum size of each file in GiB; the least recently used pages are evicted.
        kv_store: directory, Redis server or engine in which engines with the same weights share cached pages: a URL, a
            KVStoreConfig, or its fields as a dict or as JSON. Pages are copied there after the other tiers, and found
            by the content of a prompt. A Redis server needs the extra `redis`. None shares none.
        kv_role: "kv_consumer" only reads pages from `kv_store`; "kv_producer" also writes them, and a router has it
            compute long prompts for others; "kv_both" reads and writes.
        max_saved_sessions: maximum number of conversations (`LLM.sessions`) that each owner of a key may have saved.
        saved_sessions_size: maximum total size of an owner's saved conversations in GiB; 1,000 tokens take about 6 KB.
        kv_eviction: budget for each sequence's keys and values: an EvictionConfig, or its fields as a dict or as JSON,
            such as {"method": "streaming_llm", "budget": 1024}; None keeps all. Outputs are then approximate once a
            sequence is longer than the budget; a prompt must fit the pool as a whole.
        sparse_attention: budget for the keys and values that each output token sees: a SparseAttentionConfig, or its
            fields as a dict or as JSON, such as {"method": "quest", "budget": 1024}; None for all. The pool holds all
            of them, and bounds of each page's keys. Outputs are then approximate for longer sequences.
        seed: seed for random weights, and for requests without a seed; None is 0.
        attention_backend: "auto", or the name of one backend of ragged_paged_attention.
        linear_backend: "auto", or "xla" to make XLA compute all matmuls with weights, instead of the Pallas kernels for
            GPUs and TPUs (for quantised matrices and experts) and the native kernels for CPUs.
        step_ahead: plan and dispatch a step before the tokens of the previous step are read.
        count_expert_tokens: count the tokens per MoE expert and layer, in the step statistics.
        multi_step: maximum decode steps in one dispatch while no waiting request could join; 1 disables it. "auto"
            measures whether several are faster, and limits a dispatch to about 10 ms soon after a prompt, and to a
            fifth of the time since then or 40 ms later; a new request may have to wait for two. It is off with
            compile_ahead="minimal".
        compile_ahead: "all" compiles every bucket before the first request; "background" compiles the largest first,
            then the smallest, on accelerators both together, and the others while serving, after 5 s or when 8 steps
            have lacked one, so that a short run compiles nothing else; "minimal" compiles only those two. A request
            uses the next larger bucket that is ready and never waits for a compilation. On accelerators, where
            compilation is slow, buckets are few: 16, 64 and 256 tokens, then two per doubling.
        forbid_compiles: raise if a step compiles anything (tests); otherwise it is counted.
        compilation_cache_dir: directory for cached executables; "auto" is jaxserve/compiled in the user's cache
            directory, None disables caching. Executables take at most 1 GiB, and each start trims XLA's own cache files
            to 1 GiB, except in a directory that the user has named. With several processes "auto" disables caching.
        speculative_config: speculative decoding: a SpeculationConfig, or its fields under vLLM's names, as a dict or as
            JSON; None drafts no tokens. Outputs stay the model's.
        enable_lora: serve LoRA adapters, which requests choose; see `LoRARequest`.
        max_loras: maximum adapters on the devices, in memory allocated at the start. Requests with others wait until a
            slot has no rows; then the adapter that started least often of late is replaced, which compiles nothing.
        max_lora_rank: maximum rank of adapters. Smaller ranks take the same memory and time.
        lora_extras: features of adapters, beyond factors of the layers' matrices, that have memory in each slot:
            "embeddings" for factors of embedding and output projection, "modules_to_save" for whole matrices in their
            place, "lora_bias" for biases, "use_dora" for magnitudes of rows (DoRA),
            "experts" for factors of routed experts, "latents" for factors of MLA's `kv_b_proj`, "trainable_tokens" for
            the rows of up to 256 tokens in embedding and output projection.
        max_cpu_loras: maximum adapters in host memory, at least `max_loras`, including idle ones. Beyond that, the
            least recently used idle adapters are dropped, and read from their directories again. None keeps all.
        encoder_cache_size: maximum embeddings of images in device memory; the least recently used ones are replaced.
            An image with more is refused. None keeps at least 8,192.
        limit_mm_per_prompt: maximum number of images per prompt, {"image": N}, as a dict or as JSON; None for 999.
            {"image": 0} leaves the vision tower out, and serves only text. vLLM's {"image": {"count": N, "width": W,
            "height": H}} is accepted; its sizes have no effect.
        mm_processor_kwargs: image processor settings that replace the checkpoint's, as a dict or as JSON, such as
            {"max_pixels": 1000000}. Requests may have their own.
        mm_processor_cache_gb: host memory in GiB for preprocessed images, the least recently used ones being dropped.
        allowed_local_media_path: directory for images that requests name by file: URLs; empty for none.
        allowed_media_domains: host names of web servers for images that requests name by http: or https: URLs. Their
            addresses must be public, and redirects are errors. Without any, only data: URLs are loaded.
        engine_process: run scheduler and model in a separate process; this one keeps tokenizer, texts and HTTP. Steps
            then do not wait for Python code that is busy with other work, but each needs a message between the
            processes. Not in runs over several processes.
        kv_events_config: publication of prefix cache changes over ZeroMQ, for routers: a KVEventsConfig, or its fields
            under vLLM's names, as a dict or as JSON. It sends token ids, unencrypted, to all who connect. Needs the
            extra `events`.
        event_log: file that records the scheduler's inputs, including prompts: at most 1 GiB of JSON lines, with one
            more file per further replica. `python -m jaxserve.core.event_log FILE` replays the plans. None records
            nothing.
        energy_meter: meter whose energy is distributed over requests: "rapl" for processors (by default, only root may
            read it), "nvml" for GPUs (extra: energy), or "auto" for the devices' meter if it can be read. Metrics and
            headers then have joules per request. None measures nothing.
        carbon_intensity: grams of CO2 per kWh of the machine's electricity; adds grams to joules. None if unknown.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
    """

    model: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    generation_config: str = "auto"
    override_generation_config: str | Mapping[str, Any] | None = None
    hf_overrides: str | Mapping[str, Any] | Callable[[Any], Any] | None = None
    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    special_tokens_as_text: bool = False
    runner: str = "auto"
    convert: str = "auto"
    pooler_config: str | Mapping[str, Any] | None = None
    dtype: str = "auto"
    quantization: str | None = None
    activation_quantization: str | None = None
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    enable_dp_attention: bool = False
    pipeline_parallel_size: int = 1
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
    scheduling_policy: str = "fcfs"
    tenant_weights: str | Mapping[str, float] | None = None
    target_ttft_ms: str | float | Mapping[int, float] | None = None
    target_itl_ms: str | float | Mapping[int, float] | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    kv_offloading_size: float | None = None
    kv_offloading_path: str | None = None
    kv_offloading_disk_size: float = 8.0
    kv_store: str | Mapping[str, Any] | KVStoreConfig | None = None
    kv_role: str = "kv_both"
    max_saved_sessions: int = 1000
    saved_sessions_size: float = 1.0
    kv_eviction: str | Mapping[str, Any] | EvictionConfig | None = None
    sparse_attention: str | Mapping[str, Any] | SparseAttentionConfig | None = None
    seed: int = 0
    attention_backend: str = "auto"
    linear_backend: str = "auto"
    step_ahead: bool = True
    count_expert_tokens: bool = False
    multi_step: str | int = "auto"
    compile_ahead: str = "background"
    forbid_compiles: bool = False
    compilation_cache_dir: str | None = "auto"
    speculative_config: str | Mapping[str, Any] | SpeculationConfig | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    lora_extras: Sequence[str] = ()
    max_cpu_loras: int | None = None
    encoder_cache_size: int | None = None
    limit_mm_per_prompt: str | Mapping[str, Any] | None = None
    mm_processor_kwargs: str | Mapping[str, Any] | None = None
    mm_processor_cache_gb: float = 4.0
    allowed_local_media_path: str = ""
    allowed_media_domains: Sequence[str] = ()
    engine_process: bool = False
    kv_events_config: str | Mapping[str, Any] | KVEventsConfig | None = None
    event_log: str | None = None
    energy_meter: str | None = None
    carbon_intensity: float | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> EngineConfig:
        """Raise ConfigError for unknown names, as for invalid values."""
        names = {f.name for f in dataclasses.fields(cls)}
        if unknown := kwargs.keys() - names:
            raise ConfigError(unknown_names_message("engine options", unknown, names))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _SCHEMA.check(self)
        _ = self.chat_options, self.generation_overrides, self.config_overrides, self.pooler_options
        _ = read_max_images(self.limit_mm_per_prompt), read_object("mm_processor_kwargs", self.mm_processor_kwargs)
        read_tenant_weights(self.tenant_weights)
        read_targets(self.target_ttft_ms, self.target_itl_ms)
        vars(self)["speculative_config"] = SpeculationConfig.from_value(self.speculative_config)
        vars(self)["kv_eviction"] = read_budget(EvictionConfig, self.kv_eviction)
        vars(self)["sparse_attention"] = read_budget(SparseAttentionConfig, self.sparse_attention)
        vars(self)["lora_extras"] = tuple(self.lora_extras)
        vars(self)["allowed_media_domains"] = tuple(self.allowed_media_domains)
        vars(self)["kv_store"] = KVStoreConfig.from_value(self.kv_store)
        vars(self)["kv_events_config"] = KVEventsConfig.from_value(self.kv_events_config)
        check_combinations(self)

    @property
    def chat_options(self) -> ChatOptions:
        """Chat options, with the text of the template."""
        template = None if self.chat_template is None else read_template(self.chat_template)
        return ChatOptions(template, self.chat_template_content_format, self.special_tokens_as_text)

    @property
    def offloading_option(self) -> str | None:
        """Name of the option that requests tiers below device memory; None without any."""
        if self.kv_offloading_path is not None:
            return "kv_offloading_path"
        if self.kv_store is not None:
            return "kv_store"
        return "kv_offloading_size" if self.kv_offloading_size else None

    @property
    def num_devices(self) -> int:
        """Number of devices of all replicas."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def keeps_pages(self) -> bool:
        """True if cached pages outlive the engine."""
        return self.kv_offloading_path is not None or self.kv_store is not None

    @property
    def store(self) -> KVStoreConfig | None:
        """Shared store of pages; None without one."""
        return KVStoreConfig.from_value(self.kv_store)

    @property
    def num_data_shards(self) -> int:
        """Number of data-parallel attention shards in a replica."""
        return self.expert_parallel_size if self.enable_dp_attention else 1

    @property
    def max_steps(self) -> int:
        """Maximum decode steps in one dispatch; 1 disables multi-step decode."""
        if self.multi_step == "auto":
            return 1 if self.compile_ahead == "minimal" or self.pipeline_parallel_size > 1 else MAX_STEPS
        return int(self.multi_step)

    @property
    def pooler_options(self) -> dict[str, Any]:
        """Given options in `pooler_config`."""
        return read_pooler_config(read_object("pooler_config", self.pooler_config))

    @property
    def generation_overrides(self) -> dict[str, Any]:
        """`override_generation_config` as a dict."""
        return read_object("override_generation_config", self.override_generation_config)

    @property
    def config_overrides(self) -> dict[str, Any] | Callable[[Any], Any]:
        """`hf_overrides` as a dict or function."""
        return self.hf_overrides if callable(self.hf_overrides) else read_object("hf_overrides", self.hf_overrides)

    @property
    def selected_logprobs(self) -> int:
        """Number of log probabilities that a step selects for each token; -1 if it returns the whole vocabulary."""
        return self.max_logprobs if self.max_logprobs <= LARGEST_SELECTION else -1

    @property
    def speculation(self) -> SpeculationConfig | None:
        """Speculative decoding options; None without it."""
        return SpeculationConfig.from_value(self.speculative_config)

    @property
    def eviction(self) -> EvictionConfig | None:
        """Budget for keys and values; None to keep all."""
        return read_budget(EvictionConfig, self.kv_eviction)

    @property
    def page_budget(self) -> int | None:
        """Maximum tokens in the pages that an output token chooses; None if it sees all."""
        choice = read_budget(SparseAttentionConfig, self.sparse_attention)
        return None if choice is None else choice.budget

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Publication of prefix cache changes; None without it."""
        return KVEventsConfig.from_value(self.kv_events_config)

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
        """Directory of cached executables as a path; None without caching."""
        if self.compilation_cache_dir == "auto":
            return user_cache_dir() / "compiled"
        return Path(self.compilation_cache_dir) if self.compilation_cache_dir else None


def _from_text(value: Any) -> Any:
    """Return a number that a command line gives as text; other values unchanged."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


_FIXED_STEPS = integer(1, MAX_FIXED_STEPS)
_SIZE = integer(1)
_PATHS = ("model", "tokenizer", "generation_config", "compilation_cache_dir", "event_log")
_MAX_GIB = 10**9  # whose bytes are a finite number
_OPTIONAL_SIZES = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages", "max_cpu_loras"),
    "encoder_cache_size",
)


def quantization_type() -> FieldType:
    """Return the type of the option `quantization`: a registered weight format, or a checkpoint's own format."""
    words = (
        f"one of {list(WEIGHT_FORMATS)}, or the format of a quantised checkpoint, of {', '.join(CHECKPOINT_FORMATS)}"
    )
    return one_of((*WEIGHT_FORMATS, *CHECKPOINT_FORMATS), words=words)


_SCHEMA = Schema(
    ConfigError,
    EngineConfig,
    {
        **{f.name: SWITCH for f in dataclasses.fields(EngineConfig) if isinstance(f.default, bool)},
        **{f.name: _SIZE for f in dataclasses.fields(EngineConfig) if type(f.default) is int},  # the others are below
        **dict.fromkeys(_PATHS, PATH.optional()),
        "kv_offloading_path": FILLED_PATH.optional(),
        **dict.fromkeys(_OPTIONAL_SIZES, _SIZE.optional()),
        "chat_template": FieldType("a path or the text of a template", PATH.holds).optional(),
        "runner": one_of(("auto", "generate", "pooling")),
        "convert": one_of(("auto", "none", EMBED, CLASSIFY)),
        "dtype": one_of(("auto", *DTYPES), _DTYPE_ALIASES),
        "kv_cache_dtype": one_of(("auto", *KV_DTYPES), _KV_DTYPE_ALIASES),
        "quantization": quantization_type(),
        "activation_quantization": one_of((None, "int8")),
        "long_prefill_token_threshold": integer(0).optional(int),  # None is 0, as in vLLM
        "max_logprobs": integer(-1, words="an integer of 0 or more, or -1 for the whole vocabulary"),
        "scheduling_policy": one_of(("fcfs", "priority")),
        "gpu_memory_utilization": number(0, 1, excludes_low=True),
        "kv_role": one_of(ROLES),
        "kv_offloading_size": number(0, _MAX_GIB).optional(),
        "kv_offloading_disk_size": number(0, _MAX_GIB, excludes_low=True),
        "max_saved_sessions": integer(1),
        "saved_sessions_size": number(0, _MAX_GIB, excludes_low=True),
        "seed": integer(0, 2**32 - 1).optional(int),
        "lora_extras": list_of(one_of(LORA_EXTRAS), f"a list with some of {list(LORA_EXTRAS)}"),
        "linear_backend": one_of(("auto", "xla")),
        "mm_processor_cache_gb": number(0),
        "allowed_local_media_path": PATH,
        "allowed_media_domains": list_of(FILLED_TEXT, "a list of host names"),
        "multi_step": FieldType(
            f"'auto' or {_FIXED_STEPS.words}",
            lambda value: value == "auto" or _FIXED_STEPS.holds(_from_text(value)),
            _from_text,
        ),
        "compile_ahead": one_of(("all", "background", "minimal")),
        "energy_meter": one_of((None, *METERS)),
        "carbon_intensity": number(0).optional(),
    },
)
