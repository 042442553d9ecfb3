"""Laws of packed weights: every product to rounding, every row to the last bit the same in any company, the same greedy
tokens, in no more memory than before; and in a quarter of it with int8, whose products are those of the weights that
are kept, each within half a step of what it was. The same laws kill edited copies of the source."""

from __future__ import annotations

import json
import mmap
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
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
from nanoserve.config import STAGES, EngineConfig
from nanoserve.model import Decoder, Linear
from nanoserve.native import load, reason_not_to_load
from nanoserve.packed_linear import Int8Linear, PackedLinear, check_quantization, pack_linears
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


FORMS = [PackedLinear, Int8Linear]
PIECES = 1700  # inputs: three pieces


def kept_weight(form: type[PackedLinear], weight_OI: torch.Tensor) -> torch.Tensor:
    """As numbers again, float64."""
    numbers_OI, scale_O = form.numbers(weight_OI)
    return numbers_OI.double() if scale_O is None else numbers_OI * scale_O[:, None].double()


def check_product(
    num_in: int, num_out: int, rows: int, bias: bool = True, form: type[PackedLinear] = PackedLinear
) -> None:
    linear = random_linear(num_in, num_out, bias)
    x_TI = torch.randn(rows, num_in)
    exact = torch.nn.functional.linear(x_TI.double(), kept_weight(form, linear.weight))
    if linear.bias is not None:
        exact += linear.bias.double()
    torch.testing.assert_close(form(linear)(x_TI).double(), exact, atol=2e-5, rtol=1e-5)


def check_products() -> None:
    for form in FORMS:
        check_product(PIECES, 90, 25, form=form)


@given(
    form=st.sampled_from(FORMS),
    num_in=st.sampled_from([1, 2, 63, 600, 767, 768, 769, PIECES]),
    num_out=st.integers(1, 100),
    rows=st.sampled_from([0, 1, 2, 5, 12, 13, 24, 25, 95, 97]),
)
def test_every_shape_equals_the_exact_product(form, num_in, num_out, rows):
    check_product(num_in, num_out, rows, form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [*range(1, 27), 96, 97, 200, 513])
def test_every_number_of_rows_equals_the_exact_product(rows, bias, form):
    check_product(PIECES, 90, rows, bias, form)


@pytest.mark.parametrize("form", FORMS)
def test_every_row_is_itself_to_the_last_bit_in_any_company_and_on_any_number_of_threads(form):
    packed = form(random_linear(PIECES, 104))
    x_TI = torch.randn(300, PIECES)
    threads = torch.get_num_threads()
    whole = packed(x_TI)
    try:
        torch.set_num_threads(3)
        for rows in (*range(1, 14), 33, 100, 300):
            assert torch.equal(packed(x_TI[-rows:]), whole[-rows:])
    finally:
        torch.set_num_threads(threads)


def check_half_a_step(form: type[Int8Linear]) -> None:
    weight_OI = random_linear(300, 40).weight * torch.logspace(-12, 3, 40)[:, None]
    weight_OI[7] = 0
    numbers_OI, scale_O = form.numbers(weight_OI)
    assert numbers_OI.dtype is torch.int8
    largest_O = numbers_OI.abs().amax(dim=1).tolist()
    assert largest_O == [127] * 7 + [0] + [127] * 32
    half_O1 = 0.5001 * scale_O[:, None]
    assert ((numbers_OI * scale_O[:, None] - weight_OI).abs() <= half_O1).all()


def test_every_int8_weight_is_within_half_a_step_of_what_it_was():
    check_half_a_step(Int8Linear)


def test_every_bias_of_an_output_without_weights_is_kept_in_int8():
    linear = random_linear(20, 40)
    linear.weight[3] = 0
    linear.weight[4] = 1e-42
    torch.testing.assert_close(Int8Linear(linear)(torch.randn(2, 20))[:, 3:5], linear.bias[3:5].expand(2, 2))


@pytest.mark.parametrize("form", FORMS)
def test_every_matrix_is_the_same_without_large_pages(form, monkeypatch):
    linear = random_linear(1024, 2100)
    expected = form(linear).weight
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert torch.equal(form(linear).weight, expected)


