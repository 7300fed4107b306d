"""Proposers that are right always, often or never: their checkpoints and configurations."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.speculation_config import SpeculationConfig
from tests import oracles
from tests.e2e.sizes import EOS, VOCAB_SIZE
from tests.oracles import has_torch

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROPOSERS = ("same", "other", "ngram", "tree", "medusa", "layer", "foreign")
ALL_PROPOSERS = (*PROPOSERS, "heads", "mtp")
TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 1, 0), (1, 0, 1)]


def few_in_ci(*chosen: str, values: tuple[Any, ...] = ()) -> list[Any]:
    """Return all proposers as parameters, each with further values; those that are not chosen are exhaustive tests."""
    marks: dict[str, Any] = {name: () if name in chosen else pytest.mark.exhaustive for name in ALL_PROPOSERS}
    return [pytest.param(name, *values, marks=mark, id=name) for name, mark in marks.items()]


def make_speculate(llama: Path, make_folder: Callable[[str], Path]) -> Callable[..., SpeculationConfig]:
    """Write what drafts for the checkpoint `llama`, and return configurations by the name of a proposer.

    The model as its own draft is nearly always right, another random one nearly never, look-ups now and then. A tree
    has a draft that is similar to the model, so that paths differ; a foreign draft is similar too, with other ids for
    the tokens. Medusa heads are near those that repeat the model's last token, in a tree that is wide, or as a chain
    ("heads"). EAGLE-3 and MTP layers are random too.
    """
    other = make_folder("draft")
    sizes = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": EOS, "num_hidden_layers": 1}
    checkpoints.write_checkpoint(other, "llama", seed=7, **sizes)
    similar = make_folder("similar")
    shutil.copytree(llama, similar, dirs_exist_ok=True)
    rng = np.random.default_rng(3)
    for path in similar.glob("*.safetensors"):
        arrays = load_file(path)
        noisy = {name: x + 0.3 * x.std() * rng.standard_normal(x.shape, np.float32) for name, x in arrays.items()}
        save_file(noisy, path)

    foreign = make_folder("foreign")
    write_with_other_ids(similar, foreign)
    heads = make_folder("heads")
    size = hidden_size(llama)
    write_heads(heads, size, lambda size: 0.3 * size**-0.5 * rng.standard_normal((size, size), np.float32), 8)

    layer, mtp = make_folder("layer"), make_folder("mtp")
    if has_torch:
        import draft_layers

        model = transformers.AutoModelForCausalLM.from_pretrained(llama)
        draft_layers.write_eagle3(layer, model, (0, 1, 2))
        draft_layers.write_mtp(mtp, model)

    def speculate(proposer: str, num_tokens: int = 3, **options: Any) -> SpeculationConfig:
        if proposer in ("mtp", "layer") and not has_torch:
            oracles.skip()
        if proposer == "ngram":
            options = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1} | options
        elif proposer == "medusa":
            tree = [(n,) for n in range(8)] + [(0, n) for n in range(8)] + [(0, 0, n) for n in range(8)]
            options = {"method": "medusa", "model": str(heads), "speculative_token_tree": tree} | options
        elif proposer == "heads":
            options = {"method": "medusa", "model": str(heads)} | options
        elif proposer == "mtp":
            options = {"method": "mtp", "model": str(mtp)} | options
        elif proposer == "layer":
            options = {"method": "eagle3", "model": str(layer)} | options
        elif proposer == "tree":
            options = {"model": str(similar), "speculative_token_tree": TREE} | options
        else:
            options = {"model": str({"same": llama, "other": other, "foreign": foreign}[proposer])} | options
        return SpeculationConfig(num_speculative_tokens=num_tokens, adaptive=False, **options)

    return speculate


def write_with_other_ids(source: Path, target: Path) -> None:
    """Write a checkpoint whose tokens have other ids, but for special ones; the last few are missing."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    order = [0, 1, *(2 + np.random.default_rng(0).permutation(len(vocab) - 2)).tolist()]
    tokenizer["model"]["vocab"] = {token: order[token_id] for token, token_id in vocab.items()}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    for path in target.glob("*.safetensors"):
        arrays = load_file(path)
        for name, array in arrays.items():
            if "embed_tokens" in name or "lm_head" in name:
                arrays[name] = np.empty_like(array)
                arrays[name][order] = array
        save_file(arrays, path)


def hidden_size(model: Path) -> int:
    """Return the width of a checkpoint's model."""
    size: int = json.loads((model / "config.json").read_text())["hidden_size"]
    return size


def write_heads(directory: Path, size: int, weight: Callable[[int], np.ndarray], num_heads: int = 4) -> None:
    """Write Medusa heads in the original layout, that share the model's matrix for the logits."""
    tensors = {f"{head}.0.linear.weight": weight(size) for head in range(num_heads)}
    tensors |= {f"{head}.0.linear.bias": np.zeros(size, np.float32) for head in range(num_heads)}
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    (directory / "config.json").write_text(json.dumps({"medusa_num_heads": num_heads, "medusa_num_layers": 1}))


def tokenizers_of(speculation: SpeculationConfig) -> dict[str, bool]:
    """Return options by which tokenizers are compared, where the draft model has one of its own."""
    return {"skip_tokenizer_init": "foreign" not in (speculation.model or "")}
