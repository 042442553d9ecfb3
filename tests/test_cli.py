"""Laws of the `nanoserve` command: quick help, one line for every bad input, and text that arrives as it is made."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoserve import STAGES, EngineConfig
from nanoserve.api import cli, cli_engine, cli_generate, cli_output
from nanoserve.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoserve.blocks import PrivateBlocks, SharedBlocks
from nanoserve.checkpoint import resolve_model_dir
from nanoserve.config import SEAMS
from nanoserve.scheduler import PhaseSplitScheduler

SMALL = ["--kv-cache-memory-bytes", "8MiB", "--max-model-len", "256", "--max-tokens", "12"]
COMMAND = [sys.executable, "-m", "nanoserve"]


def run(*words: str) -> int:
    """The exit code of a command line, however it ends."""
    try:
        return cli.main(words)
    except SystemExit as end:
        return int(end.code or 0)


def generate(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `nanoserve generate` prints."""
    assert run("generate", *SMALL, *words) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def arguments(*words: str) -> argparse.Namespace:
    parser = cli.OneLineParser()
    cli_generate.add_arguments(parser)
    return parser.parse_args(words)


def config_of(*words: str) -> EngineConfig:
    return cli_engine.config_from_args(arguments(*words))


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Put bytes on standard input."""
    return lambda data: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


# --- The command itself


def test_every_command_of_the_help_can_be_opened(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    summary = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert name in summary
        assert command.summary in summary
        assert run(name, "--help") == 0
        assert f"usage: nanoserve {name}" in capsys.readouterr().out


def test_help_brings_no_engine() -> None:
    code = "import sys; from nanoserve.api import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('torch', 'numpy', 'tokenizers', 'nanoserve.config') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_arguments_are_read_before_torch_is_imported() -> None:
    code = "import sys; from nanoserve.api import cli\n"
    code += "try: cli.main(['generate', '--top-p', 'x'])\nexcept SystemExit: pass\n"
    code += "cli.main(['generate', '--temperature', '-1', 'Once'])\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("nanoserve 0.")


# --- Bad input: one line that names the value and the fix, exit code 2


def copy_of_nanostory(folder: Path, **changes: Any) -> Path:
    shutil.copytree(resolve_model_dir("nanostory"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Things to give to the command that it cannot use; a name in braces below stands for one of them."""
    root = tmp_path_factory.mktemp("bad")
    (root / "latin1").write_bytes(b"caf\xe9 au lait")
    (root / "blank").write_text("\n \n")
    (root / "nothing").write_text("")
    broken = copy_of_nanostory(root / "broken")
    (broken / "model.safetensors").write_bytes(b"\xff" * 100)
    other = copy_of_nanostory(root / "other", architectures=["MambaForCausalLM"])
    names = {name: str(root / name) for name in ("latin1", "blank", "nothing", "missing")}
    return names | {"folder": str(root), "broken": str(broken), "other": str(other), "python": __file__}