def check_sums_are_as_exact_as_torch() -> None:
    """One sum over 2,816 inputs in their order would be several times as far off."""
    torch.manual_seed(0)
    linear = Linear(torch.nn.Parameter(0.02 * torch.randn(1024, 2816), requires_grad=False))
    packed = PackedLinear(linear)
    for rows in (1, 12, 40):
        x = torch.randn(rows, 2816)
        exact = x.double() @ linear.weight.double().T
        error, torchs = ((y - exact).abs().mean() for y in (packed(x), linear(x)))
        assert error < 2.5 * torchs, f"sums of {rows} rows are off by {error:.1e}, torch's by {torchs:.1e}: not close"


def test_every_long_sum_is_about_as_exact_as_torch():
    check_sums_are_as_exact_as_torch()


def test_every_view_is_read_where_it_lies():
    packed = PackedLinear(random_linear(40, 70))
    wide = torch.randn(9, 100)
    assert torch.equal(packed(wide[:, 30:70]), packed(wide[:, 30:70].contiguous()))
    assert torch.equal(packed(wide[::2, :40]), packed(wide[::2, :40].contiguous()))
    assert torch.equal(packed(wide.T[:40, :9].T), packed(wide[:, :40].contiguous()))


@pytest.mark.parametrize("form", FORMS)
def test_every_row_of_the_matrix_is_found_in_its_panel(form):
    linear = random_linear(33, 100)
    ids_T = torch.tensor([0, 99, 31, 32, 5, 5])
    for ids in (ids_T, ids_T[::2]):
        assert torch.equal(form(linear).look_up(ids), kept_weight(form, linear.weight)[ids].float())


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
    exact = logits_of(load_model(folder).double())
    error, error_before = ((logits - exact).square().mean().sqrt() for logits in (logits_of(model), before))
    assert error <= 1.5 * error_before, f"logits are off by {error:.1e}, unpacked by {error_before:.1e}"
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


def dequantized(model: Decoder) -> Decoder:
    """The twin: torch's products, of the weights as they are kept."""
    for linear in linears_of(model).values():
        linear.weight.copy_(kept_weight(Int8Linear, linear.weight))
    return model


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_int8_equals_a_twin_with_the_weights_that_are_kept(family, tied, tmp_path):
    bias: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    folder = write_checkpoint(tmp_path, family, **TIED[tied], **bias)
    model = load_model(folder)
    embedding_bytes = 0 if tied == "tied" else 4 * model.embed.numel()
    pack_linears(model, "int8")
    assert {type(linear) for linear in linears_of(model).values()} == {Int8Linear}
    torch.testing.assert_close(logits_of(model), logits_of(dequantized(load_model(folder))), atol=1e-5, rtol=1e-5)
    assert model.embed.dtype is (torch.int8 if tied == "tied" else torch.float32)
    assert model.dtype is torch.float32
    others = sum(4 * p.numel() for p in model.parameters() if p.dtype is torch.float32)
    assert num_weight_bytes(model) == others + sum(linear.weight.numel() for linear in linears_of(model).values())
    assert others >= embedding_bytes


def test_nanostory_in_int8_takes_little_more_than_a_quarter_and_scores_nearly_the_same():
    model = load_model("nanostory")
    before, num_bytes = logits_of(model), num_weight_bytes(model)
    pack_linears(model, "int8")
    after = logits_of(model)
    assert num_weight_bytes(model) < 0.27 * num_bytes
    assert (after - before).abs().max() < 0.5
    assert not torch.equal(after, before)


def greedy(model: str, stage: str = "v0", **fields: Any) -> list[int]:
    config = replace(STAGES[stage], model=model, device="cpu", num_blocks=40, max_model_len="auto", **fields)
    config = replace(config, client=InProcessClient)
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

    def kept(model: Decoder, quantization: str | None) -> None:
        pack_linears(model, quantization)
        models.append(model)

    with monkeypatch.context() as patch:
        patch.setattr(packed_linear, "pack_linears", lambda model, quantization: None)
        expected = greedy(path)
    monkeypatch.setattr(packed_linear, "pack_linears", kept)
    assert greedy(path) == expected
    assert type(linears_of(models.pop())["layers.0.qkv"]) is PackedLinear
    assert greedy(path, compile="none", dtype="bfloat16")
    assert type(linears_of(models.pop())["layers.0.qkv"]) is Linear


