"""gpu_memory_utilization is a share of the whole GPU, as vLLM's is. The GPUs are made up."""

import logging

import jax
import pytest
from checkpoints import hf_dict
from jax._src import xla_bridge

from jaxserve.api.config import EngineConfig
from jaxserve.assembly import memory
from jaxserve.errors import ConfigError
from jaxserve.models import registry
from jaxserve.system.environment import gpu_memory_fraction, pinned_memory_gib

TOTAL = 80 * 2**30
ENVIRONMENT = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENVIRONMENT, PINNED):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(memory, "_claimed", {})
    monkeypatch.setattr(memory, "_claimed_pinned", {})


def pool_bytes(monkeypatch: pytest.MonkeyPatch, share: float, client: float, *, platform: str = "gpu") -> float:
    """The pool's memory where XLA's client has `client` of the device's."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    config = EngineConfig(gpu_memory_utilization=share, max_num_seqs=8)
    arch = registry.from_hf_config(hf_dict("llama"))
    stats = {"bytes_limit": int(TOTAL * client), "bytes_in_use": 0}
    kept = memory.activation_bytes(config, arch) + memory.slot_bytes(config, arch, on_cpu=False)
    return memory._free_bytes(config, arch, stats) + kept


def at_start(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Return the environment's setting when jax starts its backend."""
    seen: list[float | None] = []
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(jax, "default_backend", lambda: seen.append(gpu_memory_fraction()))
    return seen


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_xla_gets_the_memory_fraction_before_it_starts(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    seen = at_start(monkeypatch)
    memory.claim_memory(EngineConfig(gpu_memory_utilization=share))
    assert seen == [share]
    assert gpu_memory_fraction() is None, "child processes would inherit it"
    assert pool_bytes(monkeypatch, share, share) == pytest.approx(share * TOTAL)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_the_users_xla_memory_fraction_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0.5")
    seen = at_start(monkeypatch)
    memory.claim_memory(EngineConfig(gpu_memory_utilization=0.4))
    assert seen == [0.5]
    assert gpu_memory_fraction() == 0.5
    assert pool_bytes(monkeypatch, 0.4, 0.5) == pytest.approx(0.4 * TOTAL)


def test_pages_in_host_memory_raise_the_limit_of_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """XLA allows 64 GiB by default, which also hold its copies of other arrays."""
    seen: list[int | None] = []

    def start() -> str:
        seen.append(pinned_memory_gib())
        return "gpu"

    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(jax, "default_backend", start)
    memory.claim_memory(EngineConfig())
    assert seen == [None]
    memory.claim_memory(EngineConfig(kv_offloading_size=100.5, data_parallel_size=2))
    assert seen[1:] == [64 + 201, None]
    assert pinned_memory_gib() is None, "child processes would inherit it"
    assert not caplog.text
    monkeypatch.setenv(PINNED, "80")
    memory.claim_memory(EngineConfig(kv_offloading_size=96))
    assert "96.0 GiB of pinned host memory, but XLA's limit was 80 GiB" in caplog.text
    caplog.clear()
    memory.claim_memory(EngineConfig(kv_offloading_size=79))
    assert not caplog.text
    monkeypatch.setenv(PINNED, "")
    monkeypatch.setattr(memory, "_claimed_pinned", {})
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    memory.claim_memory(EngineConfig(kv_offloading_size=65))
    assert "limit was 64 GiB" in caplog.text
    assert "set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=129" in caplog.text
    monkeypatch.setenv(PINNED, "many")
    with pytest.raises(ConfigError, match="must be a number of GiB, got 'many'"):
        memory.claim_memory(EngineConfig(kv_offloading_size=1))


def test_a_backend_already_running_is_warned_of_with_figures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    memory.claim_memory(EngineConfig())
    assert gpu_memory_fraction() is None
    with caplog.at_level(logging.WARNING):
        assert pool_bytes(monkeypatch, 0.6, 0.75) == pytest.approx(0.6 * TOTAL)
        assert not caplog.text
        assert pool_bytes(monkeypatch, 0.9, 0.75) == pytest.approx(0.75 * TOTAL)
    assert "gpu_memory_utilization=0.9 of 80.0 GiB would be 72.0 GiB, but XLA took 60.0 GiB (0.75)" in caplog.text


def test_all_of_a_tpu_is_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool_bytes(monkeypatch, 0.9, 1.0, platform="tpu") == pytest.approx(0.9 * TOTAL)


def test_bounds_by_which_rows_choose_pages_are_kept_free() -> None:
    config = EngineConfig(max_num_seqs=8, max_model_len=64, page_size=8)
    arch = registry.from_hf_config(hf_dict("llama"))
    dense, sparse = (memory.activation_bytes(config, arch.with_page_budget(budget, 64)) for budget in (None, 32))
    assert sparse - dense == 4 * 8 * (64 // 8) * arch.kv_layout.pool.token_size
