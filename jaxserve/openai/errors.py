"""Errors in OpenAI's format, which name the wrong field of a body."""

from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.errors import BusyError, EngineDiedError, FaultError, PromptTooLongError, RequestError

Json = dict[str, Any]
MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 4096, 256


@dataclass(eq=False)
class BadRequestError(RequestError):
    """Error for a body that cannot be served, with the fields in OpenAI's error object.

    Attributes:
        too_long: number of prompt tokens and their maximum if the prompt is too long; None otherwise.
    """

    message: str
    param: str | None = None
    code: str = "invalid_request"
    status_code: int = 400
    too_long: tuple[int, int] | None = field(default=None, kw_only=True)

    def __str__(self) -> str:
        return self.message


def check_output_len(given: Json, max_model_len: int | None) -> None:
    """Raise BadRequestError, in vLLM's words, for a maximum output length that exceeds the model's length.

    An output that only does not fit after its prompt is cut instead, as in vLLM; so is one of the default length.

    Args:
        given: fields of the body.
        max_model_len: maximum number of tokens in prompt and output; None to refuse nothing.
    """
    for name in ("max_completion_tokens", "max_tokens"):
        if max_model_len is not None and given.get(name, 0) > max_model_len:
            message = f"{name}={given[name]} cannot be greater than max_model_len={max_model_len}. "
            raise BadRequestError(f"{message}Please request fewer output tokens.", name, "invalid_value")


def as_bad_request(error: RequestError) -> BadRequestError:
    """Return an error as one with the fields of OpenAI's error object: code, HTTP status and wrong body field."""
    if isinstance(error, BadRequestError):
        return error
    if isinstance(error, PromptTooLongError):
        length = error.num_tokens, error.max_tokens
        return BadRequestError(str(error), code="context_length_exceeded", too_long=length)
    if isinstance(error, EngineDiedError):
        return BadRequestError(str(error), code="engine_died", status_code=500)
    if isinstance(error, FaultError):
        return BadRequestError(str(error), code="internal_error", status_code=500)
    if isinstance(error, BusyError):
        return BadRequestError(str(error), code="overloaded", status_code=503)
    return BadRequestError(str(error))


def error_in(field: str, error: RequestError) -> BadRequestError:
    """Return an error as one of a body field, except if that is not to blame."""
    known = as_bad_request(error)
    return known if known.status_code >= 500 else replace(known, param=field)


def error_body(error: RequestError) -> Json:
    """Return an error as OpenAI's JSON object."""
    known = as_bad_request(error)
    kind = "invalid_request_error" if known.status_code < 500 else "server_error"
    if known.status_code == 429:
        kind = "rate_limit_error"
    param = None if known.param is None else known.param[:MAX_PARAM_CHARS]  # the client may have chosen its name
    return {"error": {"message": shown_message(known), "type": kind, "param": param, "code": known.code}}


def shown_message(error: BadRequestError) -> str:
    """Return an error's message, cut to MAX_MESSAGE_CHARS for a reply, as it may quote the request."""
    return error.message if len(error.message) <= MAX_MESSAGE_CHARS else f"{error.message[:MAX_MESSAGE_CHARS]}..."
