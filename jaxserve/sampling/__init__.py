"""Sampling on device: logits in, token ids and log probabilities out."""

from jaxserve.sampling.logprobs import PACKED_WORDS, TokenLogprobs, token_logprobs
from jaxserve.sampling.penalties import count_sampled, count_tokens
from jaxserve.sampling.rows import SAMPLING_FIELDS, SAMPLING_RECORD, SamplingRows, SlotRow, SlotTable, record_column
from jaxserve.sampling.sampler import sample
from jaxserve.sampling.vocab_split import VocabSplit

__all__ = [
    "PACKED_WORDS",
    "SAMPLING_FIELDS",
    "SAMPLING_RECORD",
    "SamplingRows",
    "SlotRow",
    "SlotTable",
    "TokenLogprobs",
    "VocabSplit",
    "count_sampled",
    "count_tokens",
    "record_column",
    "sample",
    "token_logprobs",
]
