"""Requests with pictures, from every interface: the ids of transformers' processor and model, or an error that names
the field.
"""

import base64
import dataclasses
import gc
import io
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.structured_outputs import StructuredOutputsParams
from jaxserve.assembly.engine import Engine
from jaxserve.errors import RequestError
from jaxserve.offline.beam_search import BeamSearchParams
from jaxserve.offline.llm import LLM
from jaxserve.openai.batch_files import run_batch
from jaxserve.openai.chats import has_images
from tests import picture_checkpoint
from tests.oracles import torch
from tests.picture_checkpoint import IMAGE, PROCESSOR
from tests.server.browser import PATH, Browser
from tests.server.conftest import running
from tests.server.test_batches import begin, client_of, ended
from tests.server.test_page import SEND, SETTLED
from tests.soon_compiled import few_programs
from tests.waiting import until

pytestmark = pytest.mark.long

SIZES: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 4,
    "num_pages": 128,
    "multi_step": 1,
    "compile_ahead": "minimal",
    "encoder_cache_size": 200,
}
GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
PICTURES = [
    Image.fromarray(np.random.default_rng(size).integers(0, 256, (size, 40, 3), np.uint8)) for size in (13, 40, 77)
]


@dataclasses.dataclass
class Model:
    """A tiny checkpoint as transformers runs it, and an engine over it."""

    path: Path
    model: Any
    llm: LLM

    def greedy(self, text: str, *pictures: Image.Image, **options: Any) -> list[int]:
        """Return the ids that transformers generates after a text with one placeholder per picture."""
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        own = {name: value for name, value in PROCESSOR.items() if name != "image_processor_type"}
        given = dict(CLIPImageProcessorPil(**own)(list(pictures), return_tensors="pt")) if pictures else {}
        ids = self.llm.engine.tokenizer.encode(text.replace("<image>", "<image>" * 25))
        with torch.no_grad():
            out = self.model.generate(
                input_ids=torch.tensor([ids]),
                **given,
                max_new_tokens=4,
                do_sample=False,
                eos_token_id=1,
                pad_token_id=0,
                **options,
            )
        return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("llava")
    model = picture_checkpoint.write(path)
    with few_programs():
        llm = LLM.over(Engine(EngineConfig(str(path), **SIZES)))
    yield Model(path, model, llm)
    llm.close()


