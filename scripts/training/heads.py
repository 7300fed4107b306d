"""Draft heads in training: initial tensors, predictions and files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from safetensors.flax import save_file  # numpy has no bfloat16

from jaxserve.layers.linear import embed
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.token_context import TokenContext
from jaxserve.models import decoder, llama
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, ParamSpec
from jaxserve.spec_decode.draft_layer import LayerHead, apply_layer, project_features
from jaxserve.spec_decode.head_files import layer_specs
from jaxserve.spec_decode.medusa import apply_blocks
from jaxserve.weights.rows import build_tree
from training.dense_model import DenseAttention
from training.loop import Tensors

EVERY = 4  # positions between two at which tokens are drafted: logits cost more than the text


class Prediction(NamedTuple):
    """Logits for a drafted token [B, P, V] at P positions, and the model's logits for the same token."""

    drafted: Array
    goal: Array


class Heads(Protocol):
    """Draft heads of one type; hashable."""

    def init(self, seed: int) -> Tensors:
        """Return initial tensors, by name."""
        ...

    def params(self, tensors: Tensors) -> Params:
        """Return the proposer's parameters."""
        ...

    def predict(self, tensors: Tensors, target: Params, tokens: Array) -> list[Prediction]:
        """Return one prediction per drafted token, for tokens i32[B, S], each sequence from position 0."""
        ...

    def config(self) -> dict[str, Any]:
        """Return config.json for the published layout."""
        ...

    def published(self, name: str) -> str:
        """Return a tensor's name in the published layout."""
        ...


@dataclass(frozen=True)
class HeadLoss:
    """Mean cross-entropy against the model's own distribution, with decreasing weight for later tokens."""

    heads: Heads
    decay: float = 0.8  # like heads of Medusa and EAGLE-3

    def __call__(self, tensors: Tensors, tokens: Array, target: Params) -> Array:
        weight, total = 1.0, jnp.zeros(())
        for drafted, goal in self.heads.predict(tensors, target, tokens[:, :-1]):
            total += weight * optax.softmax_cross_entropy(drafted, jax.nn.softmax(goal, axis=-1)).mean()
            weight *= self.decay
        return total


@dataclass(frozen=True)
class MedusaHeads:
    """Medusa heads that share the model's logits matrix.

    Attributes:
        target: model sizes.
        num_heads: number of heads.
        num_blocks: residual blocks per head.
    """

    target: ArchConfig
    num_heads: int = 4
    num_blocks: int = 1

    def init(self, seed: int) -> Tensors:
        """Return zeros, as in the paper: each head begins as the model itself."""
        D = self.target.hidden_size
        return {
            f"{head}.{block}.linear.{name}": jnp.zeros(shape)
            for head in range(self.num_heads)
            for block in range(self.num_blocks)
            for name, shape in (("weight", (D, D)), ("bias", (D,)))
        }

    def params(self, tensors: Tensors) -> Params:
        names = ("weight", "bias")
        blocks = [
            [{name: tensors[f"{head}.{block}.linear.{name}"] for name in names} for block in range(self.num_blocks)]
            for head in range(self.num_heads)
        ]
        return {"blocks": blocks, "lm_heads": []}

    def predict(self, tensors: Tensors, target: Params, tokens: Array) -> list[Prediction]:
        B, S = tokens.shape
        context = TokenContext(jnp.tile(jnp.arange(S), B), DenseAttention(S))
        hidden, _ = decoder.forward(target, self.target, tokens.reshape(-1), context)
        hidden = hidden.reshape(B, S, -1)
        P = (S - self.num_heads) // EVERY * EVERY
        predictions = []
        for head, blocks in enumerate(self.params(tensors)["blocks"]):
            own, model = hidden[:, :P:EVERY], hidden[:, 1 + head : 1 + head + P : EVERY]
            drafted = apply_blocks(blocks, own.reshape(-1, own.shape[-1])).reshape(own.shape)
            predictions.append(Prediction(*(_logits(target, self.target, x) for x in (drafted, model))))
        return predictions

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_blocks,
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
        }

    def published(self, name: str) -> str:
        return name