BAD_INPUT = {
    "unknown model": ("--model no/such/model/here x", ["no/such/model/here", "check the path"]),
    "a file as a model": ("--model {python} x", ["test_cli.py", "folder"]),
    "unsupported architecture": ("--model {other} x", ["MambaForCausalLM", "Qwen3ForCausalLM"]),
    "corrupt weights": ("--model {broken} x", ["model.safetensors"]),
    "long prompt": (
        "--max-model-len 8 --num-gpu-blocks-override 40 one_two_three_four_five_six_seven_eight",
        ["at most 7", "max_model_len=8", "shorten it"],
    ),
    "longer than the model": ("--max-model-len 1M x", ["max_model_len=1048576", "16384"]),
    "budget below seats": (
        "--max-num-batched-tokens 8 --max-num-seqs 16 x",
        ["8", "max_num_seqs=16", "raise it to 16"],
    ),
    "no chunks and a small budget": ("--stage v0 --max-num-batched-tokens 200 x", ["max_num_batched_tokens", "200"]),
    "pool too small": ("--num-gpu-blocks-override 3 x", ["3 blocks of 16", "max_model_len=32"]),
    "no pool": ("--num-gpu-blocks-override 1 x", ["num_blocks", "1"]),
    "temperature": ("--temperature -1 x", ["temperature must be", "in [0, 2], got -1"]),
    "top_p": ("--top-p 0 x", ["top_p must be", "in (0, 1], got 0"]),
    "n with greedy": ("--n 2 x", ["n must be 1 with temperature 0", "2"]),
    "max_tokens": ("--max-tokens 0 x", ["max_tokens must be an integer >= 1", "0"]),
    "empty prompt": ("|", ["prompt is empty (0 tokens)", "at least one"]),
    "empty file": ("--file {nothing}", ["prompt is empty (0 tokens)"]),
    "blank lines": ("--lines --file {blank}", ["there is no prompt", "0 lines"]),
    "not UTF-8": ("--file {latin1}", ["latin1 is not UTF-8", "byte 0xe9 at offset 3", "iconv"]),
    "not Unicode": ("\udce9", ["valid Unicode"]),
    "missing file": ("--file {missing}", ["missing: No such file"]),
    "folder as a file": ("--file {folder}", ["Is a directory"]),
    "unknown stage": ("--stage v9 x", ["'v9'", ", ".join(STAGES)]),
    "unknown class": ("--scheduler magic x", ["'magic'", "phase_split"]),
    "unknown device": ("--device abacus x", ["abacus", "cpu"]),
    "unknown dtype": ("--dtype int3 x", ["int3", "float32"]),
    "unknown policy": ("--scheduling-policy lottery x", ["lottery", "fcfs", "priority"]),
    "swap without swap blocks": ("--stage v0 --preemption-mode swap x", ["num_swap_blocks >= 1, got 0"]),
    "swap of shared blocks": ("--scheduler phase_split --blocks shared --preemption-mode swap x", ["PrivateBlocks"]),
    "two wishes for blocks": ("--blocks private --enable-prefix-caching x", ["SharedBlocks", "PrivateBlocks"]),
    "threshold": ("--long-prefill-token-threshold 1000 x", ["long_prefill_token_threshold=1000", "max_model_len=256"]),
    "size": ("--kv-cache-memory-bytes lots x", ["--kv-cache-memory-bytes", "'lots' is not a size", "512M"]),
    "number": ("--max-num-seqs many x", ["--max-num-seqs", "'many'"]),
    "watermark": ("--watermark 2 x", ["watermark must be in [0, 1), got 2"]),
    "unknown flag": ("--best-of 3 x", ["--best-of is not known", "nanoserve generate --help"]),
    "abbreviated flag": ("--temp 1 x", ["--temp"]),
    "logprobs without json": ("--logprobs 2 x", ["--logprobs 2", "add --json"]),
    "logprobs": ("--json --logprobs 99999 x", ["logprobs=99999", "vocabulary"]),
    "stop id": ("--stop-token-ids 99999 x", ["stop_token_ids holds 99999", "vocabulary"]),
    "empty stop": ("--stop | x", ["stop", "non-empty"]),
    "huge size": (f"--max-tokens {'9' * 5000} x", ["--max-tokens", "99...99", f"at most {2**63 - 1}"]),
    "huge number": (f"--max-num-seqs {'9' * 5000} x", ["--max-num-seqs", "99...99"]),
    "huge seed": (f"--seed {'9' * 400} x", ["seed"]),
    "huge block": ("--block-size 65537 x", ["block_size", "65536", "65537"]),
    "threads": ("--num-threads 1025 x", ["num_threads", "1024", "1025"]),
    "answers": ("--n 100000000 --temperature 1 x", ["n must be", "16384", "100000000"]),
    "endless file": ("--file /dev/zero", ["/dev/zero is longer", "67108864 bytes"]),
    "record": ("--record {folder} x", ["Is a directory"]),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_every_bad_input_is_one_line_and_exit_code_2(
    name: str, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    line, wanted = BAD_INPUT[name]
    words = ["" if word == "|" else word.format(**files) for word in line.split()]
    assert run("generate", "--kv-cache-memory-bytes", "8MiB", "--max-model-len", "256", *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("nanoserve generate: error: ")
    assert captured.err.count("\n") == 1, captured.err
    assert len(captured.err) < 600, "a value is echoed whole"
    for part in wanted:
        assert part in captured.err


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("generate - <&-", "standard input is closed"),
        ("generate --file - <&-", "standard input is closed"),
        ("generate Once >&-", "standard output is closed"),
    ],
)
def test_every_closed_stream_is_one_line(line: str, wanted: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f'"$0" -m nanoserve {line}', sys.executable],
        check=False,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert wanted in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["serve", "--served-model-name", ""], "--served-model-name is empty"),
        (["serve", "--api-key", "schlüssel"], "printable ASCII"),
        (["bench", "--api-key", "schlüssel"], "printable ASCII"),
        (["bench", "--warmup", "9" * 400], "too large"),
        (["ladder", "--requests", "9" * 400], "<= 1000000"),
        (["ladder", "--stages="], f"use one of {', '.join(STAGES)}"),
        (["ladder", "--stages", ","], f"use one of {', '.join(STAGES)}"),
    ],
)
def test_every_empty_or_unsendable_name_is_refused(
    words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert wanted in capsys.readouterr().err


def test_an_error_of_ours_is_not_taken_for_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: argparse.Namespace) -> list[str]:
        raise KeyError("ours")

    monkeypatch.setattr(cli_generate, "read_prompts", broken)
    with pytest.raises(KeyError):
        run("generate", "x")


