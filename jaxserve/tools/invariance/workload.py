"""Requests for the check: random prompts that repeat themselves, greedy and sampled."""

import random
from dataclasses import dataclass

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.errors import ConfigError

NUM_LOGPROBS = 5
_PHRASE_LEN = 12  # prompts repeat phrases, so that n-gram drafts find something


@dataclass(frozen=True, slots=True)
class Sizes:
    """Workload sizes.

    Attributes:
        num_requests: number of requests; every other one is greedy, the others are sampled with a seed.
        prompt_len: length of the longest prompt; the shortest has three quarters.
        max_tokens: number of tokens generated for each request.
        prompt_seed: seed for the prompts and samples.
    """

    num_requests: int = 8
    prompt_len: int = 96
    max_tokens: int = 32
    prompt_seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_requests", 2), ("prompt_len", 32), ("max_tokens", 2), ("prompt_seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def max_len(self) -> int:
        """Largest number of tokens in a request, prompt and output."""
        return self.prompt_len + self.max_tokens


@dataclass(frozen=True, slots=True)
class Job:
    """Prompt and sampling parameters of a request in the workload."""

    prompt: list[int]
    params: SamplingParams

    @property
    def is_greedy(self) -> bool:
        """True if each token is the most likely one."""
        return self.params.temperature == 0


def make_jobs(sizes: Sizes, vocab_size: int, special_ids: frozenset[int]) -> list[Job]:
    """Return the requests. Prompts have ids from the whole vocabulary except special ones, and share no prefix."""
    rng = random.Random(sizes.prompt_seed)
    jobs = []
    for index in range(sizes.num_requests):
        phrases: list[list[int]] = []
        while len(phrases) < 3:
            phrase = [rng.randrange(vocab_size) for _ in range(_PHRASE_LEN)]
            phrases.append([token for token in phrase if token not in special_ids] or [index])
        length = sizes.prompt_len - index * sizes.prompt_len // (4 * sizes.num_requests)
        prompt: list[int] = []
        while len(prompt) < length:
            prompt += rng.choice(phrases)
        params = SamplingParams(
            temperature=float(index % 2),
            top_p=0.95,
            seed=sizes.prompt_seed + index,
            max_tokens=sizes.max_tokens,
            ignore_eos=True,
            logprobs=NUM_LOGPROBS,
        )
        jobs.append(Job(prompt[:length], params))
    return jobs
