"""Laws of the Triton kernels, in Triton's interpreter: each equals its torch twin, on every edge that a batch has.

The same laws kill edited copies of the kernels' source. Needs TRITON_INTERPRET=1 from before the kernels are
imported (tests/conftest.py). What the interpreter cannot show, that they compile and fit, is test_kernels_compiled.py.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from kernel_cases import (
    PagedCase,
    check_close,
    check_far_block,
    check_norms,
    check_rotary,
    check_silu,
    check_store,
    fused_qkv,
    mutant,
    random,
)

from nanoserve import attention_kernels, kernels
from nanoserve.attention_kernels import Tile, pick_num_splits, pick_tile
from nanoserve.kernels import Chip
from nanoserve.ops import TorchOps, TritonOps

DTYPES = [torch.float32, torch.float16]
ALL_DTYPES = [*DTYPES, torch.bfloat16]
H200 = Chip("cuda", num_cores=132, shared_bytes=227 * 1024)
MI300 = Chip("hip", num_cores=304, shared_bytes=64 * 1024)

MIXED = [(5, 5), (1, 17), (3, 20), (1, 1), (7, 40)]
EDGES = {
    "one token": [(1, 1)],
    "one decode": [(1, 9)],
    "a prompt that fills its blocks": [(16, 16)],
    "a chunk that ends with a block": [(4, 32)],
    "a chunk that begins with a block": [(5, 21)],
    "a chunk of several tiles": [(21, 50)],
    "a tile of keys and one more": [(1, 33)],
    "a mix": MIXED,
    "rows without queries": [(0, 0), (2, 5), (0, 9), (0, 0), (1, 3), (0, 0)],
    "padding rows": [(2, 5), (1, 7), (1, 0), (1, 0)],
    "a padding row of several tokens": [(1, 20), (9, 0)],
    "nothing but padding": [(1, 0), (1, 0)],
}


def test_kernels_are_interpreted_here() -> None:
    assert kernels.INTERPRETED, "set TRITON_INTERPRET=1 before anything imports the kernels"


# Attention


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("edge", EDGES)
def test_every_edge_of_a_batch_equals_the_twin(edge: str, num_splits: int, dtype: torch.dtype) -> None:
    tile = Tile(rows=16, keys=32, num_warps=4, num_stages=1)
    PagedCase(EDGES[edge], num_kv_heads=1, dtype=dtype, tile=tile, num_splits=num_splits).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 48, 256])
def test_every_block_size_equals_the_twin(block_size: int, dtype: torch.dtype) -> None:
    PagedCase([(3, 8), (1, 50)], block_size=block_size, dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128, 256])
def test_every_head_dim_equals_the_twin(head_dim: int, num_splits: int, dtype: torch.dtype) -> None:
    PagedCase([(3, 8), (1, 40)], num_kv_heads=1, head_dim=head_dim, dtype=dtype, num_splits=num_splits).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (3, 1), (2, 3), (1, 7), (1, 24)])
def test_every_grouping_of_heads_equals_the_twin(num_kv_heads: int, group: int, dtype: torch.dtype) -> None:
    PagedCase([(3, 8), (1, 21)], num_kv_heads=num_kv_heads, group=group, dtype=dtype).check()


@pytest.mark.parametrize("tile", [(16, 16), (16, 128), (32, 16), (64, 32), (128, 64)])
def test_every_tile_equals_the_twin(tile: tuple[int, int]) -> None:
    rows, keys = tile
    PagedCase(MIXED, num_kv_heads=1, group=3, tile=Tile(rows, keys, num_warps=4, num_stages=1)).check()


@pytest.mark.parametrize("num_splits", [1, 2, 16])
def test_every_token_behind_the_last_row_is_zero(num_splits: int) -> None:
    PagedCase([(2, 5), (1, 7)], num_kv_heads=1, stray_tokens=11, num_splits=num_splits).check()
    PagedCase([(0, 0)], num_kv_heads=1, stray_tokens=2, num_splits=num_splits).check()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_every_offset_into_the_cache_is_64_bit(index_dtype: torch.dtype) -> None:
    check_far_block(index_dtype)


def test_no_result_depends_on_the_rest_of_the_batch_once_tile_and_splits_are_fixed() -> None:
    tile = Tile(rows=32, keys=32, num_warps=4, num_stages=1)
    case = PagedCase(MIXED, num_kv_heads=1, tile=tile, num_splits=2)
    together = case.run()
    for row in range(len(MIXED)):
        start, end = case.starts[row : row + 2].tolist()
        alone = attention_kernels.paged_attention(
            case.q[start:end],
            *case.cache,
            case.table[row : row + 1],
            torch.tensor([0, end - start]),
            case.lens[row : row + 1],
            tile=tile,
            num_splits=2,
        )
        assert torch.equal(alone, together[start:end])


@pytest.mark.parametrize("chip", [H200, MI300])
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8, 24, 71])
def test_every_picked_tile_holds_a_group_and_feeds_tensor_cores(
    group: int, head_dim: int, dtype: torch.dtype, chip: Chip
) -> None:
    for queries_per_row in (1, 1.5, 9, 16384):
        tile = pick_tile(chip, dtype, head_dim, group, queries_per_row)
        assert tile.rows >= max(16, group)
        assert tile.keys >= 16
        assert all(number & (number - 1) == 0 for number in (tile.rows, tile.keys, tile.num_warps))


def test_every_split_is_a_power_of_two_that_is_worth_a_program() -> None:
    for num_programs in (1, 7, 8, 66, 132, 10_000):
        for max_keys in (1, 255, 512, 4096, 131_072):
            num_splits = pick_num_splits(H200, num_programs, max_keys)
            assert num_splits & (num_splits - 1) == 0
            assert num_splits == 1 or num_programs * num_splits <= 2 * H200.num_cores
            assert num_splits == 1 or max_keys / num_splits >= attention_kernels.MIN_KEYS_PER_SPLIT
    assert pick_num_splits(H200, 8, 16_384) == 32, "one long context does not run on 8 of 132 cores"


# Element-wise kernels


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("slots", [[3, 0, 19, 7], [-1, 6, -1], [-1], []])
def test_every_token_is_stored_in_its_slot_and_nowhere_else(slots: list[int], dtype: torch.dtype) -> None:
    check_store(slots, dtype=dtype)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("head_dim", "block_size"), [(80, 1), (64, 48), (96, 3), (8, 256)])
def test_every_cache_shape_is_stored_to(head_dim: int, block_size: int, index_dtype: torch.dtype) -> None:
    last = 5 * block_size - 1
    check_store([last, 0, -1], head_dim=head_dim, block_size=block_size, index_dtype=index_dtype)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("size", [16, 24, 256])
def test_every_norm_equals_the_twin(size: int, dtype: torch.dtype) -> None:
    check_norms(dtype, size)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_every_head_of_a_view_is_normed_by_itself(dtype: torch.dtype) -> None:
    q_THD, k_TKD, _ = fused_qkv(3, 6, 2, 24, dtype)
    for heads in (q_THD, k_TKD):
        weight = random(24, dtype=dtype, seed=2)
        check_close(kernels.rms_norm(heads, weight, 1e-6), kernels.rms_norm_twin(heads, weight, 1e-6), "norm of heads")


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("head_dim", [16, 80, 96])
def test_every_turned_head_equals_the_twin(head_dim: int, dtype: torch.dtype) -> None:
    check_rotary(dtype, head_dim)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("size", [16, 40, 1500])
def test_every_swiglu_equals_the_twin(size: int, dtype: torch.dtype) -> None:
    check_silu(dtype, size)


def test_no_tokens_are_no_launch() -> None:
    x_TE, heads = torch.empty(0, 16), torch.empty(0, 2, 16)
    assert kernels.rms_norm(x_TE, torch.ones(16), 1e-6).shape == (0, 16)
    assert kernels.silu_and_mul(x_TE).shape == (0, 8)
    assert kernels.rotary(heads, heads, x_TE[:, :8], x_TE[:, :8])[0].shape == (0, 2, 16)
    assert PagedCase([]).run().shape == (0, 4, 16)
    assert PagedCase([], stray_tokens=2).run().eq(0).all()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_every_implementation_of_ops_has_the_same_results(dtype: torch.dtype) -> None:
    q_THD, k_TKD, _ = fused_qkv(3, 4, 2, 16, dtype)
    x, residual, weight = (random(*shape, dtype=dtype, seed=2) for shape in ((3, 64), (3, 64), (64,)))
    angles_TI = 10 * random(3, 8, seed=3)
    cos_TI, sin_TI = angles_TI.cos().to(dtype), angles_TI.sin().to(dtype)
    results = []
    for ops in (TorchOps(), TritonOps()):
        results.append(
            {
                "norm": ops.rms_norm(x, weight, 1e-5),
                "norm of heads": ops.rms_norm(q_THD, weight[:16], 1e-5),
                "norm of a sum": ops.add_rms_norm(x, residual, weight, 1e-5)[0],
                "the sum": ops.add_rms_norm(x, residual, weight, 1e-5)[1],
                "q": ops.rotate(q_THD, k_TKD, cos_TI, sin_TI)[0],
                "k": ops.rotate(q_THD, k_TKD, cos_TI, sin_TI)[1],
                "SwiGLU": ops.silu_and_mul(x),
            }
        )
    for name, expected in results[0].items():
        check_close(results[1][name], expected, name)


# Planted bugs: each is one edit of a kernel's source, and the law of that kernel fails.

Law = Callable[[ModuleType], None]


def attention_laws(module: ModuleType) -> None:
    tile = module.Tile(rows=16, keys=16, num_warps=4, num_stages=1)
    for num_splits in (1, 4):
        PagedCase([(3, 20), (9, 9), (1, 40)], tile=tile, num_splits=num_splits, stray_tokens=2).check(module)


CAUSAL = "position_L[None, :] <= position_M[:, None]"
JOINED = "tl.sum(part_SD * weight_S[:, None], axis=0)"
ATTENTION_BUGS = {
    "a key length without the context": ("past = seq_len - (end - start)", "past = 0"),
    "no causal mask": (CAUSAL, "is_key_L[None, :]"),
    "a mask one key too wide": (CAUSAL, f"{CAUSAL} + 1"),
    "another group's key head": ("kv_head * GROUP + m_M % GROUP", "m_M % GROUP * tl.num_programs(1) + kv_head"),
    "a sum that is not rescaled": ("sum_M * rescale_M", "sum_M"),
    "values that are not rescaled": ("acc_MD * rescale_M[:, None]", "acc_MD"),
    "a key beyond the row's": ("is_key_L = position_L < num_keys", "is_key_L = position_L < num_keys + 1"),
    "tiles that are found too late": ("// TILE_QUERIES + middle", "// TILE_QUERIES + middle + 1"),
    "the wrong place in a block": ("position_L % BLOCK_SIZE * cache", "position_L % (BLOCK_SIZE - 1) * cache"),
    "a scale for e, not 2": ("math.log2(math.e) * head_dim", "head_dim"),
    "splits that are not rescaled": ("tl.exp2(max_S - tl.max(max_S, axis=0))", "tl.exp2(max_S * 0.0)"),
    "splits that are not summed": (JOINED, JOINED.replace("tl.sum", "tl.max")),
    "tokens of no row left as they were": ("tl.where(row == num_rows - 1, num_tokens, end)", "end"),
}


@pytest.mark.parametrize("bug", ATTENTION_BUGS)
def test_a_planted_bug_in_attention_is_seen(bug: str, tmp_path) -> None:
    module = mutant(attention_kernels, *ATTENTION_BUGS[bug], tmp_path)
    with pytest.raises(AssertionError, match="is off by"):
        attention_laws(module)


@pytest.mark.parametrize(
    ("module", "cast"),
    [(attention_kernels, "block_L.to(tl.int64)"), (kernels, "tl.load(slot_mapping_ptr + token).to(tl.int64)")],
)
def test_a_planted_offset_of_32_bits_is_seen(module: ModuleType, cast: str, tmp_path) -> None:
    copy = mutant(module, cast, cast.removesuffix(".to(tl.int64)"), tmp_path)
    store, attention = (copy, attention_kernels) if module is kernels else (kernels, copy)
    with pytest.raises(AssertionError, match="far block"):
        check_far_block(torch.int32, store, attention)


def test_the_laws_that_bugs_meet_hold_without_one(tmp_path) -> None:
    attention_laws(
        mutant(attention_kernels, "past = seq_len - (end - start)", "past = seq_len + start - end", tmp_path)
    )


def check_tiny_norm(module: ModuleType) -> None:
    """Numbers so small that eps is most of what they are divided by."""
    x = 1e-3 * random(2, 16)
    check_close(module.rms_norm(x, torch.ones(16), 1e-5), kernels.rms_norm_twin(x, torch.ones(16), 1e-5), "tiny norm")


OTHER_BUGS: dict[str, tuple[str, str, Law]] = {
    "slot -1 is written": ("slot < 0", "slot < -1", lambda module: check_store([-1, 6], module=module)),
    "block and place are swapped": (
        "slot // BLOCK_SIZE * cache_stride_n + slot % BLOCK_SIZE",
        "slot % BLOCK_SIZE * cache_stride_n + slot // BLOCK_SIZE",
        lambda module: check_store([6], module=module),
    ),
    "a mean over padding": ("/ SIZE", "/ TILE_SIZE", lambda module: check_norms(torch.float32, 24, module)),
    "a norm without eps": ("square_N1 + eps", "square_N1 + 2 * eps", check_tiny_norm),
    "a residual that is not added": (
        "x_NE.to(tl.float32) + residual_NE.to(tl.float32)",
        "x_NE.to(tl.float32)",
        lambda module: check_norms(torch.float32, 16, module),
    ),
    "heads that turn the other way": (
        "first_NI * cos_1I - second_NI * sin_1I",
        "first_NI * cos_1I + second_NI * sin_1I",
        lambda module: check_rotary(torch.float32, 16, module),
    ),
    "gate and up are swapped": (
        "gate_I / (1 + tl.exp(-gate_I)) * up_I",
        "up_I / (1 + tl.exp(-up_I)) * gate_I",
        lambda module: check_silu(torch.float32, 16, module),
    ),
}


@pytest.mark.parametrize("bug", OTHER_BUGS)
def test_a_planted_bug_in_an_element_wise_kernel_is_seen(bug: str, tmp_path) -> None:
    old, new, law = OTHER_BUGS[bug]
    law(kernels)
    module = mutant(kernels, old, new, tmp_path)
    with pytest.raises(AssertionError, match=r"is off by|are not as written|is not x"):
        law(module)