def test_a_dead_engine_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from nanoserve.client import EngineDeadError

    def dead(args: argparse.Namespace) -> list[str]:
        raise EngineDeadError("the engine died in a step:\nboom")

    monkeypatch.setattr(cli_generate, "read_prompts", dead)
    assert run("generate", "x") == 1
    assert capsys.readouterr().err == "nanoserve generate: error: the engine died in a step: boom\n"


def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", *SMALL, "--temperature", "0.001", "Once") == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("nanoserve: warning: temperature")
    assert captured.err.count("\n") == 1


# --- Flags


def test_every_field_of_the_config_has_a_flag() -> None:
    fields = set(EngineConfig.__dataclass_fields__)
    flags = set(vars(arguments()))
    assert fields - flags <= {"attention"} - set(SEAMS), "a field without a flag"


def test_no_flag_means_the_last_stage() -> None:
    assert config_of() == list(STAGES.values())[-1]


def test_a_flag_overrides_one_field_of_the_stage() -> None:
    for seam, classes in SEAMS.items():
        for name, cls in classes.items():
            assert getattr(config_of(f"--{seam}", name), seam) is cls
    config = config_of("--stage", "v0", "--max-num-seqs", "7", "--num-gpu-blocks-override", "50", "--seed", "3")
    assert (config.max_num_seqs, config.num_blocks, config.seed) == (7, 50, 3)
    assert config.scheduler is PhaseSplitScheduler
    assert config_of("--max-model-len", "auto").max_model_len == "auto"
    assert config_of("--stage", "v0", "--enable-prefix-caching").blocks is SharedBlocks
    assert config_of("--no-enable-prefix-caching").blocks is PrivateBlocks
    assert config_of("--no-reserve-full-prompt").reserve_full_prompt is False


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096), ("16k", 16_000), ("16K", 16_384), ("512M", 512 * 2**20), ("2GiB", 2**31), ("2giB", 2**31),
        ("2GB", 2 * 10**9), ("1.5k", 1500), ("0.5G", 2**29), ("1 TiB", 2**40), ("7B", 7),
        ("1.1k", 1100), (f"{2**63 - 1}", 2**63 - 1), ("0" * 5000 + "7", 7),
    ],
)  # fmt: skip
def test_a_size_is_read_as_vllm_reads_it(text: str, size: int) -> None:
    assert cli_engine.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5", "1e6", "2 G i B", "0x10", "nan"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        cli_engine.parse_size(text)


