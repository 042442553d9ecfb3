"""Laws of the C++ backend beyond the matrix that every backend has (test_attention.py): views, threads, bits, NaN, and
the tokens of whole engines. The same laws kill edited copies of the source."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import LAYER, Case, check_definition
from test_modes import AHEAD, EXECUTION, requests, run

from nanoserve import native
from nanoserve.attention import TorchAttention
from nanoserve.config import SEAMS, EngineConfig, get_stage
from nanoserve.cpu_attention import CpuAttention
from nanoserve.native import load, reason_not_to_load

pytestmark = pytest.mark.needs_cxx
CHUNK = 64  # keys that attention.cpp looks at together
TILE = 64  # (query, head) pairs that it treats together, at most


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 300)), min_size=1, max_size=4),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 9)),
    head_dim=st.integers(1, 70),
    block_size=st.integers(1, 256),
)
def test_every_shape_equals_the_definition(rows, heads, head_dim, block_size):
    num_kv_heads, group = heads
    rows = [(n, past + n) for n, past in rows]
    case = Case(rows, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size)
    for row, out in enumerate(case.run(CpuAttention())):
        error = (out.double() - case.expected(row)).abs() / case.rounding(row)
        assert error.max() < 3, f"row {case.rows[row]} (queries, keys) is off by {error.max()} roundings"


@pytest.mark.parametrize("keys", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 5])
@pytest.mark.parametrize("queries", [1, 2, TILE // 8, TILE // 8 + 1, TILE // 4 + 1, TILE // 2, TILE // 2 + 1, TILE + 1])
def test_every_edge_of_a_chunk_and_a_tile_equals_the_definition(queries, keys):
    check_definition(CpuAttention(), Case([(min(queries, keys), keys)]))


def test_every_view_is_read_where_it_lies():
    """q, k and v as slices of one fused projection, by tokens and by heads, and a table that is part of a wider one."""
    case = Case([(3, 8), (1, 40), (9, 9)])
    expected = case.run(CpuAttention())
    batch = case.batch()
    num_tokens = batch.query_starts[-1]
    k = torch.cat([k[len(k) - n :] for k, (n, _) in zip(case.k, case.rows, strict=True)])
    v = torch.cat([v[len(v) - n :] for v, (n, _) in zip(case.v, case.rows, strict=True)])
    fused = torch.cat([torch.cat(case.q), k, v], dim=1)
    by_heads = fused.transpose(0, 1).contiguous().transpose(0, 1)
    by_dims = fused.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.zeros(len(case.rows), 50, dtype=torch.int64)
    wide[:, 3 : 3 + batch.block_table_RB.shape[1]] = batch.block_table_RB
    table_RB = wide[:, 3 : 3 + batch.block_table_RB.shape[1]]
    for qkv in (fused, by_heads, by_dims):
        q_THD, k_TKD, v_TKD = qkv.split((4, 2, 2), dim=1)
        assert not q_THD.is_contiguous()
        backend = CpuAttention()
        backend.store(k_TKD, v_TKD, case.cache, LAYER, batch.slot_mapping_T)
        view = type(batch)(
            batch.query_start_loc_R1, batch.seq_lens_R, table_RB, batch.slot_mapping_T, batch.query_starts, []
        )
        out = backend.attend(q_THD, case.cache, LAYER, view)
        assert torch.equal(out, torch.cat(expected))
        assert out.shape == (num_tokens, 4, 16)


def test_every_key_is_stored_where_torch_stores_it():
    cases = [Case([(20, 45), (1, 3)], block_size=7, num_kv_heads=3) for _ in range(2)]
    for case, backend in zip(cases, (TorchAttention(), CpuAttention()), strict=True):
        case.run(backend)
    torch.testing.assert_close(cases[0].cache.blocks, cases[1].cache.blocks, atol=0, rtol=0, equal_nan=True)


def test_every_row_is_itself_to_the_last_bit_in_any_batch_and_on_any_number_of_threads():
    rows = [(1, 700), (40, 300), (1, 5), (3, 900), (1, 128)]
    threads = torch.get_num_threads()
    together = Case(rows, head_dim=64).run(CpuAttention())
    try:
        torch.set_num_threads(3)
        for row, out in enumerate(Case(rows, head_dim=64).run(CpuAttention())):
            assert torch.equal(out, together[row])
        everything = Case(rows, head_dim=64)
        for row, expected in enumerate(together):
            alone = Case([rows[row]], head_dim=64)
            alone.q, alone.k, alone.v = [everything.q[row]], [everything.k[row]], [everything.v[row]]
            assert torch.equal(alone.run(CpuAttention())[0], expected)
    finally:
        torch.set_num_threads(threads)


def test_every_step_uses_the_threads_that_torch_was_given():
    """The threads of the process, before and after a batch large enough to be shared."""
    threads = torch.get_num_threads()
    case = Case([(1, 2000)] * 8, head_dim=64)
    backend = CpuAttention()
    case.run(backend)
    q, batch = torch.cat(case.q), case.batch()
    before = len(os.listdir("/proc/self/task"))
    try:
        torch.set_num_threads(1)
        backend.attend(q, case.cache, LAYER, batch)
        assert len(os.listdir("/proc/self/task")) == before
        torch.set_num_threads(before + 1)
        backend.attend(q, case.cache, LAYER, batch)
        assert len(os.listdir("/proc/self/task")) > before
    finally:
        torch.set_num_threads(threads)


def test_large_scores_do_not_overflow_and_small_weights_are_kept():
    case = Case([(1, 300), (20, 300)])
    case.q = [30 * q for q in case.q]
    case.k = [30 * k for k in case.k]
    check_definition(CpuAttention(), case, tolerance=2e-3)  # scores of thousands, rounded to float32
    case = Case([(1, 5000)])
    case.q = [0 * q for q in case.q]  # the mean of all values
    check_definition(CpuAttention(), case)


def check_nan(backend: CpuAttention, case: Case) -> None:
    """NaN where the definition has it, in all of a head's dimensions, and no trace elsewhere."""
    for row, out in enumerate(case.run(backend)):
        expected = case.expected(row)
        assert expected.isnan().any()
        assert torch.equal(out.isnan(), expected.isnan()), f"row {case.rows[row]}: NaN is lost, or where none belongs"
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0, equal_nan=True)


