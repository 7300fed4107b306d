"""Temporaries of compiled programs: none is as large as a quarter of any weight, whatever holds the weights.

Programs are compiled from shapes, so that weights may be as large as they are in use. What a step computes of a few
tokens is small beside them; a matrix that is converted, transposed or sliced as a whole is not.
"""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.api.pooling_params import Pooler
from jaxserve.execution.lowering import Lower, Lowering
from jaxserve.execution.proposer import Proposer
from jaxserve.layers.weight_formats import packed, weight_format
from jaxserve.models import pooling_heads, registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from jaxserve.pallas_kernels import native
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.spec_decode.draft_model import DraftModel
from jaxserve.spec_decode.medusa import Medusa
from jaxserve.spec_decode.ngram import NGram
from jaxserve.tools.planner.program import abstract_params, temp_bytes
from tests.checkpoints import hf_dict

full = pytest.mark.full
pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason="the native kernels were not built")

ROWS, NUM_DRAFTS = 2, 3
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 16_384,
    "intermediate_size": 8192,
    "num_hidden_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 16,
    "head_dim": 128,
}
SOME = 4  # tokens of a step without rounds: more than there are rows
LARGE = 1 << 23  # elements of a matrix; its scales are fewer
SCHEDULE = ScheduleConfig(ROWS, 16, max_model_len=32, page_size=4, num_pages=8)

NewProposer = Callable[[ArchConfig, ScheduleConfig, str], tuple[Proposer, Params]]


def ngram(arch: ArchConfig, schedule: ScheduleConfig, dtype: str) -> tuple[Proposer, Params]:
    return NGram(NUM_DRAFTS, 4, 1), {}


def draft_model(arch: ArchConfig, schedule: ScheduleConfig, dtype: str) -> tuple[Proposer, Params]:
    """Return a draft model of the same sizes, whose matrices are bfloat16."""
    own = dataclasses.replace(arch, one_kv_group=True)
    params = abstract_params(own, jnp.dtype(dtype), matrix_dtype=jnp.dtype("bfloat16"), native=True)
    sizes = (NUM_DRAFTS, own, arch.vocab_size, schedule.program_config, dtype, attention(dtype))
    return DraftModel(*sizes, kv_group=0, chunk=16), params


def medusa(arch: ArchConfig, schedule: ScheduleConfig, dtype: str) -> tuple[Proposer, Params]:
    """Return heads with matrices of their own, in the dtype of activations."""
    V, D = arch.vocab_size, arch.hidden_size
    matrix = jax.ShapeDtypeStruct((D, D), jnp.dtype(dtype))
    blocks = [[{"weight": matrix}] for _ in range(NUM_DRAFTS)]
    params = {"blocks": blocks, "lm_heads": [jax.ShapeDtypeStruct((V, D), jnp.dtype(dtype))] * NUM_DRAFTS}
    return Medusa(NUM_DRAFTS, arch, V, schedule.max_num_seqs, dtype), params


def attention(dtype: str) -> str:
    """Return the backend of attention: the native one has no pools of float16."""
    return "xla" if dtype == "float16" else "native"


def lowering_of(
    arch: ArchConfig,
    dtype: str = "float32",
    *,
    matrices: str | None = None,
    quantization: str | None = None,
    linear: str = "auto",
    new_proposer: NewProposer | None = None,
) -> Lowering:
    """Return the programs of a model.

    Args:
        arch: sizes of the model.
        dtype: dtype of activations.
        matrices: dtype of matrices that are not quantised; that of activations by default.
        quantization: format of matrices.
        linear: backend of products, "auto" for the native kernels where they have the format, or "xla".
        new_proposer: function that returns a proposer of speculative decoding and its parameters.
    """
    own_dtype, matrix_dtype = jnp.dtype(dtype), jnp.dtype(matrices or dtype)
    is_native = linear == "auto" and packed.unsupported(weight_format(quantization), matrix_dtype) is None
    params = abstract_params(arch, own_dtype, quantization, matrix_dtype=matrix_dtype, native=is_native)
    drafts = NUM_DRAFTS if new_proposer else 0
    schedule = dataclasses.replace(SCHEDULE, windows=arch.kv_layout.windows, max_drafts=drafts, has_split_steps=True)
    if arch.state is not None:
        schedule = dataclasses.replace(schedule, num_snapshots=1)
    proposer, draft = new_proposer(arch, schedule, dtype) if new_proposer else (None, {})
    sizes = (arch, params, schedule, own_dtype, attention(dtype), linear, 4)
    return Lowering(*sizes, proposer=proposer, draft_shapes=draft)


