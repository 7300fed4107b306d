"""Training with Muon and Adam: batch order, learning rates, steps and checkpoints."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import Array
from numpy.typing import NDArray

from training import bpe_tokenizer

Tensors = dict[str, Array]  # keyed by checkpoint name: Muon must see each projection separately, not fused ones
Loss = Callable[[Tensors, Array, Any], Array]  # takes tensors, tokens i32[B, S + 1] and untrained inputs; hashable

_NOT_MATRICES = ("embed", "norm", "bias")  # name parts of tensors that Muon skips, which have no matrix dimensions


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps, batches and learning rates. Batch and sequence sizes are in tokens."""

    steps: int
    batch_size: int = 4096
    microbatch_size: int = 2048  # its activations stay in cache
    seq_len: int = 512
    long_seq_len: int = 1024
    long_fraction: float = 0.15  # fraction of the steps, at the end, with `long_seq_len`
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    weight_decay: float = 0.05
    warmup_steps: int = 60
    decay_fraction: float = 0.45
    seed: int = 0

    def seq_len_at(self, step: int) -> int:
        return self.long_seq_len if step >= (1 - self.long_fraction) * self.steps else self.seq_len

    def rate(self, peak: float) -> Callable[[Array], Array]:
        """Return warm-up, constant, linear decay to zero."""

        def lr(step: Array) -> Array:
            left = (self.steps - step) / (self.decay_fraction * self.steps)
            return peak * jnp.minimum(jnp.minimum((step + 1) / self.warmup_steps, 1.0), left)

        return lr


class Batches:
    """Batches by step: an epoch packs the documents in a new order, cuts sequences, and shuffles those."""

    def __init__(self, documents: Sequence[NDArray[np.int32]], schedule: Schedule) -> None:
        self._documents, self._schedule = documents, schedule
        self._num_tokens = sum(map(len, documents))
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def at(self, step: int) -> NDArray[np.int32]:
        """Return tokens i32[microbatches, B, S + 1] for a step.

        Half of the sequences have <|endoftext|> in place of their first token, so that a text may begin anywhere.
        """
        r = self._schedule
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
        """Return all documents end to end, and the order in which to take sequences from them."""
        rng = np.random.default_rng((self._schedule.seed, 0, epoch))
        stream = np.concatenate([self._documents[i] for i in rng.permutation(len(self._documents))])
        return stream, rng.permutation((len(stream) - 1) // S)


@cache  # train_step compiles once per optimizer object
def optimizer(schedule: Schedule) -> optax.GradientTransformation:
    """Return Muon (Jordan et al. 2024) for the projections, Adam for embeddings, norms and biases."""

    def dimensions(tensors: Tensors) -> dict[str, optax.contrib.MuonDimensionNumbers | None]:
        out_in = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
        return {name: None if any(part in name for part in _NOT_MATRICES) else out_in for name in tensors}

    return optax.contrib.muon(
        schedule.rate(schedule.muon_lr),
        weight_decay=schedule.weight_decay,
        adam_b2=0.98,
        adam_learning_rate=schedule.rate(schedule.adam_lr),
        muon_weight_dimension_numbers=dimensions,
    )


@partial(jax.jit, static_argnames=("tx", "loss"), donate_argnames=("tensors", "opt_state"))
def train_step(
    tensors: Tensors,
    opt_state: optax.OptState,
    batch: Array,
    frozen: Any,
    *,
    tx: optax.GradientTransformation,
    loss: Loss,
) -> tuple[Tensors, optax.OptState, Array]:
    """Run one update with `batch` i32[microbatches, B, S + 1]; donates `tensors` and `opt_state`."""
    loss_and_grads = jax.value_and_grad(loss)

    def accumulate(total: Any, tokens: Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, loss_and_grads(tensors, tokens, frozen)), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, tensors))
    total, _ = jax.lax.scan(accumulate, zero, batch)
    nats, grads = jax.tree.map(lambda x: x / batch.shape[0], total)
    updates, opt_state = tx.update(grads, opt_state, tensors)
    return optax.apply_updates(tensors, updates), opt_state, nats


def train(
    schedule: Schedule,
    documents: Sequence[NDArray[np.int32]],
    tensors: Mapping[str, Array],
    loss: Loss,
    frozen: Any,
    checkpoints: ocp.CheckpointManager | None = None,
) -> Tensors:
    """Run all steps, or those after the newest of `checkpoints`; print the loss as JSON lines."""
    tx, batches = optimizer(schedule), Batches(documents, schedule)
    tensors = dict(tensors)
    opt_state = tx.init(tensors)
    first = (checkpoints.latest_step() if checkpoints else None) or 0
    if checkpoints and first:
        state = {"tensors": tensors, "opt_state": opt_state}
        state = checkpoints.restore(first, args=ocp.args.StandardRestore(state))
        tensors, opt_state = state["tensors"], state["opt_state"]
    started = time.monotonic()
    for step in range(first, schedule.steps):
        tensors, opt_state, nats = train_step(tensors, opt_state, batches.at(step), frozen, tx=tx, loss=loss)
        done = step + 1
        if done % 10 == 0:
            row = {"step": done, "nats_per_token": round(float(nats), 4), "tokens": done * schedule.batch_size}
            print(json.dumps({**row, "elapsed_s": round(time.monotonic() - started, 1)}), flush=True)
        if checkpoints and (done % 50 == 0 or done == schedule.steps):
            checkpoints.save(done, args=ocp.args.StandardSave({"tensors": tensors, "opt_state": opt_state}))
    if checkpoints:
        checkpoints.wait_until_finished()
    return tensors
