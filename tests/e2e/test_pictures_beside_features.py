"""Images beside drafts, tiers, saved sessions, sleep and preemption: the tokens of transformers."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import jax
import numpy as np
import pytest
import transformers

from jaxserve import weights
from jaxserve.api.reuse_hint import ReuseHint
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.assembly.memory import tree_bytes
from jaxserve.core.sessions import UnknownSessionError
from jaxserve.errors import RequestError
from jaxserve.images.prepared import ExpandedPrompt, count_embeddings
from jaxserve.models import registry
from jaxserve.offline.llm import LLM
from jaxserve.tools.planner.sizes import Sizes
from jaxserve.tools.planner.targets import parse_target
from jaxserve.tools.quantizer.checkpoint import quantize_checkpoint
from jaxserve.tools.quantizer.scheme import QuantizeOptions
from tests import draft_layers
from tests.e2e.test_pictures import GREEDY, NUM_TOKENS, Served, num_encoded, tokens

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("any_load_pays")]


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3", "qwen3_5"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Return a model with DeepStack and M-RoPE, one whose images' tokens see each other, and one with states."""
    return Served(tmp_path_factory.mktemp(request.param), request.param)


def prompts(served: Served) -> list[Any]:
    image, prompt = served.pictures.image, served.pictures.prompt
    return [prompt(7), prompt(5, image(1), 9), prompt(3, image(2), 2, image(3), 3)]


def check_all(served: Served, engine: DrivenEngine) -> None:
    for each, output in zip(prompts(served), served.run(prompts(served), engine), strict=True):
        served.check(each, output)


def test_rows_that_are_swapped_out_continue(served: Served) -> None:
    """A request of a higher class takes a row's pages, which return from host memory: no token is computed again."""
    image, prompt = served.pictures.image, served.pictures.prompt
    low, high = prompt(14, image(1), 3, image(2), 2), prompt(33)
    longest = max(len(low[0]), len(high[0])) + NUM_TOKENS
    groups = served.engine().schedule.kv_groups
    sizes = {"num_pages": groups.num_pages(longest, longest) + 2 * groups.size, "kv_offloading_size": 2.0**-10}
    engine = served.engine(scheduling_policy="priority", **sizes)
    before, count = replace(engine.stats), num_encoded(engine)
    outputs = [served.add(engine, "low", low, priority=1)]
    while not outputs[0].outputs[0].token_ids:
        engine.step()
    outputs.append(served.add(engine, "high", high))
    served.finish(engine)
    stats = engine.stats.since(before)
    assert stats.num_preemptions
    assert stats.num_loaded_pages
    assert (stats.num_encoder_inputs, stats.num_encoder_output_tokens) == (2, count_embeddings(low[1]))
    assert stats.num_tokens == len(low[0]) + len(high[0]) + 2 * (NUM_TOKENS - 1)
    assert count() == 2
    for each, output in zip((low, high), outputs, strict=True):
        served.check(each, output)


def test_pages_on_disk_are_found_by_another_engine(served: Served, tmp_path: Path) -> None:
    """It encodes no image whose tokens' pages are all there."""
    counts = []
    for number in range(2):
        engine = served.new_engine(kv_offloading_path=str(tmp_path))
        count, outputs = num_encoded(engine), served.run(prompts(served), engine)
        for each, output in zip(prompts(served), outputs, strict=True):
            served.check(each, output)
        assert bool(outputs[1].cached_tokens.disk) == bool(number)
        counts.append(count())
        engine.close()
    assert counts[0] == 3
    assert counts[1] < 3


@pytest.mark.parametrize("has_pages", [True, False])
def test_saved_sessions_keep_their_images(served: Served, tmp_path: Path, has_pages: bool) -> None:
    """Another engine continues a conversation with the same tokens, also if its pages are lost."""
    greedy, prompt = SamplingParams(**GREEDY), prompts(served)[2]
    with LLM.over(served.new_engine(kv_offloading_path=str(tmp_path))) as llm:
        given = {"prompt_token_ids": ExpandedPrompt(*prompt), "reuse": ReuseHint("mine")}
        [first] = llm.generate([given], greedy, use_tqdm=False)
        served.check(prompt, first)
        saved = llm.sessions.save("mine")
        assert saved.num_stored_tokens
    if not has_pages:
        for path in tmp_path.glob("*/pages-*.kv"):
            path.unlink()
    with LLM.over(served.new_engine(kv_offloading_path=str(tmp_path))) as llm:
        session, cached, num_computed = llm.sessions.restore("mine")
        assert (session.token_ids, session.images) == (prompt[0] + tokens(first), tuple(prompt[1]))
        assert cached.disk == (saved.num_stored_tokens if has_pages else 0)
        assert num_computed == len(session.token_ids) - cached.disk
        later = [*session.token_ids, 21, 22, 23]
        [output] = llm.generate([{"prompt_token_ids": ExpandedPrompt(later, session.images)}], greedy, use_tqdm=False)
        assert output.num_cached_tokens
        served.check((later, session.images), output)
        check_files(llm, tmp_path / "sessions")


