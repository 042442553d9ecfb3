"""Laws of the C++ operations: each equals its torch twin in every dtype, for views and any number of rows, to the last
bit the same in any company. The same laws kill edited copies of the source."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import check_close, fresh_memory_is_nan, fused_qkv, random

from nanoserve import cpu_ops, native
from nanoserve.config import EngineConfig
from nanoserve.cpu_ops import CpuOps, argmax, look_up
from nanoserve.native import load, reason_not_to_load
from nanoserve.ops import Ops, TorchOps
from nanoserve.runner import EagerRunner

pytestmark = pytest.mark.needs_cxx
EPS = 1e-5


def results(ops: Ops, tokens: int, size: int, heads: int, dim: int) -> dict[str, torch.Tensor]:
    """Of every operation, on rows with gaps between them."""
    wide = 3 * random(tokens, 2 * size + 3)
    x, residual = wide[:, :size], wide[:, size : 2 * size]
    weight, head_weight = random(size, seed=2), 1 + random(dim, seed=5)
    q_THD, k_TKD, _ = fused_qkv(tokens, 2 * heads, heads, dim, torch.float32)
    angles_TI = 10 * random(tokens, dim // 2, seed=3)
    cos_TI, sin_TI = angles_TI.cos(), angles_TI.sin()
    before = wide.clone(), q_THD.clone()
    with fresh_memory_is_nan():
        normed, stream = ops.add_rms_norm(x, residual, weight, EPS)
        turned_q, turned_k = ops.rotate(q_THD, k_TKD, cos_TI, sin_TI)
        both_q, both_k = ops.norm_and_rotate(q_THD, k_TKD, head_weight, head_weight, EPS, cos_TI, sin_TI)
        only_q, plain_k = ops.norm_and_rotate(q_THD, k_TKD, head_weight, None, EPS, cos_TI, sin_TI)
        found = {
            "norm": ops.rms_norm(x, weight, EPS),
            "norm of heads": ops.rms_norm(q_THD, head_weight, EPS),
            "norm of a sum": normed,
            "the sum": stream,
            "q": turned_q,
            "k": turned_k,
            "normed q": both_q,
            "normed k": both_k,
            "q alone is normed": only_q,
            "k is not": plain_k,
            "SwiGLU": ops.silu_and_mul(wide[:, : 2 * size]),
        }
    assert torch.equal(wide, before[0])
    assert torch.equal(q_THD, before[1])
    return found


def check(tokens: int = 5, size: int = 70, heads: int = 2, dim: int = 24) -> None:
    found = results(CpuOps(), tokens, size, heads, dim)
    for name, expected in results(TorchOps(), tokens, size, heads, dim).items():
        check_close(found[name], expected, name)


def test_every_operation_equals_its_twin():
    check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_other_dtype_is_refused(dtype):
    x, weight, ops = torch.ones(2, 8, dtype=dtype), torch.ones(8, dtype=dtype), CpuOps()
    heads = x.unsqueeze(1)
    for call in (
        lambda: ops.rms_norm(x, weight, EPS),
        lambda: ops.add_rms_norm(x, x, weight, EPS),
        lambda: ops.silu_and_mul(x),
        lambda: ops.rotate(heads, heads, x[:, :4], x[:, :4]),
        lambda: ops.norm_and_rotate(heads, heads, weight, weight, EPS, x[:, :4], x[:, :4]),
    ):
        with pytest.raises(AssertionError, match="not of float32"):
            call()


@given(
    tokens=st.integers(1, 40), size=st.integers(1, 130), heads=st.integers(1, 3), dim=st.sampled_from(range(2, 82, 2))
)
def test_every_shape_equals_the_twin(tokens, size, heads, dim):
    check(tokens, size, heads, dim)


def test_every_batch_that_is_shared_among_threads_equals_the_twin():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        check(tokens=300, size=256, heads=4, dim=64)
    finally:
        torch.set_num_threads(threads)


def test_every_row_is_itself_to_the_last_bit_in_any_company():
    whole = results(CpuOps(), 300, 256, 4, 64)
    for tokens in (1, 2, 37):
        for name, part in results(CpuOps(), 300, 256, 4, 64).items():
            assert torch.equal(part[:tokens], whole[name][:tokens])
    x, weight = random(300, 256), random(256, seed=1)
    ops = CpuOps()
    normed, swiglu = ops.rms_norm(x, weight, EPS), ops.silu_and_mul(x)
    for tokens in (1, 2, 37):
        assert torch.equal(ops.rms_norm(x[-tokens:], weight, EPS), normed[-tokens:])
        assert torch.equal(ops.silu_and_mul(x[-tokens:]), swiglu[-tokens:])


def test_every_large_and_small_number_is_like_torch():
    gate = torch.tensor([-1e30, -200.0, -88.0, -30.0, -1e-30, 0.0, 1e-30, 30.0, 88.0, 200.0, 1e30])
    both = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0)
    torch.testing.assert_close(CpuOps().silu_and_mul(both), TorchOps().silu_and_mul(both), rtol=3e-6, atol=1e-35)
    for x in (torch.zeros(1, 32), torch.full((1, 32), 1e18), torch.full((1, 32), 1e-18)):
        args = x, torch.ones(32), EPS
        torch.testing.assert_close(CpuOps().rms_norm(*args), TorchOps().rms_norm(*args), rtol=1e-6, atol=0)


def test_no_tokens_are_no_results():
    assert CpuOps().silu_and_mul(torch.zeros(0, 8)).shape == (0, 4)
    assert CpuOps().rms_norm(torch.zeros(0, 8), torch.ones(8), EPS).shape == (0, 8)


@given(
    st.integers(1, 5).flatmap(
        lambda rows: st.lists(
            st.sampled_from([-torch.inf, -2.0, -0.0, 0.0, 1.0, torch.inf, torch.nan]), min_size=rows, max_size=40 * rows
        ).map(lambda numbers: torch.tensor(numbers[: len(numbers) // rows * rows]).view(rows, -1))
    )
)
def test_every_largest_is_torch_s_among_equals_and_nan_too(x_SV):
    check_argmax(x_SV)


def check_argmax(x_SV: torch.Tensor) -> None:
    out_S = torch.full((len(x_SV),), -1)
    argmax(x_SV, out_S)
    expected_S = x_SV.argmax(dim=-1)
    assert torch.equal(out_S, expected_S), f"the largest of {x_SV.tolist()} is off by {(out_S - expected_S).tolist()}"


def test_every_engine_on_a_cpu_has_them(tmp_path):
    path = str(write_checkpoint(tmp_path))
    runner = EagerRunner(EngineConfig(model=path, device="cpu"))
    assert runner.execution.ops == "CpuOps (the default on cpu)"
    assert type(runner.model.ops) is CpuOps


def check_all() -> None:
    check(size=64, tokens=3)
    scores_SV = random(3, 70)
    scores_SV[1, 40] = torch.nan
    check_argmax(scores_SV)
    little, weight = torch.full((1, 16), 1e-3), torch.ones(16)
    check_close(CpuOps().rms_norm(little, weight, EPS), TorchOps().rms_norm(little, weight, EPS), "a norm of little")


BUGS = {
    "a residual that is forgotten": ("sum[i] = old[i] + from[i]", "sum[i] = from[i]"),
    "no epsilon": ("/ float(size) + eps", "/ float(size)"),
    "the other way round": (
        "b * cos[i] + a * sin[i];\n            }\n        } else",
        "b * cos[i] - a * sin[i];\n}} else",
    ),
    "the next head's place": ("n * h.head", "(n + 1) % h.count * h.head"),
    "a gate that never closes": ("gate[i] > 0 ? 1.0f : e", "1.0f"),
    "an exponential cut short": ("int k = 7", "int k = 3"),
    "the largest number beside a NaN": ("is_nan ? x[place] == x[place] : x[place] != most", "x[place] != most"),
    "the largest of the first row": ("a.x + r * a.size", "a.x"),
}


@pytest.fixture
def anew() -> Iterator[None]:
    for loaded in (load, cpu_ops._argmax, cpu_ops._look_up):
        loaded.cache_clear()
    yield
    for loaded in (load, cpu_ops._argmax, cpu_ops._look_up):
        loaded.cache_clear()
    reason_not_to_load.cache_clear()


def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str) -> None:
    shutil.copytree(native.SOURCES, tmp_path / "native")
    monkeypatch.setattr(native, "SOURCES", tmp_path / "native")
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    source = tmp_path / "native" / "ops.cpp"
    text = source.read_text()
    assert text.count(old) == 1
    source.write_text(text.replace(old, new))


@pytest.mark.parametrize("bug", BUGS)
def test_every_planted_bug_is_seen(bug: str, anew, monkeypatch, tmp_path: Path):
    plant(monkeypatch, tmp_path, *BUGS[bug])
    with pytest.raises(AssertionError, match="is off by"):
        check_all()


def check_look_up(tokens: int) -> None:
    table_VE = torch.randn(64, 256)
    ids_T = torch.randint(64, (tokens,))
    out_TE = torch.full((tokens, 256), torch.nan)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        look_up(table_VE, ids_T, out_TE)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(out_TE, table_VE[ids_T])


@pytest.mark.parametrize("tokens", [1, 3, 257])
def test_every_row_is_looked_up_whether_threads_share_them_or_not(tokens):
    """257 rows of 256 are more than one thread does alone."""
    check_look_up(tokens)


def test_a_planted_row_that_no_thread_looks_up_is_seen(anew, monkeypatch, tmp_path: Path):
    plant(monkeypatch, tmp_path, "t < l.tokens; t++", "t < l.tokens - l.tokens % l.threads; t++")
    with pytest.raises(AssertionError):
        check_look_up(257)
