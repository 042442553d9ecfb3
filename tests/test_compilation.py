"""Laws of torch.compile: compiled code gives the tokens that the layers give one by one, for any number of tokens, and
what cannot be compiled is said before anything is loaded twice."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from test_graph_runner import build_graphs
from test_native import wrap_compiler
from test_runner import (
    Driver,
    build,
    check_text,
    dense_attention,
    model_dir,  # noqa: F401  (a fixture)
    prompt_of,
)
from torch._dynamo.utils import counters

from nanoserve.compilation import (
    AttentionOperator,
    CompileMode,
    cache_folder,
    compile_model,
    failed_compiler_refused,
)
from nanoserve.compiler import find_compiler
from nanoserve.weights import load_model

MODES = [CompileMode.LAYERS, pytest.param(CompileMode.MODEL, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True, scope="module")
def compiled_code_of_one_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))


@pytest.mark.needs_cxx
@pytest.mark.parametrize("mode", MODES)
def test_every_compiled_model_gives_the_text_of_one_pass(model_dir, mode):  # noqa: F811
    """Captured whole, captured in pieces, and as it is: the long prompt fits no graph."""
    runner = build_graphs(model_dir, compile=mode)
    assert runner.execution.compile == mode
    assert runner.execution.compile_s > 0
    compiled = dict(counters["stats"])
    driver = Driver(runner)
    driver.add("a", prompt_of(11))
    driver.add("b", prompt_of(40, 1))
    driver.step({"a": 7})
    assert driver.step({"a": 4, "b": 30}).cost.graph == ""
    driver.step({"a": 1, "b": 10})
    driver.finish("a", 5)
    driver.finish("b", 4)
    assert driver.step({"a": 1, "b": 1}).cost.graph == "full decode 2"
    assert dict(counters["stats"]) == compiled, "code was compiled under a request"
    check_text(driver, "a")
    check_text(driver, "b")
    compiled = dict(counters["stats"])  # the reference may have been compiled in between
    again = Driver(build_graphs(model_dir, compile=mode))
    again.add("a", prompt_of(11))
    again.step({"a": 11})
    assert dict(counters["stats"]) == compiled, "a second engine of the kind compiled what the first had"
    check_text(again, "a")


def test_a_compile_mode_without_a_compiler_is_refused(model_dir, monkeypatch):  # noqa: F811
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match=r"compile='layers' on a CPU needs a C\+\+ compiler, and none of"):
        build(model_dir, compile="layers")
    monkeypatch.setenv("CXX", "my-compiler")
    with pytest.raises(ValueError, match="CXX='my-compiler' is not a program on PATH"):
        build(model_dir, compile="model")
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(ValueError, match="/bin/false does not answer to --version"):
        build(model_dir, compile="model")


COMPILERS_THAT_FAIL = {
    "two lines": '[ "$1" = --version ] && exec "$REAL" "$@"; echo "fatal error: no cc1plus" >&2; exit 1',
    "what torch makes": 'case "$*" in *-Wall*) echo "fatal error: no x.h" >&2; exit 1;; esac; exec "$REAL" "$@"',
}


@pytest.mark.needs_cxx
@pytest.mark.parametrize("what", COMPILERS_THAT_FAIL)
def test_a_compiler_that_answers_and_does_not_compile_is_refused_in_a_line(what, model_dir, monkeypatch, tmp_path):  # noqa: F811
    import torch._inductor.config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", wrap_compiler(tmp_path, COMPILERS_THAT_FAIL[what]))
    torch._dynamo.reset()
    line = r"compile='layers' on a CPU needs a C\+\+ compiler, and .*fatal error: no \S+\); [^\n]*install one [^\n]*$"
    with inductor.patch({"cpp.cxx": (None, os.environ["CXX"])}), pytest.raises(ValueError, match=line):
        build(model_dir, compile="layers")
    torch._dynamo.reset()


@pytest.mark.needs_cxx
def test_the_compiler_that_was_tried_is_the_one_that_torch_uses(monkeypatch, tmp_path):
    """With none but c++ on PATH, whatever torch would look for by itself."""
    import torch._inductor.config as inductor
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    (tmp_path / "c++").symlink_to(find_compiler())
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("nanoserve.compilation.reason_not_to_compile", lambda compiler: None)  # it needs more of PATH
    with inductor.patch({"cpp.cxx": (None, "g++")}):
        with pytest.raises(InvalidCxxCompiler):
            get_cpp_compiler()
        compile_model(load_model("nanostory"), CompileMode.LAYERS)
        assert get_cpp_compiler() == "c++"
    torch._dynamo.reset()


def check_damage_is_told(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and the next start is not the same again."""
    (kept / "xx").mkdir(parents=True)
    (kept / "xx" / "half.so").write_bytes(b"")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kept))
    line = r"^compile='layers' failed \([^\n]*file too short\); what was kept [^\n]*start again, or use [^\n]*$"
    with pytest.raises(ValueError, match=line), failed_compiler_refused(CompileMode.LAYERS):
        torch.compile(torch.sin, backend=lambda graph, inputs: ctypes.CDLL(str(kept / "xx" / "half.so")))(torch.ones(1))
    assert not kept.exists(), "damaged code is kept"


def test_damaged_results_of_an_earlier_start_are_told_and_do_not_stay(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_damage_is_told(tmp_path / "nanoserve" / "compiled" / "0123", monkeypatch)
    monkeypatch.setattr("shutil.rmtree", lambda folder, **options: None)  # a planted bug
    with pytest.raises(AssertionError, match="damaged code is kept"):
        check_damage_is_told(tmp_path / "nanoserve" / "compiled" / "4567", monkeypatch)


def test_no_folder_of_the_user_is_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="is damaged, remove it"), failed_compiler_refused(CompileMode.LAYERS):
        torch.compile(torch.cos, backend=lambda graph, inputs: 1 / 0)(torch.ones(1))
    assert tmp_path.is_dir()


def test_a_cache_that_cannot_be_written_is_refused(model_dir, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/nowhere")
    with pytest.raises(ValueError, match=r"compiled code cannot be kept in /proc/nowhere .*; set TORCHINDUCTOR_CACHE"):
        build(model_dir, compile="layers")


def test_every_cache_belongs_to_one_model_one_mode_and_one_code(tmp_path, monkeypatch):
    model = load_model("nanostory")
    folder = cache_folder(model, CompileMode.LAYERS)
    assert folder == cache_folder(load_model("nanostory"), CompileMode.LAYERS)
    others = {cache_folder(model, CompileMode.MODEL), cache_folder(model.to(torch.float64), CompileMode.LAYERS)}
    monkeypatch.setattr("inspect.getsource", lambda module: f"another {module.__name__}")
    others.add(cache_folder(load_model("nanostory"), CompileMode.LAYERS))
    assert len(others | {folder}) == 4
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Path(tmp_path) in cache_folder(model, CompileMode.LAYERS).parents


def test_an_operator_is_its_callable():
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    seen = []
    operator = AttentionOperator(lambda layer, *qkv: seen.append(layer) or dense_attention(layer, *qkv))
    assert torch.equal(operator(3, q, k, v), dense_attention(3, q, k, v))
    assert seen == [3]


def test_nothing_is_compiled_unless_asked_for():
    model = load_model("nanostory")
    pieces = model.pieces
    compile_model(model, CompileMode.NONE)
    assert model.pieces is pieces
