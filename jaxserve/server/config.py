"""Options of the server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxserve.api.schema import FieldType, Schema, integer, is_sequence, number, one_of
from jaxserve.errors import ConfigError
from jaxserve.openai.chat_formats import chat_format
from jaxserve.server.degradation import RUNGS
from jaxserve.server.lora_modules import read_modules
from jaxserve.server.request_classes import read_objectives

_MAX_RETENTION_DAYS = 1_000_000  # dates of clients end with the year 9999
_UVICORN_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(frozen=True)
class ServerConfig:
    """Server options, without the engine's.

    Attributes:
        host: address to listen at.
        port: port to listen at; 0 takes a free one.
        served_model_name: model names accepted in requests; replies use the first; by default the name of the model's
            directory.
        api_key: accepted API keys; without any, requests need none.
        api_key_file: file with one API key per line, optionally as TENANT:KEY.
        objectives: priority classes by objective, as NAME=PRIORITY: requests that name it in the header
            x-llm-d-inference-objective get this `priority`. They need scheduling_policy "priority".
        max_queued_requests: maximum number of waiting requests; later ones are refused with 503, or with 429 if their
            tenant exceeds its quota.
        max_queued_tokens: maximum prompt tokens of waiting requests; a request that would exceed it is refused with
            503.
        admission_ttft_ms: maximum estimated time to first token; a request with a longer estimate is refused. MS for
            all requests, or PRIORITY=MS for one class.
        degradation: features that requests may lose under load: "speculation", "coalesce", "extras", "batch", "shed";
            "none" for nothing.
        requests_per_minute_per_key: maximum requests per minute and key; 0 for no limit.
        tokens_per_minute_per_key: maximum prompt and output tokens per minute and key; 0 for no limit.
        max_open_requests_per_key: maximum unfinished requests per key; later ones are refused with 429.
        max_body_bytes: maximum size of a request body.
        max_json_depth: maximum nesting depth in a JSON body.
        max_prompts: maximum prompts per completion or embedding request; OpenAI accepts 2048 for embeddings. A
            larger limit needs a larger max_queued_requests.
        body_timeout_s: maximum time for a body to arrive.
        send_timeout_s: time after which a client that reads nothing is disconnected.
        stuck_after_s: time without progress after which /health fails.
        shutdown_timeout_s: time that unfinished requests have after the first signal.
        tool_call_parser: format in which the model writes tool calls: hermes, llama3_json, mistral, deepseek_v3,
            deepseek_v31, openai or none; "auto" infers it from the chat template.
        reasoning_parser: format in which the model writes reasoning: deepseek_r1, qwen3, mistral, openai_gptoss or
            none; "auto" infers it from the chat template.
        enable_auto_tool_choice: True to start only if the tool call format is known. Tools may be called in any case.
        response_role: role in chat replies.
        trust_request_chat_template: True to accept chat templates in requests. They run in a sandbox, but may take up
            to five seconds and much memory.
        allowed_origins: origins whose pages may call from a browser (CORS), such as `https://chat.example.org`; `*` for
            all.
        otlp_traces_endpoint: OpenTelemetry collector's URL, such as `http://localhost:4318/v1/traces`, to which each
            request's span is sent by OTLP over HTTP.
        public_metrics: True to serve /metrics without a key.
        root_path: path prefix that a proxy adds; requests are served with and without it.
        uds: path of a Unix domain socket to listen at instead of host and port.
        access_log: True to log each request's client, path, status and time.
        uvicorn_log_level: minimum level of uvicorn's log: critical, error, warning, info, debug or trace.
        enable_force_include_usage: True to send token counts in all streamed completions and chats.
        enable_per_request_metrics: True to send a request's times as `metrics`, with whole replies and with the token
            counts at the end of a stream.
        batch_dir: directory in which /v1/files and /v1/batches keep files and batches, from which a restarted server
            resumes; without it there are neither.
        max_batch_file_bytes: maximum size of an uploaded file.
        max_batch_storage_bytes: maximum total file size per key.
        batch_retention_days: days after which files, and batches that have ended, are deleted; at most 1,000,000.
        lora_modules: LoRA adapters to load at the start, each as NAME=PATH or as JSON with name, path and
            base_model_name; requests name them as `model`. They need enable_lora.
        lora_root: directory with the LoRA adapters that POST /v1/load_lora_adapter may load; it needs admin_key.
        admin_key: key for requests that change the server: /v1/load_lora_adapter and /v1/unload_lora_adapter.
        return_tokens_as_token_ids: True to name tokens by their ids, as token_id:7, in all log probabilities.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: Sequence[str] = ()
    api_key: Sequence[str] = field(default=(), repr=False)
    api_key_file: Path | None = None
    objectives: Sequence[str] = ()
    max_queued_requests: int = 1024
    max_queued_tokens: int = 2**22
    admission_ttft_ms: Sequence[str] = ()
    degradation: Sequence[str] = RUNGS
    requests_per_minute_per_key: int = 0
    tokens_per_minute_per_key: int = 0
    max_open_requests_per_key: int = 4096
    max_body_bytes: int = 8 * 2**20
    max_json_depth: int = 64
    max_prompts: int = 1024
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    stuck_after_s: float = 120.0
    shutdown_timeout_s: float = 30.0
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    enable_auto_tool_choice: bool = False
    response_role: str = "assistant"
    trust_request_chat_template: bool = False
    allowed_origins: Sequence[str] = ()
    otlp_traces_endpoint: str | None = None
    public_metrics: bool = False
    root_path: str = ""
    uds: str | None = None
    access_log: bool = False
    uvicorn_log_level: str = "warning"
    enable_force_include_usage: bool = False
    enable_per_request_metrics: bool = False
    batch_dir: Path | None = None
    max_batch_file_bytes: int = 200 * 2**20
    max_batch_storage_bytes: int = 2**33
    batch_retention_days: float = 30.0
    lora_modules: Sequence[str] = ()
    lora_root: Path | None = None
    admin_key: str | None = field(default=None, repr=False)
    return_tokens_as_token_ids: bool = False

    def __post_init__(self) -> None:
        _SCHEMA.check(self)
        read_objectives(self.objectives)
        _ = self.ttft_targets_s
        read_modules(self.lora_modules)
        if self.lora_root is not None and not self.admin_key:
            raise ConfigError("lora_root needs admin_key, with which adapters are loaded; set one")
        chat_format((), self.tool_call_parser, self.reasoning_parser)  # ConfigError for unknown names

    @property
    def enabled_degradation(self) -> frozenset[str]:
        """Features that load may disable."""
        return frozenset() if "none" in self.degradation else frozenset(self.degradation)

    @property
    def ttft_targets_s(self) -> dict[int | None, float]:
        """Maximum time to first token in seconds by priority class; the key None stands for all other classes."""
        targets: dict[int | None, float] = {}
        for entry in self.admission_ttft_ms:
            priority, _, number = entry.rpartition("=")
            try:
                targets[int(priority) if priority else None] = float(number) / 1e3
            except ValueError:
                raise ConfigError(f"admission_ttft_ms must be MS or PRIORITY=MS, got {entry!r}") from None
            if not float(number) > 0:
                raise ConfigError(f"admission_ttft_ms must be positive, got {entry!r}")
        return targets


