"""Laws of loading: names, files, dtypes, dummy weights; and one line for everything that is wrong with a checkpoint."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, random_tensors, tensor_shapes, tiny_config, write_checkpoint
from reference import reference_generate
from safetensors.torch import load_file, save_file

import nanoserve
from nanoserve.weights import checkpoint_slots, load_model, read_model_config, resolve_dtype, resolve_model_dir

CPU = torch.device("cpu")
GPU = torch.device("cuda")  # only named, never used


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_of_a_checkpoint_is_in_its_slot(family: str, num_shards: int, tied: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family, num_shards=num_shards, tie_word_embeddings=tied, attention_bias=True)
    model = load_model(tmp_path)
    expected = random_tensors(tiny_config(family, tie_word_embeddings=tied, attention_bias=True))
    slots = checkpoint_slots(model)
    assert slots.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(slots[name], tensor), name
    assert (model.head.weight is model.embed) == tied
    assert sum(slot.numel() for slot in slots.values()) == model.config.num_parameters


def test_every_slot_is_a_view_that_covers_the_model_exactly_once(tmp_path: Path) -> None:
    model = load_model(write_checkpoint(tmp_path, "qwen3", attention_bias=True))
    for parameter in model.parameters():
        parameter.zero_()
    for slot in checkpoint_slots(model).values():
        slot += 1
    assert all(torch.equal(p, torch.ones_like(p)) for p in model.parameters())
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "half", torch.bfloat16])
def test_every_dtype_is_converted_as_torch_converts_it(
    stored: torch.dtype, wanted: str | torch.dtype, tmp_path: Path
) -> None:
    model = load_model(write_checkpoint(tmp_path, dtype=stored), dtype=wanted)
    dtype = {"float32": torch.float32, "half": torch.float16}.get(str(wanted), torch.bfloat16)
    for name, tensor in random_tensors(tiny_config()).items():
        assert torch.equal(checkpoint_slots(model)[name], tensor.to(stored).to(dtype)), name


def test_auto_dtype_is_float32_on_a_cpu_and_the_checkpoints_own_elsewhere(tmp_path: Path) -> None:
    assert load_model(write_checkpoint(tmp_path, dtype=torch.float16)).dtype == torch.float32
    assert resolve_dtype("auto", CPU, "bfloat16") == torch.float32
    assert resolve_dtype("auto", GPU, "bfloat16") == torch.bfloat16
    assert resolve_dtype("auto", GPU, "float32") == torch.float32
    assert resolve_dtype("float16", GPU, "bfloat16") == torch.float16


def test_the_files_dtype_counts_when_config_json_names_none(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, dtype=torch.bfloat16)
    edit_config(tmp_path, torch_dtype=None)
    assert load_model(tmp_path, device="meta").dtype == torch.bfloat16
    assert load_model(tmp_path, device="meta", load_format="dummy").dtype == torch.float32


def test_loading_never_holds_a_second_copy_of_the_model(tmp_path: Path) -> None:
    """Anonymous memory grows by the decoder (as large as the file here) and one tensor, not by twice the file."""
    if not Path("/proc/self/status").exists():  # only Linux tells anonymous from mapped memory
        return
    write_checkpoint(tmp_path, hidden_size=256, intermediate_size=1024, vocab_size=4000, num_hidden_layers=4)
    code = f"""
