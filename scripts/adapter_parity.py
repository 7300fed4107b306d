"""Compare LoRA adapters with PEFT: each variant on random tiny models of some families, all in one mixed batch.

    python scripts/adapter_parity.py                                # needs the test extra
    python scripts/adapter_parity.py --families llama --json out.json

Two families have a quantised base. For "llama, int8" each matrix is rounded to what blocks of int8 hold exactly, as
`quantization="int8"` stores it; "llama, GGUF" is a file of Q8_0 by the gguf package. PEFT has the same values.

For each pair it prints the largest difference in log probabilities of a prompt's tokens, and whether the greedy
continuation is the same. PEFT runs each adapter by itself, as it mixes none with DoRA or with experts.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_softmax

import parity
from jaxserve import LLM, LoRARequest, SamplingParams
from jaxserve.api.lora_request import LORA_EXTRAS

ROOT = Path(__file__).parent.parent
TOLERANCE, NUM_TOKENS = 1e-4, 8
MIN_LEN = 17  # with 16 tokens and less, transformers would use the short factors of phi3's LongRoPE
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLA = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    "qwen3": {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    "qwen3_moe": {"target_modules": ATTENTION},
    "deepseek_v3": {"target_modules": MLA},
    "phi3": {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    "llama, int8": {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    "llama, GGUF": {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
}
INT8_BLOCK, INT8_STEP = 64, 2.0**-10  # weights that share a scale, and the scale
SIZES: dict[str, dict[str, Any]] = {"qwen3_moe": {"num_hidden_layers": 2, "decoder_sparse_step": 1}}
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
VARIANTS: dict[str, dict[str, Any]] = {
    "rank 4": {"r": 4},
    "rank 64": {"r": 64},
    "rsLoRA": {"r": 8, "use_rslora": True},
    "patterns": {"r": 16, "rank_pattern": {"o_proj": 4}, "alpha_pattern": {"q_proj": 3}},
    "embeddings": {"r": 8, "target_modules": ["o_proj", "embed_tokens", "lm_head"]},
    "modules_to_save": {"r": 4, "modules_to_save": ["embed_tokens", "lm_head"]},
    "lora_bias": {"r": 4, "lora_bias": True},
    "use_dora": {"r": 8, "use_dora": True},
    "use_dora, embeddings": {"r": 8, "use_dora": True, "target_modules": ["o_proj", "embed_tokens", "lm_head"]},
    "trainable_tokens": {
        "r": 4,
        "trainable_token_indices": {"embed_tokens": [*range(3, 60)], "lm_head": [*range(9, 90)]},
    },
    "routed experts": {"r": 4, "target_parameters": PARAMETERS},
    "latents": {"r": 8, "target_modules": [*MLA, "kv_b_proj"]},
}
ONLY_IN = {"routed experts": ("qwen3_moe", "deepseek_v3"), "latents": ("deepseek_v3",)}


def variants(family: str) -> dict[str, dict[str, Any]]:
    """Return LoraConfig arguments by variant."""
    names = [name for name in VARIANTS if family in ONLY_IN.get(name, FAMILIES)]
    return {name: FAMILIES[family] | VARIANTS[name] for name in names}


def write_base(family: str, directory: Path) -> tuple[Any, dict[str, Any]]:
    """Write a family's base; return it as transformers has it, and the options with which jaxserve serves it."""
    from tests.checkpoints import write_checkpoint  # noqa: PLC0415 - the oracle needs torch
    from tests.oracles import torch  # noqa: PLC0415
    from tests.weights.gguf_files import write_gguf  # noqa: PLC0415

    if family == "llama, GGUF":
        model = write_gguf(directory / "model.gguf", "Q8_0")
        return model, {"model": str(directory / "model.gguf"), "dtype": "float32"}
    path, name = directory / "model", family.partition(",")[0]
    model = write_checkpoint(path, name, **SIZES.get(family, {}))
    if family != "llama, int8":
        return model, {"model": str(path)}
    for parameter in model.parameters():
        if parameter.ndim == 2:
            elements = torch.clamp(torch.round(parameter.data / INT8_STEP), -126, 126)
            elements[:, ::INT8_BLOCK] = 127  # the largest one in each block, which thus has this scale
            parameter.data = elements * INT8_STEP
    model.save_pretrained(path)
    return model, {"model": str(path), "quantization": "int8"}


def compare(family: str, directory: Path) -> dict[str, dict[str, Any]]:
    """Return the results by variant."""
    sys.path.insert(0, str(ROOT))
    from tests.adapters import greedy_ids, separate_logits, write_adapters  # noqa: PLC0415 - the oracle needs torch

    (model, base), configs = write_base(family, directory), variants(family)
    pefts = {name: write_adapters(copy.deepcopy(model), directory, {name: fields}) for name, fields in configs.items()}
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, model.config.vocab_size, MIN_LEN + index).tolist() for index in range(len(configs))]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=20)
    lora = {"enable_lora": True, "max_loras": len(configs), "max_lora_rank": 64, "lora_extras": LORA_EXTRAS}
    options: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 64, "compile_ahead": "minimal"}
    llm = LLM(skip_tokenizer_init=True, **base, **options, **lora)
    requests = [LoRARequest(name, 1, str(directory / name)) for name in configs]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False, lora_request=requests)
    results = {}
    for name, prompt, output in zip(configs, prompts, outputs, strict=True):
        expected = log_softmax(separate_logits(pefts[name], prompt, name), axis=-1)
        errors = [
            abs(entry.logprob - expected[position - 1, token_id])
            for position, table in enumerate(output.prompt_logprobs or ())
            for token_id, entry in (table or {}).items()
        ]
        same = greedy_ids(pefts[name], prompt, name, NUM_TOKENS) == output.outputs[0].token_ids
        results[name] = {"max_error": float(max(errors)), "same_ids": same}
    return results


def table(results: dict[str, parity.Results]) -> str:
    """Return the results as text, a row per variant and a column per family."""
    rows = [[name, *(parity.cell(found.get(name)) for found in results.values())] for name in VARIANTS]
    return parity.aligned([["", *results], *rows])


if __name__ == "__main__":
    sys.exit(parity.run("adapter_parity", __doc__, FAMILIES, compare, table, TOLERANCE))
