"""Train the checkpoint that jaxserve embeds, then its draft, from the standard library of the running CPython.

    python scripts/train_default.py
    python scripts/train_default.py --draft

Everything follows from the seed and the number of steps: tokenizer, document order, weights. The learning rate is `peak
* min((step + 1) / warmup_steps, 1, (steps - step) / (decay_fraction * steps))`: warm-up, constant, linear decay to
zero. It is constant until the decay, so a slow run can end early: interrupt it, and give fewer `--steps` with
`--resume` and `--out`. The draft learns the target's whole next-token distribution (Hinton et al. 2015).
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from jaxserve.models.params import Params, ParamSpec
from jaxserve.models.registry import from_hf_config, param_specs
from jaxserve.weights import save
from jaxserve.weights.rows import build_tree
from training import bpe_tokenizer, loop, stdlib_corpus
from training.dense_model import load_model, logits, token_nats
from training.loop import Schedule, Tensors

WEIGHTS = Path(__file__).parents[1] / "weights"
Teacher = tuple[Params, ArchConfig]


@dataclass(frozen=True, kw_only=True)
class Recipe(Schedule):
    """Model sizes and training schedule."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    head_dim: int = 64
    vocab_size: int = 4096

    def hf_config(self) -> dict[str, Any]:
        """Return config.json for a Llama with these sizes."""
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


TARGET = Recipe(hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, ffn_size=768, steps=1500)
DRAFT = Recipe(
    hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, ffn_size=256, steps=500,
    muon_lr=0.03, adam_lr=0.008, warmup_steps=30,
)  # fmt: skip


def init_tensors(specs: Sequence[ParamSpec], seed: int) -> Tensors:
    """Return Normal(0.02) weights, norms of one, and zeros for outputs to the residual stream: every block starts as
    the identity.
    """
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
    """Return tensors by name as the model's parameters."""
    return build_tree(param_specs(arch), lambda spec: jnp.concatenate([tensors[n] for n in spec.hf_names]))


@dataclass(frozen=True)
class MeanNats:
    """Mean cross-entropy over tokens, against the next token or a teacher's distribution."""

    arch: ArchConfig
    teacher_arch: ArchConfig | None

    def __call__(self, tensors: Tensors, tokens: Array, teacher: Params | None) -> Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        out = logits(as_params(tensors, self.arch), self.arch, inputs)
        if teacher is None or self.teacher_arch is None:
            return token_nats(out, targets).mean()
        goal = jax.nn.softmax(logits(teacher, self.teacher_arch, inputs), axis=-1)
        return optax.softmax_cross_entropy(out, goal).mean()


def train(
    recipe: Recipe, documents: Sequence[NDArray[np.int32]], teacher: Teacher | None, checkpoints: ocp.CheckpointManager
) -> Tensors:
    """Run all steps, or those after the newest of `checkpoints`; print the loss as JSON lines."""
    arch = from_hf_config(recipe.hf_config())
    teacher_params, teacher_arch = teacher or (None, None)
    tensors = init_tensors(param_specs(arch), recipe.seed)
    return loop.train(recipe, documents, tensors, MeanNats(arch, teacher_arch), teacher_params, checkpoints)


def export(directory: Path, recipe: Recipe, tensors: Tensors, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face directory, with bfloat16 weights."""
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
