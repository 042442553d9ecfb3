"""Laws of compiled code: built once for what made it, whole or built again, whoever builds at the same time, and a
machine without a compiler says so and runs all the same."""

from __future__ import annotations

import ctypes
import io
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanoserve import compiler, folders, native
from nanoserve.api.doctor import examine
from nanoserve.attention import TorchAttention
from nanoserve.compiler import BuildError, find_compiler, reason_not_to_compile
from nanoserve.cpu_attention import CpuAttention
from nanoserve.native import build, load, reason_not_to_load
from nanoserve.platforms import CpuPlatform, resolve_attention

ANSWER = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def forget_what_was_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test begins as a process does, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memories = (load, reason_not_to_load, compiler._version, reason_not_to_compile, folders._private_folder)
    for memory in memories:
        memory.cache_clear()
    yield
    for memory in memories:
        memory.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(ANSWER)
    return path


def answer_of(library: Path) -> int:
    return ctypes.CDLL(str(library)).answer()


def run_python(code: str, **environment: str) -> str:
    """In a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wrap_compiler(tmp_path: Path, script: str) -> str:
    """A compiler of that shell script, which knows the real one as $REAL."""
    path = tmp_path / "wrapped++"
    path.write_text(f"#!/bin/sh\nREAL={find_compiler()}\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.needs_cxx
def test_every_source_flag_compiler_and_processor_has_a_build_of_its_own(source, tmp_path, monkeypatch):
    folder, compiler = tmp_path / "kept", find_compiler()
    paths = [build(source, compiler, folder)]
    made = paths[0].stat().st_mtime_ns
    assert answer_of(paths[0]) == 42
    assert build(source, compiler, folder) == paths[0]
    assert paths[0].stat().st_mtime_ns == made, "it was there already"
    source.write_text(ANSWER.replace("42", "43"))
    paths.append(build(source, compiler, folder))
    assert answer_of(paths[1]) == 43
    paths.append(build(source, wrap_compiler(tmp_path, 'exec "$REAL" "$@"'), folder))
    monkeypatch.setattr(native, "_cpu_flags", lambda: "another processor")
    paths.append(build(source, compiler, folder))
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-DANOTHER"))
    paths.append(build(source, compiler, folder))
    assert len(set(paths)) == 5
    assert sorted(folder.iterdir()) == sorted(paths), "nothing else is left over"


@pytest.mark.needs_cxx
def test_a_terminal_is_told_of_every_build_and_of_nothing_else(source, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    said = []
    for stderr in (Terminal(), Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stderr)
        build(source, find_compiler(), tmp_path / "builds")
        said.append(stderr.getvalue())
        source.write_text(ANSWER + "// another\n" * (len(said) == 2))
    assert said == ["nanoserve: compiling answer.cpp for this processor\n", "", ""]
    assert len(list((tmp_path / "builds").glob("*.so"))) == 2


@pytest.mark.needs_cxx
@pytest.mark.parametrize("damage", ["cut", "empty", "changed"])
def test_every_damaged_build_is_built_again(source, tmp_path, damage):
    library = build(source, find_compiler(), tmp_path)
    whole = library.read_bytes()
    content = bytearray(whole)
    content[len(content) // 2] ^= 1
    library.write_bytes({"cut": whole[:5000], "empty": b"", "changed": bytes(content)}[damage])
    assert build(source, find_compiler(), tmp_path) == library
    assert native._is_whole(library)
    assert answer_of(library) == 42


@pytest.mark.needs_cxx
def test_processes_that_build_at_once_all_get_a_whole_one(source, tmp_path):
    code = f"""
        import ctypes, sys
        from pathlib import Path
        from nanoserve.native import build, find_compiler
        sys.stdin.readline()
        library = build(Path({str(source)!r}), find_compiler(), Path({str(tmp_path / "kept")!r}))
        print(ctypes.CDLL(str(library)).answer())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for child in children:  # all have their modules loaded when they are let go
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    assert [child.communicate(timeout=120)[0].strip() for child in children] == ["42"] * 3
    assert len(list((tmp_path / "kept").iterdir())) == 1


@pytest.mark.needs_cxx
def test_a_package_and_a_home_that_cannot_be_written_to_still_give_the_code(monkeypatch, tmp_path):
    """A file in the folder's place: root writes to whatever is only forbidden."""
    copy = tmp_path / "package"
    shutil.copytree(native.SOURCES, copy)
    before = {path: path.read_bytes() for path in copy.iterdir()}
    monkeypatch.setattr(native, "SOURCES", copy)
    monkeypatch.setenv("XDG_CACHE_HOME", str(next(copy.glob("*.cpp"))))
    assert load("attention").attend
    assert {path: path.read_bytes() for path in copy.iterdir()} == before, "nothing is written beside the source"
    assert reason_not_to_load("attention") is None


