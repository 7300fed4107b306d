"""Random EAGLE-3 and MTP heads over a tiny model of transformers: their files, and what they draft."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from tests import oracles
from tests.oracles import torch

NOISE = 0.3  # spread of weights around those that repeat the model's last prediction, so that some drafts are right


class Eagle3Layer(LlamaDecoderLayer):
    """Llama's layer whose queries, keys and values are projected from embedding and feature side by side."""

    def __init__(self, config: transformers.LlamaConfig, norms_residual: bool) -> None:
        super().__init__(config, 0)
        D, H = config.hidden_size, config.head_dim
        for name, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
            ("v_proj", config.num_key_value_heads),
        ):
            setattr(self.self_attn, name, torch.nn.Linear(2 * D, heads * H, bias=False))
        self.hidden_norm = LlamaRMSNorm(D, config.rms_norm_eps)
        self.norms_residual = norms_residual

    def forward(self, embedding: torch.Tensor, feature: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Return the output before the final norm."""
        normed = self.hidden_norm(feature)
        both = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        x = (normed if self.norms_residual else feature) + self.self_attn(both, **kwargs)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass
class Head:
    """A head and the model that it drafts for.

    Attributes:
        model: the model.
        layer: its decoder layer.
        fc: projection of the layers' inputs; None for MTP.
        feature_layers: layers whose inputs it reads.
        norm: final norm of an EAGLE-3 head.
        lm_head: matrix for the logits.
        token_ids: the model's ids of the rows of `lm_head`.
        norms_output: True if the next feature is the output after the norm.
    """

    model: transformers.PreTrainedModel
    layer: torch.nn.Module
    fc: torch.nn.Linear | None
    feature_layers: tuple[int, ...]
    norm: torch.nn.Module
    lm_head: torch.Tensor
    token_ids: torch.Tensor
    norms_output: bool

    @torch.no_grad()
    def features(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the features of all tokens of a sequence [S, D]."""
        last_input = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, args: last_input.append(args[0]))
        out = self.model.model(torch.tensor([token_ids]), output_hidden_states=True)
        hook.remove()
        if self.fc is None:
            return out.last_hidden_state[0]
        inputs = [*out.hidden_states[:-1], *last_input]
        return self.fc(torch.cat([inputs[layer] for layer in self.feature_layers], dim=-1))[0]

    @torch.no_grad()
    def draft(self, token_ids: Sequence[int], features: torch.Tensor, num_tokens: int) -> list[int]:
        """Return the most likely tokens behind a sequence, of all but whose last token there are features."""
        ids, features = list(token_ids), features[: len(token_ids) - 1]
        for _ in range(num_tokens):
            embedding = self.model.model.embed_tokens(torch.tensor([ids[1:]]))
            S = features.shape[0]
            positions = torch.arange(S)[None]
            kwargs = {
                "attention_mask": torch.full((1, 1, S, S), -torch.inf).triu(1),
                "position_ids": positions,
                "position_embeddings": self.model.model.rotary_emb(embedding, positions),
            }
            if self.fc is None:
                kwargs[oracles.cache_argument(self.layer)] = None
                normed = self.layer(embedding, features[None], **kwargs)[0, -1:]
                feature = normed
            else:
                out = self.layer(embedding, features[None], **kwargs)[0, -1:]
                normed = self.norm(out)
                feature = normed if self.norms_output else out
            ids.append(int(self.token_ids[torch.argmax(normed @ self.lm_head.T)]))
            features = torch.cat([features, feature])
        return ids[len(token_ids) :]