import re
from pathlib import Path
from nanoserve.weights import load_model
load_model("nanostory")
anonymous = lambda: int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before = anonymous()
model = load_model({str(tmp_path)!r})
size = model.config.num_parameters * 4
print((anonymous() - before) / size)
"""
    root = Path(nanoserve.__file__).parent.parent
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=True
    )
    assert float(ran.stdout) < 1.3


def test_old_checkpoints_with_rotary_buffers_load(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load_model(tmp_path)


def test_a_tied_head_stored_twice_must_equal_the_embedding(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_model(tmp_path).config.tied_head
    edit_tensors(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    assert "tie_word_embeddings" in refusal_of(tmp_path)


def test_a_file_of_any_name_is_found_when_it_is_the_only_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    load_model(tmp_path)
    shutil.copy(tmp_path / "weights.safetensors", tmp_path / "more.safetensors")
    assert "2 safetensors files" in refusal_of(tmp_path)


# Dummy weights


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_dummy_model_says_varied_things_that_depend_on_the_prompt(
    family: str, tied: bool, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, family, tie_word_embeddings=tied, vocab_size=1024, hidden_size=64)
    (tmp_path / "model.safetensors").unlink()
    model = load_model(tmp_path, load_format="dummy")
    tokens = reference_generate(model, [5, 6, 7, 8], 40)
    assert len(set(tokens)) >= 28
    swapped = reference_generate(model, [6, 5, 7, 8], 40)
    assert sum(a == b for a, b in zip(tokens, swapped, strict=True)) <= 8


def test_dummy_weights_follow_from_the_seed_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    torch.manual_seed(1)
    first = load_model(tmp_path, load_format="dummy", seed=3).state_dict()
    torch.manual_seed(2)
    again = load_model(tmp_path, load_format="dummy", seed=3).state_dict()
    half = load_model(tmp_path, load_format="dummy", seed=3, dtype="bfloat16").state_dict()
    other = load_model(tmp_path, load_format="dummy", seed=4).state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor.bfloat16(), half[name])
        assert not torch.equal(tensor, other[name])


# Names


def test_every_kind_of_name_resolves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "nanostory")
    embedded = Path(nanoserve.__file__).parent / "models" / "nanostory"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_dir("nanostory") == embedded
    assert resolve_model_dir("./nanostory").samefile(tmp_path / "nanostory")
    assert resolve_model_dir("~/nanostory") == tmp_path / "nanostory"
    assert resolve_model_dir(tmp_path / "nanostory") == tmp_path / "nanostory"
    assert read_model_config("nanostory").architecture == "Qwen3ForCausalLM"
    assert read_model_config("./nanostory").architecture == "LlamaForCausalLM"


def test_a_hub_id_asks_for_what_is_needed_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []
    folder = write_checkpoint(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.append((name, options)) or str(folder)
    )
    read_model_config("some/model")
    load_model("some/model")
    patterns = [options["allow_patterns"] for _, options in asked]
    assert [name for name, _ in asked] == ["some/model"] * 3
    assert patterns[:2] == [["config.json"], ["config.json"]]
    assert "*.safetensors" in patterns[2]


def test_reading_a_config_imports_no_torch() -> None:
    code = (
        "import sys, nanoserve.checkpoint as c; c.read_model_config('nanostory'); "
        "assert not {'torch', 'numpy', 'huggingface_hub'} & set(sys.modules)"
    )
    root = Path(nanoserve.__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=True)


# Everything that can be wrong, in one line that names it


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def truncate(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def refusal_of(name: Path | str, **options: object) -> str:
    with pytest.raises(ValueError, match=r"\w") as refusal:
        load_model(name, **options)  # type: ignore[arg-type]
    message = str(refusal.value)
    assert "\n" not in message
    assert re.search(r"[;:] .*\w.*\.$", message), f"no fix in {message!r}"
    return message


Q_BIAS = "model.layers.0.self_attn.q_proj.bias"
Q_WEIGHT = "model.layers.0.self_attn.q_proj.weight"
SHARD = "model-00002-of-00002.safetensors"

BROKEN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json", "whole checkpoint"]),
    "config is cut off": (lambda f: truncate(f / "config.json", 0.5), ["config.json", "JSON"]),
    "config is binary": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), ["config.json", "JSON"]),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), ["config.json", "list"]),
    "config is empty": (lambda f: (f / "config.json").write_text("{}"), ["config.json", "architecture None"]),
    "architecture": (lambda f: edit_config(f, architectures=["OPTForCausalLM"]), ["config.json", "OPTForCausalLM"]),
    "rope is text": (lambda f: edit_config(f, rope_scaling="yarn"), ["config.json", "rope_parameters='yarn'"]),
    "architecture is text": (lambda f: edit_config(f, architectures="Llama"), ["config.json", "architecture 'L"]),
    "deep config": (
        lambda f: (f / "config.json").write_text('{"a":' + "[" * 200_000),
        ["config.json", "RecursionError"],
    ),
    **{
        f"absurd {key}": (lambda f, key=key, value=value: edit_config(f, **{key: value}), ["config.json", key])
        for key, value in {
            "hidden_size": 2**31,
            "vocab_size": 2**40,
            "head_dim": 2**62,
            "max_position_embeddings": 10**300,
            "num_hidden_layers": 10_001,
            "rope_theta": 10**400,
            "intermediate_size": 2**31,
        }.items()
    },
    "absurd product": (
        lambda f: edit_config(f, hidden_size=2**31 - 2, intermediate_size=2**31 - 1),
        ["config.json", "hidden_size=2147483646", "intermediate_size=2147483647", "weights"],
    ),
    "absurd factor": (
        lambda f: edit_config(f, rope_scaling={"rope_type": "linear", "factor": 1e29}),
        ["config.json", "max_position_embeddings"],
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["0 safetensors files", "save_pretrained"]),
    "weights cut off": (lambda f: truncate(f / "model.safetensors", 0.9), ["model.safetensors", "fetch"]),
    "header cut off": (lambda f: truncate(f / "model.safetensors", 0.001), ["model.safetensors", "fetch"]),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), ["model.safetensors", "fetch"]),
    "not safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"PK\x03\x04" * 99), ["model.safetensors"]),
    "bad header": (
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 8) + b"{\n bad\n}"),
        ["model.safetensors", "fetch"],
    ),
    "no tensors": (lambda f: save_file({}, f / "model.safetensors"), ["21 of 21 tensors"]),
    "missing tensor": (lambda f: edit_tensors(f, lambda t: t.pop(Q_WEIGHT)), ["1 of 21 tensors", Q_WEIGHT]),
    "no head": (lambda f: edit_tensors(f, lambda t: t.pop("lm_head.weight")), ["lm_head.weight"]),
    "unexpected tensor": (
        lambda f: edit_tensors(f, lambda t: t.update({Q_BIAS: torch.ones(64)})),
        ["model.safetensors", Q_BIAS, "LlamaForCausalLM"],
    ),
    "wrong shape": (
        lambda f: edit_tensors(f, lambda t: t.update({Q_WEIGHT: torch.ones(64, 49)})),
        ["model.safetensors", Q_WEIGHT, "[64, 49]", "[64, 48]"],
    ),
    "quantised": (
        lambda f: edit_tensors(f, lambda t: t.update({Q_WEIGHT: torch.ones(64, 48, dtype=torch.int8)})),
        ["model.safetensors", Q_WEIGHT, "torch.int8", "bfloat16"],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_checkpoint_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    breaks, words = BROKEN[name]
    breaks(write_checkpoint(tmp_path))
    message = refusal_of(tmp_path)
    assert all(word in message for word in [str(tmp_path), *words]), message


def test_a_model_larger_than_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nException raised from ...")

    monkeypatch.setattr("nanoserve.weights.Decoder", full)
    for load_format in ("auto", "dummy"):
        assert "can't allocate memory" in refusal_of("nanostory", load_format=load_format)


BROKEN_SHARDS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "index cut off": (
        lambda f: truncate(f / "model.safetensors.index.json", 0.5),
        ["model.safetensors.index.json", "JSON"],
    ),
    "index without map": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        ["model.safetensors.index.json", "weight_map"],
    ),
    "index with numbers": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}'),
        ["model.safetensors.index.json", "weight_map"],
    ),
    "index of nothing": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
        ["model.safetensors.index.json", "weight_map"],
    ),
    **{
        f"shard {shard}": (
            lambda f, shard=shard: (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": shard}})
            ),
            ["model.safetensors.index.json", "weight_map", "model folder"],
        )
        for shard in ("/etc/passwd", "../other/model.safetensors", "a/../../b", "\ud800", "a\0")
    },
    "shard missing": (lambda f: (f / SHARD).unlink(), [SHARD, "fetch"]),
    "shard cut off": (lambda f: truncate(f / SHARD, 0.7), [SHARD, "fetch"]),
    "shard of another model": (
        lambda f: save_file({"model.norm.weight": torch.ones(7)}, f / SHARD),
        [SHARD, "model.norm.weight", "[7]", "[48]"],
    ),
}


@pytest.mark.parametrize("name", BROKEN_SHARDS)
def test_every_broken_shard_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    breaks, words = BROKEN_SHARDS[name]
    breaks(write_checkpoint(tmp_path, num_shards=2))
    message = refusal_of(tmp_path)
    assert all(word in message for word in [str(tmp_path), *words]), message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nanostry", ["'nanostry'", "nanostory", "organisation/name"]),
        ("/no/such/folder", ["'/no/such/folder'", "check the path"]),
        ("./models/llama", ["'./models/llama'", "check the path"]),
        ("../nanostory", ["'../nanostory'", "check the path"]),
        ("", ["''", "check the path"]),
        (__file__, [__file__, "is a file", "folder"]),
        ("nobody/has-this-model", ["'nobody/has-this-model'", "hub", "HF_TOKEN", "folder"]),
    ],
)
def test_every_unknown_name_is_refused_in_one_line(
    name: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for options in ({}, {"load_format": "dummy"}):
        message = refusal_of(name, **options)
        assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"load_format": "gguf"}, ["load_format='gguf'", "dummy"]),
        ({"dtype": "int8"}, ["dtype='int8'", "bfloat16"]),
        ({"dtype": torch.int8}, ["torch.int8", "bfloat16"]),
    ],
)
def test_every_unknown_option_is_refused_in_one_line(options: dict[str, object], words: list[str]) -> None:
    message = refusal_of("nanostory", **options)
    assert all(word in message for word in words), message


def test_the_loader_sees_a_planted_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's k and v exchanged have the same shapes: only the values can tell."""
    import nanoserve.weights as weights

    write_checkpoint(tmp_path)
    rows = weights._rows

    def exchanged(prefix, linear, sizes):  # type: ignore[no-untyped-def]
        if "k_proj" in sizes:
            sizes = {"q_proj": sizes["q_proj"], "v_proj": sizes["v_proj"], "k_proj": sizes["k_proj"]}
        return rows(prefix, linear, sizes)

    right = load_model(tmp_path)
    monkeypatch.setattr(weights, "_rows", exchanged)
    wrong = load_model(tmp_path)
    monkeypatch.setattr(weights, "_rows", rows)
    assert tensor_shapes(tiny_config()).keys() == checkpoint_slots(wrong).keys()
    assert reference_generate(wrong, [1, 2, 3], 10) != reference_generate(right, [1, 2, 3], 10)
