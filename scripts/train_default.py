"""Train the checkpoint that jaxserve embeds, then its draft, from the standard library of the running CPython.

    python scripts/train_default.py
    python scripts/train_default.py --draft

Everything follows from the seed and the number of steps: the tokenizer, the order of the documents, the weights. The
learning rate is `peak * min((step + 1) / warmup_steps, 1, (steps - step) / (decay_fraction * steps))`: warm-up,
constant, linear decay to zero. It is constant until the decay, so a run that turns out slow can end early: interrupt
it, and give fewer `--steps` with `--resume` and `--out`. The draft learns the target's whole next-token distribution
(Hinton et al. 2015).
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import Array
from numpy.typing import NDArray
from tokenizers import Tokenizer

from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, ParamSpec, build_tree
from jaxserve.models.registry import from_hf_config, param_specs
from jaxserve.weights import save
from training import bpe_tokenizer, stdlib_corpus
from training.dense_model import load_model, logits, token_nats

WEIGHTS = Path(__file__).parents[1] / "weights"
Tensors = dict[str, Array]  # keyed by Hugging Face name: Muon is to see each projection by itself, not fused ones
Teacher = tuple[Params, ArchConfig]


@dataclass(frozen=True)
class Recipe:
    """Recipe of the training. Sizes of batches and sequences are in tokens."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    steps: int
    head_dim: int = 64
    vocab_size: int = 4096
    batch_size: int = 4096
    microbatch_size: int = 2048  # its activations stay in cache
    seq_len: int = 512
    long_seq_len: int = 1024
    long_fraction: float = 0.15  # share of the steps, at the end, with `long_seq_len`
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    weight_decay: float = 0.05
    warmup_steps: int = 60
    decay_fraction: float = 0.45
    seed: int = 0

    def hf_config(self) -> dict[str, Any]:
        """config.json of a Llama of these sizes."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.long_seq_len,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": bpe_tokenizer.END_ID,
            "eos_token_id": bpe_tokenizer.END_ID,
        }

    def seq_len_at(self, step: int) -> int:
        return self.long_seq_len if step >= (1 - self.long_fraction) * self.steps else self.seq_len

    def schedule(self, peak: float) -> Callable[[Array], Array]:
        """Warm-up, constant, linear decay to zero."""

        def lr(step: Array) -> Array:
            left = (self.steps - step) / (self.decay_fraction * self.steps)
            return peak * jnp.minimum(jnp.minimum((step + 1) / self.warmup_steps, 1.0), left)

        return lr


TARGET = Recipe(hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, ffn_size=768, steps=1500)
DRAFT = Recipe(
    hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, ffn_size=256, steps=500,
    muon_lr=0.03, adam_lr=0.008, warmup_steps=30,
)  # fmt: skip


class Batches:
    """The batch of any step: an epoch packs the documents in a new order, cuts sequences, and shuffles those."""

    def __init__(self, documents: Sequence[NDArray[np.int32]], recipe: Recipe) -> None:
        self._documents, self._recipe = documents, recipe
        self._num_tokens = sum(map(len, documents))
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def at(self, step: int) -> NDArray[np.int32]:
        """Tokens i32[microbatches, B, S + 1] of a step.

        Half of the sequences have <|endoftext|> in place of their first token, so that a text may begin anywhere.
        """
        r = self._recipe
        S = r.seq_len_at(step)
        num_rows = r.batch_size // S
        rows = np.stack([self._sequence(i, S) for i in range(step * num_rows, (step + 1) * num_rows)])
        rows[np.random.default_rng((r.seed, 1, step)).random(num_rows) < 0.5, 0] = bpe_tokenizer.END_ID
        return rows.reshape(-1, r.microbatch_size // S, S + 1)

    def _sequence(self, index: int, S: int) -> NDArray[np.int32]:
        epoch, i = divmod(index, (self._num_tokens - 1) // S)
        stream, order = self._epoch(epoch, S)
        return stream[order[i] * S : order[i] * S + S + 1]

    def _shuffled(self, epoch: int, S: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """All documents end to end, and the order in which to take its sequences."""
        rng = np.random.default_rng((self._recipe.seed, 0, epoch))
        stream = np.concatenate([self._documents[i] for i in rng.permutation(len(self._documents))])
        return stream, rng.permutation((len(stream) - 1) // S)


def init_tensors(specs: Sequence[ParamSpec], seed: int) -> Tensors:
    """Normal(0.02), norms at one, zero in what writes to the residual stream: every block starts as the identity."""
    rng = np.random.default_rng((seed, 2))
    tensors = {}
    for spec in specs:
        for name, rows in zip(spec.hf_names, spec.hf_rows, strict=True):
            shape = (rows, *spec.shape[1:])
            std = 0.0 if "o_proj" in name or "down_proj" in name else 0.02
            x = np.ones(shape) if spec.init == "ones" else rng.normal(0, std, shape)
            tensors[name] = jnp.asarray(x, jnp.float32)
    return tensors


def as_params(tensors: Tensors, arch: ArchConfig) -> Params:
    return build_tree(param_specs(arch), lambda spec: jnp.concatenate([tensors[n] for n in spec.hf_names]))


@cache  # train_step compiles once per optimizer object
def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the projections, Adam for embeddings and norms."""

    def dimensions(tensors: Tensors) -> dict[str, optax.contrib.MuonDimensionNumbers | None]:
        out_in = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
        return {name: out_in if "_proj" in name else None for name in tensors}

    return optax.contrib.muon(
        recipe.schedule(recipe.muon_lr),
        weight_decay=recipe.weight_decay,
        adam_b2=0.98,
        adam_learning_rate=recipe.schedule(recipe.adam_lr),
        muon_weight_dimension_numbers=dimensions,
    )


