"""WeightReads: weight bytes that a step reads, by its number of tokens."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxserve.layers.experts import Experts
from jaxserve.models.params import Params, ParamSpec, lookup_bytes, lookup_tables


class WeightReads(NamedTuple):
    """Weight bytes that a step reads on a device.

    Attributes:
        every_step: bytes that every step reads.
        per_token: bytes that each token reads from look-up tables, such as embeddings.
        per_expert: bytes in one expert's weights, summed over layers.
        experts: sizes and routing rules in MoE layers; None if there are none.
    """

    every_step: int
    per_token: int
    per_expert: int = 0
    experts: Experts | None = None

    @classmethod
    def from_params(
        cls, params: Params, specs: Sequence[ParamSpec], num_bytes: Callable[[Any], int], *, has_logits: bool = True
    ) -> "WeightReads":
        """Count the weight bytes that steps read.

        Args:
            params: parameters; layers may be stacked.
            specs: one device's specs.
            num_bytes: function that returns a tree's bytes on one device.
            has_logits: False if the model pools.
        """
        experts = next((spec.experts for spec in specs if spec.experts is not None), None)
        names = {spec.path[-1] for spec in specs if spec.experts is not None}
        expert_weights = [
            leaf
            for path, leaf in jax.tree.leaves_with_path(params["layers"])
            if any(isinstance(key, jax.tree_util.DictKey) and key.key in names for key in path)
        ]
        all_experts = num_bytes(expert_weights)
        whole = num_bytes(params) - num_bytes(lookup_tables(params, has_logits=has_logits)) - all_experts
        per_expert = 0 if experts is None else all_experts // experts.num_held
        return cls(whole, lookup_bytes(params, specs, num_bytes), per_expert, experts)

    def step(self, num_tokens: int, num_live: int | None = None) -> int:
        """Return a step's bytes, with the maximum number of experts that its tokens can choose.

        Args:
            num_tokens: tokens on the token axis.
            num_live: tokens that are not padding; padding chooses no experts. None without padding.
        """
        num_choosing = num_tokens if num_live is None else num_live
        num_experts = 0 if self.experts is None else self.experts.max_read(num_choosing)
        return self.every_step + num_tokens * self.per_token + num_experts * self.per_expert