def test_without_a_compiler_the_reason_is_told_and_torch_attends(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: none of g\+\+, clang\+\+, c\+\+ is on PATH"):
        load("attention")
    backend, why = resolve_attention(CpuPlatform(), None)
    assert backend is TorchAttention
    assert why == "CpuAttention cannot run: no C++ compiler: none of g++, clang++, c++ is on PATH"
    with pytest.raises(ValueError, match=r"attention=CpuAttention cannot run: no C\+\+ compiler.*install a C\+\+ com"):
        resolve_attention(CpuPlatform(), CpuAttention)
    device = examine(device="cpu").device
    assert device is not None
    assert device.attention == "TorchAttention"
    assert "no C++ compiler" in device.attention_why
    assert "the only one here" in device.attention_why


@pytest.mark.needs_cxx
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 3", r"wrapped\+\+ failed with 3 \(it does not say why\)"),
        ('[ "$1" = --version ] && echo 1 && exit; echo "x: error: no such flag" >&2; exit 1', "error: no such flag"),
    ],
)
def test_every_compiler_that_fails_is_told_and_torch_attends(script, reason, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", wrap_compiler(tmp_path, script))
    with pytest.raises(BuildError, match=reason):
        load("attention")
    assert resolve_attention(CpuPlatform(), None)[0] is TorchAttention
    assert not list((tmp_path / "cache" / "nanoserve" / "native").glob("*")), "no half of a build is kept"


def check_waited_for_once(script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler.run_compiler, "__kwdefaults__", {"timeout_s": 1.0, "folder": None})
    asked = tmp_path / "asked"
    asked.unlink(missing_ok=True)
    monkeypatch.setenv("CXX", wrap_compiler(tmp_path, f'{script} echo "$@" >> {asked}; sleep 1000'))
    for name in ("attention", "ops"):
        with pytest.raises(BuildError, match=r"wrapped\+\+ has not ended after 1 s"):
            load(name)
    assert len(asked.read_text().splitlines()) == 1, "waited for more than once"


@pytest.mark.needs_cxx
@pytest.mark.parametrize("script", ['[ "$1" = --version ] && echo 1 && exit;', ""], ids=["builds", "answers"])
def test_a_compiler_that_hangs_is_waited_for_once(script, monkeypatch, tmp_path):
    check_waited_for_once(script, monkeypatch, tmp_path)


@pytest.mark.needs_cxx
def test_a_planted_version_that_is_asked_for_again_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "_version", compiler._version.__wrapped__)
    with pytest.raises(AssertionError, match="more than once"):
        check_waited_for_once("", monkeypatch, tmp_path)


@pytest.mark.needs_cxx
def test_what_killed_builds_have_left_goes_and_what_others_build_stays(source, tmp_path):
    old, young = tmp_path / "tmpkilled", tmp_path / "tmpyoung"
    for folder in (old, young):
        folder.mkdir()
        (folder / "half.so").touch()
    long_ago = time.time() - native.STALE_S - 60
    os.utime(old, (long_ago, long_ago))
    library = build(source, find_compiler(), tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([library, source, young])


def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As in a container, as a user that it knows nothing of. Where temporary folders go."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders._private_folder.cache_clear()
    return tmp_path / f"nanoserve-cache-{os.getuid()}"


def test_a_user_without_a_home_has_a_folder_that_is_his_alone_and_lasts(monkeypatch, tmp_path):
    wanted = no_home(monkeypatch, tmp_path)
    for _ in range(2):  # starts
        folders._private_folder.cache_clear()
        assert native.cache_folder() == wanted / "native"
    assert stat.S_IMODE(wanted.stat().st_mode) == 0o700
    assert [path.name for path in tmp_path.iterdir()] == [wanted.name]


def check_no_place_of_the_start(name: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variable without an absolute path stands for no folder: neither for one of the folder that a start is in, nor
    for one at the root."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(name, value)
    assert folders.cache_folder().is_relative_to(tmp_path)


@pytest.mark.parametrize("value", ["", "cache", "./cache"])
@pytest.mark.parametrize("name", ["HOME", "XDG_CACHE_HOME"])
def test_every_cache_folder_is_one_of_the_user(name, value, monkeypatch, tmp_path):
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_dir=str(tmp_path / "home")))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    check_no_place_of_the_start(name, value, monkeypatch, tmp_path)
    monkeypatch.setattr("os.path.isabs", lambda path: True)  # a bug
    if value:
        with pytest.raises(AssertionError):
            check_no_place_of_the_start(name, value, monkeypatch, tmp_path)


def check_not_trusted(wanted: Path, elsewhere: Path) -> None:
    assert folders.cache_folder() not in (wanted, elsewhere)
    assert stat.S_IMODE(folders.cache_folder().stat().st_mode) == 0o700
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("planted", ["link", "open to all", "file"])
def test_what_somebody_else_has_put_in_its_place_is_not_loaded_from(planted, monkeypatch, tmp_path):
    wanted, elsewhere = no_home(monkeypatch, tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if planted == "link":
        wanted.symlink_to(elsewhere)
    elif planted == "file":
        wanted.touch()
    else:
        wanted.mkdir()
        wanted.chmod(0o777)
    check_not_trusted(wanted, elsewhere)
    monkeypatch.setattr(folders, "_private_folder", lambda parent: wanted)  # a bug
    with pytest.raises(AssertionError):
        check_not_trusted(wanted, elsewhere)


def test_a_named_compiler_that_is_not_there_is_told_by_its_name(monkeypatch):
    monkeypatch.setenv("CXX", "my-compiler")
    assert reason_not_to_load("attention") == "no C++ compiler: CXX='my-compiler' is not on PATH"


@pytest.mark.needs_cxx
def test_loading_leaves_denormals_on_and_brings_no_second_runtime_of_threads():
    """Linked with -ffast-math a library would flush them to zero in the whole process."""
    code = """
        import torch
        from pathlib import Path
        from nanoserve.native import load
        library = load("attention")
        torch.set_num_threads(2)
        tiny = torch.full((4,), 1e-40) * 1
        maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}
        print(bool((tiny != 0).all()), len(maps), library.omp_get_max_threads())
    """
    assert run_python(code, OMP_NUM_THREADS="1") == "True 1 2"


def test_a_planted_build_that_is_never_checked_is_seen(source, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_is_whole", lambda library: library.exists())
    monkeypatch.setattr(native, "_key", lambda source, compiler: "0")
    damaged = tmp_path / "answer-0.so"
    damaged.write_bytes(b"damaged")
    with pytest.raises(OSError, match=r"answer-0\.so"):
        answer_of(build(source, "a compiler", tmp_path))
