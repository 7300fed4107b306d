"""vLLM's options: accepted values, error messages, and the table in the documentation."""

import dataclasses
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.vllm_options import (
    GENERATE_ARGUMENTS,
    SAMPLING_ARGUMENTS,
    SERVER_OPTIONS,
    VLLM_OPTIONS,
    VllmOption,
    check_arguments,
    engine_options,
    markdown_table,
    server_options,
)
from jaxserve.errors import ConfigError, RequestError
from jaxserve.server.config import ServerConfig
from tests.vllm_defaults import ENGINE_ARGS, SAMPLING_PARAMS, SERVER_ARGS

# Options as scripts written for vLLM pass them: its defaults, and those that ask for what jaxserve does.
ACCEPTED: dict[str, Any] = {
    "trust_remote_code": False,
    "enforce_eager": True,
    "cpu_offload_gb": 0,
    "load_format": "safetensors",
    "revision": None,
    "tokenizer_mode": "auto",
    "enable_chunked_prefill": True,
    "disable_log_stats": False,
    "disable_custom_all_reduce": True,
    "distributed_executor_backend": None,
    "max_seq_len_to_capture": 8192,
    "decode_context_parallel_size": 1,
}
REFUSED = {
    "enforce_eager": (1, r"must be False or True or None, got 1: everything is compiled.*compile_ahead=\"minimal\""),
    "rope_theta": (1e6, "must be None, got 1000000.0: hf_overrides replaces fields"),
    "logprobs_mode": (
        "processed_logits",
        "must be 'raw_logprobs', got 'processed_logits': log probabilities",
    ),
    "nnodes": (2, "must be 1 or None, got 2: several processes are set up by jaxserve.distributed"),
    "load_format": ("dummy", "must be 'auto' or 'safetensors', got 'dummy'"),
    "revision": ("main", "must be None, got 'main': models are local directories"),
    "enable_chunked_prefill": (False, "must be True or None, got False"),
    "decode_context_parallel_size": (True, "must be 1, got True"),
    "cpu_offload_gb": (4, "all weights stay on the device"),
}


def test_options_that_match_jaxserves_behaviour_are_accepted() -> None:
    assert engine_options({**ACCEPTED, "max_num_seqs": 8}) == {"max_num_seqs": 8}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_options_are_rejected_by_name(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(ConfigError, match=f"^{name} .*{message}"):
        engine_options({name: value})


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("block_size", 32, "page_size"),
        ("num_gpu_blocks_override", 9, "num_pages"),
        ("async_scheduling", False, "step_ahead"),
    ],
)
def test_other_names_of_own_options(name: str, value: object, field: str) -> None:
    assert engine_options({name: value}) == {field: value}
    assert getattr(EngineConfig(**engine_options({name: value})), field) == value
    assert engine_options({name: None}) == {}
    with pytest.raises(ConfigError, match=f"{name} is called {field}.* got both"):
        engine_options({name: value, field: value})


def test_swap_space_is_host_memory_per_device() -> None:
    assert engine_options({"swap_space": 4}) == {"kv_offloading_size": 4}
    assert engine_options({"swap_space": 0, "kv_offloading_size": None}) == {"kv_offloading_size": 0}
    assert engine_options({"swap_space": None, "kv_offloading_size": 3}) == {"kv_offloading_size": 3}
    split = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "data_parallel_size": 3}
    assert engine_options({"swap_space": 0.5, **split}) == split | {"kv_offloading_size": 4}
    with pytest.raises(ConfigError, match="swap_space sets kv_offloading_size; pass one of them, got both"):
        engine_options({"swap_space": 4, "kv_offloading_size": 1})
    tiers = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}}
    for given in ({"swap_space": 4, "kv_transfer_config": tiers}, {"kv_transfer_config": tiers, "swap_space": 4}):
        first, last = given
        with pytest.raises(ConfigError, match=f"{last} sets kv_offloading_size, and so does {first}; pass one of them"):
            engine_options(given)
    for value in (-1, "4", True, float("nan")):
        with pytest.raises(ConfigError, match=f"swap_space must be a number of 0 or more, got {value!r}"):
            engine_options({"swap_space": value})
    with pytest.raises(ConfigError, match="kv_offloading_size must be None with sparse_attention, got 4"):
        EngineConfig(**engine_options({"swap_space": 4, "sparse_attention": {"method": "quest", "budget": 64}}))


def test_expert_parallelism_over_all_devices() -> None:
    options = engine_options({"enable_expert_parallel": True, "tensor_parallel_size": 4})
    assert EngineConfig(**options).expert_parallel_size == 4
    for given in ({"enable_expert_parallel": False, "tensor_parallel_size": 4}, {"enable_expert_parallel": True}):
        assert EngineConfig(**engine_options(given)).expert_parallel_size == 1
    with pytest.raises(ConfigError, match=r"enable_expert_parallel must be False or True, got 4"):
        engine_options({"enable_expert_parallel": 4})
    with pytest.raises(ConfigError, match=r"enable_expert_parallel sets .* got both"):
        engine_options({"enable_expert_parallel": True, "expert_parallel_size": 2})
    replicas = {"enable_expert_parallel": True, "tensor_parallel_size": 2, "data_parallel_size": 4}
    with pytest.raises(ConfigError, match=r"got 4: vLLM .* tensor_parallel_size=8, expert_parallel_size=4 and enable_"):
        engine_options(replicas)
    assert EngineConfig(**engine_options(replicas | {"enable_expert_parallel": False})).expert_parallel_size == 1
    with pytest.raises(ConfigError, match=r"expert_parallel_size must divide tensor_parallel_size.* got 3 and 4"):
        EngineConfig(tensor_parallel_size=4, expert_parallel_size=3)


