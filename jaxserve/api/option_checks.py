"""Checks of engine options that depend on each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.api.config import EngineConfig


def check_devices(config: EngineConfig) -> None:
    """Raise ConfigError for numbers of devices and shards that do not divide, or options that shards do not support."""
    if config.tensor_parallel_size % config.expert_parallel_size:
        raise ConfigError(
            f"expert_parallel_size must divide tensor_parallel_size, the number of devices, got "
            f"{config.expert_parallel_size} and {config.tensor_parallel_size}; set it to a divisor",
            about=("expert_parallel_size", "tensor_parallel_size"),
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
    for name, value, neutral in (
        ("data_parallel_size", config.data_parallel_size, 1),
        ("tenant_weights", config.tenant_weights or None, None),
        ("speculative_config", config.speculative_config, None),
    ):
        if value != neutral:
            raise ConfigError(
                f"{name} must be {neutral} with enable_dp_attention, got {value!r}: it is not supported; drop one"
            )


def check_adapters(config: EngineConfig) -> None:
    """Raise ConfigError for options about LoRA adapters without `enable_lora`, or that contradict each other."""
    if not config.enable_lora:
        for name in ("max_loras", "max_lora_rank", "max_cpu_loras"):
            if (value := getattr(config, name)) != getattr(type(config), name):
                raise ConfigError(f"{name} needs enable_lora, got {value!r} without it; drop it, or set enable_lora")
        return
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        raise ConfigError(
            f"max_cpu_loras must be at least max_loras, got {config.max_cpu_loras} and {config.max_loras}; raise it"
        )
    for name in ("enable_dp_attention", "kv_eviction", "sparse_attention"):
        if value := getattr(config, name):
            raise ConfigError(f"{name} must be {getattr(type(config), name)} with enable_lora, got {value!r}; drop one")
