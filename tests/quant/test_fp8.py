"""Matrices rounded to float8 when they are loaded."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve import LLM, SamplingParams
from jaxserve.layers.weight_formats.fp8 import FORMAT, rounded, scales
from jaxserve.layers.weight_formats.packed import NativeMatrix
from jaxserve.layers.weight_formats.stored_matrix import StoredMatrix
from tests.checkpoints import reference_logits, write_checkpoint
from tests.e2e.sizes import SIZES
from tests.oracles import torch
from tests.parameters import mainly
from tests.random_runs import examples
from tests.soon_compiled import few_programs


@given(st.integers(0, 2**32 - 1), st.sampled_from(["normal", "wide", "zeros", "one large"]))
@settings(max_examples=examples(10))
def test_elements_are_those_that_torch_rounds_to(seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((5, 48)).astype(np.float32)
    if kind == "wide":
        rows *= np.exp2(rng.integers(-20, 20, rows.shape)).astype(np.float32)
    elif kind == "zeros":
        rows[2] = 0
    elif kind == "one large":
        rows[1, 7] = 1e6
    elements, scale = FORMAT.encode(rows, ())
    assert elements.dtype == ml_dtypes.float8_e4m3fn
    largest = np.abs(elements.astype(np.float32)).max(axis=1)
    np.testing.assert_array_equal(largest, np.where(np.abs(rows).max(axis=1) == 0, 0, 448))
    multiples = torch.from_numpy(rows) / torch.where(torch.from_numpy(scale) == 0, 1, torch.from_numpy(scale))
    wanted = multiples.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(elements.view(np.uint8), wanted)


def test_columns_are_rounded_as_in_their_rows() -> None:
    rows = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
    whole = rounded(rows, scales(rows))
    np.testing.assert_array_equal(rounded(rows[:, 8:16], scales(rows)).view(np.uint8), whole[:, 8:16].view(np.uint8))


def is_matrix(x: object) -> bool:
    return isinstance(x, StoredMatrix | NativeMatrix)


@pytest.mark.long
@pytest.mark.parametrize("family", mainly(["llama"], "olmoe"))
def test_an_engine_serves_it(tmp_path: Path, family: str) -> None:
    """Logits are near those of transformers with the float32 weights, and matrices take a byte per element."""
    model, ids = write_checkpoint(tmp_path, family), np.arange(3, 33)
    with few_programs():
        llm = LLM(str(tmp_path), skip_tokenizer_init=True, quantization="fp8", **SIZES)
    with llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        (output,) = llm.generate([{"prompt_token_ids": ids.tolist()}], params)
        leaves = [x for x in jax.tree.leaves(llm.params, is_leaf=is_matrix) if is_matrix(x)]
    assert leaves
    elements = [x.packed.weights if isinstance(x, NativeMatrix) else x.elements for x in leaves]
    routers = {"float32"} if family == "olmoe" and any(isinstance(x, NativeMatrix) for x in leaves) else set()
    assert {x.dtype.name for x in elements} == {"float8_e4m3fn", *routers}
    found = [max(x.logprob for x in each.values()) for each in output.prompt_logprobs[1:]]
    expected = torch.log_softmax(torch.tensor(reference_logits(model, ids)), -1).amax(-1).numpy()
    assert 0 < np.abs(found - expected[:-1]).mean() < 0.05
