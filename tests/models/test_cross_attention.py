"""A toy family with cross attention, GPT-2's decoder over an encoder's states: two layer specs per layer of GPT-2."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.linear import linear
from jaxserve.models import decoder, registry
from jaxserve.models.block import attention, block, project_out
from jaxserve.models.kv_layout import NO_GROUP
from jaxserve.models.layer_spec import EXTERNAL
from tests.checkpoints import build_model, hf_dict
from tests.models.test_parity import assert_close, whole_sequence
from tests.oracles import torch

SELF = {"input_norm": "ln_1", "qkv": "attn.c_attn", "o": "attn.c_proj"}
CROSS = {"input_norm": "ln_cross_attn", "q": "crossattention.q_attn", "kv": "crossattention.c_attn"}
CROSS |= {"o": "crossattention.c_proj", "mlp_norm": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj"}


def attend(p, x, tokens, layer, arch, norm, residual):
    if layer.attention.kv_source != EXTERNAL:
        return attention(p, x, tokens, layer, arch, norm, residual)
    q, kv = linear(x, p["q_proj"], norm=norm, bias=p["q_bias"]), linear(layer.inputs, p["kv_proj"], bias=p["kv_bias"])
    q, k, v = (y.reshape(len(y), -1, layer.attention.head_dim) for y in (q, *jnp.split(kv, 2, axis=1)))
    scores = jnp.einsum("tqh,sqh->qts", q, k) * layer.attention.options.scale
    return project_out(p, jnp.einsum("qts,sqh->tqh", jax.nn.softmax(scores), v), tokens, arch, residual), tokens


def test_cross_attention_reads_an_encoder_and_keeps_no_tokens(monkeypatch):
    arch = registry.from_hf_config(hf_dict("gpt2"))
    specs = [(replace(layer, mlp=None), layer.attending(kv_source=EXTERNAL)) for layer in arch.layers]
    arch = replace(arch, architecture="Toy", layers=sum(specs, ()))
    toy = replace(
        registry.FAMILIES["GPT2LMHeadModel"],
        block=partial(block, attention=attend),
        layer_inputs=lambda params, *_: params["encoder"],
    )
    monkeypatch.setitem(registry.FAMILIES, "Toy", toy)
    states, token_ids = np.random.default_rng(0).standard_normal((9, arch.hidden_size), np.float32), np.arange(20)
    model = build_model("gpt2", add_cross_attention=True)
    hf = {name: jnp.asarray(tensor.detach().numpy()) for name, tensor in model.transformer.named_parameters()}

    def tensors(prefix, name):
        weight, bias = hf[f"{prefix}.weight"], hf[f"{prefix}.bias"]
        return {name: {"weight": weight, "bias": bias}, f"{name}_proj": weight.T, f"{name}_bias": bias}

    layers = [
        {key: y for name, own in names.items() for key, y in tensors(f"h.{index}.{own}", name).items()}
        for index in range(len(specs))
        for names in (SELF, CROSS)
    ]
    params = {"embed": hf["wte.weight"], "position_embed": hf["wpe.weight"], "layers": layers}
    params |= {"encoder": jnp.tile(states, (arch.num_layers, 1, 1)), "final_norm": tensors("ln_f", "norm")["norm"]}
    hidden, _ = decoder.forward(params, arch, jnp.asarray(token_ids), whole_sequence(token_ids))
    with torch.no_grad():
        expected = model(torch.tensor(token_ids)[None], encoder_hidden_states=torch.tensor(states)[None]).logits[0]
    assert_close(np.asarray(decoder.compute_logits(params, arch, hidden)), expected.numpy())
    assert [kept.group for kept in arch.kv_layout.layers] == [0, NO_GROUP] * len(specs)
    assert arch.kv_layout.num_pool_layers == len(specs)