def test_unknown_options_are_left_to_the_configuration() -> None:
    with pytest.raises(
        ConfigError, match=r"unsupported engine options \['max_num_seq'\] \(did you mean max_num_seqs\?\)"
    ):
        EngineConfig(**engine_options({"max_num_seq": 8}))
    assert EngineConfig(**engine_options({"seed": None})) == EngineConfig()


def test_arguments_of_calls() -> None:
    neutral = {"tokenization_kwargs": None, "mm_processor_kwargs": None}
    check_arguments(neutral, GENERATE_ARGUMENTS)
    with pytest.raises(RequestError, match=r"^tokenization_kwargs must be None or {}, got 5: the tokenizer has no"):
        check_arguments({"tokenization_kwargs": 5}, GENERATE_ARGUMENTS)
    with pytest.raises(RequestError, match=r"^unsupported argument continue_final_message"):
        check_arguments({**neutral, "continue_final_message": False}, GENERATE_ARGUMENTS)


NEUTRAL_SAMPLING: dict[str, Any] = {  # vLLM's defaults, and those of parameters that it had before
    option.name: SAMPLING_PARAMS.get(option.name) for option in SAMPLING_ARGUMENTS
}


def test_all_parameters_of_vllm_are_known() -> None:
    own = {field.name for field in dataclasses.fields(SamplingParams)}
    assert SAMPLING_PARAMS.keys() <= own | NEUTRAL_SAMPLING.keys()
    assert not own & NEUTRAL_SAMPLING.keys()
    for name, default in SAMPLING_PARAMS.items():
        assert SamplingParams(**{name: default}) == SamplingParams()


def test_all_options_of_vllms_engine_are_known() -> None:
    own = {field.name for field in dataclasses.fields(EngineConfig)}
    others = {option.name for option in VLLM_OPTIONS}
    assert ENGINE_ARGS.keys() <= own | others
    for name, default in ENGINE_ARGS.items():
        options = engine_options({name: default})
        assert name in own or not options, name
        EngineConfig(**options)


def test_all_options_of_vllms_server_are_known() -> None:
    own = {field.name for config in (ServerConfig, EngineConfig) for field in dataclasses.fields(config)}
    others = {option.name for option in SERVER_OPTIONS}
    assert set(SERVER_ARGS) <= own | others | {option.name for option in VLLM_OPTIONS}
    assert not own & others


@pytest.mark.parametrize("option", SERVER_OPTIONS, ids=lambda option: option.name)
def test_no_option_of_the_server_is_ignored(option: VllmOption) -> None:
    for value in option.accepts or (object, None, True):
        assert server_options({option.name: value, "port": 5}) == {"port": 5}
    if option.accepts is not None:
        with pytest.raises(ConfigError, match=f"^{option.name} must be .*, got {object}: .*; leave it out$"):
            server_options({option.name: object})


@pytest.mark.parametrize("name", [option.name for option in VLLM_OPTIONS if option.accepts is not None])
def test_no_option_is_ignored(name: str) -> None:
    """Whatever does not accept every value refuses one that nobody means, and says what to do."""
    (option,) = (option for option in VLLM_OPTIONS if option.name == name)
    if option.field is None and option.read is None:
        with pytest.raises(ConfigError, match=f"^{name} must be .*, got {object}: .*; leave it out$"):
            engine_options({name: object})


def test_neutral_sampling_parameters_are_accepted() -> None:
    params = SamplingParams(n=3, top_k=5, **NEUTRAL_SAMPLING)
    assert params == SamplingParams(n=3, top_k=5) == params.clone() == SamplingParams(n=3, top_k=5, best_of=3)


@pytest.mark.parametrize("option", SAMPLING_ARGUMENTS, ids=lambda option: option.name)
def test_other_values_of_them_are_refused_by_name(option: VllmOption) -> None:
    for value in (5, "json"):
        with pytest.raises(RequestError, match=rf"^{option.name} must be .*, got {value!r}: {option.behaviour}"):
            SamplingParams(n=2, **{option.name: value})


def test_the_table_has_every_option_once() -> None:
    names = [option.name for option in VLLM_OPTIONS]
    own = {field.name for field in dataclasses.fields(EngineConfig)}
    assert len(names) == len(set(names))
    assert not own & set(names)
    assert {option.field for option in VLLM_OPTIONS} - {None} <= own
    shared = [name for name in own if any(row.startswith(f"| `{name}` |") for row in markdown_table().splitlines())]
    assert len(shared) + len(names) == len(markdown_table().splitlines()) - 2
    rows = markdown_table().splitlines()
    for name in names:
        assert sum(row.startswith(f"| `{name}` |") for row in rows) == 1
    load_format = "safetensors, Orbax and GGUF are distinguished by their files"
    assert f"| `load_format` | 'auto' or 'safetensors' | {load_format} |" in rows
    assert all(row.count("|") == 4 for row in rows)
