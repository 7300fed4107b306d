"""Rotary frequencies against transformers, to an ulp or two: far positions multiply the error."""

import numpy as np
import pytest

from jaxserve.models.hf_config import read_rope
from tests.checkpoints import ROPES, build_config
from tests.oracles import torch

YARN = ROPES["yarn"]
VARIANTS = {
    **ROPES,
    "yarn_betas": {**YARN, "beta_fast": 24.0, "beta_slow": 2.0},
    "yarn_untruncated": {**YARN, "truncate": False, "factor": 3.0},
    "yarn_mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn_mscale_zero": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.0},
    "yarn_attention_factor": {**YARN, "attention_factor": 0.7},
    "llama3_8k": {**ROPES["llama3"], "original_max_position_embeddings": 8192},
}


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("theta", [1e4, 12345.6, 5e5, 1e7])
@pytest.mark.parametrize("head_dim", [6, 64, 128])
def test_frequencies(name, theta, head_dim):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = build_config("llama", head_dim=head_dim, rope_parameters={**VARIANTS[name], "rope_theta": theta})
    frequencies, factor = read_rope(config.to_dict()).frequencies(head_dim)
    with torch.no_grad():
        expected = LlamaRotaryEmbedding(config)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, expected.inv_freq.numpy(), rtol=4e-7, atol=0)
    assert factor == pytest.approx(expected.attention_scaling, rel=1e-12)
