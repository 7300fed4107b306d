import inspect
import io
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import fake_engine
import pytest
import tiny_tokenizers
from batch_jobs import batch_input, wait_for
from killing import records_by_id

import jaxserve
from jaxserve import EngineConfig, LoRARequest, RequestError, cli
from jaxserve.cli.config_flags import NOT_FLAGS, engine_options, with_dashes
from jaxserve.cli.loading import load_llm
from jaxserve.cli.parser import COMMANDS, build_parser
from jaxserve.server.auth import Keys

PROGRAM = [sys.executable, fake_engine.__file__]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_tokenizers.write(tmp_path_factory.mktemp("model"), tiny_tokenizers.byte_level()))


PARSER = build_parser()


@pytest.fixture(autouse=True)
def one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the parser once for all commands, as it takes longer than what most of them do."""
    monkeypatch.setattr(cli, "build_parser", lambda: PARSER)


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxserve.offline.llm", SimpleNamespace(LLM=fake_engine.FakeLLM))


def test_help_is_instant() -> None:
    program = (
        "import sys; from jaxserve.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    try: main(line.split())\n"
        "    except SystemExit as stop: assert not stop.code\n"
        "    heavy = {'jax', 'numpy', 'torch', 'transformers', 'tokenizers', 'tqdm', 'ray'} & sys.modules.keys()\n"
        "    assert not heavy, (line, heavy)"
    )
    lines = ("--version", "--help", "generate --help", "batch --help", "bench serve --help", "plan --help")
    subprocess.run([sys.executable, "-c", program, *lines], check=True, stdout=subprocess.DEVNULL)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"jaxserve {jaxserve.__version__}\n"


def test_python_m_jaxserve() -> None:
    shown = subprocess.run([sys.executable, "-m", "jaxserve", "--version"], check=True, capture_output=True, text=True)
    assert shown.stdout == f"jaxserve {jaxserve.__version__}\n"


def test_every_engine_option_is_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setitem(
        sys.modules, "jaxserve.offline.llm", SimpleNamespace(LLM=lambda **options: seen.update(options))
    )
    load_llm(build_parser().parse_args(["batch", "in", "out"]))
    assert seen == {}  # only EngineConfig knows the defaults

    given: dict[str, object] = {}
    flags = []
    for name, kind in inspect.get_annotations(EngineConfig, eval_str=True).items():
        flag = "--" + name.replace("_", "-")
        if name in NOT_FLAGS:
            continue
        if kind is bool:
            given[name] = not getattr(EngineConfig, name)
            flags.append(flag if given[name] else flag.replace("--", "--no-", 1))
        elif kind == Sequence[str]:
            given[name] = ["one", "two"]
            flags += [flag, "one", "two"]
        else:
            text = __file__ if name in ("model", "tokenizer") else "text"  # these must exist
            given[name] = 7 if kind in (int, int | None) else 0.5 if kind in (float, float | None) else text
            flags += [flag, str(given[name])]
    load_llm(build_parser().parse_args(["batch", "in", "out", *flags]))
    assert seen == given


def test_flags_of_vllm_mean_the_same() -> None:
    flags = ["--block_size", "8", "--num-gpu-blocks-override=7", "--no-async-scheduling", "--max_num_seqs", "3"]
    flags += ["--trust-remote-code", "--swap-space", "0.5", "--compilation-config", "{}", "--download_dir", "a_b"]
    args = build_parser().parse_args(with_dashes(["generate", *flags, "--", "--an_option"]))
    expected = {"page_size": 8, "num_pages": 7, "step_ahead": False, "max_num_seqs": 3, "kv_offloading_size": 0.5}
    assert engine_options(args) == expected
    assert args.prompt == "--an_option"


@pytest.mark.parametrize(("flags", "shown"), [([], ""), (["--log-level", "info"], "iw"), (["--log-level=ERROR"], "")])
def test_the_log_is_written_from_a_level_on(
    flags: list[str],
    shown: str,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stream(*_: object) -> tuple[()]:
        for level, text in ((logging.DEBUG, "d"), (logging.INFO, "i"), (logging.WARNING, "w")):
            logging.getLogger("jaxserve.assembly.build").log(level, text)
        return ()

    monkeypatch.setattr(fake_engine.FakeLLM, "stream", stream)
    handlers = list(logging.getLogger("jaxserve").handlers)
    assert cli.main(["generate", "Once", "--model", model, *flags]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line[-1] for line in lines] == list(shown)
    assert all(" jaxserve.assembly.build: " in line for line in lines)
    assert logging.getLogger("jaxserve").handlers == handlers


def test_every_command_that_loads_an_engine_has_a_log_level() -> None:
    parser = build_parser()
    for command in ("generate", "serve", "batch a b", "bench offline", "bench serve"):
        assert parser.parse_args([*command.split(), "--log-level", "debug"]).log_level == "debug"


def test_every_flag_has_a_help() -> None:
    commands = build_parser()._subparsers._group_actions[0].choices
    kinds = commands["bench"]._subparsers._group_actions[0].choices
    assert kinds.keys() == {"offline", "serve"}
    for parser in (*(commands[name] for name in commands.keys() - {"bench"}), *kinds.values()):
        assert all(action.help for action in parser._actions)


def test_generate_shows_the_text_as_it_comes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "Once", "--model", model, "--max-tokens", "12", "--seed", "3", "--stats"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr()
    engine = fake_engine.FakeLLM(model).engine
    engine.add_request("0", "Once", jaxserve.SamplingParams(max_tokens=12, seed=3))
    while engine.has_unfinished():
        (output,) = engine.step()
    assert shown.out == output.outputs[0].text + "\n"
    assert "output 12 tokens" in shown.err
    assert re.search(r"ended by length; E \d+\.\d%\n$", shown.err)


def test_generate_samples_as_the_checkpoint_recommends(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recommended = jaxserve.SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1, max_tokens=999)
    seen: list[jaxserve.SamplingParams] = []
    monkeypatch.setattr(fake_engine.FakeLLM, "get_default_sampling_params", lambda _: recommended.clone())
    monkeypatch.setattr(fake_engine.FakeLLM, "stream", lambda _, prompt, params: seen.append(params) or ())
    for flags in ([], ["--temperature", "0", "--top-p", "0.5", "--stop", "x", "--bad-words", "y", "--max-tokens", "7"]):
        assert cli.main(["generate", "Once", "--model", model, *flags]) == 0
    shared = {"top_k": 20, "repetition_penalty": 1.1}
    assert seen == [
        jaxserve.SamplingParams(temperature=0.6, max_tokens=256, **shared),
        jaxserve.SamplingParams(temperature=0, top_p=0.5, stop="x", bad_words=["y"], max_tokens=7, **shared),
    ]


def test_generate_reads_standard_input(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--model", model, "--seed", "0"]
    piped = subprocess.run([*PROGRAM, *command], input=b"Once", check=True, capture_output=True).stdout.decode()
    assert cli.main([*command, "Once"]) == 0
    assert capsys.readouterr().out == piped
    monkeypatch.setattr("sys.stdin", io.StringIO("Once"))
    assert cli.main([*command, "-"]) == 0
    assert capsys.readouterr().out == piped


def test_batch_exit_codes_and_resume(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = batch_input(tmp_path / "in.jsonl", 3), str(tmp_path / "out.jsonl")
    assert cli.main(["batch", source, out, "--model", model]) == 0
    assert "3 records; no line failed; 15 tokens" in capsys.readouterr().err
    with open(source, "a") as file:
        file.write("{}\n")
    for _ in range(2):  # resuming a finished batch gives the same
        assert cli.main(["batch", source, out, "--model", model]) == 0  # complete, including error records
        monkeypatch.setattr(
            sys.modules["jaxserve.offline.llm"], "LLM", lambda **_: pytest.fail("there is nothing to serve")
        )
    assert "4 records (4 from before); 1 of 4 lines failed, and their records have the errors; 0 tokens" in (
        capsys.readouterr().err
    )
    assert cli.main(["batch", source, out, "--model", model, "--strict"]) == 1


def test_batch_stats_take_the_place_of_the_progress_bar(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(fake_engine.STEP_S, "0.25")
    source = batch_input(tmp_path / "in.jsonl", 1)
    assert cli.main(["batch", source, str(tmp_path / "out.jsonl"), "--model", model, "--stats"]) == 0
    shown = capsys.readouterr().err.splitlines()
    assert all(re.fullmatch(r"1 rows, in \d+ tok/s, out [34] tok/s, 0 waiting, .*", line) for line in shown[:-1])
    assert len(shown) == 2  # one second of the 1.25 s of the batch, then the summary


def test_served_model_names(model: str, tmp_path: Path) -> None:
    source, out = batch_input(tmp_path / "in.jsonl", 1, model="b"), tmp_path / "out.jsonl"
    assert cli.main(["batch", source, str(out), "--model", model, "--served-model-name", "a", "b"]) == 0
    assert records_by_id(out)["batch_req_1"]["response"]["body"]["model"] == "b"


def test_adapters_of_a_batch(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded: list[tuple[str, str]] = []

    def load(_: object, request: LoRARequest) -> None:
        if request.lora_name == "bad":
            raise RequestError("it is bad")
        loaded.append((request.lora_name, request.lora_path))

    monkeypatch.setattr(fake_engine.FakeLLM, "load_lora", load, raising=False)
    source = batch_input(tmp_path / "in.jsonl", 1)
    command = ["batch", source, str(tmp_path / "out.jsonl"), "--model", model, "--enable-lora", "--lora-modules"]
    assert cli.main([*command, "bad=z"]) == 2
    assert "lora_modules: it is bad" in capsys.readouterr().err
    assert cli.main([*command, "a=x/y", '{"name": "b", "path": "z"}']) == 0
    assert loaded == [("a", "x/y"), ("b", "z")]
    batch_input(tmp_path / "in.jsonl", 1, model="misspelt")
    assert cli.main([*command[:2], str(tmp_path / "other.jsonl"), *command[3:], "a=x/y"]) == 0
    assert "model_not_found" in (tmp_path / "other.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--top-p", "7"], "top_p must be a number in (0, 1], got 7.0"),
        (["generate", "x", "--page-size", "0"], "page_size must be a positive integer, got 0"),
        (
            ["generate", "x", "--quantization", "int3"],
            "quantization must be one of [None, 'int8', 'int4', 'fp8'], or the format of a quantised checkpoint, of ",
        ),
        (["generate", "x", "--model", "/no/such"], "the model must be a local directory or a .gguf file, got /no/such"),
        (["serve", "/no/such"], "the model must be a local directory or a .gguf file, got /no/such (absent)"),
        (["serve", "/no", "--model", "/such"], "--model must be MODEL, /no, or be left out, got /such"),
        (["serve", "--root-path", "v"], "root_path must be empty or begin with a slash, got 'v'"),
        (["serve", "--ssl-keyfile", "k"], "ssl_keyfile must be None or {} or [] or '' or False or 0, got 'k': a proxy"),
        (
            ["generate", "x", "--max-loras", "2"],
            "max_loras needs enable_lora, got 2 without it; drop it, or",
        ),
        (["serve", "--lora-root", "x"], "lora_root needs admin_key, with which adapters are loaded; set one"),
        (["serve", "--lora-modules", "x"], "lora_modules must be NAME=PATH or JSON, got 'x'"),
        (["batch", "a", "b", "--lora-modules", "x=y"], "lora_modules needs enable_lora; add --enable-lora"),
        (
            ["batch", "a", "b", "--ray", "--enable-lora", "--lora-modules", "x=y"],
            "--lora-modules are loaded by one engine, and --ray runs several",
        ),
        (
            ["batch", "a", "b", "--enable-lora", "--lora-modules", "x=y", "--served-model-name", "w", "x"],
            "--lora-modules must not have a name of the model's, got 'x'; choose another name",
        ),
        (["generate", "x", "--cpu_offload_gb", "4"], "cpu_offload_gb must be 0, got 4: all weights stay on the device"),
        (["generate", "x", "--block_size=8", "--page-size", "8"], "block_size is called page_size; pass one of them"),
        (
            ["batch", __file__, "/no/such/out.jsonl"],
            "the batch output must be a regular file that can be written, got /no/such/out.jsonl: there is no",
        ),
        (
            ["batch", "/no/such", "out.jsonl"],
            "the batch input must be a regular file that can be read, got /no/such: No such file or directory; check",
        ),
    ],
)
def test_configuration_errors_are_one_line(
    model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    if "--model" not in arguments and "/no/such" not in arguments[1:2]:
        arguments = [*arguments, "--model", model]
    assert cli.main(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"jaxserve: error: {message}")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "keys", "model"),
    [
        ([".", "--api-key", "a", "b"], ["a", "b"], "."),
        (["--api-key", "a", "b", "--", "."], ["a", "b"], "."),
        (["--api-key", "a", "--api-key", "b/c"], ["a", "b/c"], None),
        (["--api-key", "a", "b", "--allowed-origins", "http://a", "http://b"], ["a", "b"], None),
        (["--api-key", "a", "b" * 300], ["a", "b" * 300], None),  # longer than a file's name may be
    ],
)
def test_a_server_has_the_keys_of_all_flags(
    flags: list[str], keys: list[str], model: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(Keys, "read", lambda given, _: seen.append(given))
    monkeypatch.setattr("jaxserve.cli.serve.listen", lambda _: socket.socket())
    monkeypatch.setattr("jaxserve.server.serve.serve", lambda engine, *_, **__: seen.append(engine))
    monkeypatch.setitem(sys.modules, "jaxserve.assembly.engine", SimpleNamespace(Engine=lambda config: config.model))
    assert cli.main(["serve", *flags]) == 0
    assert seen == [keys, model]


@pytest.mark.parametrize("values", [["secret", "."], ["secret", "no/such/model", "--port", "0"], ["a", "b", "/"]])
@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name"])
def test_a_model_path_taken_by_a_flag_is_reported(
    flag: str, values: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", flag, *values]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("jaxserve: error: MODEL must come before flags with several values")
    assert f"{flag} took all values after it" in shown
    assert f"repeat {flag} for each value" in shown
    assert "secret" not in shown


@pytest.mark.parametrize("arguments", ["--nonsense", "generate --nonsense", "batch in", "generate --top-k x"])
def test_usage_errors(arguments: str) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments.split())
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "a", "--max-tokns=5"], "unrecognized arguments: --max-tokns=5 (did you mean --max-tokens?)"),
        (["plan", "--target", "cpu", "--modle", "x"], "unrecognized arguments: --modle x (did you mean --model?)"),
        (["quantize", "--model=x", "a", "b", "--scheme", "int8"], "--model=x (MODEL is positional: leave out --model)"),
        (["bench", "offline", "--zzz"], "unrecognized arguments: --zzz; jaxserve bench offline --help lists all"),
    ],
)
def test_unknown_flags_are_reported_with_similar_ones(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_a_full_disk_is_one_line(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    source = batch_input(tmp_path / "in.jsonl", 3)
    code = cli.main(["batch", source, str(tmp_path / "out.jsonl"), "--model", model])
    monkeypatch.undo()
    assert code == 2
    assert "No space left on device; run the same command again to resume" in capsys.readouterr().err


def test_interrupted_batch_resumes(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = batch_input(tmp_path / "in.jsonl", 60), tmp_path / "out.jsonl"
    command = [*PROGRAM, "batch", source, str(out), "--model", model]
    slow = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {fake_engine.STEP_S: "0.01"}, text=True)
    wait_for(out)
    slow.send_signal(signal.SIGINT)
    _, shown = slow.communicate(timeout=30)
    assert slow.returncode == 130
    assert shown == "\njaxserve: interrupted; run the same command again to resume\n"
    before = len(records_by_id(out))
    assert 0 < before < 60
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert f"60 records ({before} from before); no line failed" in done.stderr
    assert len(records_by_id(out)) == 60


def test_a_reader_that_goes_away_is_no_error(model: str) -> None:
    command = [*PROGRAM, "generate", "Once", "--model", model, "--max-tokens", "300"]
    env = os.environ | {fake_engine.STEP_S: "0.005"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    process.stdout.read(1)
    process.stdout.close()
    shown = process.stderr.read()
    process.stderr.close()
    assert process.wait(30) == 141
    assert shown == b""


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^    {command.name}\s+{' '.join(command.summary.split()[:3])}", shown, re.MULTILINE)


def complete(words: list[str], capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Return what bash suggests for the last word."""
    assert cli.main(["completion", "bash"]) == 0
    script = capfd.readouterr().out
    typed = " ".join(f"'{word}'" for word in words)
    program = (
        f"{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _jaxserve; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", program], check=True, capture_output=True, text=True)
    return done.stdout.split()


