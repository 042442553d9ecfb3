"""How far each kernel is from float64 on the same numbers, in each dtype that it takes; and whole models' logits.

Inputs are normal numbers rounded to the dtype, and the reference is computed from what they were rounded to: what is
left is the kernel's own error. Triton's kernels run in its interpreter, at tiny shapes; their attention is left out in
bfloat16, where the interpreter's products are wrong. A model's logits are compared with those of its checkpoint's
float32 weights, computed in float64 by tests/reference.py: rounding the weights to the dtype is in the error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from floor import Products
from micro import make_batch
from torch import Tensor

from nanoserve.attention import AttentionBackend, AttentionBatch, TorchAttention
from nanoserve.cpu_attention import CpuAttention
from nanoserve.cpu_ops import CpuOps
from nanoserve.kv_cache import KVCache
from nanoserve.model import Decoder, Linear
from nanoserve.ops import Ops, TorchOps, TritonOps
from nanoserve.packed_linear import pack_linears
from nanoserve.triton_attention import TritonAttention
from nanoserve.weights import load_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from reference import Reference

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EPS = 1e-6
Rows = list[tuple[int, int]]  # (queries, keys) of each row
ROWS: Rows = [(1, 100), (1, 2000), (64, 300), (256, 256)]
FEW_ROWS: Rows = [(1, 20), (5, 21), (7, 7)]
TOKENS = 200  # of whose logits a model's error is found


@dataclass(frozen=True)
class Error:
    """Of all numbers of a result. `largest`: of the float64 ones; `steps`: the error in steps that the dtype has near
    the largest."""

    kernel: str
    dtype: str
    largest: float
    max_error: float
    steps: float
    argmax_alike: float | None = None  # the share of rows in which the largest number stands at the same place


def compare(kernel: str, dtype: torch.dtype, out: Sequence[Tensor], expected: Sequence[Tensor]) -> Error:
    pairs = list(zip(out, expected, strict=True))
    error = max((a.double() - b).abs().max().item() for a, b in pairs)
    largest = max(b.abs().max().item() for b in expected)
    assert error == error, f"{kernel} gives NaN in {dtype}"
    return Error(kernel, str(dtype).removeprefix("torch."), largest, error, error / largest / torch.finfo(dtype).eps)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def attention_errors() -> Iterable[Error]:
    cases: list[tuple[AttentionBackend, Rows, Sequence[str]]] = [
        (TorchAttention(), ROWS, TorchAttention.dtypes),
        (CpuAttention(), ROWS, CpuAttention.dtypes),
        (TritonAttention(), FEW_ROWS, [name for name in TritonAttention.dtypes if name != "bfloat16"]),
    ]
    for backend, rows, dtypes in cases:
        for name in dtypes:
            yield attention_error(backend, rows, DTYPES[name])


def attention_error(backend: AttentionBackend, rows: Rows, dtype: torch.dtype) -> Error:
    """Every key and value goes through `store`, and the newest of them are asked about: heads of 64, two to a key."""
    torch.manual_seed(0)  # the same for all that take the same shapes
    num_heads, num_kv_heads, head_dim = 4, 2, 64
    every, _ = make_batch([(keys, keys) for _, keys in rows])
    batch, num_blocks = asked_about(every, rows)
    cache = KVCache(
        num_layers=1,
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        block_size=16,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    cache.blocks.fill_(torch.nan)
    k_TKD, v_TKD = (random(sum(keys for _, keys in rows), num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
    q_THD = random(batch.query_starts[-1], num_heads, head_dim, dtype=dtype)
    backend.store(k_TKD, v_TKD, cache, 0, every.slot_mapping_T)
    out_THD = backend.attend(q_THD, cache, 0, batch)
    lens = batch.seq_lens
    queries = q_THD.split([n for n, _ in rows])
    expected = [attended(q, k, v) for q, k, v in zip(queries, k_TKD.split(lens), v_TKD.split(lens), strict=True)]
    return compare(type(backend).__name__, dtype, [out_THD], [torch.cat(expected)])


def asked_about(every: AttentionBatch, rows: Rows) -> tuple[AttentionBatch, int]:
    """The same tables, and only the last queries of each row; and how many blocks there are."""
    starts = [0]
    for queries, _ in rows:
        starts.append(starts[-1] + queries)
    slots_T = torch.cat(
        [slots[-n:] for slots, (n, _) in zip(every.slot_mapping_T.split(every.seq_lens), rows, strict=True)]
    )
    tensors = torch.tensor(starts), every.seq_lens_R, every.block_table_RB, slots_T
    batch = AttentionBatch(*tensors, query_starts=starts, seq_lens=every.seq_lens)
    return batch, int(every.block_table_RB.max()) + 1


def attended(q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor) -> Tensor:
    """The definition, in float64."""
    group = q_THD.shape[1] // k_LKD.shape[1]
    q_HTD, k_HLD, v_HLD = (
        x.double().repeat_interleave(times, dim=1).transpose(0, 1)
        for x, times in ((q_THD, 1), (k_LKD, group), (v_LKD, group))
    )
    scores_HTL = q_HTD @ k_HLD.mT * q_THD.shape[-1] ** -0.5
    unseen_TL = torch.ones(len(q_THD), len(k_LKD), dtype=torch.bool).triu(len(k_LKD) - len(q_THD) + 1)
    return (scores_HTL.masked_fill(unseen_TL, -torch.inf).softmax(-1) @ v_HLD).transpose(0, 1)


def op_errors() -> Iterable[Error]:
    for ops, tokens in ((TorchOps(), 64), (CpuOps(), 64), (TritonOps(), 3)):
        for name in type(ops).dtypes:
            for operation, (out, expected) in op_results(ops, tokens, DTYPES[name]).items():
                yield compare(f"{type(ops).__name__}.{operation}", DTYPES[name], out, expected)


def op_results(ops: Ops, tokens: int, dtype: torch.dtype) -> Mapping[str, tuple[Sequence[Tensor], Sequence[Tensor]]]:
    torch.manual_seed(0)
    hidden, head_dim = 256, 64
    x, residual = (random(tokens, hidden, dtype=dtype) for _ in range(2))
    weight, head_weight = random(hidden, dtype=dtype), random(head_dim, dtype=dtype)
    q, k = random(tokens, 4, head_dim, dtype=dtype), random(tokens, 2, head_dim, dtype=dtype)
    angles = torch.arange(tokens)[:, None] * torch.rand(head_dim // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    gate_up = random(tokens, 2 * hidden, dtype=dtype)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / ((x * x).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()

    def turned(x_TND: Tensor) -> Tensor:
        first, second = norm(x_TND.double(), head_weight).chunk(2, dim=-1)
        cos_T1D, sin_T1D = cos.double()[:, None], sin.double()[:, None]
        return torch.cat((first * cos_T1D - second * sin_T1D, second * cos_T1D + first * sin_T1D), dim=-1)

    gate, up = gate_up.double().chunk(2, dim=-1)
    total = x.double() + residual.double()
    return {
        "rms_norm": ([ops.rms_norm(x, weight, EPS)], [norm(x.double(), weight)]),
        "add_rms_norm": (ops.add_rms_norm(x, residual, weight, EPS), [norm(total, weight), total]),
        "norm_and_rotate": (
            ops.norm_and_rotate(q, k, head_weight, head_weight, EPS, cos, sin),
            [turned(q), turned(k)],
        ),
        "silu_and_mul": ([ops.silu_and_mul(gate_up)], [gate * gate.sigmoid() * up]),
    }


def product_errors(path: Path | str) -> Iterable[Error]:
    """Of the matrix with most inputs in a layer: the sums are longest there."""
    linear: Linear = load_model(path).layers[0].down
    x_TI = torch.randn(64, linear.weight.shape[1])
    expected = x_TI.double() @ linear.weight.double().T
    for layout, (product,) in Products.layouts([linear]).items():
        yield compare(f"product of {x_TI.shape[1]}, {layout}", torch.float32, [product(x_TI)], [expected])
    for dtype in (torch.float16, torch.bfloat16):
        x, weight = x_TI.to(dtype), linear.weight.to(dtype)
        out = torch.nn.functional.linear(x, weight)
        yield compare(f"product of {x_TI.shape[1]}, F.linear", dtype, [out], [x.double() @ weight.double().T])


def logits_of(model: Decoder, backend: AttentionBackend, ids: list[int]) -> Tensor:
    batch, num_blocks = make_batch([(len(ids), len(ids))])
    config = model.config
    cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=num_blocks,
        num_kv_heads=config.num_kv_heads,
        block_size=16,
        head_dim=config.head_dim,
        dtype=model.dtype,
        device=model.device,
    )

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, /) -> Tensor:
        backend.store(k_TKD, v_TKD, cache, layer, batch.slot_mapping_T)
        return backend.attend(q_THD, cache, layer, batch)

    return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), attend))


def fast(model: Decoder) -> AttentionBackend:
    """What a CPU is given by itself."""
    pack_linears(model)
    model.ops = CpuOps()
    return CpuAttention()


def model_errors(name: str, path: Path | str) -> Iterable[Error]:
    ids = torch.randint(16, load_model(path).config.vocab_size, (TOKENS,)).tolist()
    whole = load_model(path, dtype="float32")
    expected = Reference(whole).logits(ids)
    forms: list[tuple[str, str, Callable[[Decoder], AttentionBackend]]] = [
        ("torch's kernels", "float32", lambda _: TorchAttention()),
        ("a CPU's kernels", "float32", fast),
        ("torch's kernels", "float16", lambda _: TorchAttention()),
        ("torch's kernels", "bfloat16", lambda _: TorchAttention()),
    ]
    for kernels, dtype, prepare in forms:
        model = load_model(path, dtype=dtype)
        logits = logits_of(model, prepare(model), ids)
        found = compare(f"logits of {name}, {kernels}", DTYPES[dtype], [logits], [expected])
        alike = (logits.argmax(-1) == expected.argmax(-1)).double().mean().item()
        yield Error(found.kernel, dtype, found.largest, found.max_error, found.steps, alike)


def measure_errors(models: Mapping[str, Path | str]) -> list[Error]:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before Triton's kernels are imported"
    with torch.inference_mode():
        found = [*attention_errors(), *op_errors(), *product_errors(models["30m"])]
        for name, path in models.items():
            found += model_errors(name, path)
    return found


def table(errors: Sequence[Error]) -> str:
    rows = ["| kernel | dtype | largest result | largest error | in steps of the dtype | argmax alike |"]
    rows.append("|---" * 6 + "|")
    for e in errors:
        alike = "" if e.argmax_alike is None else f"{e.argmax_alike:.1%}"
        rows.append(f"| {e.kernel} | {e.dtype} | {e.largest:.3g} | {e.max_error:.2g} | {e.steps:.2g} | {alike} |")
    return "\n".join(rows)
