"""One of several processes with LoRA adapters: `adapters_leader.py ADDRESS COUNT ID MODEL ADAPTERS OUTPUTS OPTIONS`.

ADAPTERS is a folder with adapters. All processes but the first one have another content in those named "differs", lack
those named "missing", and can read those named "fades" only once. The first process writes tokens, and the errors of
these three, to OUTPUTS.
"""

import json
import sys
from pathlib import Path
from typing import Any

from jaxserve import LLM, LoRARequest, RequestError, SamplingParams
from jaxserve.assembly import adapter_store
from jaxserve.distributed import processes
from jaxserve.weights.adapter_files import CONFIG, TENSORS, read_adapter
from jaxserve.weights.json_file import read_object
from jaxserve.weights.safetensors_file import map_file
from tests.soon_compiled import few_programs, soon_compiled

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def generate(llm: LLM, adapters: Path, names: list[str | None], prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of a prompt for each adapter."""
    known = llm.list_loras()
    paths = {name: "" if name in known else str(adapters / name) for name in names if name is not None}
    requests = [None if name is None else LoRARequest(name, 1, paths[name]) for name in names]
    given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, PARAMS, use_tqdm=False, lora_request=requests)
    return [output.outputs[0].token_ids for output in outputs]


def main() -> None:
    address, count, index, model, adapters, outputs, given = sys.argv[1:]
    options, prompts = json.loads(given), json.loads((Path(adapters) / "prompts.json").read_text())
    processes.initialize(address, int(count), int(index))

    others = {"differs": "a", "missing": "nowhere"}

    def read_another(path: str) -> Any:
        name = Path(path).name
        found = read_adapter(Path(path).parent / others.get(name, name))
        others.setdefault(name, "nowhere" if name == "fades" else name)
        return found

    if int(index):
        adapter_store.read_adapter = read_another  # type: ignore[assignment] # as if the directory were another
    with soon_compiled(), few_programs():
        llm = LLM(model, **options)  # only the first process returns
    names = ["a", None, "b", "c"]
    found: dict[str, Any] = {"first": generate(llm, Path(adapters), names, prompts)}
    for name in ("differs", "missing"):
        try:
            llm.load_lora(LoRARequest(name, 1, str(Path(adapters) / name)))
        except RequestError as error:
            found[name] = str(error)
    llm.unload_lora("a")
    fades = LoRARequest("fades", 1, str(Path(adapters) / "fades"))
    llm.load_lora(fades)
    found["again"] = generate(llm, Path(adapters), names, prompts)
    try:
        llm.generate({"prompt_token_ids": prompts[0]}, PARAMS, use_tqdm=False, lora_request=fades)
    except RequestError as error:
        found["fades"] = str(error)
    llm.unload_lora("b")
    tensors = map_file(Path(adapters) / "b" / TENSORS)
    llm.update_lora("b", tensors, read_object(Path(adapters) / "b" / CONFIG) | {"target_modules": {"q_proj"}})
    found["given"] = generate(llm, Path(adapters), [None, "b", "b", "a"], prompts)
    Path(outputs).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
