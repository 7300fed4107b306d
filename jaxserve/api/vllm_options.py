"""vLLM's options and sampling parameters that jaxserve accepts in addition to its own.

Their values must match jaxserve's behaviour.

`python -m jaxserve.api.vllm_options` prints the table as Markdown.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.api.kv_transfer import read_kv_transfer
from jaxserve.api.schema import SWITCH, FieldType, is_one_of, number
from jaxserve.api.vllm_names import ANY_VALUE, OFF, SERVER, SWITCHES, UNSUPPORTED, Row
from jaxserve.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True)
class VllmOption:
    """A vLLM option that is not a field of EngineConfig.

    Attributes:
        name: vLLM's name.
        behaviour: clause that describes jaxserve's behaviour.
        accepts: values that match this behaviour; None accepts every value, as none changes results.
        field: EngineConfig field that takes the value; `accepts` is then ignored.
        switch: EngineConfig field whose value `field` gets if the option is True; if False, `field` keeps its default.
        read: returns the EngineConfig options that a value means beside all given options; `accepts` is then ignored.
    """

    name: str
    behaviour: str
    accepts: Sequence[Any] | None = ()
    field: str | None = None
    switch: str | None = None
    read: Callable[[object, Mapping[str, Any]], dict[str, Any]] | None = None

    @property
    def is_switch(self) -> bool:
        """True if the option is a flag without a value on vLLM's command line."""
        return self.name in SWITCHES or (self.name.startswith(("enable_", "disable_")) and self.field is None)

    @property
    def accepted(self) -> str:
        """Accepted values as text for errors and documentation."""
        if self.switch is not None:
            return "False or True"
        if self.field is not None:
            return f"any value of {self.field}"
        if self.read is not None:
            return "see there"
        if self.accepts is None:
            return "any"
        if isinstance(self.accepts, range):
            return f"{self.accepts.start} to {self.accepts.stop - 1}"
        return " or ".join(map(repr, self.accepts))

    @property
    def accepted_type(self) -> FieldType:
        """Type for the accepted values, with the behaviour as advice."""
        accepts = self.accepts
        holds = (lambda _: True) if accepts is None else (lambda value: is_one_of(value, accepts))
        return FieldType(self.accepted, holds, advice=f": {self.behaviour}")


def _options(*rows: Row) -> tuple[VllmOption, ...]:
    """Return an option for each name in table rows."""
    return tuple(VllmOption(name, behaviour, accepts) for behaviour, accepts, names in rows for name in names.split())