@pytest.mark.parametrize("text", [f"{2**63}", "9" * 400, "9" * 5000, "9" * 400 + ".5k", "8388608T"])
def test_a_size_beyond_64_bits_is_refused_with_the_largest(text: str) -> None:
    with pytest.raises(ValueError, match=f"too large; give at most {2**63 - 1}"):
        cli_engine.parse_size(text)


# --- Prompts


def test_prompts_come_from_arguments_files_and_standard_input(stdin: Any, tmp_path: Path) -> None:
    whole, lines = tmp_path / "whole", tmp_path / "lines"
    whole.write_bytes(b"\xef\xbb\xbfone\ntwo\r\n")
    lines.write_text("a\n\n b \n")
    read = cli_generate.read_prompts
    assert read(arguments("x", "y")) == ["x", "y"]
    assert read(arguments("--file", str(whole))) == ["one\ntwo"]
    assert read(arguments("--file", str(lines), "--lines")) == ["a", " b "]
    stdin("Es war einmal ä\n".encode())
    assert read(arguments()) == ["Es war einmal ä"]
    stdin(b"b\nc\n")
    assert read(arguments("a", "-", "d", "--file", str(whole))) == ["a", "b\nc", "d", "one\ntwo"]
    stdin(b"b\nc\n")
    assert read(arguments("--file", "-", "--lines")) == ["b", "c"]