def url(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def ids_of(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_prompts_with_pictures_are_those_of_transformers(served: Model) -> None:
    one, two, three = PICTURES
    prompts = [
        {"prompt": "Once <image> upon", "multi_modal_data": {"image": one}},
        {"prompt": "<image><image>a time", "multi_modal_data": {"image": [np.asarray(two), three]}},
        {"prompt": "there was a small engine"},
    ]
    outputs = served.llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
    expected = [
        served.greedy("Once <image> upon", one),
        served.greedy("<image><image>a time", two, three),
        served.greedy("there was a small engine"),
    ]
    assert ids_of(outputs) == expected
    assert outputs[0].prompt_token_ids.count(IMAGE) == 25, "outputs have the expanded prompt"
    assert outputs[0].prompt == "Once <image> upon"
    expanded = {"prompt_token_ids": outputs[0].prompt_token_ids, "multi_modal_data": {"image": [one]}}
    (again,) = served.llm.generate(expanded, SamplingParams(**GREEDY), use_tqdm=False)
    assert ids_of([again]) == expected[:1]
    assert again.prompt_token_ids == outputs[0].prompt_token_ids


def test_structured_outputs_after_pictures(served: Model) -> None:
    """The most likely tokens that a pattern allows, also in a batch with free text."""
    tokenizer = served.llm.engine.tokenizer
    texts = {token_id: tokenizer.decode([token_id]) for token_id in range(2, IMAGE)}
    digits = [token_id for token_id, text in texts.items() if re.fullmatch("[0-9]", text)]
    pattern = SamplingParams(**GREEDY, structured_outputs=StructuredOutputsParams(regex="[0-9]{8}"))
    prompt = {"prompt": "Once <image> upon", "multi_modal_data": {"image": PICTURES[0]}}
    for _ in range(2):  # the second time with cached pages
        outputs = served.llm.generate([prompt, prompt], [pattern, SamplingParams(**GREEDY)], use_tqdm=False)
        constrained = served.greedy("Once <image> upon", PICTURES[0], prefix_allowed_tokens_fn=lambda *_: digits)
        assert ids_of(outputs) == [constrained, served.greedy("Once <image> upon", PICTURES[0])]


def chat(*pictures: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url(picture)}} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Tokens go in"}]}]


def test_chats_with_pictures(served: Model) -> None:
    expected = served.greedy("[user] <image><image>Tokens go in", *PICTURES[:2])
    same = [{"type": "image", "image": PICTURES[0]}, {"type": "image_pil", "image_pil": PICTURES[1]}]
    chats = [chat(*PICTURES[:2]), [{"role": "user", "content": [*same, {"type": "text", "text": "Tokens go in"}]}]]
    outputs = served.llm.chat(chats, SamplingParams(**GREEDY), use_tqdm=False)
    assert ids_of(outputs) == [expected, expected]
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (output,) = served.llm.chat(chat(PICTURES[0]), SamplingParams(**GREEDY), use_tqdm=False, chat_template=plain)
    assert ids_of([output]) == [served.greedy("<image>\nTokens go in", PICTURES[0])]


def test_chats_wait_for_those_whose_pictures_take_the_memory(served: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may have more pictures than memory holds at once."""
    reader = served.llm.engine.reader.images
    assert reader is not None
    pictures = [Image.new("RGB", (40, 40), (shade, 0, 0)) for shade in (20, 90, 160, 230)]
    monkeypatch.setattr(reader, "_max_living_bytes", 0)
    outputs = served.llm.chat([chat(each) for each in pictures], SamplingParams(**GREEDY), use_tqdm=False)
    assert ids_of(outputs) == [served.greedy("[user] <image>Tokens go in", each) for each in pictures]
    assert reader.living.num_bytes < 4 * 25 * 48 * 4, "the first ones' patches were freed"


def test_several_samples_and_beams_share_a_picture(served: Model) -> None:
    prompt = {"prompt": "Once <image> upon", "multi_modal_data": {"image": PICTURES[0]}}
    (output,) = served.llm.generate(prompt, SamplingParams(n=2, seed=1, max_tokens=4), use_tqdm=False)
    assert len(output.outputs) == 2
    (beams,) = served.llm.beam_search(prompt, BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True))
    greedy = served.llm.generate(prompt, SamplingParams(**GREEDY, ignore_eos=True), use_tqdm=False)
    assert [beams.sequences[0].tokens[-4:]] == ids_of(greedy)


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ({"prompt": "no placeholder", "multi_modal_data": {"image": PICTURES[0]}}, "got 0 of them .* 1 images"),
        ({"prompt": "<image><image>", "multi_modal_data": {"image": PICTURES[0]}}, "got 2 of them .* 1 images"),
        ({"prompt": "<image>"}, "got 1 of them .* 0 images"),
        ({"prompt": "<image>" * 11, "multi_modal_data": {"image": PICTURES[:1] * 11}}, "maximum context length"),
        ({"prompt": "<image>", "multi_modal_data": {"audio": 1}}, "audio and video are not supported"),
        ({"prompt": "<image>", "multi_modal_data": {"image": "/etc/passwd"}}, "must begin with data:"),
    ],
)
def test_wrong_prompts_are_refused(served: Model, prompt: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word):
        served.llm.generate(prompt, use_tqdm=False)


def test_truncated_prompts_cannot_have_pictures(served: Model) -> None:
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": PICTURES[0]}}
    with pytest.raises(RequestError, match="truncate_prompt_tokens must be None"):
        served.llm.generate(prompt, SamplingParams(truncate_prompt_tokens=9), use_tqdm=False)


def test_pictures_over_http(served: Model) -> None:
    expected = served.llm.engine.tokenizer.decode(served.greedy("[user] <image>Tokens go in", PICTURES[0]))
    text, picture = "Tokens go in", url(PICTURES[0])
    source = {"type": "base64", "media_type": "image/png", "data": picture.partition(",")[2]}
    inputs = [{"type": "input_image", "image_url": picture, "detail": "auto"}, {"type": "input_text", "text": text}]
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    bodies = {
        "/v1/chat/completions": {"messages": chat(PICTURES[0]), **GREEDY},
        "/v1/responses": {"input": [{"role": "user", "content": inputs}], "max_output_tokens": 4, "temperature": 0},
        "/v1/messages": {"messages": [{"role": "user", "content": blocks}], **GREEDY},
    }
    with running(served.llm.engine) as server:
        replies = {path: server.client.post(path, json=body) for path, body in bodies.items()}
        assert {path: reply.status_code for path, reply in replies.items()} == dict.fromkeys(bodies, 200)
        found = replies["/v1/chat/completions"].json()
        assert found["choices"][0]["message"]["content"] == expected
        num_tokens = found["usage"]["prompt_tokens"]
        assert num_tokens > 25, "usage counts the expanded tokens"
        assert replies["/v1/responses"].json()["output"][0]["content"][0]["text"] == expected
        assert replies["/v1/messages"].json()["content"][0]["text"] == expected
        usage = replies["/v1/messages"].json()["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_tokens
        body = {"messages": bodies["/v1/messages"]["messages"]}
        assert server.client.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": num_tokens}
        check_errors(server.client)


def check_errors(client: httpx.Client) -> None:
    """Assert that wrong pictures are errors of the field with the messages, and that others are served."""

    def ask(image: Any, text: str = "Tokens go in") -> httpx.Response:
        content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": text}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return client.post("/v1/chat/completions", json=body)

    for image, text, word in [
        ({"url": "http://169.254.169.254/latest"}, "", "allowed domain"),
        ({"url": "file:///etc/passwd"}, "", "allowed_local_media_path"),
        ({"url": "data:image/png;base64,QUJD"}, "", "none of the formats"),
        ({"url": "data:image/svg+xml;base64,PHN2Zy8+"}, "", "none of the formats"),
        ({"url": 3}, "", "got int"),
        ({}, "", "content parts with an image must be"),
        ({"url": "http://images.example/"}, "", "allowed domain"),
        ({"url": url(PICTURES[0])}, "<image>", "got 2 of them in the prompt and 1 images"),
    ]:
        reply = ask(image, text)
        assert reply.status_code == 400, image
        assert reply.json()["error"]["param"] == "messages"
        assert word in reply.json()["error"]["message"]
    assert ask({"url": url(PICTURES[0])}).status_code == 200
    odd = {"messages": [{"role": "user", "content": [{"type": ["image"]}]}]}
    assert client.post("/v1/chat/completions", json=odd).status_code == 400


def part(picture: Image.Image, **others: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(picture)}, **others}


def body_with(*parts: dict[str, Any], **others: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "Tokens go in"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0, **others}


def test_named_pictures_and_options_over_http(served: Model, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one:first\nother:second\n")
    named = part(PICTURES[2], uuid="a")
    only_name = {"type": "image_url", "image_url": None, "uuid": "a"}
    with running(served.llm.engine, api_key_file=tmp_path / "keys") as server:

        def ask(body: dict[str, Any], key: str = "first", path: str = "/v1/chat/completions") -> httpx.Response:
            return server.client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

        first = ask(body_with(named))
        assert first.status_code == 200, first.text
        again = ask(body_with(only_name))
        assert again.json()["choices"][0]["message"] == first.json()["choices"][0]["message"]
        assert again.json()["usage"]["prompt_tokens"] == first.json()["usage"]["prompt_tokens"]
        for reply in (ask(body_with(only_name), "second"), ask(body_with(only_name, cache_salt="b"))):
            assert reply.status_code == 400
            assert "must be sent again" in reply.json()["error"]["message"]
            assert reply.json()["error"]["param"] == "messages"
        detailed = ask(body_with({**named, "image_url": {"url": url(PICTURES[2]), "detail": "high"}}))
        assert detailed.headers["x-ignored-params"] == "detail"
        assert ask(body_with(named, mm_processor_kwargs={})).status_code == 200
        metrics = server.client.get("/metrics", headers={"Authorization": "Bearer first"}).text
        assert re.search(r"^jaxserve:prepared_image_bytes{.*} [1-9]", metrics, re.M)
        count = ask({"messages": body_with(named)["messages"]}, path="/tokenize").json()["count"]
        assert count == first.json()["usage"]["prompt_tokens"]
        for given in (named, {"type": "text", "text": "a"}):
            reply = ask(body_with(given, mm_processor_kwargs={"max_pixels": 3}))
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "mm_processor_kwargs"
        unknown = ask(body_with(part(PICTURES[0], min_pixels=3)))
        assert "['min_pixels'] in a content part" in unknown.json()["error"]["message"]


def test_pictures_that_must_wait_are_no_bad_requests(served: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = served.llm.engine.reader.images
    assert reader is not None
    picture = Image.new("RGB", (23, 24))
    inputs = [{"type": "input_image", "image_url": url(picture)}]
    bodies = {
        "/v1/chat/completions": body_with(part(picture)),
        "/v1/responses": {"input": [{"role": "user", "content": inputs}]},
        "/tokenize": {"messages": body_with(part(picture))["messages"]},
    }
    with running(served.llm.engine) as server:
        with monkeypatch.context() as busy:
            busy.setattr(reader._decoders, "_free", [])
            busy.setattr("jaxserve.images.decoding.DECODE_S", 0.01)
            for path, body in bodies.items():
                reply = server.client.post(path, json=body)
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")
                assert int(reply.headers["retry-after"]) >= 1
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                source = {"type": "base64", "media_type": "image/png", "data": url(picture).partition(",")[2]}
                messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
                reply = server.client.post(path, json={"messages": messages} | ({} if "count" in path else GREEDY))
                assert (reply.status_code, reply.json()["error"]["type"]) == (529, "overloaded_error")
        assert server.client.post("/v1/chat/completions", json=bodies["/v1/chat/completions"]).status_code == 200


def test_a_client_that_leaves_has_no_more_pictures_read(served: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, begun, may_continue = served.llm.engine.reader.images, threading.Event(), threading.Event()
    assert reader is not None
    num_read, prepare = 0, reader._prepare

    def slowly(*given: Any) -> Any:
        nonlocal num_read
        num_read += 1
        begun.set()
        assert may_continue.wait(10)
        return prepare(*given)

    monkeypatch.setattr(reader, "_prepare", slowly)
    body = json.dumps(body_with(*[part(PICTURES[0])] * 3)).encode()
    with running(served.llm.engine) as server:
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port or 80)) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            assert begun.wait(10)
        until(lambda: not server.app.service.admission.num_open)
        may_continue.set()
        until(lambda: not server.app.service.workers._num_running)
    assert num_read == 1


PICK = """{
    const bytes = Uint8Array.from(atob(%r), char => char.charCodeAt(0)), files = new DataTransfer();
    files.items.add(new File([bytes], "a.png", { type: "image/png" }));
    const picture = document.getElementById("picture"); picture.files = files.files;
    picture.dispatchEvent(new Event("change")); 1 }"""


@pytest.mark.skipif(PATH is None, reason="Chromium is not installed")
def test_the_page_takes_a_picture(served: Model, tmp_path: Path) -> None:
    data = url(PICTURES[0]).partition(",")[2]
    with running(served.llm.engine) as server:
        browser = Browser(tmp_path, server.url)
        try:
            browser.until("document.getElementById('model').textContent")
            browser.run(PICK % data)
            browser.run(SEND % ("Tokens go in", "chat/completions", 4))
            assert browser.until(SETTLED)
            assert browser.run("document.querySelectorAll('#reply .error').length") == 0
            shown = browser.run("document.querySelector('#reply .text').textContent")
        finally:
            browser.close()
    prompt = served.llm.chat([chat(PICTURES[0])], SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids
    assert prompt.count(IMAGE) == 25
    assert isinstance(shown, str)


def test_short_bodies_with_pictures_are_read_off_the_loop() -> None:
    part = {"type": "image_url", "image_url": {"url": "http://images.example/"}}
    assert has_images({"messages": [{"role": "user", "content": [part]}]})
    assert has_images({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]})
    for messages in ([{"role": "user", "content": "image"}], [{"content": [{"type": ["image"]}]}], "image", [3], None):
        assert not has_images({"messages": messages})


def test_pictures_in_batch_files(served: Model, tmp_path: Path) -> None:
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages, **GREEDY}}
        for name, messages in (("a", chat(PICTURES[0])), ("b", chat()), ("c", chat(PICTURES[1])))
    ]
    lines[1]["body"]["messages"][0]["content"].insert(0, {"type": "image_url", "image_url": {"url": "data:,x"}})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_batch(served.llm.batch_engine(), tmp_path / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    records = {
        record["custom_id"]: record for record in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    }
    tokenizer = served.llm.engine.tokenizer
    for name, picture in (("a", PICTURES[0]), ("c", PICTURES[1])):
        content = records[name]["response"]["body"]["choices"][0]["message"]["content"]
        assert content == tokenizer.decode(served.greedy("[user] <image>Tokens go in", picture))
    assert "none of the formats" in json.dumps(records["b"])


def test_pictures_in_batches_over_http(served: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names belong to tenants, and lines wait while other clients use the decoding processes."""
    named = body_with(part(PICTURES[1], uuid="mine"))
    only_name = body_with({"type": "image_url", "image_url": None, "uuid": "mine"})
    with running(served.llm.engine, batch_dir=tmp_path, api_key=["one", "two"]) as server:
        outcomes = []
        for key, body in (("one", named), ("one", only_name), ("two", only_name)):
            line = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body}
            client = client_of(server, key)
            batch = ended(client, begin(client, json.dumps(line).encode(), endpoint="/v1/chat/completions").id)
            found = batch.output_file_id or batch.error_file_id
            assert found is not None
            record = json.loads(client.files.content(found).text)
            outcomes.append(record["response"]["body"])
        reader = served.llm.engine.reader.images
        assert reader is not None
        free = reader._decoders._free
        monkeypatch.setattr("jaxserve.images.decoding.DECODE_S", 0.01)
        reader._decoders._free = []
        other = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions"}
        other["body"] = body_with(part(Image.new("RGB", (33, 34))))
        client = client_of(server, "one")
        began = begin(client, json.dumps(other).encode(), endpoint="/v1/chat/completions")
        until(lambda: client.batches.retrieve(began.id).status == "in_progress")
        time.sleep(0.3)
        assert client.batches.retrieve(began.id).status == "in_progress"
        monkeypatch.undo()
        reader._decoders._free = free
        assert ended(client, began.id).request_counts == openai.types.BatchRequestCounts(total=1, completed=1, failed=0)
    assert outcomes[0]["usage"]["prompt_tokens"] == outcomes[1]["usage"]["prompt_tokens"] > 25
    assert "must be sent again" in outcomes[2]["error"]["message"]


def test_the_core_may_be_another_process(served: Model) -> None:
    with few_programs():
        llm = LLM.over(Engine(EngineConfig(str(served.path), **SIZES, engine_process=True)))
    with llm:
        prompt = {"prompt": "Once <image> upon", "multi_modal_data": {"image": PICTURES[0]}}
        outputs = llm.generate([prompt, "a small engine"], SamplingParams(**GREEDY), use_tqdm=False)
        assert ids_of(outputs) == [served.greedy("Once <image> upon", PICTURES[0]), served.greedy("a small engine")]


def test_without_pictures_the_text_model_is_served(served: Model) -> None:
    with few_programs():
        llm = LLM.over(Engine(EngineConfig(str(served.path), **SIZES, limit_mm_per_prompt={"image": 0})))
    with llm:
        assert llm.engine.arch.images is None
        prompt = "there was a small engine"
        assert ids_of(llm.generate(prompt, SamplingParams(**GREEDY), use_tqdm=False)) == [served.greedy(prompt)]
        with pytest.raises(RequestError, match="needs a model that takes images, got LlamaForCausalLM"):
            llm.generate({"prompt": "a", "multi_modal_data": {"image": PICTURES[0]}}, use_tqdm=False)
        with pytest.raises(RequestError, match="unsupported type 'image_url'"):
            llm.chat(chat(PICTURES[0]), use_tqdm=False)


def test_pictures_of_clients_that_leave_are_freed(served: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = served.llm.engine.reader.images
    assert reader is not None
    reader.cache.clear()
    monkeypatch.setattr(reader.cache, "_max_bytes", 0)
    body = body_with(part(Image.new("RGB", (29, 31))), stream=True) | {"max_tokens": 150, "ignore_eos": True}
    with running(served.llm.engine) as server:
        for _ in range(3):
            with server.client.stream("POST", "/v1/chat/completions", json=body) as reply:
                assert next(reply.iter_lines()).startswith("data: ")
                assert reader.living.num_bytes, "it is in use"

        def is_freed() -> bool:
            gc.collect()  # Python 3.12's contexts keep a cycle of the traceback by which the client's call ended
            return not reader.living.num_bytes

        until(is_freed)