@pytest.mark.parametrize("key", [0, CHUNK - 1, CHUNK, 99])
@pytest.mark.parametrize(("queries", "head_dim"), [(1, 32), (2, 32), (3, 20), (40, 32)])
def test_every_nan_in_a_query_or_in_a_key_that_it_looks_at_is_seen(queries, head_dim, key):
    case = Case([(queries, 100)], head_dim=head_dim)
    case.k[0][key, 1, 7] = torch.nan
    check_nan(CpuAttention(), case)
    case = Case([(queries, 100)], head_dim=head_dim)
    case.q[0][queries // 2, 2, 7] = torch.nan
    check_nan(CpuAttention(), case)


# --- Rows that begin with the same blocks


def with_shared_blocks(lens: list[int], num_blocks: int, **shape: Any) -> tuple[Case, Case]:
    """Decodes whose first blocks hold the same keys: as the same blocks of the pool, and as blocks of their own."""
    together, apart = (Case([(1, seq_len) for seq_len in lens], **shape) for _ in range(2))
    longest = lens.index(max(lens))
    for row, seq_len in enumerate(lens):
        for x in (together.k, together.v, apart.k, apart.v):
            same = min(num_blocks * together.block_size, seq_len)
            x[row][:same] = x[longest][:same]
        same = min(num_blocks, len(together.tables[row]))
        together.tables[row][:same] = together.tables[longest][:same]
    return together, apart


def check_shared_blocks(backend: CpuAttention, together: Case, apart: Case) -> None:
    check_definition(backend, together)
    for shared, alone in zip(together.run(backend), apart.run(CpuAttention()), strict=True):
        assert torch.equal(shared, alone), f"other bits with shared blocks, by {(shared - alone).abs().max().item()}"


@settings(max_examples=40)
@given(
    first=st.integers(0, 3 * CHUNK),
    extra=st.lists(st.integers(1, 2 * CHUNK), min_size=2, max_size=20),
    short=st.integers(0, 19),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    head_dim=st.sampled_from([16, 20, 80]),
    block_size=st.sampled_from([1, 7, 16, 64, 256]),
)
def test_every_row_with_shared_blocks_is_itself_to_the_last_bit(first, extra, short, heads, head_dim, block_size):
    """Prefixes that end within a chunk, too; one row ends within the others' prefix."""
    num_blocks = -(-first // block_size)
    lens = [num_blocks * block_size + more for more in extra]
    lens[short % len(lens)] = extra[0]
    num_kv_heads, group = heads
    shape = {"num_kv_heads": num_kv_heads, "group": group, "head_dim": head_dim, "block_size": block_size}
    check_shared_blocks(CpuAttention(), *with_shared_blocks(lens, num_blocks, **shape))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Rows are not spread over threads: as many as can be go together."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check_together(rows: int) -> None:
    check_shared_blocks(CpuAttention(), *with_shared_blocks([150 + 10 * row for row in range(rows)], 9, head_dim=32))


@pytest.mark.parametrize("rows", [full + more for full in (4, 8, 16, 32) for more in (-1, 0, 1)])
def test_every_number_of_rows_that_go_together_keeps_the_bits_of_each(rows, one_thread):
    """Two pairs a row: just as many as fill vectors, and one row less and more."""
    check_together(rows)


def check_nan_in_shared_blocks() -> None:
    together, _ = with_shared_blocks([200] * 12, 9, head_dim=32)
    for k in together.k:
        k[50, 1, 7] = torch.nan
    check_nan(CpuAttention(), together)


def test_every_nan_in_shared_blocks_is_seen_in_every_row(one_thread):
    check_nan_in_shared_blocks()


def test_every_row_among_several_prefixes_is_itself_to_the_last_bit():
    """Two prefixes, of which one begins as the other does; more rows than go together; chunks and padding between."""
    lens = [300] * 20
    together, apart = with_shared_blocks(lens, 16)
    for row in range(7, 13):
        together.tables[row][8:] = apart.tables[row][8:]
        for mine, theirs in zip((together.k, together.v), (apart.k, apart.v), strict=True):
            mine[row][128:] = theirs[row][128:] = torch.randn(172, 2, 16)
    check_shared_blocks(CpuAttention(), together, apart)
    live = torch.cat(together.run(CpuAttention()))
    batch = together.batch()
    padded = replace(
        batch,
        query_start_loc_R1=torch.tensor([*batch.query_starts, 21, 22]),
        seq_lens_R=torch.tensor([*batch.seq_lens, 0, 0]),
        block_table_RB=torch.cat((batch.block_table_RB, batch.block_table_RB[:2])),
    )
    q = torch.cat((*together.q, torch.full((2, 4, 16), torch.nan)))
    assert torch.equal(CpuAttention().attend(q, together.cache, LAYER, padded)[:20], live)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_number_of_threads_gives_rows_with_shared_blocks_the_same_bits(num_threads):
    threads = torch.get_num_threads()
    together, apart = with_shared_blocks([700 + row for row in range(9)], 40, head_dim=64)
    try:
        torch.set_num_threads(num_threads)
        check_shared_blocks(CpuAttention(), together, apart)
    finally:
        torch.set_num_threads(threads)


# --- Whole engines


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    paths = {family: str(write_checkpoint(tmp_path_factory.mktemp(family), family)) for family in FAMILIES}
    return {"nanostory": "nanostory"} | paths


def tokens_of(model: str, **fields: Any) -> dict[str, list[int]]:
    config = EngineConfig(
        model=model,
        device="cpu",
        max_model_len=96,
        num_blocks=13,
        block_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        check_invariants=True,
        **fields,
    )
    return run(config, requests())[0]


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> dict[str, dict[str, list[int]]]:
    return {name: tokens_of(path, attention=TorchAttention) for name, path in models.items()}


@pytest.mark.parametrize("name", ["nanostory", *FAMILIES])
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("execution", EXECUTION)
def test_every_way_to_execute_gives_the_tokens_of_torch_attention(execution, ahead, name, models, expected):
    batch = SEAMS["batch"]["persistent" if ahead else "rebuilt"]
    fields = EXECUTION[execution] | {"async_scheduling": ahead, "batch": batch}
    assert tokens_of(models[name], attention=CpuAttention, **fields) == expected[name]


def test_stage_v1_on_a_cpu_attends_with_it_and_without_being_asked():
    from nanoserve.core import EngineCore

    core = EngineCore.build(EngineConfig(device="cpu", max_model_len="auto", runner=get_stage("v1").runner))
    try:
        runner: Any = core.runner
        assert runner.execution.attention == "CpuAttention (the default on cpu)"
    finally:
        core.runner.close()


# --- Planted bugs


class LooksOneKeyTooFar(CpuAttention):
    def attend(self, q_THD, kv_cache, layer, batch):
        return super().attend(q_THD, kv_cache, layer, type(batch)(
            batch.query_start_loc_R1, batch.seq_lens_R + 1, batch.block_table_RB, batch.slot_mapping_T,
            batch.query_starts, batch.seq_lens))  # fmt: skip


class ForgetsTheLayer(CpuAttention):
    def attend(self, q_THD, kv_cache, layer, batch):
        return super().attend(q_THD, kv_cache, 0, batch)


@pytest.mark.parametrize("backend", [LooksOneKeyTooFar, ForgetsTheLayer])
def test_every_planted_bug_is_seen(backend):
    with pytest.raises(AssertionError, match="off by"):
        check_definition(backend(), Case([(4, 9), (1, 17)]))


class SharesOneBlockTooMany(CpuAttention):
    """Takes the block behind the common ones from the first row, too."""

    def attend(self, q_THD, kv_cache, layer, batch):
        table_RB = batch.block_table_RB.clone()
        num_blocks = int((table_RB == table_RB[0]).all(dim=0).cumprod(dim=0).sum())
        table_RB[:, num_blocks] = table_RB[0, num_blocks]
        return super().attend(q_THD, kv_cache, layer, replace(batch, block_table_RB=table_RB))


class SplitsOtherwiseInCompany(CpuAttention):
    """Sums in another order where rows share blocks, as partial results of a prefix that are merged would be."""

    def attend(self, q_THD, kv_cache, layer, batch):
        out_THD = super().attend(q_THD, kv_cache, layer, batch)
        shares = bool((batch.block_table_RB[1:, 0] == batch.block_table_RB[0, 0]).any())
        return TorchAttention().attend(q_THD, kv_cache, layer, batch) if shares else out_THD


@pytest.mark.parametrize(
    ("backend", "seen"), [(SharesOneBlockTooMany, "off by"), (SplitsOtherwiseInCompany, "other bits")]
)
def test_every_planted_bug_of_shared_blocks_is_seen(backend, seen):
    with pytest.raises(AssertionError, match=seen):
        check_shared_blocks(backend(), *with_shared_blocks([200] * 4, 8))


BUGS = {
    "one total where few have several": ("weigh<PARTS>(s, places.n", "weigh<1>(s, places.n"),
    "parts of a product that are forgotten": ("dots[i][v] += others[i][v]", "dots[i][v] += 0 * others[i][v]"),
    "a largest score that is forgotten": ("pairs[i].most = Floats{} + most[v][lane];", ""),
    "a total that is forgotten": ("pairs[i].total[part] = total[part][v][lane];", ";"),
    "a NaN that weighs nothing": ("larger(Floats{} - 127.0f, x)", "larger(x, Floats{} - 127.0f)"),
}


def check_all() -> None:
    check_together(16)
    check_nan_in_shared_blocks()


@pytest.fixture
def anew() -> Iterator[None]:
    load.cache_clear()
    yield
    load.cache_clear()
    reason_not_to_load.cache_clear()


@pytest.mark.parametrize("bug", BUGS)
def test_every_planted_bug_in_the_source_is_seen(bug: str, anew, one_thread, monkeypatch, tmp_path: Path):
    shutil.copytree(native.SOURCES, tmp_path / "native")
    monkeypatch.setattr(native, "SOURCES", tmp_path / "native")
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    source = tmp_path / "native" / "attention.cpp"
    old, new = BUGS[bug]
    text = source.read_text()
    assert text.count(old) == 1
    source.write_text(text.replace(old, new))
    with pytest.raises(AssertionError, match=r"off by|other bits|NaN is lost"):
        check_all()


def test_the_source_travels_with_the_package():
    assert (Path(native.__file__).parent / "native" / "attention.cpp").is_file()