def _read_language_model_only(value: object, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option that vLLM's `language_model_only` means."""
    is_on = SWITCH.optional().read("language_model_only", value, ConfigError)
    return {"limit_mm_per_prompt": {"image": 0}} if is_on else {}


def _read_swap_space(value: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option that vLLM's `swap_space` means: GiB of host memory per device, for preempted requests."""
    size_gib = number(0).optional().read("swap_space", value, ConfigError)
    if size_gib is None:
        return {}
    sizes = [given.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
    return {"kv_offloading_size": size_gib * math.prod(size for size in sizes if isinstance(size, int))}


_NONE_OR_EMPTY: tuple[Any, ...] = (None, {})
_BOOLS = (False, True)
_ENGINE: Sequence[Row] = (
    # Model and tokenizer
    ("no code from a checkpoint is run; a model that needs it is refused", _BOOLS, "trust_remote_code"),
    ("models are local directories, which have no revisions", (None,), "revision"),
    ("no code from a checkpoint is ever run", (None,), "code_revision"),
    ("tokenizers are local directories, which have no revisions", (None,), "tokenizer_revision"),
    ("nothing is downloaded", None, "download_dir hf_token ignore_patterns"),
    ("tokenizer.json is read if there is one", ("auto", "hf"), "tokenizer_mode"),
    ("safetensors, Orbax and GGUF are distinguished by their files", ("auto", "safetensors"), "load_format"),
    ("config.json is read as Hugging Face writes it", ("auto", "hf"), "config_format"),
    ("config.json comes from the model's directory", (None,), "hf_config_path"),
    ("hf_overrides replaces fields of config.json", _NONE_OR_EMPTY, "rope_scaling"),
    ("hf_overrides replaces fields of config.json", (None,), "rope_theta"),
    ("models have one implementation", ("auto",), "model_impl"),
    ("the loader has no options", _NONE_OR_EMPTY, "model_loader_extra_config"),
    ("a progress bar is shown if loading takes long", _BOOLS, "use_tqdm_on_load"),
    ("loading needs no workers", (None,), "max_parallel_loading_workers"),
    ("has no effect offline", None, "served_model_name"),
    ("a model's sliding window is kept", (False,), "disable_sliding_window"),
    ("recurrent states are float32", ("auto", "float32"), "mamba_cache_dtype mamba_ssm_cache_dtype"),
    ("scales of a quantised KV cache are per token and head", (False,), "calculate_kv_scales"),
    # Tasks, adapters and other features
    ("runner and convert select the task", ("auto", "generate", None), "task"),
    ("prompts are text or token ids", (False,), "enable_prompt_embeds"),
    ("there are no logits processors", (None, []), "logits_processors"),
    ("there are no logits processors", (None,), "logits_processor_pattern"),
    ("llguidance is the only backend for structured outputs", _NONE_OR_EMPTY, "structured_outputs_config"),
    # Execution
    ("jax chooses the device; JAX_PLATFORMS selects it", ("auto",), "device"),
    (
        'everything is compiled, ahead of requests, to the same results; compile_ahead="minimal" starts soonest',
        (*_BOOLS, None),
        "enforce_eager",
    ),
    ("XLA compiles; compile_ahead decides when", _NONE_OR_EMPTY, "compilation_config"),
    ("compiled programs serve every length", None, "max_seq_len_to_capture"),
    ("long prompts are always computed in chunks", (True, None), "enable_chunked_prefill"),
    ("multi_step is the option for several steps in one dispatch", (1,), "num_scheduler_steps"),
    ("preempted requests are computed again, or read from a tier", (None, "recompute"), "preemption_mode"),
    ("all weights stay on the device", (0,), "cpu_offload_gb"),
    ("num_pages and gpu_memory_utilization size the KV cache", (None,), "kv_cache_memory_bytes"),
    ("every engine can sleep", _BOOLS, "enable_sleep_mode"),
    # Several devices
    ("sequences are not split over devices", (1,), "decode_context_parallel_size"),
    ("one process drives all its devices", (None, "uni"), "distributed_executor_backend"),
    ("XLA's collectives are used", _BOOLS, "disable_custom_all_reduce"),
    ("there are no Ray workers", (False,), "ray_workers_use_nsight"),
    ("there are no worker classes", ("auto",), "worker_cls"),
    # Logs
    ("llm.engine.stats has the statistics, which are never logged", _BOOLS, "disable_log_stats"),
    ("requests are not logged", (True,), "disable_log_requests"),
    ("requests are not logged", (False,), "enable_log_requests"),
    ("offline there are no traces", (None,), "otlp_traces_endpoint"),
    ("there are no traces", (None,), "collect_detailed_traces"),
)
VLLM_OPTIONS = (
    VllmOption("block_size", "is called page_size", field="page_size"),
    VllmOption(
        "kv_transfer_config",
        "'OffloadingConnector' with cpu_bytes_to_use and a secondary tier of type 'fs' sets kv_offloading_size and "
        "kv_offloading_path; 'ExampleConnector' with shared_storage_path sets kv_store and kv_role; 'NixlConnector' "
        "sets kv_role, and needs kv_store",
        read=lambda value, _: read_kv_transfer(value),
    ),
    VllmOption(
        "swap_space",
        "is GiB of host memory per device, for preempted requests and cached pages: sets kv_offloading_size to this "
        "times the devices of a replica",
        read=_read_swap_space,
    ),
    VllmOption("language_model_only", 'True sets limit_mm_per_prompt to {"image": 0}', read=_read_language_model_only),
    VllmOption("num_gpu_blocks_override", "is called num_pages", field="num_pages"),
    VllmOption("async_scheduling", "is called step_ahead, which is True by default", field="step_ahead"),
    VllmOption(
        "enable_expert_parallel",
        "sets expert_parallel_size to tensor_parallel_size; not with a data_parallel_size above 1",
        field="expert_parallel_size",
        switch="tensor_parallel_size",
    ),
    *_options(*_ENGINE),
    *_options(*((behaviour, None, names) for behaviour, names in ANY_VALUE.items())),
    *_options(*UNSUPPORTED),
)
_BY_NAME = {option.name: option for option in VLLM_OPTIONS}
SERVER_OPTIONS = _options(*SERVER)  # vLLM's server options that are not fields of ServerConfig


GENERATE_ARGUMENTS = _options(
    ("the tokenizer has no options", _NONE_OR_EMPTY, "tokenization_kwargs"),
    ("a prompt has its own mm_processor_kwargs", _NONE_OR_EMPTY, "mm_processor_kwargs"),
)

SAMPLING_ARGUMENTS = _options(  # SamplingParams arguments; best_of may also be `n`
    ("structured_outputs is the argument for the form of outputs", (None,), "guided_decoding"),
    ("there are no logits processors", (None, []), "logits_processors"),
    ("there are no plug-ins to read them", _NONE_OR_EMPTY, "extra_args"),
    ("as many completions are sampled as returned, n", (None,), "best_of"),
    ("log probabilities are a dict per token", (False,), "flat_logprobs"),
    ("the tokenizer's own spaces are kept", (True,), "spaces_between_special_tokens"),
    ("outputs have no watermark", (None, False), "watermarking _watermarking_skipped"),
    (
        "log probabilities are of the most likely tokens; logprobs=-1 returns all",
        (None,),
        "prompt_logprob_token_ids prompt_logprob_start logprob_token_ids",
    ),
    ("outputs are cumulative, and LLM.stream yields increments", (None, 0, 2), "output_kind"),
    ("outputs are streamed as they come", (None, 1), "stream_interval"),
    ("parameters are always copied", (False, True), "skip_clone"),
    ("it is computed, not given", (None, 0, set()), "output_text_buffer_length _all_stop_token_ids"),
    ("it is computed, not given", (None,), "_eos_token_id _bad_words_token_ids"),
    ("LLM.reset_prefix_cache and cache_salt keep a prompt from cached pages", OFF, "skip_reading_prefix_cache"),
    ("max_tokens bounds the whole output", (None,), "thinking_token_budget"),
    ("frequency_penalty discourages repetition", (None,), "repetition_detection"),
    ("routing is not returned", (None, 0), "routed_experts_prompt_start"),
    ("tokens are sampled", (None,), "trace_decode_token_ids"),
)


def check_arguments(given: Mapping[str, Any], accepted: Sequence[VllmOption]) -> None:
    """Raise RequestError unless the values of vLLM's arguments match jaxserve's behaviour."""
    by_name = {option.name: option for option in accepted}
    for name, value in given.items():
        if name not in by_name:
            raise RequestError(f"unsupported argument {name}; of vLLM's, these are accepted: {sorted(by_name)}")
        by_name[name].accepted_type.read(name, value, RequestError)


def _check_option(option: VllmOption, value: object) -> None:
    """Raise ConfigError unless jaxserve's behaviour matches this value."""
    if (problem := option.accepted_type.problem(option.name, value)) is not None:
        raise ConfigError(f"{problem}; leave it out")


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return EngineConfig options from vLLM's and EngineConfig's options.

    Raises:
        ConfigError: a vLLM option has an unsupported value, or an option is given under both names.
    """
    options = {
        name: value for name, value in given.items() if name not in _BY_NAME and not (value is None and name in _SHARED)
    }
    sources = {name: name for name in options}
    for option in (_BY_NAME[name] for name in given if name in _BY_NAME):
        value = given[option.name]
        if option.read is not None:
            meant = option.read(value, given)
            if both := sorted(meant.keys() & sources.keys()):
                source = sources[both[0]]
                also = "" if source == both[0] else f", and so does {source}"
                raise ConfigError(f"{option.name} sets {both[0]}{also}; pass one of them, got both")
            options |= meant
            sources |= dict.fromkeys(meant, option.name)
        elif option.field is None:
            _check_option(option, value)
        elif option.field in given:
            raise ConfigError(f"{option.name} {option.behaviour}; pass one of them, got both")
        elif option.switch is not None:
            if FieldType(option.accepted, SWITCH.holds).read(option.name, value, ConfigError):
                _check_single_replica(option, given)
                if option.switch in given:
                    options[option.field] = given[option.switch]
        elif value is not None:
            options[option.field] = value
    return options


def server_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ServerConfig options in `given`, which may also have vLLM's server options; these are only checked.

    Raises:
        ConfigError: a vLLM option has an unsupported value.
    """
    others = {option.name: option for option in SERVER_OPTIONS}
    for name, value in given.items():
        if name in others:
            _check_option(others[name], value)
    return {name: value for name, value in given.items() if name not in others}


def _check_single_replica(option: VllmOption, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for experts that vLLM would divide among several replicas' devices."""
    tensor, data = (given.get(name, 1) for name in ("tensor_parallel_size", "data_parallel_size"))
    if not isinstance(data, int) or not isinstance(tensor, int) or data <= 1:
        return
    raise ConfigError(
        f"{option.name} needs a data_parallel_size of 1, got {data}: vLLM divides the experts among the devices of all "
        "replicas, here each replica has all of them. To hold experts once beside attention that is data parallel, "
        f"give tensor_parallel_size={tensor * data}, expert_parallel_size={data} and enable_dp_attention; for replicas "
        "that each divide their experts, give data_parallel_size and expert_parallel_size"
    )


def markdown_table() -> str:
    """Return a Markdown table of vLLM's options and their treatment, for the documentation."""
    rows = [(name, "see EngineConfig", "the same option") for name in _SHARED]
    rows += [(option.name, option.accepted, option.behaviour) for option in VLLM_OPTIONS]
    lines = ["| vLLM's option | accepted | jaxserve |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {accepted} | {behaviour} |" for name, accepted, behaviour in rows)])


_SHARED = (  # EngineConfig fields with vLLM's name and meaning; None means the default
    *("model", "tokenizer", "skip_tokenizer_init", "dtype", "quantization", "kv_cache_dtype", "tensor_parallel_size"),
    *(
        "pipeline_parallel_size",
        "data_parallel_size",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_partial_prefills",
    ),
    *("max_long_partial_prefills", "long_prefill_token_threshold", "gpu_memory_utilization", "enable_prefix_caching"),
    *("kv_offloading_size", "limit_mm_per_prompt", "mm_processor_kwargs", "mm_processor_cache_gb"),
    *("allowed_local_media_path", "allowed_media_domains"),
    *("seed", "runner", "convert", "pooler_config", "hf_overrides", "generation_config", "override_generation_config"),
    *("max_logprobs", "scheduling_policy", "speculative_config", "attention_backend", "linear_backend"),
    *("kv_events_config", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras"),
)

if __name__ == "__main__":
    print(markdown_table())
