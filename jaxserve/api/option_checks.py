"""Checks of engine options that depend on each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.api.lora_request import EMBEDDINGS, MODULES_TO_SAVE, TRAINABLE_TOKENS
from jaxserve.api.pooling_params import CLASSIFY, EMBED
from jaxserve.api.sparsity_config import COMPACTING
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.api.config import EngineConfig


def check_combinations(config: EngineConfig) -> None:
    """Raise ConfigError for options that contradict each other."""
    if config.runner == "generate" and config.convert in (EMBED, CLASSIFY):
        raise ConfigError(f"convert={config.convert!r} needs runner='pooling', got runner='generate'; drop one")
    if config.max_long_partial_prefills > config.max_num_partial_prefills:
        raise ConfigError(
            "max_long_partial_prefills must be at most max_num_partial_prefills, "
            f"got {config.max_long_partial_prefills} and {config.max_num_partial_prefills}"
        )
    _check_tiers(config)
    _check_sparsity(config)
    _check_adapters(config)
    _check_devices(config)


def _check_tiers(config: EngineConfig) -> None:
    """Check options about tiers below device memory."""
    for name in ("kv_offloading_disk_size", "max_saved_sessions", "saved_sessions_size"):
        if config.kv_offloading_path is None and (value := getattr(config, name)) != getattr(type(config), name):
            raise ConfigError(
                f"{name} needs kv_offloading_path, the directory of the pages, got only {value}; drop it, or name a "
                "directory"
            )
    if config.kv_store is None and config.kv_role != type(config).kv_role:
        raise ConfigError(f"kv_role needs kv_store, got only {config.kv_role!r}; name the store that engines share")
    if (option := config.offloading_option) is None:
        return
    _require(
        option,
        ("enable_prefix_caching", config.enable_prefix_caching, True),
        ("enable_dp_attention", config.enable_dp_attention, False),
    )


def _check_sparsity(config: EngineConfig) -> None:
    """Check options about tokens that see fewer keys and values."""
    # Draft models and layers keep keys and values of their own; drafted tokens would share one choice of pages.
    for name, methods in (("kv_eviction", (None, "ngram", "medusa")), ("sparse_attention", (None,))):
        if getattr(config, name) is None:
            continue
        _require_method(config, name, methods)
        if (option := config.offloading_option) is not None:
            _require(name, (option, getattr(config, option), None))
    if config.sparse_attention is not None:
        _require("sparse_attention", ("kv_eviction", config.kv_eviction, None))
    if config.eviction is not None and config.eviction.method in COMPACTING:
        method = f"the method {config.eviction.method!r} of kv_eviction"
        _require(method, ("enable_dp_attention", config.enable_dp_attention, False))


def _check_adapters(config: EngineConfig) -> None:
    """Check options about LoRA adapters."""
    if not config.enable_lora:
        for name in ("max_loras", "max_lora_rank", "lora_extras", "max_cpu_loras"):
            if (value := getattr(config, name)) != getattr(type(config), name):
                raise ConfigError(f"{name} needs enable_lora, got {value!r} without it; drop it, or set enable_lora")
        return
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        raise ConfigError(
            f"max_cpu_loras must be at least max_loras, got {config.max_cpu_loras} and {config.max_loras}; raise it"
        )
    _require(
        "enable_lora",
        ("kv_eviction", config.kv_eviction, None),
        ("sparse_attention", config.sparse_attention, None),
    )


def _check_devices(config: EngineConfig) -> None:
    """Check numbers of devices and shards, and options that shards do not support."""
    if config.tensor_parallel_size % config.expert_parallel_size:
        raise ConfigError(
            f"expert_parallel_size must divide tensor_parallel_size, the number of devices, got "
            f"{config.expert_parallel_size} and {config.tensor_parallel_size}; set it to a divisor",
            about=("expert_parallel_size", "tensor_parallel_size"),
        )
    if config.pipeline_parallel_size > 1:
        # All stages would have to move the entries of a tree's accepted nodes, which the last one finds.
        if config.speculation is not None and config.speculation.tree is not None:
            raise ConfigError(
                "speculative_token_tree must be None with a pipeline_parallel_size above 1, got "
                f"{config.speculation.tree.paths}; drop one"
            )
        _require(
            "a pipeline_parallel_size above 1",
            ("enable_dp_attention", config.enable_dp_attention, False),
            ("kv_eviction", config.kv_eviction, None),
            ("sparse_attention", config.sparse_attention, None),
            ("count_expert_tokens", config.count_expert_tokens, False),
        )
        if tables := {EMBEDDINGS, MODULES_TO_SAVE, TRAINABLE_TOKENS}.intersection(config.lora_extras):
            raise ConfigError(
                f"lora_extras must not have {sorted(tables)[0]!r} with a pipeline_parallel_size above 1, got "
                f"{[*config.lora_extras]}; drop one"
            )
        if config.multi_step not in ("auto", 1):
            raise ConfigError(
                f"multi_step must be 'auto' or 1 with a pipeline_parallel_size above 1, got {config.multi_step!r}; "
                "drop one"
            )
    if not config.enable_dp_attention:
        return
    if config.expert_parallel_size == 1:
        raise ConfigError(
            "enable_dp_attention needs an expert_parallel_size above 1, the number of shares of devices that have rows "
            f"of their own, got 1 share of {config.tensor_parallel_size} devices; set expert_parallel_size to "
            "tensor_parallel_size or another divisor of it above 1, or drop enable_dp_attention",
            about=("expert_parallel_size", "tensor_parallel_size"),
        )
    _require(
        "enable_dp_attention",
        ("data_parallel_size", config.data_parallel_size, 1),
        ("tenant_weights", config.tenant_weights or None, None),
        ("speculative_config", config.speculative_config, None),
    )


def _require(option: str, *others: tuple[str, object, object]) -> None:
    """Raise ConfigError for the first other option, given as (name, value, needed), that `option` does not support."""
    for name, value, needed in others:
        if value != needed:
            raise ConfigError(f"{name} must be {needed!r} with {option}, got {value!r}; drop one")


def _require_method(config: EngineConfig, option: str, supported: tuple[str | None, ...]) -> None:
    """Raise ConfigError unless `option` supports the method in `speculative_config`; None is no method."""
    method = None if config.speculation is None else config.speculation.method
    if method not in supported:
        raise ConfigError(
            f"the method in speculative_config must be in {supported} with {option}, got {method!r}; drop one"
        )
