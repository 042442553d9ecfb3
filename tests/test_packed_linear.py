"""Laws of packed weights: the same logits to rounding and the same greedy tokens, in no more memory than before."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, write_checkpoint
from test_runner import dense_attention

from nanoserve import packed_linear
from nanoserve.client import InProcessClient
from nanoserve.config import EngineConfig
from nanoserve.model import Decoder, Linear
from nanoserve.packed_linear import PackedLinear, pack_linears
from nanoserve.request import EngineRequest, SamplingParams
from nanoserve.weights import load_model

TIED = {"tied": {"tie_word_embeddings": True}, "untied": {}}


@pytest.fixture(params=["oneDNN", "by columns"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of every matrix that is not the embedding as well: tiny models have no large ones."""
    monkeypatch.setattr(packed_linear, "LARGE", 1 if request.param == "oneDNN" else 2**60)
    return request.param


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
    pack_linears(model)
    torch.testing.assert_close(logits_of(model), before, atol=1e-5, rtol=1e-5)
    assert num_weight_bytes(model) == num_bytes


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_logits_and_its_size(family, tied, layout, tmp_path):
    bias: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    check_logits(write_checkpoint(tmp_path, family, **TIED[tied], **bias))


def test_the_embedded_model_keeps_its_logits(layout):
    check_logits("nanostory")


@pytest.mark.parametrize("tied", TIED)
def test_every_matrix_is_packed_and_the_one_before_is_gone(tied, layout, tmp_path):
    model = load_model(write_checkpoint(tmp_path, "qwen3", **TIED[tied]))
    before = {name: weakref.ref(linear) for name, linear in linears_of(model).items()}
    pack_linears(model)
    for name, linear in linears_of(model).items():
        if layout == "by columns" or (name == "head" and tied == "tied"):
            assert type(linear) is Linear
            assert linear.weight.t().is_contiguous()
        else:
            assert type(linear) is PackedLinear
            assert before[name]() is None
    assert (model.head.weight is model.embed) == (tied == "tied")


def test_every_row_of_a_packed_product_is_itself_in_any_company(layout):
    torch.manual_seed(0)
    linear = Linear(torch.nn.Parameter(torch.randn(96, 80), requires_grad=False))
    packed = PackedLinear(linear)
    x = torch.randn(70, 80)
    with torch.inference_mode():
        whole = packed(x)
        for rows in (0, 1, 2, 7, 33):
            assert torch.equal(packed(x[:rows]), whole[:rows])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_other_dtype_is_left_alone(dtype, tmp_path):
    model = load_model(write_checkpoint(tmp_path), dtype=dtype)
    before = {name: linear.weight for name, linear in linears_of(model).items()}
    pack_linears(model)
    assert all(linear.weight is before[name] for name, linear in linears_of(model).items())


def test_without_onednn_every_matrix_lies_by_columns(layout, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = load_model(write_checkpoint(tmp_path))
    pack_linears(model)
    assert all(linear.weight.t().is_contiguous() for linear in linears_of(model).values())


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
    for large, kind in ((1, PackedLinear), (2**60, Linear)):
        monkeypatch.setattr(packed_linear, "LARGE", large)
        assert greedy(path) == expected
        assert type(linears_of(models.pop())["layers.0.qkv"]) is kind
    assert greedy(path, compile="none", dtype="bfloat16")
    assert type(linears_of(models.pop())["layers.0.qkv"]) is Linear


class ForgetsTheBias(PackedLinear):
    def forward(self, x_TI):
        return torch.ops.mkldnn._linear_pointwise(x_TI, self.weight, None, "none", [], "")


def test_a_planted_missing_bias_is_seen(monkeypatch, tmp_path):
    folder = write_checkpoint(tmp_path, "qwen2")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"  # which has some
    monkeypatch.setattr(packed_linear, "LARGE", 1)
    check_logits(folder)
    monkeypatch.setattr(packed_linear, "PackedLinear", ForgetsTheBias)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(folder)


def test_a_planted_second_copy_of_a_tied_head_is_seen(monkeypatch, tmp_path):
    def copies(linear: Linear) -> None:
        linear.weight = torch.nn.Parameter(linear.weight.clone(), requires_grad=False)

    monkeypatch.setattr(packed_linear, "lay_by_columns", copies)
    with pytest.raises(AssertionError):
        check_logits(write_checkpoint(tmp_path, "llama", tie_word_embeddings=True))
