"""Sampling on device: logits in, token ids and log probabilities out."""

from jaxserve.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxserve.sampling.rows import SamplingRows, SlotTable, by_blocks
from jaxserve.sampling.sampler import sample
from jaxserve.sampling.vocab_split import VocabSplit

__all__ = ["SamplingRows", "SlotTable", "TokenLogprobs", "VocabSplit", "by_blocks", "sample", "token_logprobs"]
