"""Laws of packed weights: every product to rounding, every row to the last bit the same in any company, the same greedy
tokens, in no more memory than before. The same laws kill edited copies of the source."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from test_runner import dense_attention

from nanoserve import native, packed_linear
from nanoserve.client import InProcessClient
from nanoserve.config import EngineConfig
from nanoserve.model import Decoder, Linear
from nanoserve.native import load, reason_not_to_load
from nanoserve.packed_linear import PackedLinear, pack_linears
from nanoserve.request import EngineRequest, SamplingParams
from nanoserve.weights import load_model

pytestmark = pytest.mark.needs_cxx
TIED = {"tied": {"tie_word_embeddings": True}, "untied": {}}


def random_linear(num_in: int, num_out: int, bias: bool = True) -> Linear:
    torch.manual_seed(0)
    weight, bias_O = torch.randn(num_out, num_in) / num_in**0.5, torch.randn(num_out)
    return Linear(
        torch.nn.Parameter(weight, requires_grad=False),
        torch.nn.Parameter(bias_O, requires_grad=False) if bias else None,
    )


def check_product(num_in: int, num_out: int, rows: int, bias: bool = True) -> None:
    linear = random_linear(num_in, num_out, bias)
    x_TI = torch.randn(rows, num_in)
    exact = torch.nn.functional.linear(*(t.double() for t in (x_TI, linear.weight)))
    if linear.bias is not None:
        exact += linear.bias.double()
    torch.testing.assert_close(PackedLinear(linear)(x_TI).double(), exact, atol=2e-5, rtol=1e-5)


@given(
    num_in=st.integers(1, 600), num_out=st.integers(1, 100), rows=st.sampled_from([0, 1, 2, 5, 12, 13, 24, 25, 95, 97])
)
def test_every_shape_equals_the_exact_product(num_in, num_out, rows):
    check_product(num_in, num_out, rows)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [*range(1, 27), 96, 97, 200, 513])
def test_every_number_of_rows_equals_the_exact_product(rows, bias):
    check_product(530, 90, rows, bias)


def test_every_row_is_itself_to_the_last_bit_in_any_company_and_on_any_number_of_threads():
    packed = PackedLinear(random_linear(700, 96))
    x_TI = torch.randn(300, 700)
    threads = torch.get_num_threads()
    whole = packed(x_TI)
    try:
        torch.set_num_threads(3)
        for rows in (1, 2, 7, 12, 13, 33, 100, 300):
            assert torch.equal(packed(x_TI[-rows:]), whole[-rows:])
    finally:
        torch.set_num_threads(threads)


def test_every_view_is_read_where_it_lies():
    packed = PackedLinear(random_linear(40, 70))
    wide = torch.randn(9, 100)
    assert torch.equal(packed(wide[:, 30:70]), packed(wide[:, 30:70].contiguous()))
    assert torch.equal(packed(wide[::2, :40]), packed(wide[::2, :40].contiguous()))
    assert torch.equal(packed(wide.T[:40, :9].T), packed(wide[:, :40].contiguous()))


def test_every_row_of_the_matrix_is_found_in_its_panel():
    linear = random_linear(33, 100)
    ids_T = torch.tensor([0, 99, 31, 32, 5, 5])
    assert torch.equal(PackedLinear(linear).look_up(ids_T), linear.look_up(ids_T))


def logits_of(model: Decoder) -> torch.Tensor:
    ids_T = torch.arange(3, 20)
    with torch.inference_mode():
        return model.logits(model(ids_T, torch.arange(len(ids_T)), dense_attention))


def linears_of(model: Decoder) -> dict[str, Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def num_weight_bytes(model: Decoder) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def check_logits(folder: Path | str) -> None:
    model = load_model(folder)
    before, num_bytes = logits_of(model), num_weight_bytes(model)
    rounding = sum(4 * 31 * linear.weight.shape[1] for linear in linears_of(model).values())
    pack_linears(model)
    torch.testing.assert_close(logits_of(model), before, atol=1e-5, rtol=1e-5)
    assert num_weight_bytes(model) <= num_bytes + rounding


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_logits_and_its_size(family, tied, tmp_path):
    bias: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    check_logits(write_checkpoint(tmp_path, family, **TIED[tied], **bias))


def test_the_embedded_model_keeps_its_logits():
    check_logits("nanostory")


@pytest.mark.parametrize("tied", TIED)
def test_every_matrix_is_packed_and_the_one_before_is_gone(tied, tmp_path):
    model = load_model(write_checkpoint(tmp_path, "qwen3", **TIED[tied]))
    before = {name: weakref.ref(linear.weight) for name, linear in linears_of(model).items()}
    pack_linears(model)
    for name, linear in linears_of(model).items():
        assert type(linear) is PackedLinear
        assert before[name]() is None
    assert (model.head.weight is model.embed) == (tied == "tied")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_other_dtype_is_left_alone(dtype, tmp_path):
    model = load_model(write_checkpoint(tmp_path), dtype=dtype)
    pack_linears(model)
    assert {type(linear) for linear in linears_of(model).values()} == {Linear}


def test_without_a_compiler_every_matrix_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(packed_linear, "reason_not_to_load", lambda name: "no C++ compiler")
    model = load_model(write_checkpoint(tmp_path))
    pack_linears(model)
    assert {type(linear) for linear in linears_of(model).values()} == {Linear}


def greedy(model: str, **fields: Any) -> list[int]:
    config = EngineConfig(model=model, device="cpu", num_blocks=40, max_model_len="auto", **fields)
    tokens: list[int] = []
    with InProcessClient(config) as client:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        client.submit(EngineRequest(id="a", prompt_token_ids=list(range(3, 30)), params=params))
        while len(tokens) < 40:
            tokens += [token for output in client.poll(5) for token in output.new_token_ids]
    return tokens


@pytest.mark.parametrize("model", ["nanostory", "llama"])
def test_every_engine_packs_and_keeps_its_greedy_tokens(model, monkeypatch, tmp_path):
    path = model if model == "nanostory" else str(write_checkpoint(tmp_path, model))
    models: list[Decoder] = []

    def kept(model: Decoder) -> None:
        pack_linears(model)
        models.append(model)

    with monkeypatch.context() as patch:
        patch.setattr(packed_linear, "pack_linears", lambda model: None)
        expected = greedy(path)
    monkeypatch.setattr(packed_linear, "pack_linears", kept)
    assert greedy(path) == expected
    assert type(linears_of(models.pop())["layers.0.qkv"]) is PackedLinear
    assert greedy(path, compile="none", dtype="bfloat16")
    assert type(linears_of(models.pop())["layers.0.qkv"]) is Linear


class ForgetsTheBias(PackedLinear):
    def __init__(self, linear: Linear) -> None:
        super().__init__(Linear(linear.weight))


def test_a_planted_missing_bias_is_seen(monkeypatch, tmp_path):
    folder = write_checkpoint(tmp_path, "qwen2")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"  # which has some
    check_logits(folder)
    monkeypatch.setattr(packed_linear, "PackedLinear", ForgetsTheBias)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(folder)


class Copies(PackedLinear):
    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        self.second = torch.nn.Parameter(self.weight.clone(), requires_grad=False)


def test_a_planted_second_copy_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(packed_linear, "PackedLinear", Copies)
    with pytest.raises(AssertionError):
        check_logits("nanostory")


BUGS = {
    "a piece of the inputs that is forgotten": ("from += step", "from += step + 1"),
    "sums that begin anew": ("from ? y + r * p.out : p.bias", "from < 0 ? y + r * p.out : p.bias"),
    "a tile that is one row short": ("tiles[end - start - 1]", "tiles[std::max<int64_t>(end - start - 2, 0)]"),
    "an edge that is not kept": ("i < width ? y[r * p.out + i] : 0", "0"),
}


@pytest.fixture
def anew() -> Iterator[None]:
    load.cache_clear()
    yield
    load.cache_clear()
    reason_not_to_load.cache_clear()


@pytest.mark.parametrize("bug", BUGS)
def test_every_planted_bug_in_the_product_is_seen(bug: str, anew, monkeypatch, tmp_path: Path):
    shutil.copytree(native.SOURCES, tmp_path / "native")
    monkeypatch.setattr(native, "SOURCES", tmp_path / "native")
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    source = tmp_path / "native" / "linear.cpp"
    old, new = BUGS[bug]
    text = source.read_text()
    assert text.count(old) == 1
    source.write_text(text.replace(old, new))
    with pytest.raises(AssertionError, match="not close"):
        check_product(530, 90, 25)
