"""Models in GGUF files: Hugging Face names of their tensors, and how llama.cpp's converter changes the weights."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.weights.gguf_file import GgufFile

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_PHI2 = {
    "output_norm": "model.final_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_EXPERTS = {  # * stands for the expert index
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+?)(?:\.(\d+))?\.(weight|bias)")


class GgufModel(NamedTuple):
    """How a model type's GGUF files differ from its Hugging Face checkpoints: names, config.json fields and weights.

    Attributes:
        architecture: architecture name in config.json.
        model_type: family name in config.json.
        names: tensor names that differ from Llama's, name in the file -> Hugging Face name.
        constants: further config.json fields, which llama.cpp hard-codes and files lack.
        is_interleaved: True if the converter interleaves the rows of query and key heads for RoPE.
        norm_offset: amount that the converter adds to norm weights.
        splits_qkv: True if Hugging Face's model has separate queries, keys and values, which a file may fuse.
        epsilon: metadata key for the norms' epsilon, and its config.json field.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str] = {}
    constants: Mapping[str, Any] = {}
    is_interleaved: bool = False
    norm_offset: float = 0.0
    splits_qkv: bool = False
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")

    def hf_name(self, name: str) -> str:
        """Return a tensor's Hugging Face name, with * for the expert index; unknown names stay the same.

        Early files have one tensor per expert, with the expert index after the name: it replaces the *.
        """
        names = {**_NAMES, **self.names}
        match = _NAME.fullmatch(name)
        stem = None if match is None else match[2] if match[3] is None else f"{match[2]}_exps"
        if match is None or stem not in names:
            return name
        layer = "" if match[1] is None else f"model.layers.{match[1]}."
        full = f"{layer}{names[stem]}.{match[4]}"
        return full if match[3] is None else full.replace("*", match[3])


_MODELS = {
    "llama": GgufModel("LlamaForCausalLM", "llama", is_interleaved=True),
    "qwen2": GgufModel("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufModel("Qwen3ForCausalLM", "qwen3"),
    "gemma2": GgufModel("Gemma2ForCausalLM", "gemma2", _GEMMA, norm_offset=1.0),
    "gemma3": GgufModel("Gemma3ForCausalLM", "gemma3_text", _GEMMA, norm_offset=1.0),
    "phi2": GgufModel(
        "PhiForCausalLM", "phi", _PHI2, splits_qkv=True, epsilon=("attention.layer_norm_epsilon", "layer_norm_eps")
    ),
    "phi3": GgufModel("Phi3ForCausalLM", "phi3", _PHI3),
    "qwen2moe": GgufModel("Qwen2MoeForCausalLM", "qwen2_moe", _EXPERTS, {"norm_topk_prob": False}),
    "qwen3moe": GgufModel("Qwen3MoeForCausalLM", "qwen3_moe", _EXPERTS, {"norm_topk_prob": True}),
    "olmoe": GgufModel("OlmoeForCausalLM", "olmoe", _EXPERTS, {"norm_topk_prob": False}),
}
_LLAMA_MOE = GgufModel("MixtralForCausalLM", "mixtral", _MIXTRAL, is_interleaved=True)


def find_model(file: GgufFile) -> GgufModel:
    """Return the description of a file's model type; CheckpointError if it is not supported."""
    if file.architecture not in _MODELS:
        raise file.fault(f"be of an architecture in {sorted(_MODELS)}", file.architecture)
    if not (num_experts := file.get("expert_count")):
        return _MODELS[file.architecture]
    if file.architecture == "llama":
        return _LLAMA_MOE
    if "ffn_gate_exps" not in _MODELS[file.architecture].names:
        raise file.fault(f"be of a model without experts, as {file.architecture} is", f"{num_experts} of them")
    return _MODELS[file.architecture]
