"""Laws of the compiled kernels: what each takes of an A100, an H100 and an MI300, in bfloat16, without one at hand.

A process either interprets kernels or compiles them, so one child runs `scripts/aot_kernels.py`, whose rows these laws
read. That results are right is shown in test_kernels.py; speed, only by a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
COMMON_HEAD_DIMS, OTHER_HEAD_DIMS = (64, 128), (80, 96, 256)
KERNELS = {"store_kv", "paged_attention", "join_splits", "rms_norm", "rotary", "silu_and_mul"}

Row = dict[str, Any]

pytestmark = pytest.mark.timeout(600)  # half a minute of CPU for the first law, which may have to share it


# What the child runs: the script, then launches that break a law.
CHILD = """
import json, sys
sys.path.insert(0, "scripts")
import aot_kernels
from aot_kernels import Tile, asdict, attention_launch, compile_launch
from triton.runtime.errors import OutOfResources

out, planted_out = sys.argv[1:]
sys.argv[1:] = ["--out", out]
aot_kernels.main()

def usage(target, tile):
    rows = compile_launch(target, "planted", lambda: attention_launch(2048, 1, 2048, 128, tile), 128)
    return next(asdict(row) for row in rows if row.kernel == "paged_attention")

def look_at_numbers():
    return aot_kernels.torch.empty(3, device="meta").max().item()

planted = {"spills": usage("gfx942", Tile(rows=256, keys=128, num_warps=4, num_stages=1))}
for name, launch, error in [
    ("too large", lambda: usage("gfx942", Tile(rows=64, keys=256, num_warps=4, num_stages=3)), OutOfResources),
    ("looks at numbers", lambda: compile_launch("sm_90", "planted", look_at_numbers), RuntimeError),
]:
    try:
        launch()
        planted[name] = "passed"
    except error as refusal:
        planted[name] = f"{type(refusal).__name__}: {refusal}"
with open(planted_out, "w") as file:
    json.dump(planted, file)
"""


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], dict[str, Any]]:
    """The script's rows, and what became of the planted bugs."""
    folder = tmp_path_factory.mktemp("compiled")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    rows_path, planted_path = folder / "rows.json", folder / "planted.json"
    python = os.environ.get("AOT_PYTHON", sys.executable)  # another one, to compile with its Triton
    command = [python, "-c", CHILD, str(rows_path), str(planted_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(rows_path.read_text(encoding="utf-8"))["rows"]
    return rows, json.loads(planted_path.read_text(encoding="utf-8"))


@pytest.fixture
def rows(compiled: tuple[list[Row], dict[str, Any]]) -> list[Row]:
    return compiled[0]


@pytest.fixture
def planted(compiled: tuple[list[Row], dict[str, Any]]) -> dict[str, Any]:
    return compiled[1]


def attention(rows: list[Row], target: str, head_dims: tuple[int, ...] = COMMON_HEAD_DIMS) -> list[Row]:
    found = [row for row in rows if row["kernel"] == "paged_attention" and row["target"] == target]
    found = [row for row in found if row["head_dim"] in head_dims]
    assert {row["head_dim"] for row in found} == set(head_dims), "a head dim is missing"
    return found


@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_every_kernel_compiles_for_every_target(target: str, rows: list[Row]) -> None:
    assert {row["kernel"] for row in rows if row["target"] == target} == KERNELS
    assert all(row["registers"] > 0 and row["binary_bytes"] > 0 for row in rows)


@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_every_kernel_fits_into_shared_memory(target: str, rows: list[Row]) -> None:
    attention(rows, target, COMMON_HEAD_DIMS + OTHER_HEAD_DIMS)
    for row in rows:
        assert row["target"] != target or row["shared_bytes"] <= SHARED_LIMITS[target], row


@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_every_attention_kernel_uses_tensor_cores(target: str, rows: list[Row]) -> None:
    for row in attention(rows, target, COMMON_HEAD_DIMS + OTHER_HEAD_DIMS):
        assert row["tensor_core_instructions"] > 0, row


@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_no_attention_kernel_of_a_common_head_dim_spills(target: str, rows: list[Row]) -> None:
    for row in attention(rows, target):
        assert row["spilled"] == 0, row


def test_no_kernel_for_amd_spills(rows: list[Row]) -> None:
    for row in rows:
        assert row["target"] != "gfx942" or row["spilled"] == 0, row


def test_every_batch_shape_has_a_kernel_of_its_own(rows: list[Row]) -> None:
    """A decode takes small tiles and is split when alone; a prompt takes large ones. None was dropped as a repeat."""
    for target in SHARED_LIMITS:
        for head_dim in COMMON_HEAD_DIMS:
            cases = [row["case"] for row in attention(rows, target) if row["head_dim"] == head_dim]
            assert len(cases) == 4, cases


# Planted bugs.


def test_a_planted_tile_that_does_not_fit_is_refused(planted: dict[str, Any]) -> None:
    assert planted["too large"].startswith("OutOfResources: out of resource: shared memory")


def test_a_planted_launch_that_looks_at_numbers_is_refused(planted: dict[str, Any]) -> None:
    assert "meta" in planted["looks at numbers"]


def test_a_planted_tile_that_spills_is_seen(planted: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        test_no_kernel_for_amd_spills([planted["spills"]])
