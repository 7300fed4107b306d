"""The embedded checkpoint and the scripts that made it."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
DEFAULT, DRAFT = ROOT / "weights" / "default", ROOT / "weights" / "default-draft"
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEFAULT / "tokenizer.json"))


def test_files_are_present_and_small():
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    for directory in (DEFAULT, DRAFT):
        assert names <= {path.name for path in directory.iterdir()}
    assert (DEFAULT / "MODEL_CARD.md").is_file()
    files = [*DEFAULT.iterdir(), *DRAFT.iterdir()]
    assert sum(path.stat().st_size for path in files) < 24e6


def test_draft_has_the_same_tokenizer():
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (DRAFT / name).read_bytes() == (DEFAULT / name).read_bytes()


@settings(deadline=None)
@given(st.text().filter(lambda text: END not in text))
def test_tokenizer_round_trips_any_text(text):
    tokenizer = Tokenizer.from_file(str(DEFAULT / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids[0] == tokenizer.token_to_id(END) == 0
    assert tokenizer.decode(ids) == text


def test_every_byte_has_a_token(tokenizer):
    from tokenizers.pre_tokenizers import ByteLevel

    assert tokenizer.get_vocab_size() == 4096
    assert all(tokenizer.token_to_id(byte) is not None for byte in ByteLevel.alphabet())


def test_transformers_reads_the_tokenizer_alike(tokenizer):
    from transformers import AutoTokenizer

    text = "def f(x):\n    return x\n\n\nclass A:\n\tpass  # é\n"
    hf = AutoTokenizer.from_pretrained(DEFAULT)
    assert hf(text)["input_ids"] == tokenizer.encode(text).ids
    assert hf.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text
    assert hf.bos_token_id == hf.eos_token_id == 0


@pytest.fixture(scope="module")
def held_out(tokenizer):
    """Return documents, their ids, and what the model makes of them."""
    from eval_bpb import score, take
    from training import stdlib_corpus
    from training.dense_model import load_model

    longest = max(stdlib_corpus.read(held_out=True), key=len)
    documents = take([longest], 12_000)
    ids = [tokenizer.encode(stdlib_corpus.as_text(document)).ids for document in documents]
    return documents, ids, score(*load_model(DEFAULT), ids, window=256)


@pytest.mark.long
def test_beats_xz_on_held_out_text(held_out):
    from eval_bpb import bits_per_byte, score, xz_bits_per_byte
    from training.dense_model import load_model

    documents, ids, target = held_out
    draft = score(*load_model(DRAFT), ids, window=256)
    assert bits_per_byte(target, documents) < bits_per_byte(draft, documents)
    assert bits_per_byte(target, documents) < xz_bits_per_byte(documents)
    assert (target.greedy_ids == draft.greedy_ids).mean() > 0.3


@pytest.mark.parametrize(
    ("quantization", "kv_dtype", "cost", "agreement"),
    [
        pytest.param("int8", None, 0.005, 0.97, marks=pytest.mark.full),
        pytest.param(None, "int4", 0.03, 0.9, marks=pytest.mark.full),
        pytest.param(None, "int8", 0.005, 0.97, marks=pytest.mark.full),
    ],
)
def test_a_few_bits_cost_little(held_out, quantization, kv_dtype, cost, agreement):
    from eval_bpb import bits_per_byte, score
    from training.dense_model import load_model

    documents, ids, exact = held_out
    narrow = score(*load_model(DEFAULT, quantization=quantization), ids, window=256, kv_dtype=kv_dtype)
    assert bits_per_byte(narrow, documents) == pytest.approx(bits_per_byte(exact, documents), rel=cost)
    assert (narrow.nats != exact.nats).any()
    assert (narrow.greedy_ids == exact.greedy_ids).mean() > agreement


def test_split_is_disjoint_and_one_in_twenty():
    from training import stdlib_corpus

    modules = stdlib_corpus.modules()
    held_out = [path for path in modules if stdlib_corpus.is_held_out(path)]
    assert len(modules) / 30 < len(held_out) < len(modules) / 14
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in modules)


def test_windows_score_every_token_once():
    from eval_bpb import windows

    for length in range(1, 40):
        ids = list(range(length))
        scored = [ids[first + 1 :] for ids, first in windows(ids, 8)]
        assert list(chain.from_iterable(scored)) == ids[1:]


@pytest.fixture(scope="module")
def tiny():
    """Return a recipe and documents that train in a second."""
    from train_default import Recipe

    recipe = Recipe(
        hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=32, steps=60, head_dim=8,
        vocab_size=32, batch_size=64, microbatch_size=32, seq_len=16, long_seq_len=32, warmup_steps=5,
        decay_fraction=0.1,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    return recipe, [np.arange(n, dtype=np.int32) % 7 for n in rng.integers(5, 90, size=30)]


@pytest.mark.full  # tests/scripts/test_train_medusa.py runs the same loop by default
def test_training_learns_repeats_and_resumes(tiny, tmp_path, capsys):
    import json

    import orbax.checkpoint as ocp

    from train_default import train

    recipe, documents = replace(tiny[0], long_fraction=0.0), tiny[1]
    with ocp.CheckpointManager(tmp_path / "a") as checkpoints:
        first = train(recipe, documents, None, checkpoints)
        nats = [json.loads(line)["nats_per_token"] for line in capsys.readouterr().out.splitlines()]
        assert nats[-1] < 0.5 * nats[0]
        checkpoints.delete(60)
        resumed = train(recipe, documents, None, checkpoints)  # resumes from step 50
    with ocp.CheckpointManager(tmp_path / "b") as checkpoints:
        again = train(recipe, documents, None, checkpoints)
    for other in (resumed, again):
        jax.tree.map(np.testing.assert_array_equal, first, other)


def test_sequences_are_longer_at_the_end(tiny):
    from training.loop import Batches

    batches = Batches(tiny[1], tiny[0])
    assert batches.at(50).shape == (2, 2, 17)
    assert batches.at(51).shape == (2, 1, 33)


def test_another_seed_is_another_model(tiny):
    from jaxserve.models.registry import from_hf_config, param_specs
    from train_default import init_tensors
    from training.loop import Batches

    recipe, documents = tiny
    other = replace(recipe, seed=1)
    assert not np.array_equal(Batches(documents, recipe).at(3), Batches(documents, other).at(3))
    specs = param_specs(from_hf_config(recipe.hf_config()))
    embeds = [init_tensors(specs, seed)["model.embed_tokens.weight"] for seed in (0, 1)]
    assert not np.array_equal(*embeds)
