"""Bytes that LoRA adapters add to a compiled step."""

import jax.numpy as jnp

from jaxserve.execution.lowering import Lowering
from jaxserve.models import registry
from jaxserve.models.adapter_layout import AdapterLayout
from jaxserve.models.arch import ArchConfig
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.program import abstract_params
from tests.checkpoints import hf_dict

NUM_ROWS, RANK = 4, 16
DTYPE = jnp.dtype("float32")
SIZES = {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 2, "vocab_size": 512}
SIZES |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}


def step_bytes(arch: ArchConfig, adapters: AdapterLayout | None) -> float:
    """Return XLA's count for a decode step without the native kernels, whose bytes it leaves out."""
    schedule = ScheduleConfig(NUM_ROWS, 16, max_model_len=32, page_size=4, num_pages=8)
    params = abstract_params(arch, DTYPE)
    lowering = Lowering(arch, params, schedule, DTYPE, "xla", "xla", 1, adapters=adapters)
    return float(lowering.step(NUM_ROWS).compile().cost_analysis()["bytes accessed"])


def test_an_adapter_adds_its_factors_to_the_bytes_of_a_decode_step() -> None:
    """A step reads each slot's factors once, and activations are smaller than these."""
    arch = registry.from_hf_config(hf_dict("llama", **SIZES))
    plain, counts = step_bytes(arch, None), {}
    for num_slots in (1, 8):
        layout = AdapterLayout(num_slots, RANK, dtype=DTYPE.name, is_native=False, is_scanned=False)
        factors = sum(
            RANK * (each.spec.shape[1] + each.num_rows(part)) * DTYPE.itemsize
            for each in layout.specs(arch, arch)
            for part in each.parts
        )
        counts[num_slots] = (step_bytes(arch, layout) - plain) / (num_slots * factors)
    assert all(0.9 < count <= 2 for count in counts.values()), counts