def test_a_terminal_is_not_waited_for(stdin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with pytest.raises(ValueError, match="there is no prompt; give one"):
        cli_generate.read_prompts(arguments())


# --- What is printed


def news(slot: int, n: int, text: str, *, finished: bool) -> RequestOutput:
    answer = CompletionOutput(slot % n, text, [1], finish_reason="length" if finished else None)
    return RequestOutput(str(slot // n), None, [1, 2], [answer], finished, num_cached_tokens=1)


@pytest.mark.parametrize("arrival", list(itertools.permutations(range(3))))
def test_answers_are_printed_whole_and_in_order_however_they_arrive(arrival: tuple[int, ...]) -> None:
    starts = [news(slot, 1, f"<{slot}", finished=False) for slot in arrival]
    ends = [news(slot, 1, f"{slot}>", finished=True) for slot in reversed(arrival)]
    out = io.StringIO()
    cli_output.print_text([*starts, *ends], ["p0 ", "p1 ", "p2 "], 1, out)
    headers = [f"--- prompt {i} of 3 ---\n" for i in (1, 2, 3)]
    assert out.getvalue() == "\n\n".join(f"{headers[i]}p{i} <{i}{i}>" for i in range(3)) + "\n"
    lines = io.StringIO()
    cli_output.print_json([*starts, *ends], lines)
    assert [json.loads(line)["request_id"] for line in lines.getvalue().splitlines()] == ["0", "1", "2"]


def test_what_has_its_turn_is_printed_at_once() -> None:
    printed: list[str] = []

    def stream() -> Iterator[RequestOutput]:
        yield news(1, 1, "b", finished=False)
        assert printed == []
        yield news(0, 1, "a", finished=False)
        assert printed[-1] == "a"
        yield news(0, 1, "A", finished=True)
        assert printed[-1] == "b"
        yield news(1, 1, "B", finished=True)

    class Out(io.StringIO):
        def flush(self) -> None:
            printed.append(self.getvalue()[-1:]) if self.getvalue() else None

    cli_output.print_text(stream(), ["", ""], 1, Out())


def test_every_answer_of_n_has_its_header() -> None:
    out = io.StringIO()
    cli_output.print_text([news(slot, 2, "x", finished=True) for slot in range(2)], [""], 2, out)
    assert out.getvalue() == "--- prompt 1 of 1, answer 1 of 2 ---\nx\n\n--- prompt 1 of 1, answer 2 of 2 ---\nx\n"


def test_statistics_count_every_token_once() -> None:
    tally = cli_output.Tally(load_s=1.0)
    outputs = [news(0, 2, "a", finished=False), news(1, 2, "b", finished=True)]
    assert list(tally.watch(outputs)) == outputs
    assert str(tally).startswith("1 request, 2 prompt tokens (1 cached), 2 generated in ")
    assert "TTFT" not in str(tally), "not measured, not printed"
    timed = cli_output.Tally(load_s=1.0)
    last = RequestOutput("0", None, [1], [], True, metrics=RequestMetrics(1.0, 1.25, 2.0))
    list(timed.watch([last]))
    assert "TTFT median 250 ms" in str(timed)


# --- With the real engine


def test_every_stage_prints_the_same_story_and_streaming_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    stories = {stage: generate(capsys, "--stage", stage, "Once upon a time") for stage in STAGES}
    assert len(set(stories.values())) == 1
    story = stories["v0"]
    assert story.startswith("Once upon a time")
    result = json.loads(generate(capsys, "--json", "Once upon a time"))
    assert "Once upon a time" + result["outputs"][0]["text"] + "\n" == story
    assert result["prompt"] == "Once upon a time"
    assert result["finished"] is True
    bare = generate(capsys, "--no-echo", "Once upon a time")
    assert "Once upon a time" + bare == story


def test_a_prompt_that_was_not_an_argument_is_not_repeated(capsys: pytest.CaptureFixture[str], stdin: Any) -> None:
    echoed = generate(capsys, "Once upon a time")
    stdin(b"Once upon a time\n")
    piped = generate(capsys)
    assert "Once upon a time" + piped == echoed
    stdin(b"Once upon a time\n")
    assert generate(capsys, "--echo", "-") == echoed
    assert generate(capsys, "--chat", "Once upon a time") == piped


def test_json_holds_log_probabilities(capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(generate(capsys, "--json", "--logprobs", "1", "--prompt-logprobs", "0", "Once upon"))
    answer = result["outputs"][0]
    assert len(answer["logprobs"]) == len(answer["token_ids"])
    assert result["prompt_logprobs"][0] is None
    assert answer["cumulative_logprob"] < 0


def test_a_record_has_a_line_for_every_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert run("generate", *SMALL, "--record", str(path), "--ignore-eos", "--stats", "Once") == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["config"]["model"] == "nanostory"
    assert sum(len(ids) for line in lines[1:] for ids in line.get("sampled", {}).values()) == 12
    assert "12 generated in" in capsys.readouterr().err


def test_a_seed_repeats_a_sampled_story(capsys: pytest.CaptureFixture[str]) -> None:
    seeded = ("--temperature", "1", "--seed", "4", "Once upon a time")
    first = generate(capsys, *seeded)
    assert generate(capsys, *seeded) == first
    assert generate(capsys, "--temperature", "1", "--seed", "5", "Once upon a time") != first


# --- As a process


def test_a_story_takes_under_five_seconds_of_processor_time() -> None:
    """From process start, model load included; processor time, so that a busy machine does not count."""
    process = subprocess.Popen([*COMMAND, "generate", "Once upon a time"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    assert process.returncode == 0
    assert text.startswith("Once upon a time")
    assert usage.ru_utime + usage.ru_stime < 5.0


@pytest.fixture
def long_story() -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes a long story, and has begun."""
    words = ["generate", "--ignore-eos", "--max-tokens", "8000", "Once upon a time"]
    process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.read(40).startswith(b"Once upon a time")
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_an_interrupt_ends_it_with_130_and_no_traceback(long_story: subprocess.Popen[bytes]) -> None:
    long_story.send_signal(signal.SIGINT)
    _, err = long_story.communicate(timeout=60)
    assert long_story.returncode == 130
    assert err == b""


def test_a_reader_that_leaves_early_hears_no_complaint(long_story: subprocess.Popen[bytes]) -> None:
    assert long_story.stdout is not None
    assert long_story.stderr is not None
    long_story.stdout.close()
    assert long_story.wait(timeout=60) == 1
    assert long_story.stderr.read() == b""
