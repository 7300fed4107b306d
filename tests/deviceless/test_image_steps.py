"""Steps with image columns, compiled for chips with the layers of published models: in place, with few temporaries."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.assembly.memory import tree_bytes
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.program import StepCompiler, temp_bytes
from tests.vision_checkpoints import PUBLISHED

pytestmark = pytest.mark.deviceless

BFLOAT16, NUM_TOKENS, NUM_SEQS, NUM_ROWS = jnp.dtype("bfloat16"), 512, 32, 8192
BACKENDS = {"h200": "mosaic_gpu", "v6e:1x1": "mosaic_tpu"}
# Text parts with few layers.
TEXTS: dict[str, dict[str, Any]] = {
    "llava-1.5-7b": {
        "model_type": "llama",
        "vocab_size": 32064,
        "intermediate_size": 11008,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
    },
    "qwen2.5-vl-7b": {
        "vocab_size": 152064,
        "intermediate_size": 18944,
        "num_hidden_layers": 2,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "qwen3-vl-4b": {
        "vocab_size": 151936,
        "intermediate_size": 9728,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        "tie_word_embeddings": True,
    },
    "gemma-3-4b": {
        "vocab_size": 262208,
        "intermediate_size": 10240,
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        "rope_local_base_freq": 1e4,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
}


def read(name: str) -> ArchConfig:
    """Return a model with a published model's layers."""
    stem, vision, hidden_size = PUBLISHED[name]
    text = {"hidden_size": hidden_size, "max_position_embeddings": 8192, "dtype": "bfloat16", **TEXTS[name]}
    config = {"architectures": [f"{stem}ForConditionalGeneration"], "vision_config": vision, "text_config": text}
    return registry.from_hf_config(config, with_images=True)


def compile_step(target: Any, backend: str, arch: ArchConfig) -> tuple[jax.stages.Compiled, int]:
    """Return a step's program, and the bytes of the pool and the encoder cache."""
    axes = arch.images is not None and arch.images.has_axes
    images = {"num_encoder_rows": NUM_ROWS, "has_position_axes": axes, "sees_images": arch.sees_images}
    windows = {"windows": arch.kv_layout.windows}
    schedule = ScheduleConfig(NUM_SEQS, NUM_TOKENS, 4096, 64, 256, few_programs=True, **windows, **images)
    compiler = StepCompiler(target, schedule, BFLOAT16, BFLOAT16, backend)
    [program] = compiler.compile(arch, [NUM_TOKENS])
    state = compiler._lowering(arch).abstract_state
    return program, tree_bytes((state.kv_pages, state.encoder_cache))


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("qwen2.5-vl-7b", "h200"),
        ("qwen2.5-vl-7b", "v6e:1x1"),
        pytest.param("llava-1.5-7b", "h200", marks=pytest.mark.full),
        pytest.param("llava-1.5-7b", "v6e:1x1", marks=pytest.mark.full),
        pytest.param("qwen3-vl-4b", "h200", marks=pytest.mark.full),
        pytest.param("qwen3-vl-4b", "v6e:1x1", marks=pytest.mark.full),
        pytest.param("gemma-3-4b", "h200", marks=pytest.mark.full),
        pytest.param("gemma-3-4b", "v6e:1x1", marks=pytest.mark.full),
    ],
)
def test_steps_with_images_work_in_place(targets, name, chip):
    """Embeddings are gathered, and no copy of the encoder cache or the pool is made for them."""
    arch, backend = read(name), BACKENDS[chip]
    program, num_kept = compile_step(targets(chip), backend, arch)
    assert program.memory_analysis().alias_size_in_bytes >= num_kept
    widest = max(arch.images.tower.row_size, arch.hidden_size + 2 * arch.layers[0].mlp.ffn_size)
    logits = 8 * NUM_SEQS * arch.vocab_size * 4
    assert temp_bytes(program) <= 8 * NUM_TOKENS * widest * 4 + logits
