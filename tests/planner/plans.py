"""Plans of models that come along, and the models' published sizes."""

import dataclasses
from typing import Any

from jaxserve import EngineConfig
from jaxserve.tools.planner.plan import Plan, make_plan
from jaxserve.tools.planner.targets import Target, parse_target

PARAMS = {  # millions of parameters, as published by the makers
    "llama-3.1-8b": 8030,
    "llama-3.1-70b": 70554,
    "llama-3.1-405b": 405853,
    "qwen3-32b": 32762,
    "mistral-7b-v0.3": 7248,
    "gemma-2-9b": 9242,
    "gemma-3-27b": 27009,
    "mixtral-8x7b": 46703,
    "qwen3-30b-a3b": 30532,
    "olmoe-1b-7b": 6919,
    "deepseek-v2-lite": 15706,
    "kimi-k2": 1026408,
    "glm-4.7-flash": 29943,
    "qwen3-next-80b-a3b": 79674,
    "qwen3.5-9b": 8954,
    "qwen3.5-27b": 26896,
    "qwen3.5-35b-a3b": 34661,
}
QUANTISED_PARAMS = {"deepseek-v3": 671026, "deepseek-v3.2": 671878, "gpt-oss-20b": 20910, "gpt-oss-120b": 116830}
GPT_PARAMS = {"gpt2": 124.44, "gpt2-xl": 1557.6, "gpt-neo-125m": 125.2, "gpt-neo-2.7b": 2651.3}
DENSE_PARAMS = {
    "gemma-4-31b": 30700,
    "gemma-4-26b-a4b": 25230,
    "afm-4.5b": 4619,
    "granite-3.1-3b-a800m": 3299,
    "granite-4.0-micro": 3403,
    "granite-4.0-h-micro": 3191,
    "granite-4.0-h-tiny": 6939,
    "granite-4.0-h-small": 32207,
    "command-r": 34981,
    "command-r7b": 8028,
    "glm-4-9b": 9400,
    "ministral-3-8b": 8490,
    "olmo-2-7b": 7299,
    "olmo-3-7b": 7298,
    "phi-2": 2780,
    "phi-4": 14659.5,
    "phi-4-mini": 3836,
    "pythia-6.9b": 6857,
    "seed-oss-36b": 36151,
    "smollm3-3b": 3075,
    "starcoder2-7b": 7174,
}
DTYPES = {**dict.fromkeys(GPT_PARAMS, "float32"), **dict.fromkeys(["command-r", "phi-2", "pythia-6.9b"], "float16")}
GPUS = [parse_target(name) for name in ("h200", "h200x2", "h200x4", "h200x8")]
TPUS = [parse_target(name) for name in ("v5e:4x4", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1")]
SUM_BYTES = 2 * 4096 * 2  # bytes per token of the two all-reduces of a layer


def plan_of(model: str, target: str | Target = "h200", **options: Any) -> Plan:
    target = parse_target(target) if isinstance(target, str) else target
    return make_plan(EngineConfig(model=model, tensor_parallel_size=target.num_devices, **options), target)


def with_memory(target: Target, memory_bytes: int) -> Target:
    assert target.sheet is not None
    return dataclasses.replace(target, sheet=dataclasses.replace(target.sheet, memory_bytes=memory_bytes))
