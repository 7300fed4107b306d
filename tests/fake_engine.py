"""Engine without a model, for tests of the layers above engines: tokens are a hash of prompt, seed and position.

As a program it is the `jaxserve` command over that engine; each step takes FAKE_STEP_S seconds.
"""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from jaxserve import __main__ as command
from jaxserve.api.cached_tokens import CachedTokens
from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import EngineStats, Occupancy, PeakRates, StepStats
from jaxserve.api.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.errors import RequestError
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.loading import load_tokenizer
from jaxserve.text.tokenizer import Tokenizer

STEP_S = "FAKE_STEP_S"


@dataclass
class FakeEngine:
    """The Engine API over hashed tokens. Prompts that contain "refuse" are refused."""

    tokenizer: Tokenizer | None
    config: EngineConfig = field(default_factory=lambda: EngineConfig(model="tiny"))
    max_num_seqs: int = 4
    step_s: float = 0.0
    sleep: Callable[[float], None] = time.sleep
    default_sampling_params: SamplingParams = field(default_factory=SamplingParams)
    waiting: dict[str, "_Running"] = field(default_factory=dict)
    max_unfinished: int = 0
    num_added: int = 0
    num_cache_resets: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    last_steps: list[StepStats] = field(default_factory=list)
    is_warm: bool = False

    @property
    def schedule(self) -> ScheduleConfig:
        return ScheduleConfig(
            self.max_num_seqs, 512, max_model_len=1000, page_size=16, num_pages=self.config.num_pages or 100
        )

    @property
    def occupancy(self) -> Occupancy:
        num_running = min(len(self.waiting), self.max_num_seqs)
        return Occupancy(num_running, len(self.waiting) - num_running, num_running, self.schedule.num_pages)

    @property
    def arch(self) -> Any:
        from jaxserve.layers.kv_forms import HeadVectors
        from jaxserve.models.arch import ArchConfig  # imports jax, which most programs here do without
        from jaxserve.models.layer_spec import AttentionSpec, LayerSpec, MlpSpec

        vocab_size = self.tokenizer.vocab_size if self.tokenizer else 100
        layers = (LayerSpec(AttentionSpec(1, HeadVectors(1, 8)), MlpSpec(8)),)
        return ArchConfig("LlamaForCausalLM", vocab_size, 8, layers, max_position=1000, norm_eps=1e-6)

    def describe_device(self) -> Any:
        from jaxserve.execution.roofline import describe_device

        return describe_device()

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> None:
        if isinstance(prompt, str):
            if "refuse" in prompt:
                raise RequestError("a prompt must not say refuse; leave it out")
            token_ids = self.tokenizer.encode(prompt)
        else:
            token_ids = list(prompt)
        assert request_id not in self.waiting
        self.waiting[request_id] = _Running(request_id, token_ids, params or SamplingParams(), self.tokenizer)
        self.num_added += 1
        self.max_unfinished = max(self.max_unfinished, sum(r.params.n for r in self.waiting.values()))

    def abort(self, request_id: str) -> None:
        self.waiting.pop(request_id, None)

    def reset_prefix_cache(self) -> None:
        self.num_cache_resets += 1

    def wait_until_warm(self) -> None:
        self.is_warm = True

    def peak_rates(self) -> PeakRates:
        assert self.is_warm, "beside compiles they would be measured too low, and kept"
        return PeakRates(flops_per_s=1e9, bytes_per_s=1e9)

    def has_unfinished(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[RequestOutput]:
        self.sleep(self.step_s)
        outputs = [request.advance() for request in list(self.waiting.values())[: self.max_num_seqs]]
        self._account(outputs)
        for output in outputs:
            if output.finished:
                del self.waiting[output.request_id]
        return outputs

    def wait(self) -> list[RequestOutput]:
        return [output for output in self.step() if output.finished]

    def _account(self, outputs: list[RequestOutput]) -> None:
        """Compute one token for each row; each row holds one page."""
        wall_ms = self.step_s * 1e3
        account = StepStats(
            step_id=self.stats.num_steps,
            num_steps=1,
            num_rows=len(outputs),
            num_tokens=len(outputs),
            num_padding_tokens=0,
            num_prefill_tokens=sum(len(output.outputs[0].token_ids) == 1 for output in outputs),
            num_decode_tokens=sum(len(output.outputs[0].token_ids) > 1 for output in outputs),
            cached_tokens=CachedTokens(),
            num_sought_tokens=0,
            num_preemptions=0,
            num_pages_used=len(outputs),
            num_slack_tokens=0,
            num_waiting=len(self.waiting) - len(outputs),
            host_ms=0.0,
            device_ms=wall_ms,
            wall_ms=wall_ms,
            weight_bytes=1000,
            kv_bytes=0,
            flops=2000,
        )
        self.last_steps = [account]
        self.stats.add(account)
        self.stats.num_output_tokens += len(outputs)


class _Running:
    def __init__(self, request_id: str, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.params = params
        self.tokenizer = tokenizer
        completions = [CompletionOutput(i) for i in range(params.n)]
        self.output = RequestOutput(request_id, None, prompt, completions)
        self.texts = [Detokenizer(tokenizer, params) for _ in completions]

    def advance(self) -> RequestOutput:
        for completion, text in zip(self.output.outputs, self.texts, strict=True):
            if completion.finish_reason is None:
                self._append(completion, text)
        self.output.finished = all(c.finish_reason for c in self.output.outputs)
        return self.output

    def _append(self, completion: CompletionOutput, text: Detokenizer) -> None:
        position = len(completion.token_ids)
        source = (self.output.prompt_token_ids, self.params.seed, completion.index, position)
        vocab_size = self.tokenizer.vocab_size if self.tokenizer else 100
        token_id = int.from_bytes(hashlib.blake2b(repr(source).encode(), digest_size=4).digest()) % vocab_size
        completion.token_ids.append(token_id)
        completion.metrics.num_output_tokens += 1
        if self.params.logprobs is not None:
            count = self.params.logprobs if self.params.logprobs >= 0 else vocab_size
            others = {(token_id + i) % vocab_size: Logprob(-1.0 - i, i + 1) for i in range(count)}
            completion.logprobs = [*(completion.logprobs or []), {token_id: Logprob(-1.0, 1)} | others]
        completion.stop_reason = text.push([token_id])
        if completion.stop_reason is not None:
            completion.finish_reason = "stop"
        elif position + 1 == (self.params.max_tokens or 40):
            text.finish()
            completion.finish_reason = "length"
        completion.text = str(text.visible)


class FakeLLM:
    """`jaxserve.offline.llm.LLM` over a FakeEngine; the model's directory is that of a tokenizer."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        config = EngineConfig(model=model, **options)
        self.engine = FakeEngine(
            load_tokenizer(config.tokenizer_path), config, step_s=float(os.environ.get(STEP_S, "0"))
        )

    def batch_engine(self) -> FakeEngine:
        return self.engine

    def get_default_sampling_params(self) -> SamplingParams:
        return self.engine.default_sampling_params.clone()

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[RequestOutput]:
        self.engine.add_request("0", prompt, params)
        shown = ""
        while self.engine.has_unfinished():
            (output,) = self.engine.step()
            completion = output.outputs[0]
            increment = replace(completion, text=completion.text.removeprefix(shown))
            shown = completion.text
            yield replace(output, outputs=[increment])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background jobs
    sys.modules["jaxserve.offline.llm"] = SimpleNamespace(LLM=FakeLLM)
    sys.exit(command.main())
