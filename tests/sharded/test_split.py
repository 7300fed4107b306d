"""Split of a model: heads of each device, possible splits, and messages for impossible ones."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.build import check_sizes
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.assembly.memory import build_schedule
from jaxserve.errors import ConfigError
from jaxserve.layers.sharding import held_heads, tensor_mesh
from jaxserve.models import registry
from jaxserve.models.layer_spec import MlpSpec
from jaxserve.scheduling.schedule_config import resolve_schedule
from tests.checkpoints import hf_dict


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 16))
def test_query_heads_meet_their_own_keys(num_kv_heads: int, group: int, num_devices: int) -> None:
    """Attention on a device takes its query heads in even groups, one for each of its KV heads."""
    num_heads = num_kv_heads * group
    assume(num_heads % num_devices == 0)
    copies = [head for index in range(num_devices) for head in held_heads(num_kv_heads, index, num_devices)]
    assert copies == sorted(copies)
    assert {copies.count(head) for head in range(num_kv_heads)} == {len(copies) // num_kv_heads}
    for index in range(num_devices):
        queries, keys = (held_heads(n, index, num_devices) for n in (num_heads, num_kv_heads))
        assert len(queries) * num_devices == num_heads
        assert [query // group for query in queries] == [k for k in keys for _ in range(len(queries) // len(keys))]


@given(st.integers(1, 12), st.integers(1, 16))
def test_no_more_copies_than_needed(num_heads: int, num_devices: int) -> None:
    count = len(held_heads(num_heads, 0, num_devices)) * num_devices
    assert not any(num_devices * n % num_heads == 0 for n in range(1, count // num_devices))
    assert (count == num_heads) == (num_heads % num_devices == 0)


def test_sizes_that_do_not_divide_are_refused() -> None:
    arch = registry.from_hf_config(hf_dict("llama", num_attention_heads=8, intermediate_size=100))
    with pytest.raises(ConfigError, match="must divide num_attention_heads, got 3 and 8"):
        arch.local(3)
    with pytest.raises(ConfigError, match="must divide intermediate_size, got 8 and 100; set it to a divisor of 4"):
        arch.local(8)
    assert arch.local(4).layers[0].mlp == MlpSpec(25)
    assert arch.local(1) is arch


@dataclass
class Device:
    """A device that reports its memory."""

    bytes_in_use: int
    bytes_limit: int = 10**9

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": self.bytes_in_use, "bytes_limit": self.bytes_limit}


def test_page_count_fits_the_fullest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    arch = registry.from_hf_config(hf_dict("llama", num_attention_heads=8, num_key_value_heads=4))

    def num_pages(num_devices: int, *bytes_in_use: int) -> int:
        config, local = EngineConfig(tensor_parallel_size=num_devices), arch.local(num_devices)
        devices = [Device(count) for count in bytes_in_use]
        return build_schedule(config, local, jnp.dtype("float32"), "xla", [(local, devices)]).num_pages

    alone = num_pages(1, 10**8)
    assert num_pages(4, 0, 10**8, 0, 0) == pytest.approx(4 * alone, rel=0.05)  # activations shrink as well
    assert num_pages(4, 0, 0, 0, 0) > num_pages(4, 0, 0, 0, 10**8)


def test_experts_that_cannot_be_divided_or_counted() -> None:
    arch = registry.from_hf_config(hf_dict("olmoe", num_experts=6, intermediate_size=6, num_attention_heads=8))
    with pytest.raises(ConfigError, match=r"expert_parallel_size must divide the number of experts, got 4 and 6"):
        arch.divided(4, 4)
    with pytest.raises(ConfigError, match=r"expert_parallel_size must be 1, as LlamaForCausalLM has no experts, got 2"):
        registry.from_hf_config(hf_dict("llama")).divided(2, 2)
    with pytest.raises(ConfigError, match=r"must divide intermediate_size of an expert x expert_parallel_size, got 8"):
        arch.divided(8, 2).local(8)
    with pytest.raises(ConfigError, match="count_expert_tokens must be False, as LlamaForCausalLM has no experts"):
        check_sizes(EngineConfig(count_expert_tokens=True), registry.from_hf_config(hf_dict("llama")))
    local = arch.divided(4, 2).local(4).experts
    assert local is not None
    assert (local.ffn_size, local.num_held, local.max_read(1), local.max_read(9)) == (3, 3, 2, 3)
    flops = [registry.flop_counts(arch.divided(2, n).local(2)).per_token for n in (1, 2)]
    assert flops[0] == flops[1], "on average over the devices"


def test_rows_that_cannot_be_divided() -> None:
    split: dict[str, Any] = {"tensor_parallel_size": 4, "expert_parallel_size": 2, "enable_dp_attention": True}
    with pytest.raises(ConfigError, match=r"got 1 share of 4 devices; set expert_parallel_size to tensor_par"):
        EngineConfig(enable_dp_attention=True, tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="data_parallel_size must be 1 with enable_dp_attention, got 2"):
        EngineConfig(**split, data_parallel_size=2)
    with pytest.raises(ConfigError, match="speculative_config must be None with enable_dp_attention"):
        EngineConfig(**split, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match=r"tenant_weights must be None with enable_dp_attention, got \{'a': 2"):
        EngineConfig(**split, tenant_weights={"a": 2})
    few = EngineConfig(**split, max_num_batched_tokens=16, max_num_seqs=32)
    with pytest.raises(ConfigError, match="got 16 and 32"):
        resolve_schedule(few, max_position=64, platform="cpu", page_size=16, num_pages=10)
    with pytest.raises(ConfigError, match="must be False for Qwen3NextForCausalLM, as rows of recurrent layers"):
        registry.from_hf_config(hf_dict("qwen3_next", num_experts=6)).divided(4, 2, 2)
    arch = registry.from_hf_config(hf_dict("olmoe", num_experts=6, intermediate_size=6, num_attention_heads=8))
    with pytest.raises(ConfigError, match=r"_size / expert_parallel_size must divide num_attention_heads, got 3 and 8"):
        arch.divided(6, 2, 2).local(6)
    local = arch.divided(2, 2, 2).local(2)
    assert (local.attention.num_heads, local.attention.num_kv_heads, local.vocab_size) == (8, 2, 66)
    assert local.experts is not None
    assert (local.experts.num_held, local.experts.ffn_size) == (3, 6)
    whole, halves = (registry.flop_counts(each) for each in (arch, local))
    assert (2 * halves.per_token, 2 * halves.per_score) == (whole.per_token, whole.per_score), "on average"


def test_more_devices_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"at most the number of devices, got 99 and \d+; .* virtual"):
        DrivenEngine(EngineConfig(tensor_parallel_size=99, skip_tokenizer_init=True))
    assert tensor_mesh(1) is None
