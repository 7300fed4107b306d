"""Info: handlers for models, health, metrics, load and tokenization."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve import __version__
from jaxserve.api.schema import FieldType
from jaxserve.core.prompt import outside_vocabulary
from jaxserve.openai.chats import PROMPT_FIELDS, has_images, read_prompt
from jaxserve.openai.context import allow_any
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.fields import ANY, LIST, SWITCH, TEXT, BodyField, BodyReader, ObjectFields, needed
from jaxserve.openai.format import SCORING_PATHS, check_model
from jaxserve.openai.interfaces import INTERFACES
from jaxserve.openai.pooling import TASKS
from jaxserve.openai.responses import INPUT_TOKENS
from jaxserve.openai.tools import read_tools
from jaxserve.server import http

if TYPE_CHECKING:
    from jaxserve.server.call import Call
    from jaxserve.server.http import Json
    from jaxserve.server.service import Service
    from jaxserve.text.tokenizer import Tokenizer


PAGE = Path(__file__).parent / "page.html"
POOLING_PATHS = (*TASKS, *SCORING_PATHS)
MAX_TEXT_CHARS = 2**21  # of a text whose tokens are listed: making the list holds Python's lock
_TOKENIZED: ObjectFields = {"model": ANY, "return_token_strs": SWITCH, "add_special_tokens": SWITCH}
_TOKENIZED_TEXT: ObjectFields = {**_TOKENIZED, "prompt": needed(TEXT)}
_TOKENIZED_CHAT: ObjectFields = {**_TOKENIZED, **PROMPT_FIELDS, "tools": ANY, "documents": LIST}
_TOKEN_IDS = FieldType("a list of token ids", lambda ids: isinstance(ids, list) and {*map(type, ids)} <= {int})
_DETOKENIZED: ObjectFields = {"model": ANY, "tokens": needed(BodyField(_TOKEN_IDS))}


class Info:
    """Handlers for all requests that generate nothing.

    Args:
        service: engine and server state.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._engine = service, service.engine
        self._started_s = int(time.time())
        self._page = PAGE.read_bytes()

    async def tokenize(self, call: Call) -> None:
        """Reply with the token ids of the body's text or chat."""
        body = await call.json()
        tokens = await call.read_off_loop(partial(self._tokens, call, body), needs_time=has_images(body))
        await call.send_json(tokens)

    async def detokenize(self, call: Call) -> None:
        """Reply with the text of the body's token ids."""
        body = await call.json()
        await call.send_json(await call.read_off_loop(partial(self._text, body)))

    async def count(self, call: Call) -> None:
        """Reply with the body's number of prompt tokens, without serving it."""
        body, interface = await call.json(), INTERFACES[call.path]
        read = partial(interface.read, body, partial(self._service.parse, call=call, is_counted=True))
        request = await call.read_off_loop(read, needs_time=has_images(body))
        (prompt,) = request.prompts
        kind = {"object": "response.input_tokens"} if call.path == INPUT_TOKENS else {}
        await call.send_json(kind | {"input_tokens": len(prompt)})

    async def pool(self, call: Call) -> None:
        """Refuse a request for embeddings, classes or scores: the model generates text."""
        message = (
            f"{call.path} needs a model that pools, and {self._service.model_names[0]} generates text; "
            "a server started with --runner pooling makes embeddings of any model"
        )
        raise BadRequestError(message, "model", "model_does_not_pool")

    def _tokenizer(self) -> Tokenizer:
        """Return the tokenizer; BadRequestError if the engine has none."""
        if self._engine.tokenizer is None:
            raise BadRequestError("the engine must have a tokenizer, and runs with skip_tokenizer_init")
        return self._engine.tokenizer

    def _tokens(self, call: Call, body: Json) -> Json:
        """Return the reply to a /tokenize body."""
        tokenizer, is_chat = self._tokenizer(), body.get("messages") is not None
        given = BodyReader().read(body, _TOKENIZED_CHAT if is_chat else _TOKENIZED_TEXT)
        self._check_model(given)
        if is_chat:
            check = call.checked(allow_any)
            context = replace(self._service.context, check_prompt=allow_any, check_len=check, salt=call.salt)
            tokens = read_prompt(given, context, read_tools(given)).token_ids
        else:
            text, most = given["prompt"], max(MAX_TEXT_CHARS, (tokenizer.bound.max_chars or 0) * self._max_model_len)
            if len(text) > most:
                message = f"prompt must have at most {most} characters, got {len(text)}; send it in parts"
                raise BadRequestError(message, "prompt")
            tokens = tokenizer.encode(text, given.get("add_special_tokens", True))
        pieces = [tokenizer.piece(token_id) for token_id in tokens] if given.get("return_token_strs") else None
        return {"count": len(tokens), "max_model_len": self._max_model_len, "tokens": tokens, "token_strs": pieces}

    def _text(self, body: Json) -> Json:
        """Return the reply to a /detokenize body."""
        given = BodyReader().read(body, _DETOKENIZED)
        self._check_model(given)
        tokens, limit = given["tokens"], self._engine.arch.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < limit:
            raise BadRequestError(outside_vocabulary("tokens", tokens, limit), "tokens")
        return {"prompt": self._tokenizer().decode(tokens, skip_special_tokens=False)}

    def _check_model(self, body: Json) -> None:
        """Raise BadRequestError if a body names a model that the server does not have."""
        if (model := body.get("model")) is not None:
            check_model(model, self._service.model_names, self._engine.adapters)

    @property
    def _max_model_len(self) -> int:
        """Maximum number of tokens in a request, prompt and output."""
        return self._engine.schedule.max_model_len

    def _model_card(self, name: str) -> Json:
        """Return OpenAI's model object for one of the model's names, or for a LoRA adapter."""
        card = {"id": name, "object": "model", "created": self._started_s, "owned_by": "jaxserve"}
        model, adapter = self._service.model_names[0], self._engine.adapters.find(name)
        own = {"root": model, "parent": None}
        if adapter is not None:
            own = {"root": adapter.request.lora_path or name, "parent": adapter.request.base_model_name or model}
        return card | own | {"max_model_len": self._max_model_len}

    async def models(self, call: Call) -> None:
        """Reply with a model object for each of the model's names and each adapter."""
        names = *self._service.model_names, *self._engine.adapters
        await call.send_json({"object": "list", "data": [self._model_card(name) for name in names]})

    async def model(self, call: Call) -> None:
        """Reply with the model object for the name in the path."""
        name = call.path.removeprefix("/v1/models/")
        check_model(name, self._service.model_names, self._engine.adapters)
        await call.send_json(self._model_card(name))

    async def health(self, call: Call) -> None:
        """Reply with status 200 if the engine makes progress, else with 503 and the reason."""
        await self._send_status(call, self._service.health.problem())

    async def ready(self, call: Call) -> None:
        """Reply with status 200 if the server takes requests, else with 503 and the reason."""
        reason = self._service.health.problem()
        if self._service.is_draining:
            reason = "the server is stopping"
        elif reason is None and not self._engine.host.is_warm:
            reason = "programs are being compiled"
        elif reason is None and self._service.admission.is_full:
            reason = "the queue is full"
        await self._send_status(call, reason)

    async def _send_status(self, call: Call, reason: str | None) -> None:
        """Reply with status 200 and "ok", or with 503 and the reason if there is one."""
        await call.send_json({"status": reason or "ok"}, 200 if reason is None else 503)

    async def load(self, call: Call) -> None:
        """Reply with the unfinished requests' number, as vLLM does, and with what a router asks for."""
        await call.send_json({"server_load": len(self._service.streams), **self._service.observer.load()})

    async def version(self, call: Call) -> None:
        """Reply with jaxserve's version."""
        await call.send_json({"version": __version__})

    async def page(self, call: Call) -> None:
        """Reply with an HTML page on which to try the model and to see the load."""
        policy = b"default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
        headers = [(b"content-security-policy", policy + b"; frame-ancestors 'none'")]
        await http.send_bytes(call.send, 200, self._page, b"text/html; charset=utf-8", headers)

    async def metrics(self, call: Call) -> None:
        """Reply with all metrics in Prometheus' text format."""
        content_type = b"text/plain; version=0.0.4; charset=utf-8"
        text = await call.in_workers(self._service.observer.text)
        await http.send_bytes(call.send, 200, text, content_type)
