"""Mixtures of experts in the layers of a family: sizes, tensors and computation, whatever the attention."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.layers.experts import Experts
from jaxserve.models.hf_config import SIZE, read_fields


def read_experts(
    config: Mapping[str, Any],
    *,
    size: str = "intermediate_size",
    per_token: str = "num_experts_per_tok",
    **facts: Any,
) -> Experts:
    """Read the number of experts, which transformers writes under either of two names, and their size.

    Args:
        config: content of config.json.
        size: name of the feed-forward size of an expert.
        per_token: name of the number of experts of a token.
        facts: other fields of `Experts`.
    """
    count = config.get("num_local_experts")
    count = config.get("num_experts") if count is None else count
    fields = read_fields({**config, "num_experts": count}, {"num_experts": SIZE, per_token: SIZE, size: SIZE})
    experts = Experts(fields["num_experts"], fields[per_token], fields[size], **facts)
    if experts.per_token > experts.num_experts:
        raise ConfigError(f"{per_token} must be at most num_experts, got {experts.per_token} and {experts.num_experts}")
    return experts
