"""gradio: a chat interface with pictures, whose function sends its history to the server by openai's client."""

import base64
import mimetypes
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio
import numpy as np
import openai
from checks import Target, check, run
from gradio_client import Client, handle_file
from PIL import Image


def as_parts(content: Any) -> list[dict[str, Any]]:
    """Return a content of gradio's messages as parts of OpenAI's."""
    match content:
        case str(text):
            return [{"type": "text", "text": text}]
        case [*items]:
            return [part for item in items for part in as_parts(item)]
        case {"text": str(text), "files": files}:
            return [*(part for file in files for part in as_parts({"path": file})), *as_parts(text)]
        case {"text": str(text)}:
            return as_parts(text)
        case {"file": file}:
            return as_parts(file)
    path = content["path"]
    data = base64.b64encode(Path(path).read_bytes()).decode()
    return [{"type": "image_url", "image_url": {"url": f"data:{mimetypes.guess_type(path)[0]};base64,{data}"}}]


@check
def multimodal_chat_interface(target: Target) -> None:
    there = openai.OpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0)
    num_prompt_tokens: list[int] = []

    def answer(message: Any, history: list[Any]) -> Iterator[str]:
        messages = [{"role": turn["role"], "content": as_parts(turn["content"])} for turn in history]
        stream = there.chat.completions.create(
            model=target.model,
            messages=[*messages, {"role": "user", "content": as_parts(message)}],
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        text = ""
        for chunk in stream:
            if chunk.usage:
                num_prompt_tokens.append(chunk.usage.prompt_tokens)
            for choice in chunk.choices:
                text += choice.delta.content or ""
                yield text

    interface = gradio.ChatInterface(answer, multimodal=True, api_name="chat")
    _, url, _ = interface.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "picture.jpg")
            Image.fromarray(np.arange(48 * 32 * 3, dtype=np.uint8).reshape(48, 32, 3)).save(path)
            page = Client(url, verbose=False)
            page.predict({"text": "What is this?", "files": [handle_file(str(path))]}, api_name="/chat")
            page.predict({"text": "And now?", "files": []}, api_name="/chat")
    finally:
        interface.close()
    first, second = num_prompt_tokens
    assert 25 < first < second, num_prompt_tokens  # the picture is sent again with the second turn


run("gradio")