def check_files(llm: LLM, directory: Path) -> None:
    """Assert that a session's patches are as old as itself."""
    [patches] = directory.glob("*.npz")
    assert llm.sessions.list()[0].images[0].image.num_bytes == 0
    patches.write_bytes(patches.read_bytes()[:-100])
    with pytest.raises(RequestError, match="images of a saved session must be readable"):
        llm.sessions.restore("mine")
    llm.generate([{"prompt_token_ids": [30, 31], "reuse": ReuseHint("mine")}], SamplingParams(max_tokens=2))
    llm.sessions.save("mine")
    assert not [*directory.glob("*.npz")]
    llm.sessions.delete("mine")
    with pytest.raises(UnknownSessionError):
        llm.sessions.restore("mine")
    assert not [*directory.iterdir()]


def test_images_are_encoded_again_after_sleep(served: Served) -> None:
    engine = served.engine()
    check_all(served, engine)
    count = num_encoded(engine)
    engine.sleep()
    engine.devices.wake_up()
    check_all(served, engine)
    engine.sleep(level=2)
    engine.devices.wake_up()
    engine.update_weights(served.path)
    check_all(served, engine)
    assert count() == 6


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_drafts_change_no_output(served: Served, tmp_path: Path, method: str) -> None:
    """Another model and layers of EAGLE-3 and MTP draft tokens after images, which they see as placeholders."""
    arch, path = served.engine().arch, tmp_path / "draft"
    if arch.state is not None:
        pytest.skip("recurrent states cannot undo drafts")
    checkpoints.write_checkpoint(path, "llama", seed=7, vocab_size=arch.vocab_size)
    if method != "draft_model":
        model, path = transformers.AutoModelForCausalLM.from_pretrained(path), tmp_path / "layer"
        path.mkdir()
        if method == "eagle3":
            draft_layers.write_eagle3(path, model, (0, 1, 2))
        else:
            draft_layers.write_mtp(path, model)
    config = {"method": method, "model": str(path), "num_speculative_tokens": 3, "adaptive": False}
    engine = served.engine(speculative_config=json.dumps(config))
    check_all(served, engine)
    check_all(served, engine)
    assert engine.stats.num_drafted_tokens


def test_checkpoints_made_from_another_keep_the_tower(served: Served, tmp_path: Path) -> None:
    """As Orbax a model has the same tokens; a quantised one has the same tower."""
    config = weights.read_config(served.path)
    specs = registry.param_specs(registry.from_hf_config(config, with_images=True))
    weights.convert(served.path, tmp_path / "orbax", specs)
    with closing(served.new_engine(model=str(tmp_path / "orbax"))) as engine:
        check_all(served, engine)
    if served.engine().arch.state is not None:
        return  # the quantizer refuses recurrent layers
    quantize_checkpoint(served.path, tmp_path / "int8", QuantizeOptions("int8"))
    with closing(served.new_engine(model=str(tmp_path / "int8"))) as engine:
        served.run(prompts(served), engine)
        towers = [each.replicas[0].executor.params["vision"] for each in (engine, served.engine())]
    jax.tree.map(np.testing.assert_array_equal, *towers)


def test_the_planner_counts_the_tower_and_the_encoder_cache(served: Served) -> None:
    engine = served.engine()
    runner: Any = engine.replicas[0].executor
    sizes = Sizes.resolve(engine.config, parse_target("cpu"))
    assert sizes.memory.weights == tree_bytes(runner.params)
    assert sizes.memory.images == tree_bytes(runner.state.encoder_cache)
    text = Sizes.resolve(replace(engine.config, limit_mm_per_prompt={"image": 0}), parse_target("cpu"))
    assert sizes.memory.weights - text.memory.weights == tree_bytes(runner.params["vision"])
    assert text.memory.images == 0
