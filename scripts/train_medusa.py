"""Train draft heads for the embedded model: Medusa heads, or an EAGLE-3 layer.

    python scripts/train_medusa.py
    python scripts/train_medusa.py --kind eagle3

The model stays unchanged. It continues from positions in its training files, greedily and with its checkpoint's
recommended sampling, and the heads learn its next-token distributions in that text (cross-entropy against its softmax).
Everything follows from the seed and the number of steps. Finally, it prints for each drafted token how often it is the
model's greedy one in continuations of held-out files, if the previous ones were.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from tokenizers import Tokenizer

from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from training import bpe_tokenizer, generated_text, loop, stdlib_corpus
from training.dense_model import load_model
from training.heads import Eagle3Layer, HeadLoss, Heads, MedusaHeads, save
from training.loop import Batches, Schedule, Tensors

WEIGHTS = Path(__file__).parents[1] / "weights"
SCHEDULES = {
    "medusa": Schedule(steps=500, warmup_steps=10),
    "eagle3": Schedule(steps=450, warmup_steps=10),
}
TEXTS, HELD_OUT_TEXTS = 1536, 64


def shipped_heads(kind: str, target: ArchConfig) -> Heads:
    """Return heads with the shipped sizes, for a model."""
    if kind == "medusa":
        return MedusaHeads(target)
    n = target.num_layers
    return Eagle3Layer(target, feature_layers=tuple(sorted({n // 4, n - 1, n})), ffn_size=target.hidden_size)


@partial(jax.jit, static_argnames="heads")
def agreement(tensors: Tensors, target: Params, tokens: Array, *, heads: Heads) -> Array:
    """Return the fractions of positions at which the first drafted token, the first two, ... are the model's greedy
    ones.
    """
    predictions = heads.predict(tensors, target, tokens)
    P = min(drafted.shape[1] for drafted, _ in predictions)
    right = jnp.stack([(d.argmax(-1) == g.argmax(-1))[:, :P] for d, g in predictions])
    return jnp.cumprod(right.astype(jnp.float32), axis=0).mean((1, 2))


def held_out_agreement(
    tensors: Tensors, target: Params, heads: Heads, documents: Sequence[NDArray[np.int32]], schedule: Schedule
) -> list[float]:
    """Return for each drafted token the fraction of positions at which it is the model's greedy one, if the previous
    ones were.
    """
    batches = Batches(documents, replace(schedule, long_fraction=0.0))
    num_batches = (sum(map(len, documents)) - 1) // schedule.batch_size
    shares = [
        agreement(tensors, target, tokens[:, :-1], heads=heads)
        for step in range(num_batches)
        for tokens in batches.at(step)
    ]
    all_so_far = np.mean(shares, axis=0)
    return [round(float(x), 3) for x in all_so_far / np.array([1.0, *all_so_far[:-1]])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(SCHEDULES), default="medusa")
    parser.add_argument("--model", type=Path, default=WEIGHTS / "default", help="model that the heads draft for")
    parser.add_argument("--out", type=Path, help="default if only --kind is given: weights/default-KIND")
    parser.add_argument("--steps", type=int, help="steps, in place of the recipe's")
    parser.add_argument("--texts", type=int, default=TEXTS, help="texts that the model writes; 0 trains on the files")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    is_other = any(getattr(args, name) != parser.get_default(name) for name in ("steps", "texts", "model", "seed"))
    if is_other and not args.out:
        parser.error("other options than --kind must come with --out: without it the embedded heads are replaced")
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")

    schedule = SCHEDULES[args.kind]
    schedule = replace(schedule, seed=args.seed, steps=args.steps or schedule.steps)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    seen, held_out = (
        bpe_tokenizer.encode(tokenizer, list(map(stdlib_corpus.as_text, stdlib_corpus.read(held_out=split))), args.seed)
        for split in (False, True)
    )
    if args.texts:
        seen = generated_text.continuations(args.model, seen, args.texts, args.seed)
        held_out = generated_text.continuations(args.model, held_out, HELD_OUT_TEXTS, args.seed)
    target, arch = load_model(args.model)
    heads = shipped_heads(args.kind, arch)
    tensors = heads.init(args.seed)
    settings = {
        "schedule": schedule.__dict__,
        "config": heads.config(),
        "parameters": sum(x.size for x in tensors.values()),
    }
    print(json.dumps(settings), flush=True)
    tensors = loop.train(schedule, seen, tensors, HeadLoss(heads), target)
    save(args.out or WEIGHTS / f"default-{args.kind}", heads, tensors)
    shares = held_out_agreement(tensors, target, heads, held_out, schedule)
    print(json.dumps({"held_out_agreement_by_position": shares}))


if __name__ == "__main__":
    main()
