"""Options of speculative decoding: which are read, and how bad ones are refused."""

from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.generation_defaults import build_arch
from jaxserve.assembly.load_proposer import load_draft
from jaxserve.errors import ConfigError
from jaxserve.offline.llm import LLM
from tests.checkpoints import write_checkpoint
from tests.e2e.sizes import SIZES


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"method": "magic"}, "must be one of"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "integer in"),
        ({"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 9}, "prompt_lookup_min"),
        (
            {"method": "ngram", "lookup": 9},
            r"unsupported speculative_config .* supported keys are .*'prompt_lookup_max'",
        ),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 8}, "supported keys are"),
        (7, "must be a dict"),
        ({"num_speculative_tokens": 2}, "must name its draft model"),
        ({"method": "medusa"}, "must name its medusa heads"),
        ({"method": "eagle3"}, "must name its eagle3 heads"),
        ({"speculative_token_tree": [(0, 0)]}, "token tree must be"),
        ({"speculative_token_tree": "[(0,), (0"}, "token tree must be"),
        ({"speculative_token_tree": [(0,)], "num_speculative_tokens": 3}, "depth"),
        ({"speculative_token_tree": [(0,), (0, 0)], "num_speculative_tokens": 4}, "depth"),
        ({"speculative_token_tree": [(0,)], "method": "ngram"}, "needs a method"),
        ({"method": "ngram", "quantization": "int8"}, "quantization .* needs the method 'draft_model'"),
    ],
)
def test_bad_options_are_refused(llama: Path, config: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LLM(str(llama), speculative_config=config, **SIZES)


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"method": "ngram", "prompt_lookup_min": 7}, {"prompt_lookup_max": 7, "prompt_lookup_min": 7}),
        ({"method": "ngram", "prompt_lookup_max": 3}, {"prompt_lookup_max": 3, "prompt_lookup_min": 3}),
        ({"model": "[ngram]"}, {"method": "ngram", "model": None, "prompt_lookup_max": 5}),
        ({"method": "deepseek_mtp", "model": "a", "enforce_eager": False}, {"method": "mtp", "model": "a"}),
        ({"model": "a", "draft_tensor_parallel_size": 1, "use_heterogeneous_vocab": True}, {"method": "draft_model"}),
    ],
)
def test_options_are_read_as_vllm_reads_them(given: dict[str, Any], same: dict[str, Any]) -> None:
    config = SpeculationConfig.from_value(given)
    assert config is not None
    assert {name: getattr(config, name) for name in same} == same


def test_latents_draft_only_for_models_without_windows_in_all_layers(tmp_path: Path) -> None:
    for family in ("mistral", "gemma2", "deepseek_v2"):
        write_checkpoint(tmp_path / family, family)
    options = {"model": str(tmp_path / "deepseek_v2"), "num_speculative_tokens": 2}
    for family in ("mistral", "gemma2"):
        config = EngineConfig(str(tmp_path / family), speculative_config=options, skip_tokenizer_init=True)
        arch = build_arch(config)
        if family == "gemma2":
            assert load_draft(config, arch).arch is not None
            continue
        with pytest.raises(ConfigError, match=r"needs a model with full attention .* window of 9 tokens"):
            load_draft(config, arch)
