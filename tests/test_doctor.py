"""Laws of `nanoserve doctor`: it finds what was left over and removes it, and what is in use it leaves alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from faulty import config_of, is_alive, request, wait_until
from stubborn import make_orphan, stubborn

from nanoserve.api import cli, doctor, leftovers
from nanoserve.api.doctor import Checkup, examine, find_packages
from nanoserve.api.leftovers import CrashDump, OrphanProcess, SocketFolder, find_dumps, find_folders, find_orphans
from nanoserve.client import CoreProcessClient
from nanoserve.config import EngineConfig
from nanoserve.core import CRASH_PREFIX, EngineCore
from nanoserve.process import ChildProcess
from nanoserve.record import StepRecord, TraceHeader

LONG_AGO = (1e9, 1e9)


@pytest.fixture(autouse=True)
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of this test's own: it must not look at, let alone remove, what is another's."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(leftovers, "_temp_folders", lambda: [folder])
    return folder


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Processes of this test; no others are seen."""
    pids: set[int] = set()
    find = find_orphans
    monkeypatch.setattr(leftovers, "find_orphans", lambda: [found for found in find() if found.pid in pids])
    monkeypatch.setattr(leftovers, "SIGNAL_WAIT_S", 0.3)
    monkeypatch.setattr(leftovers, "SETTLE_S", 0.3)
    yield pids
    for pid in pids:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Checkup]:
    code = cli.main(["doctor", "--json", *words])
    return code, msgspec.json.decode(capsys.readouterr().out, type=Checkup)


def plant_folder(temp: Path, name: str = "nanoserve-abcd_012", files: tuple[str, ...] = ("input", "owner")) -> Path:
    folder = temp / name
    folder.mkdir(0o700)
    for file in files:
        (folder / file).touch()
    os.utime(folder, LONG_AGO)
    return folder


def folders(temp: Path) -> list[str]:
    return [Path(found.path).name for found in find_folders([temp])]


# --- Processes


@pytest.mark.parametrize("stopped", [False, True])
def test_an_orphan_is_found_and_ended(stopped: bool, planted: set[int], capsys: pytest.CaptureFixture[str]) -> None:
    pid = make_orphan()
    planted.add(pid)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    (found,) = leftovers.find_orphans()
    assert (found.pid, found.target) == (pid, "stubborn:stubborn")
    code, checkup = run(capsys, "--clean")
    assert code == 0
    assert checkup.removed == [str(found)]
    assert not any(checkup.leftovers)
    assert not is_alive(pid)


def test_an_orphan_is_a_problem_until_it_is_cleaned(planted: set[int]) -> None:
    pid = make_orphan()
    planted.add(pid)
    checkup = examine()
    assert [found.pid for found in checkup.leftovers.processes] == [pid]
    assert ["doctor --clean" in problem for problem in checkup.problems] == [True]
    assert is_alive(pid)


def test_a_child_whose_parent_lives_is_never_listed() -> None:
    child = ChildProcess("stubborn", stubborn)
    try:
        child.recv(60)
        assert child.pid not in [found.pid for found in find_orphans()]
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.stop()


