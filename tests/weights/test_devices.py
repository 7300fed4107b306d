"""Loading over several devices, in a process that has four of them, and imports that serving must avoid."""

import os
import subprocess
import sys

LOADED = """
import sys
from jaxserve import weights
import jaxserve.models.registry, jaxserve.models.decoder
assert not any(name.partition(".")[0] in ("torch", "transformers", "orbax", "tensorstore") for name in sys.modules)
"""

SHARDED = """
import jax, numpy as np
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxserve import weights
from jaxserve.weights import stored_tensor
from jaxserve.weights.rows import build_tree, leaf_at
from jaxserve.models import registry

path = {path!r}
config = dict(architectures=["LlamaForCausalLM"], vocab_size=132, hidden_size=64, num_hidden_layers=2,
              num_attention_heads=4, num_key_value_heads=2, intermediate_size=96)
specs = registry.param_specs(registry.from_hf_config(config))
mesh = Mesh(np.array(jax.devices()), ("model",))
axes = {{"heads": "model", "ffn": "model", "vocab": "model"}}
shardings = {{s.path: NamedSharding(mesh, PartitionSpec(*(axes.get(a) for a in s.axes))) for s in specs}}
alone = weights.dummy(specs, 7, jnp.bfloat16)
assert len(jax.devices()) == 4
for dummy in (weights.dummy(specs, 7, jnp.bfloat16, shardings=shardings.get), alone):
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), dummy, alone))
weights.save(path, specs, alone, config)

copied = []
original = stored_tensor._copy
stored_tensor._copy = lambda piece: (copied.append(piece[1].nbytes), original(piece))
as_tree = build_tree(specs, lambda s: shardings[s.path])
for given in (shardings.get, as_tree):
    copied.clear()
    params = weights.load(path, specs, jnp.float32, given)
    for s in specs:
        array, want = leaf_at(params, s.path), leaf_at(alone, s.path)
        assert array.sharding == shardings[s.path] and array.dtype == jnp.float32, s
        assert (np.asarray(array) == np.asarray(want, np.float32)).all(), s
        held = {{shard.data.nbytes for shard in array.addressable_shards}}
        assert held == {{array.nbytes // (1 if array.is_fully_replicated else 4)}}, s
    # Replicated tensors are read once and each shard by its device alone: in all, the file once.
    assert sum(copied) == sum(x.nbytes for x in jax.tree.leaves(alone)), sum(copied)

one = jax.devices()[2]
copied.clear()
only = lambda path: NamedSharding(Mesh(np.array([one]), ("model",)), PartitionSpec())
assert leaf_at(weights.load(path, specs, None, only), ("embed",)).devices() == {{one}}

half = [NamedSharding(Mesh(np.array(jax.devices()[:2]), ("model",)), s.spec) for s in shardings.values()]
device_reads = []
read = weights.StoredTensor._read
weights.StoredTensor._read = lambda self, index: (out := read(self, index), device_reads.append(out.nbytes))[0]
weights.load(path, specs, None, dict(zip(shardings, half)).get)
largest = max(x.nbytes for x in jax.tree.leaves(alone))
assert max(device_reads) == largest // 2
"""


def test_each_device_reads_its_own_slices_and_nothing_slow_is_imported(tmp_path):
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADED + SHARDED.format(path=str(tmp_path))],
        env={**os.environ, **devices},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
