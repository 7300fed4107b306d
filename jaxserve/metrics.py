"""What a step cost and what the engine has done so far. Units in the names."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step's account."""

    step_id: int
    num_rows: int
    num_tokens: int  # computed for requests
    num_padding_tokens: int  # computed in vain to fill the bucket
    num_prefill_tokens: int
    num_decode_tokens: int
    num_cached_tokens: int  # prompt tokens that admissions of this step found in the prefix cache
    num_preemptions: int
    num_pages_used: int
    num_slack_tokens: int  # positions in used pages that hold nothing yet
    num_waiting: int
    host_ms: float  # schedule, pack and dispatch
    device_ms: float  # dispatch (or end of the step before) to result
    weight_bytes: int  # read by the step
    kv_bytes: int  # read and written by the step
    flops: int


@dataclass(slots=True)
class EngineStats:
    """Totals since start."""

    num_steps: int = 0
    num_tokens: int = 0
    num_padding_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_wasted_tokens: int = 0  # sampled after a stop that was seen one step late
    num_finished: int = 0
    num_compiles: int = 0  # after warm-up; 0 unless something is wrong
    used_page_steps: int = 0  # sum over steps of pages used
    slack_token_steps: int = 0  # sum over steps of allocated positions that held nothing
    host_ms: float = 0.0
    device_ms: float = 0.0
    weight_bytes: int = 0
    kv_bytes: int = 0
    flops: int = 0

    def add(self, step: StepStats) -> None:
        """Account for one step."""
        self.num_steps += 1
        self.used_page_steps += step.num_pages_used
        self.slack_token_steps += step.num_slack_tokens
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(step, name))

    @property
    def padding_share(self) -> float:
        """Share of computed tokens that were padding."""
        return self.num_padding_tokens / max(1, self.num_tokens + self.num_padding_tokens)

    def page_slack_share(self, page_size: int) -> float:
        """Share of allocated positions that held nothing, averaged over steps."""
        return self.slack_token_steps / max(1, self.used_page_steps * page_size)


_SUMMED = tuple(
    {f.name for f in dataclasses.fields(StepStats)} & {f.name for f in dataclasses.fields(EngineStats)} - {"num_steps"}
)