@dataclass(frozen=True)
class Eagle3Layer:
    """EAGLE-3 layer as wide as the model, which shares embedding and logits.

    In training the layer continues from its own outputs for some steps, as in drafting (the paper's training-time
    test). Step n reads at each position the output of step n - 1 at the previous position, as if only positions up to n
    earlier had been known: it sees keys and values from step 0 for those, and for later positions from the step that
    reached them.

    Attributes:
        target: model sizes.
        feature_layers: model layers whose inputs it reads.
        ffn_size: feed-forward width.
        num_steps: consecutive tokens that it drafts in training.
    """

    target: ArchConfig
    feature_layers: tuple[int, ...]
    ffn_size: int
    num_steps: int = 3

    @cached_property
    def head(self) -> LayerHead:
        arch = llama.arch({**self.config(), "architectures": ["LlamaForCausalLM"]})  # its layer is Llama's
        return LayerHead("eagle3", arch, self.feature_layers, norms_output=False)

    @cached_property
    def specs(self) -> Sequence[ParamSpec]:
        return layer_specs(self.head, self.target, {})

    def init(self, seed: int) -> Tensors:
        """Return Normal(0.02) weights, norms of one, zeros for outputs to the residual stream; the feature is the last
        input.
        """
        rng = np.random.default_rng((seed, 2))
        D = self.target.hidden_size
        tensors = {}
        for spec in self.specs:
            for name, rows in zip(spec.hf_names, spec.hf_rows, strict=True):
                std = 0.0 if "o_proj" in name or "down_proj" in name else 0.02
                shape = (rows, *spec.shape[1:])
                tensors[name] = np.ones(shape) if len(shape) == 1 else rng.normal(0, std, shape)
        tensors["fc"][:, -D:] += np.eye(D)
        return {name: jnp.asarray(x, jnp.float32) for name, x in tensors.items()}

    def params(self, tensors: Tensors) -> Params:
        return build_tree(self.specs, lambda spec: jnp.concatenate([tensors[name] for name in spec.hf_names]))

    def predict(self, tensors: Tensors, target: Params, tokens: Array) -> list[Prediction]:
        own = self.params(tensors)
        B, S = tokens.shape
        P, D = (S - self.num_steps) // EVERY * EVERY, self.target.hidden_size
        context = TokenContext(jnp.tile(jnp.arange(S), B), DenseAttention(S))
        hidden, inputs, _ = decoder.forward_with_features(
            target, self.target, tokens.reshape(-1), context, self.feature_layers
        )
        hidden = hidden.reshape(B, S, D)
        feature = project_features(own, self.head, inputs).reshape(B, S, D)[:, :P]
        places, attention = jnp.arange(P), DenseAttention(S, entries=())
        predictions = []
        for step in range(self.num_steps):
            embedding = embed(tokens[:, 1 + step + places].reshape(-1), target["embed"], dtype=feature.dtype)
            attention = replace(attention, seq_len=len(places))
            context = TokenContext(jnp.tile(step + places, B), attention)
            out, context = apply_layer(own, self.head, embedding, feature.reshape(-1, D), context)
            attention = context.attention
            feature = out.reshape(B, -1, D)
            if step == 0:  # other positions provide only keys and values
                places, feature = places[::EVERY], feature[:, ::EVERY]
            drafted = rms_norm(feature, own["final_norm"], self.head.arch.norm_eps)
            model = hidden[:, 1 + step + places]
            predictions.append(Prediction(*(_logits(target, self.target, x) for x in (drafted, model))))
        return predictions

    def config(self) -> dict[str, Any]:
        target = self.target
        rope = target.ropes[0]
        assert rope is not None, "Llama's layers rotate"
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": target.vocab_size,
            "draft_vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": 1,
            "num_attention_heads": target.attention.num_heads,
            "num_key_value_heads": target.attention.num_kv_heads,
            "head_dim": target.attention.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": target.max_position,
            "rms_norm_eps": target.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
            "tie_word_embeddings": True,
            "eagle_aux_hidden_state_layer_ids": list(self.feature_layers),
        }

    def published(self, name: str) -> str:
        """Return EAGLE's own name."""
        names = {
            "embedding_norm": "midlayer.input_layernorm.weight",
            "feature_norm": "midlayer.hidden_norm.weight",
            "final_norm": "norm.weight",
            "fc": "fc.weight",
        }
        return names.get(name) or name.replace("model.layers.0.", "midlayer.")


def _logits(target: Params, arch: ArchConfig, hidden: Array) -> Array:
    """Return the model's logits [B, P, V] for hidden states after the final norm."""
    return decoder.compute_logits(target, arch, hidden.reshape(-1, arch.hidden_size)).reshape(*hidden.shape[:2], -1)


def save(directory: Path, heads: Heads, tensors: Tensors) -> None:
    """Write config.json and model.safetensors, with bfloat16 weights."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = {heads.published(name): tensor.astype(jnp.bfloat16) for name, tensor in tensors.items()}
    save_file(stored, str(directory / "model.safetensors"))
    (directory / "config.json").write_text(json.dumps(heads.config(), indent=2) + "\n")
