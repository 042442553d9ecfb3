"""Laws of the files that the laboratory's commands read and write: none is overwritten unasked, none is waited for, and
whatever is wrong is one line that names it."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from recordings_files import write_trace

from nanoserve.api import cli
from nanoserve.lab import files
from nanoserve.lab.files import check_inputs, check_outputs, naming, refuse_device

LINEAR = ["--costs", "linear:8000,30", "--policies"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a trace, a workload, a table of costs, links to the first, and a pipe."""
    write_trace(tmp_path / "t.jsonl")
    (tmp_path / "w.jsonl").write_text('{"max_tokens": 2, "prompt_len": 9}\n')
    assert cli.main(["calibrate", str(tmp_path / "t.jsonl"), "--out", str(tmp_path / "costs.json")]) == 0
    (tmp_path / "soft.jsonl").symlink_to("t.jsonl")
    os.link(tmp_path / "t.jsonl", tmp_path / "hard.jsonl")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def run(*words: str) -> int:
    try:
        return cli.main(list(words))
    except SystemExit as end:
        return int(end.code or 0)


OVERWRITES = [
    ("calibrate t.jsonl --out t.jsonl", "--out {}/t.jsonl is {}/t.jsonl, which is read and would be overwritten"),
    ("calibrate t.jsonl --out soft.jsonl", "would be overwritten"),
    ("calibrate t.jsonl --out hard.jsonl", "would be overwritten"),
    ("calibrate t.jsonl --check t.jsonl --out ./t.jsonl", "would be overwritten"),
    ("trace t.jsonl --out hard.jsonl", "would be overwritten"),
    ("trace t.jsonl --perfetto soft.jsonl", "--perfetto {}/soft.jsonl is {}/t.jsonl"),
    ("trace t.jsonl --out o.html --perfetto o.html", "--perfetto {}/o.html is the file of --out too"),
    ("trace t.jsonl --perfetto t.html", "is the file of --out too"),
    ("simulate --workload w.jsonl --out w.jsonl", "would be overwritten"),
    ("simulate --workload w.jsonl --record w.jsonl", "--record {}/w.jsonl is {}/w.jsonl, which is read"),
    ("simulate --workload w.jsonl --policies v0 --record w.jsonl", "would be overwritten"),
    ("simulate --workload w.jsonl --policies v0 --out x --record x", "--record {}/x is the file of --out too"),
    ("simulate --workload w.jsonl --policies v0,v1 --out run-v0.jsonl --record run.jsonl", "the file of --out too"),
    ("simulate --workload w.jsonl --costs table:costs.json --out costs.json", "would be overwritten"),
]


def in_folder(words: str, folder: Path) -> list[str]:
    def place(word: str) -> str:
        kind, colon, name = word.rpartition(":")
        is_file = "." in name or name in ("x", "pipe", "folder")
        return f"{kind}{colon}{folder}/{name.removeprefix('./')}" if is_file else word

    return [place(word) for word in words.split()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert message in captured.err


@pytest.mark.parametrize(("words", "message"), OVERWRITES)
def test_no_output_overwrites_an_input_or_another_output(words, message, folder, capsys):
    before = contents(folder)
    refused(in_folder(words, folder), message.format(folder, folder), capsys)
    assert contents(folder) == before


@pytest.mark.parametrize("link", ["soft.jsonl", "hard.jsonl"])
def test_a_check_that_compares_names_overlooks_links(link, folder, capsys, monkeypatch):
    monkeypatch.setattr(files, "is_same", lambda one, other: one == other)
    with pytest.raises(AssertionError):
        refused(["calibrate", f"{folder}/t.jsonl", "--out", f"{folder}/{link}"], "would be overwritten", capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trace pipe", "pipe is a pipe, and a file is read"),
        ("replay pipe", "is a pipe"),
        ("calibrate pipe --out x", "is a pipe"),
        ("calibrate t.jsonl --check pipe --out x", "is a pipe"),
        ("simulate --workload pipe", "is a pipe"),
        ("simulate --workload w.jsonl --costs table:pipe", "is a pipe"),
        ("trace t.jsonl --out pipe", "--out {}/pipe is a pipe; give the path of a file"),
        ("trace t.jsonl --perfetto pipe", "is a pipe"),
        ("calibrate t.jsonl --out pipe", "is a pipe"),
        ("simulate --workload w.jsonl --out pipe", "is a pipe"),
        ("simulate --workload w.jsonl --policies v0 --record pipe", "is a pipe"),
        ("replay /dev/zero", "/dev/zero is a device"),
        ("simulate --workload w.jsonl --record {}", "is a folder; give the path of a file"),
        ("simulate --workload w.jsonl --record /dev/null", "--record /dev/null is a device"),
        ("simulate --workload w.jsonl --record /dev/full", "--record /dev/full is a device"),
        ("trace {}", "is a folder"),
        ("trace t.jsonl --out {}", "is a folder"),
    ],
)  # fmt: skip
def test_no_pipe_is_waited_for_and_no_folder_or_device_taken_for_a_file(words, message, folder, capsys):
    words = [word.format(folder) for word in in_folder(words, folder)]
    words = [word.replace(f"{folder}//", "/") for word in words]
    refused(words, message.format(folder), capsys)


