"""Models of GGUF files: names of their tensors in Hugging Face's models, and what the converter does to the values."""

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
_EXPERTS = {  # * is the number of an expert
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
    """A model.

    Attributes:
        architecture: name of the architecture in a config.json.
        model_type: name of the family there.
        names: names of tensors beside Llama's, by those in files.
        facts: further fields of the config.json, which files do not have since llama.cpp does nothing else.
        is_alternating: True if the converter has reordered rows of queries and keys.
        norm_offset: number that the converter has added to the weights of norms.
        splits_qkv: True if Hugging Face's model has queries, keys and values apart, which a file may have in one.
        epsilon: key of the number that norms add, and its name in a config.json.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str] = {}
    facts: Mapping[str, Any] = {}
    is_alternating: bool = False
    norm_offset: float = 0.0
    splits_qkv: bool = False
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")

    def hf_name(self, name: str) -> str:
        """Return the name of a tensor in Hugging Face's model, with * for the number of experts; the same if unknown.

        Early files have a tensor for each expert, with its number behind the name.
        """
        names = {**_NAMES, **self.names}
        match = _NAME.fullmatch(name)
        own = None if match is None else match[2] if match[3] is None else f"{match[2]}_exps"
        if match is None or own not in names:
            return name
        layer = "" if match[1] is None else f"model.layers.{match[1]}."
        full = f"{layer}{names[own]}.{match[4]}"
        return full if match[3] is None else full.replace("*", match[3])


_MODELS = {
    "llama": GgufModel("LlamaForCausalLM", "llama", is_alternating=True),
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
_LLAMA_MIXTURE = GgufModel("MixtralForCausalLM", "mixtral", _MIXTRAL, is_alternating=True)


def model_of(file: GgufFile) -> GgufModel:
    """Return the model of a file; CheckpointError if it is not supported."""
    if file.architecture not in _MODELS:
        raise file.fault(f"be of an architecture in {sorted(_MODELS)}", file.architecture)
    if not (num_experts := file.get("expert_count")):
        return _MODELS[file.architecture]
    if file.architecture == "llama":
        return _LLAMA_MIXTURE
    if "ffn_gate_exps" not in _MODELS[file.architecture].names:
        raise file.fault(f"be of a model without experts, as {file.architecture} is", f"{num_experts} of them")
    return _MODELS[file.architecture]