def test_every_stage_writes_the_same_tokens_in_int8():
    expected = greedy("nanostory", quantization="int8")
    assert greedy("nanostory", "v1", quantization="int8", graph_sizes=(1, 8, 32)) == expected


def test_every_engine_says_what_is_quantized_and_counts_it():
    config = EngineConfig(device="cpu", num_blocks=40, max_model_len="auto")
    told = {}
    for quantization in (None, "int8"):
        with InProcessClient(replace(config, quantization=quantization)) as client:
            told[quantization] = client.info.execution
    assert str(told["int8"]).startswith("weights int8, ")
    assert "int8" not in str(told[None])
    assert told["int8"].weight_bytes < 0.27 * told[None].weight_bytes


REFUSED = {
    "another": ({"quantization": "int4"}, ["quantization='int4'", "int8"]),
    "16-bit": ({"dtype": "bfloat16"}, ["quantization='int8'", "torch.bfloat16", "float32"]),
    "compiled": ({"compile": "layers"}, ["quantization='int8'", "torch.compile", "compile='none'"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_every_engine_that_cannot_be_quantized_is_refused_in_one_line(case):
    fields, words = REFUSED[case]
    with pytest.raises(ValueError, match="quantization") as refusal:
        InProcessClient(EngineConfig(**{"device": "cpu", "quantization": "int8", **fields}))
    assert all(word in str(refusal.value) for word in words)
    assert "\n" not in str(refusal.value)


def test_every_gpu_and_every_machine_without_a_compiler_is_refused_by_name(monkeypatch):
    with pytest.raises(ValueError, match="device='cuda'; leave it out, or use cpu"):
        check_quantization("int8", "cuda", torch.float32, is_compiled=False)
    monkeypatch.setattr(packed_linear, "reason_not_to_load", lambda name: "none of g++, c++ is on PATH")
    with pytest.raises(ValueError, match="quantization='int8' needs a C"):
        InProcessClient(EngineConfig(device="cpu", quantization="int8"))
    check_quantization(None, "cuda", torch.bfloat16, is_compiled=True)


class ForgetsTheBias(PackedLinear):
    def __init__(self, linear: Linear) -> None:
        super().__init__(Linear(linear.weight))


def test_a_planted_missing_bias_is_seen(monkeypatch, tmp_path):
    folder = write_checkpoint(tmp_path, "qwen2")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"  # which has some
    check_logits(folder)
    monkeypatch.setattr(packed_linear, "PackedLinear", ForgetsTheBias)
    with pytest.raises(AssertionError, match="logits are off"):
        check_logits(folder)


class OneScale(Int8Linear):
    """Of all outputs: a matrix loses its small rows."""

    @staticmethod
    def numbers(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers_1N, scale_1 = Int8Linear.numbers(weight_OI.flatten()[None])
        return numbers_1N.view(weight_OI.shape), scale_1.expand(len(weight_OI))


def test_a_planted_scale_for_all_outputs_is_seen():
    with pytest.raises(AssertionError):
        check_half_a_step(OneScale)


class Copies(PackedLinear):
    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        self.second = torch.nn.Parameter(self.weight.clone(), requires_grad=False)


def test_a_planted_second_copy_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(packed_linear, "PackedLinear", Copies)
    with pytest.raises(AssertionError):
        check_logits("nanostory")


BUGS = {
    "a piece of the inputs that is forgotten": ("from += DEPTH", "from += DEPTH + 1"),
    "sums that begin anew": ("if (from == 0) piece.bias", "piece.bias"),
    "a tile that is one row short": ("sized[end - start - 1]", "sized[std::max<int64_t>(end - start - 2, 0)]"),
    "an edge that is not kept": ("p.out - out, p.y", "p.out - out - 1, p.y"),
    "one sum for all pieces": ("DEPTH = 256", "DEPTH = 4096"),
    "a scale for every piece": ("p.scale && from + DEPTH >= p.in", "p.scale"),
    "a scale that is forgotten": ("p.scale && from + DEPTH >= p.in", "false"),
    "a piece that is not widened": ("i < piece.depth * WIDTH", "i < WIDTH"),
}


def check_all() -> None:
    check_products()
    check_sums_are_as_exact_as_torch()


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
        check_all()
