"""Class and tenant of a request over HTTP."""

import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.errors import ConfigError
from jaxserve.openai.context import BodyContext
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.format import COMPLETIONS, EMBEDDINGS, parse_body
from jaxserve.openai.messages import message_to_chat
from jaxserve.openai.pooling import parse_pooling
from jaxserve.openai.responses import response_to_chat
from jaxserve.server.request_classes import in_class, read_objectives

OBJECTIVES = {"interactive": -1, "batch": 10}


def parsed(may_stream=True, **fields):
    body = {"prompt": [1, 2], **fields}
    return parse_body(COMPLETIONS, body, BodyContext("m", ["m"], None, SamplingParams(), may_stream=may_stream))


@pytest.mark.parametrize("read", [parsed, lambda **body: response_to_chat(body), lambda **body: message_to_chat(body)])
def test_the_error_of_an_unknown_field_lists_that_of_who_waits(read):
    with pytest.raises(BadRequestError, match=r"unsupported fields \[.*'patience'\].*supported are .*'timeout'"):
        read(patience=1, timeout=2, max_tokens=3, messages=[], input="a")


def test_clients_of_vectors_may_have_a_timeout_and_lines_of_batch_files_have_none():
    def vector(may_stream=True, **fields):
        return parse_pooling(EMBEDDINGS, {"input": "a", **fields}, BodyContext("m", ["m"], may_stream=may_stream))

    for read in (parsed, vector):
        assert read(timeout=1) == read()
        with pytest.raises(BadRequestError, match=r"unsupported fields \['timeout'\]"):
            read(may_stream=False, timeout=1)


@pytest.mark.parametrize("prefix", [b"x-llm-d-inference-", b"x-gateway-inference-"])
def test_headers_of_a_gateway_say_class_and_tenant(prefix):
    headers = [(prefix + b"objective", b"batch"), (prefix + b"fairness-id", b"team a")]
    request = in_class(parsed(), headers, "", OBJECTIVES)
    assert (request.priority, request.tenant, request.ignored) == (10, "team a", ())
    request = in_class(parsed(priority=3), headers, "key's owner", OBJECTIVES)
    assert (request.priority, request.tenant) == (3, "key's owner"), "a body and a key count more"
    request = in_class(parsed(), headers, "", {})
    assert request.priority is None
    assert request.ignored == ("x-llm-d-inference-objective",), "what changes nothing is named"


def test_objectives_are_names_with_numbers():
    assert read_objectives(["interactive=-1", "a=b=10"]) == {"interactive": -1, "a=b": 10}
    for wrong in ("batch", "batch=", "=1", "batch=low"):
        with pytest.raises(ConfigError, match="objectives must"):
            read_objectives([wrong])


def test_a_batch_file_has_no_classes():
    assert parsed(may_stream=False, priority=0).priority is None
    with pytest.raises(BadRequestError, match="priority must be 0, got 1"):
        parsed(may_stream=False, priority=1)