def mean_nats(tensors: Tensors, tokens: Array, teacher: Params | None, arch: ArchConfig, teacher_arch: Any) -> Array:
    """Mean cross-entropy over `tokens` i32[B, S + 1], against the next token or a teacher's idea of it."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    out = logits(as_params(tensors, arch), arch, inputs)
    if teacher is None:
        return token_nats(out, targets).mean()
    goal = jax.nn.softmax(logits(teacher, teacher_arch, inputs), axis=-1)
    return optax.softmax_cross_entropy(out, goal).mean()


@partial(jax.jit, static_argnames=("tx", "arch", "teacher_arch"), donate_argnames=("tensors", "opt_state"))
def train_step(
    tensors: Tensors,
    opt_state: optax.OptState,
    batch: Array,
    teacher: Params | None,
    *,
    tx: optax.GradientTransformation,
    arch: ArchConfig,
    teacher_arch: ArchConfig | None,
) -> tuple[Tensors, optax.OptState, Array]:
    """One update from `batch` i32[microbatches, B, S + 1]; donates `tensors` and `opt_state`."""
    loss_and_grads = jax.value_and_grad(partial(mean_nats, arch=arch, teacher_arch=teacher_arch))

    def accumulate(total: Any, tokens: Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, loss_and_grads(tensors, tokens, teacher)), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, tensors))
    total, _ = jax.lax.scan(accumulate, zero, batch)
    nats, grads = jax.tree.map(lambda x: x / batch.shape[0], total)
    updates, opt_state = tx.update(grads, opt_state, tensors)
    return optax.apply_updates(tensors, updates), opt_state, nats


def train(
    recipe: Recipe, documents: Sequence[NDArray[np.int32]], teacher: Teacher | None, checkpoints: ocp.CheckpointManager
) -> Tensors:
    """Run all steps, or those after the newest of `checkpoints`; prints the loss as JSON lines."""
    arch, tx, batches = from_hf_config(recipe.hf_config()), optimizer(recipe), Batches(documents, recipe)
    teacher_params, teacher_arch = teacher or (None, None)
    tensors = init_tensors(param_specs(arch), recipe.seed)
    opt_state = tx.init(tensors)
    first = checkpoints.latest_step() or 0
    if first:
        state = {"tensors": tensors, "opt_state": opt_state}
        state = checkpoints.restore(first, args=ocp.args.StandardRestore(state))
        tensors, opt_state = state["tensors"], state["opt_state"]
    started = time.monotonic()
    for step in range(first, recipe.steps):
        tensors, opt_state, nats = train_step(
            tensors, opt_state, batches.at(step), teacher_params, tx=tx, arch=arch, teacher_arch=teacher_arch
        )
        done = step + 1
        if done % 10 == 0:
            row = {"step": done, "nats_per_token": round(float(nats), 4), "tokens": done * recipe.batch_size}
            print(json.dumps({**row, "elapsed_s": round(time.monotonic() - started, 1)}), flush=True)
        if done % 50 == 0 or done == recipe.steps:
            checkpoints.save(done, args=ocp.args.StandardSave({"tensors": tensors, "opt_state": opt_state}))
    checkpoints.wait_until_finished()
    return tensors


def export(directory: Path, recipe: Recipe, tensors: Tensors, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face directory, weights in bfloat16."""
    arch = from_hf_config(recipe.hf_config())
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), as_params(tensors, arch))
    bpe_tokenizer.save(tokenizer, directory, recipe.long_seq_len)
    save(directory, param_specs(arch), params, recipe.hf_config())
    ids = {"bos_token_id": bpe_tokenizer.END_ID, "eos_token_id": bpe_tokenizer.END_ID}
    generation = {**ids, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", action="store_true", help="train the draft of the checkpoint in weights/default")
    parser.add_argument("--target", type=Path, default=WEIGHTS / "default", help="what the draft learns from")
    parser.add_argument("--out", type=Path, help="default without --steps: weights/default or weights/default-draft")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("checkpoints"), help="one folder per run is made below"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--steps", type=int, help="in place of the recipe's; needs --out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps and not args.out:
        parser.error("--steps must come with --out: without it the embedded model would be replaced")

    name = "default-draft" if args.draft else "default"
    recipe = DRAFT if args.draft else TARGET
    recipe = replace(recipe, seed=args.seed, steps=args.steps or recipe.steps)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    checkpoints = ocp.CheckpointManager((args.checkpoints / name).absolute(), options=options)
    newest = checkpoints.latest_step()
    if newest and not args.resume:
        parser.error(f"{args.checkpoints / name} has a checkpoint of step {newest}: pass --resume or remove it")

    texts = [stdlib_corpus.as_text(module) for module in stdlib_corpus.read(held_out=False)]
    if args.draft:
        teacher = load_model(args.target)
        tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    else:
        teacher = None
        tokenizer = bpe_tokenizer.train(texts, recipe.vocab_size)
    documents = bpe_tokenizer.encode(tokenizer, texts, recipe.seed)
    print(json.dumps({"recipe": recipe.__dict__, "train_tokens": sum(map(len, documents))}), flush=True)
    tensors = train(recipe, documents, teacher, checkpoints)
    export(args.out or WEIGHTS / name, recipe, tensors, tokenizer)


if __name__ == "__main__":
    main()