def llama(*, tied: bool) -> ArchConfig:
    return registry.from_hf_config(hf_dict("llama", **SIZES, tie_word_embeddings=tied))


def programs(lowering: Lowering) -> dict[str, Lower]:
    """Return what lowers each kind of program, for few tokens."""
    if lowering.arch.pooler is not None:
        return {"pooling": partial(lowering.step, SOME)}
    compute, sample = lowering.split(ROWS)
    found: dict[str, Lower] = {
        "step": partial(lowering.step, SOME),
        "multi-step": partial(lowering.step, ROWS, lowering.max_steps),
        "one row": partial(lowering.step, 1, lowering.max_steps),
        "compute": compute,
        "sample": sample,
    }
    return found | ({"speculative": partial(lowering.speculative, ROWS, 2)} if lowering.proposer else {})


def check(lowering: Lowering, lower: Lower) -> None:
    """Compile a program; all its temporaries together must be smaller than a quarter of the smallest matrix."""
    leaves = jax.tree.leaves((lowering.param_shapes, lowering.draft_shapes))
    smallest = min(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.size >= LARGE)
    compiled = lower().compile()
    assert temp_bytes(compiled) < smallest // 4, largest_buffers(compiled)


def largest_buffers(compiled: jax.stages.Compiled) -> str:
    """Return the largest arrays that a program computes, for the message of a failure."""
    found = re.findall(
        r"= (\w+\[([\d,]+)\])\S* (?!parameter|get-tuple-element|bitcast)([\w-]+)\(", compiled.as_text() or ""
    )
    made = {(prod(map(int, sizes.split(","))), f"{kind} of {array}") for array, sizes, kind in found}
    return "; ".join(text for _, text in sorted(made, reverse=True)[:8])


CASES: list[Any] = [
    # As a 16-bit checkpoint is served by default.
    pytest.param("multi-step", True, {"matrices": "bfloat16"}, id="bfloat16"),
    pytest.param(
        "speculative",
        True,
        {"matrices": "bfloat16", "new_proposer": draft_model},
        id="draft-model",
        marks=pytest.mark.long,
    ),
    pytest.param("multi-step", False, {"quantization": "fp8"}, id="fp8"),
]


@pytest.mark.parametrize(("name", "tied", "options"), CASES)
def test_a_program_makes_no_copy_of_a_weight(name: str, tied: bool, options: dict[str, Any]) -> None:
    lowering = lowering_of(llama(tied=tied), **options)
    check(lowering, programs(lowering)[name])


PLAIN = ["step", "multi-step", "one row", "compute", "sample"]
FORMATS = [(matrices, None) for matrices in (None, "bfloat16", "float16")]
FORMATS += [(None, quantization) for quantization in ("int8", "int4", "fp8")]


@full
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("linear", ["auto", "xla"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("matrices", "quantization"), FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_program_makes_a_copy_of_a_weight(
    dtype: str, matrices: str | None, quantization: str | None, tied: bool, linear: str, name: str
) -> None:
    if matrices is not None and (dtype != "float32" or linear == "xla"):
        pytest.skip("matrices have a dtype of their own in packed form alone, beside activations of float32")
    lowering = lowering_of(llama(tied=tied), dtype, matrices=matrices, quantization=quantization, linear=linear)
    check(lowering, programs(lowering)[name])


@full
@pytest.mark.parametrize("linear", ["auto", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("new_proposer", [ngram, draft_model, medusa])
def test_no_speculative_program_makes_a_copy_of_a_weight(new_proposer: NewProposer, dtype: str, linear: str) -> None:
    lowering = lowering_of(llama(tied=True), dtype, linear=linear, new_proposer=new_proposer)
    for name in ("speculative", "multi-step"):
        check(lowering, programs(lowering)[name])


@full
@pytest.mark.parametrize("linear", ["auto", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_pooling_program_makes_a_copy_of_a_weight(dtype: str, linear: str) -> None:
    arch = pooling_heads.pooling_arch(llama(tied=True), Pooler(num_labels=3))
    lowering = lowering_of(arch, dtype, linear=linear)
    check(lowering, programs(lowering)["pooling"])