@pytest.mark.parametrize(
    "words",
    [["trace", ""], ["replay", ""], ["trace", "x", "--out", ""], ["calibrate", "x", "--out", ""],
     ["simulate", "--workload", "burst", "--record", ""], ["simulate", "--workload", "burst", "--out", ""]],
)  # fmt: skip
def test_an_empty_path_is_told(words, capsys):
    refused(words, "the path is empty; name a file", capsys)


@pytest.mark.parametrize(
    "words",
    ["trace t.jsonl --out", "trace t.jsonl --perfetto", "calibrate t.jsonl --out", "simulate --workload w.jsonl --out"],
)
def test_a_full_disk_is_told_with_the_file(words, folder, capsys):
    refused([*in_folder(words, folder), "/dev/full"], "/dev/full: No space left on device", capsys)


def test_an_error_while_recording_names_the_file(tmp_path):
    with (
        pytest.raises(OSError, match="No space left") as error,
        naming(tmp_path / "run.jsonl"),
        open("/dev/full", "wb", 0) as full,
    ):
        full.write(b"x")
    assert cli.describe(error.value).startswith(f"{tmp_path}/run.jsonl: No space left")


def test_an_error_that_names_no_file_is_seen(folder, capsys, monkeypatch):
    monkeypatch.setattr("nanoserve.lab.simulate.write_file", lambda path, content: path.write_bytes(content))
    with pytest.raises(AssertionError):
        test_a_full_disk_is_told_with_the_file("simulate --workload w.jsonl --out", folder, capsys)


def test_what_can_be_written_is(folder):
    check_inputs([folder / "t.jsonl", folder / "soft.jsonl"])
    check_outputs([("--out", folder / "new"), ("--record", folder / "w.jsonl"), ("--x", None)], [folder / "t.jsonl"])
    check_outputs([("--out", Path("/dev/null"))])
    refuse_device("--record", folder / "t.jsonl")
    with pytest.raises(ValueError, match="is in a folder that does not exist; make it first"):
        check_outputs([("--out", folder / "absent" / "x")])
    (folder / "loop").symlink_to("loop")
    check_outputs([("--out", folder / "loop")], [folder / "t.jsonl"])
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(folder / "s"))
        with pytest.raises(ValueError, match="is a socket"):
            check_outputs([("--out", folder / "s")])


def test_each_of_several_policies_is_written_where_the_help_says(folder, capsys):
    words = ["simulate", "--workload", f"{folder}/w.jsonl", *LINEAR, "unified:512,v0", "--json"]
    assert run(*words, "--record", f"{folder}/run.jsonl") == 0
    capsys.readouterr()
    assert {path.name for path in folder.iterdir() if path.name.startswith("run")} == {
        "run-unified-512.jsonl", "run-v0.jsonl",
    }  # fmt: skip
    assert run("simulate", "--help") == 0
    assert "of run.jsonl run-unified-512.jsonl" in " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    assert json.loads((folder / "run-v0.jsonl").read_bytes().splitlines()[0])["config"]["scheduler"]