def write_eagle3(
    directory: Path,
    model: transformers.LlamaForCausalLM,
    feature_layers: tuple[int, ...],
    *,
    layout: str = "eagle",
    norms_residual: bool = False,
    norms_output: bool = False,
    token_ids: Sequence[int] | None = None,
) -> Head:
    """Write a random EAGLE-3 head in the layout of its authors or of the speculators library, and return it.

    With `token_ids` it has a matrix for the logits of these alone.
    """
    config = model.config
    D = config.hidden_size
    layer = Eagle3Layer(config, norms_residual)
    fc = torch.nn.Linear(len(feature_layers) * D, D, bias=False)
    norm = LlamaRMSNorm(D, config.rms_norm_eps)
    with torch.no_grad():
        for parameter in [*layer.parameters(), *fc.parameters(), *norm.parameters()]:
            if parameter.ndim > 1:
                parameter.normal_(std=NOISE / D**0.5)
            else:
                parameter.uniform_(0.5, 1.5)
        fc.weight[:, -D:] += torch.eye(D)
    lm_head, ids = model.lm_head.weight, torch.arange(config.vocab_size)
    prefix = "midlayer" if layout == "eagle" else "layers.0"
    tensors = {f"{prefix}.{name}": value for name, value in layer.state_dict().items()}
    tensors |= {"fc.weight": fc.weight, "norm.weight": norm.weight}
    sizes = {**config.to_dict(), "num_hidden_layers": 1}
    if token_ids is not None:
        ids = torch.tensor(sorted(token_ids))
        lm_head = model.lm_head.weight[ids]
        offsets, is_drafted = ids - torch.arange(len(ids)), torch.zeros(config.vocab_size, dtype=torch.bool)
        is_drafted[ids] = True
        tensors |= {"lm_head.weight": lm_head, "d2t": offsets, "t2d": is_drafted}
    options = {
        "eagle_aux_hidden_state_layer_ids": list(feature_layers),
        "norm_before_residual": norms_residual,
        "norm_output": norms_output,
    }
    if layout == "eagle":
        written = {**sizes, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(ids), **options}
    else:
        written = {"speculators_model_type": "eagle3", "transformer_layer_config": sizes, **options}
    _write(directory, tensors, written)
    return Head(model, layer, fc, feature_layers, norm, lm_head, ids, norms_output)


def write_mtp(directory: Path, model: transformers.LlamaForCausalLM, layout: str = "deepseek") -> Head:
    """Write a random MTP head in the layout of DeepSeek, of the speculators library or of MiMo, and return it."""
    config = model.config
    D = config.hidden_size
    layer = MtpLayer(config, LlamaDecoderLayer, LlamaRMSNorm, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=NOISE / D**0.5)
            else:
                parameter.uniform_(0.5, 1.5)
        layer.eh_proj.weight[:, D:] += torch.eye(D)
    prefix, *names = {
        "deepseek": ("model.layers.61.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
        "speculators": ("mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "mimo": ("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    }[layout]
    renamed = dict(zip(("enorm", "hnorm", "eh_proj", "post_norm"), names, strict=True))
    tensors = {}
    for name, value in layer.state_dict().items():
        first, _, rest = name.partition(".")
        tensors[prefix + (rest if first == "mtp_block" else f"{renamed[first]}.{rest}")] = value
    if layout == "mimo":
        proj = tensors[f"{prefix}input_proj.weight"]
        tensors[f"{prefix}input_proj.weight"] = torch.cat([proj[:, D:], proj[:, :D]], dim=1)
    if layout == "deepseek":
        tensors[f"{prefix}shared_head.head.weight"] = model.lm_head.weight
        tensors[f"{prefix}embed_tokens.weight"] = model.model.embed_tokens.weight
    sizes = config.to_dict()
    nested = {"speculators_model_type": "mtp", "transformer_layer_config": sizes}
    _write(directory, tensors, nested if layout == "speculators" else sizes)
    ids = torch.arange(config.vocab_size)
    return Head(model, layer, None, (), torch.nn.Identity(), model.lm_head.weight, ids, norms_output=True)


def add_mtp(directory: Path, model: transformers.PreTrainedModel) -> Head:
    """Add a random MTP layer to the checkpoint of a model that attends over latents, and return it."""
    config, last = model.config, model.model.layers[-1]
    D, prefix = config.hidden_size, f"model.layers.{config.num_hidden_layers}."
    layer = MtpLayer(config, type(last), type(last.input_layernorm), config.num_hidden_layers - 1)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=NOISE / D**0.5)
            else:
                parameter.uniform_(0.5, 1.5)
        layer.eh_proj.weight[:, D:] += torch.eye(D)
        for name, buffer in layer.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.1, 0.1)
    tensors = {f"{prefix}shared_head.head.weight": model.lm_head.weight}
    tensors[f"{prefix}embed_tokens.weight"] = model.model.embed_tokens.weight
    for own_name, value in layer.state_dict().items():
        name = own_name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if name.startswith("mlp.experts."):  # one tensor of all experts
            parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            for expert, matrices in enumerate(value):
                for part, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
                    tensors[f"{prefix}mlp.experts.{expert}.{part}.weight"] = matrix
        else:
            tensors[prefix + name] = value
    [file] = directory.glob("*.safetensors")
    save_file({**load_file(file), **{name: value.detach().clone() for name, value in tensors.items()}}, file)
    ids = torch.arange(config.vocab_size)
    return Head(model, layer.eval(), None, (), torch.nn.Identity(), model.lm_head.weight, ids, norms_output=True)


def _write(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().clone() for name, value in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