def _or_inf(finite: FieldType) -> FieldType:
    """Return the field type that also accepts infinity, for a time without a limit."""
    return replace(finite, holds=lambda value: (isinstance(value, float) and value == math.inf) or finite.holds(value))


_COUNTS = (
    *("max_queued_requests", "max_queued_tokens", "max_open_requests_per_key", "max_body_bytes", "max_prompts"),
    *("max_json_depth", "max_batch_file_bytes", "max_batch_storage_bytes"),
)
_TIMES = ("body_timeout_s", "send_timeout_s", "stuck_after_s")
_LADDER = (*RUNGS, "none")
_SCHEMA = Schema(
    ConfigError,
    ServerConfig,
    {
        **dict.fromkeys(_COUNTS, integer(1)),
        **dict.fromkeys(_TIMES, _or_inf(number(0, excludes_low=True))),
        **dict.fromkeys(("requests_per_minute_per_key", "tokens_per_minute_per_key"), integer(0)),
        "port": integer(0, 2**16 - 1),
        "shutdown_timeout_s": _or_inf(number(0)),
        "batch_retention_days": number(0, _MAX_RETENTION_DAYS, excludes_low=True),
        "degradation": FieldType(f"of {list(_LADDER)}", lambda given: is_sequence(given) and {*given} <= {*_LADDER}),
        "uvicorn_log_level": one_of(_UVICORN_LEVELS),
        "root_path": FieldType("empty or begin with a slash", lambda path: not path or path.startswith("/")),
    },
)