def test_bash_completes_commands_flags_and_choices(capfd: pytest.CaptureFixture[str]) -> None:
    assert complete(["jaxserve", ""], capfd) == [command.name for command in COMMANDS]
    assert complete(["jaxserve", "ge"], capfd) == ["generate"]
    assert complete(["jaxserve", "serve", "--max-model"], capfd) == ["--max-model-len"]
    assert complete(["jaxserve", "serve", "m", "--log-level", "w"], capfd) == ["warning"]
    assert complete(["jaxserve", "completion", "f"], capfd) == ["fish"]
    assert complete(["jaxserve", "batch", "in"], capfd) == [], "files, which bash completes itself"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_all_flags_that_help_shows_are_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    parsers = build_parser().parse_args(["completion", shell]).parsers
    for name, parser in parsers.items():
        shown = set(re.findall(r"(?<![\w-])--[\w-]+", parser.format_help()))
        lines = [line for line in script.splitlines() if re.search(rf"\b{name}\b", line)]
        assert not [flag for flag in shown if not any(flag.lstrip("-") in line for line in lines)]
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, capture_output=True)


def test_server_configuration_errors_need_no_jax(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        faults = [
            ["--port", str(taken.getsockname()[1])],
            ["/no/such"],
            ["--api-key-file", str(tmp_path / "absent")],
            ["--enable-prompt-embeds"],
        ]
        code = (
            "import sys; from jaxserve import cli\n"
            f"for fault in {faults}: assert cli.main(['serve', *fault]) == 2\n"
            "print(*sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    told = done.stderr.splitlines()
    assert len(told) == len(faults)
    assert all(line.startswith("jaxserve: error: ") for line in told)
    assert "jax" not in done.stdout.split()