def test_an_orphan_that_ends_by_itself_is_none(planted: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [[OrphanProcess(1, 2, "a:b", 3)], []]
    monkeypatch.setattr(leftovers, "find_orphans", lambda: looks.pop(0))
    assert leftovers.find_leftovers().processes == []


def test_no_other_process_is_ended_in_an_orphans_place(planted: set[int]) -> None:
    """Its number may be another's by now."""
    pid = make_orphan()
    planted.add(pid)
    (found,) = leftovers.find_orphans()
    assert replace(found, start_ticks=found.start_ticks - 1).remove()
    assert is_alive(pid)
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert replace(found, pid=bystander.pid).remove()
    assert bystander.poll() is None
    bystander.communicate(b"\n")


@pytest.mark.parametrize(
    "words", [["-m", "http.server"], ["-c", "input()", "-m", "nanoserve.process", "1", "a:b", "3"]]
)
def test_a_process_that_only_looks_alike_is_none(words: list[str]) -> None:
    other = subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert other.pid not in [found.pid for found in find_orphans()]
    finally:
        other.kill()
        other.communicate()


# --- Socket folders


def test_the_folder_of_a_killed_engine_is_found_and_removed(temp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import os; from nanoserve.client import _socket_folder\n"
    code += "print(_socket_folder()[0], flush=True); os.kill(os.getpid(), 9)"
    env = {**os.environ, "TMPDIR": str(temp)}
    killed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env, check=False
    )
    folder = Path(killed.stdout.strip())
    if folder.parent != temp:  # a path too long for a socket: it is where sockets fit
        moved = temp / folder.name
        folder.rename(moved)
        folder = moved
    assert folders(temp) == []  # too young to be sure
    os.utime(folder, LONG_AGO)
    assert find_folders([temp]) == [SocketFolder(str(folder))]
    assert run(capsys, "--clean")[0] == 0
    assert not folder.exists()


def check_live_folder_is_left_alone(temp: Path) -> None:
    with CoreProcessClient(config_of()) as client:
        folder = Path(client._folder)
        os.utime(folder, LONG_AGO)
        assert str(folder) not in [found.path for found in find_folders([folder.parent])]  # others may have left some
        SocketFolder(str(folder)).remove()
        assert folder.exists()
        client.submit(request("a"))
        assert any(client.poll(5) for _ in range(5))
    assert not folder.exists()


def test_the_folder_of_a_live_engine_is_never_listed_or_removed(temp: Path) -> None:
    check_live_folder_is_left_alone(temp)


def test_the_folder_of_a_live_engine_is_known_by_its_lock_alone(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc shows no sockets: on another system, or from another network namespace."""
    monkeypatch.setattr(leftovers, "_is_bound", lambda folder: False)
    check_live_folder_is_left_alone(temp)


def test_a_planted_blindness_to_locks_is_seen(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_is_bound", lambda folder: False)
    monkeypatch.setattr(leftovers, "_is_locked", lambda owner: False)
    with pytest.raises(AssertionError):
        check_live_folder_is_left_alone(temp)


def test_a_folder_with_a_bound_socket_is_in_use(temp: Path) -> None:
    folder = plant_folder(temp, files=())
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "input"))
        sock.listen()
        os.utime(folder, LONG_AGO)
        assert folders(temp) == []
    assert folders(temp) == [folder.name]


def test_only_folders_that_an_engine_made_are_listed(temp: Path) -> None:
    plant_folder(temp, "nanoserve-notes")
    plant_folder(temp, "nanoserve-00000001", files=("input", "letters.txt"))
    plant_folder(temp, "nanoserve-00000002").chmod(0o755)
    (temp / "nanoserve-00000003").touch()
    (temp / "nanoserve-00000004").symlink_to(plant_folder(temp, "elsewhere"))
    plant_folder(temp, "nanoserve-00000005")
    assert folders(temp) == ["nanoserve-00000005"]


# --- Crash dumps


def test_a_crash_dump_is_found_with_its_error_and_removed(temp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = EngineCore.build(config_of())
    path = core.dump_crash(RuntimeError("the third step is cursed"))
    core.close()
    assert find_dumps([temp]) == [CrashDump(path, "RuntimeError: the third step is cursed")]
    (temp / f"{CRASH_PREFIX}1-1.jsonl").write_text("{")
    code, checkup = run(capsys)
    assert code == 1
    assert [dump.error for dump in checkup.leftovers.dumps] == [
        "it cannot be read",
        "RuntimeError: the third step is cursed",
    ]
    code, checkup = run(capsys, "--clean")
    assert (code, len(checkup.removed)) == (0, 2)
    assert not list(temp.iterdir())


# --- The machine


def test_a_healthy_machine_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    code, checkup = run(capsys)
    assert (code, checkup.problems) == (0, [])
    assert checkup.version == doctor.DOCTOR_VERSION
    assert {"torch", "numpy", "pyzmq", "msgspec", "triton"} <= {package.name for package in checkup.packages}
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for label in ("torch", "device", "attention", "C++ compiler", "weights", "KV pool", "requests at a time"):
        assert f"  {label}" in printed
    assert "left over\n  nothing\nno problems" in printed


def test_the_memory_budget_is_what_an_engine_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoserve import platforms

    free = 64 << 20
    monkeypatch.setattr(platforms, "available_memory", lambda: free)
    memory = examine(device="cpu").memory
    assert memory is not None
    monkeypatch.setattr(platforms, "available_memory", lambda: free - memory.weights)
    core = EngineCore.build(EngineConfig(device="cpu", max_model_len="auto"))
    try:
        model = core.runner.model  # type: ignore[attr-defined]
        assert memory.weights == sum(p.numel() * p.itemsize for p in model.parameters())
        assert memory.num_blocks == core.info.num_blocks
        assert memory.num_tokens == (core.info.num_blocks - 1) * core.info.block_size
        assert memory.requests_of_max_len == memory.num_tokens / 16384
    finally:
        core.close()


def test_what_is_missing_is_a_problem_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("msgspec", "uvicorn") else version(name))
    code, checkup = run(capsys)
    assert code == 1
    assert checkup.problems == ["package msgspec is missing; pip install msgspec."]  # an extra may be missing
    code, checkup = run(capsys, "--model", "no/such/model")
    assert code == 1
    assert "no/such/model" in checkup.problems[-1]
    assert checkup.memory is None
    code, checkup = run(capsys, "--device", "abacus")
    assert "abacus" in checkup.problems[-1]


def test_every_package_that_the_project_needs_is_looked_for() -> None:
    packages = {package.name: package for package in find_packages()}
    assert all(package.version for package in packages.values() if not package.extra)
    assert packages["uvicorn"].extra == "serve"
    assert "pytest" not in packages


def test_processes_are_gone_before_the_doctor_returns(planted: set[int]) -> None:
    pids = {make_orphan(), make_orphan()}
    planted |= pids
    checkup = examine(clean=True)
    assert len(checkup.removed) == 2
    wait_until(lambda: not any(map(is_alive, pids)), 1, "both are gone")


def test_a_plan_that_was_launched_ahead_does_not_hide_the_error(temp: Path) -> None:
    path = temp / f"{CRASH_PREFIX}1-2.jsonl"
    steps = [
        StepRecord(step=i, start_s=i, launched_s=i, end_s=i, error="ValueError: cursed\n" * (i == 1)) for i in (1, 2)
    ]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (TraceHeader(crash=True), *steps)))
    assert find_dumps([temp]) == [CrashDump(str(path), "ValueError: cursed")]
