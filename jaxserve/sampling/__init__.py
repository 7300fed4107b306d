"""Sampling on device: logits in, token ids and log probabilities out."""

from jaxserve.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxserve.sampling.rows import SamplingRows, SlotTable
from jaxserve.sampling.sampler import sample

__all__ = ["SamplingRows", "SlotTable", "TokenLogprobs", "sample", "token_logprobs"]
