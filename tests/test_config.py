"""Laws of the configuration: a refusal names the value, the limit and the fix; every None is filled in when the engine
is built; a stage is one change of the one above it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from itertools import pairwise

import pytest

from nanoserve.blocks import PrivateBlocks, SharedBlocks, V0CachedBlocks
from nanoserve.client import CoreProcessClient, SplitRunnerClient
from nanoserve.config import SEAMS, STAGES, EngineConfig, get_stage
from nanoserve.record import describe_config
from nanoserve.scheduler import ChunkedNoMixScheduler, PhaseSplitScheduler, UnifiedScheduler

SCHEDULERS = list(SEAMS["scheduler"].values())
SWAP = {"preemption_mode": "swap", "num_swap_blocks": 4}


def resolve(model_len: int = 4096, pool_blocks: int = 2000, device: str = "cpu", **changes) -> EngineConfig:
    return EngineConfig(**changes).resolve(model_len=model_len, pool_blocks=pool_blocks, device=device)


# Refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"load_format": "gguf"}, ["load_format='gguf'", "auto, dummy"]),
        ({"free_order": "random"}, ["free_order='random'", "uncached_first, append"]),
        ({"policy": "lifo"}, ["policy='lifo'", "fcfs, priority"]),
        ({"preemption_mode": "kill"}, ["preemption_mode='kill'", "recompute, swap"]),
        ({"block_size": 0}, ["block_size", ">= 1", "0"]),
        ({"block_size": True}, ["block_size", ">= 1", "True"]),
        ({"max_num_seqs": 0}, ["max_num_seqs", ">= 1", "0"]),
        ({"max_num_seqs": 1.5}, ["max_num_seqs", "integer", "1.5"]),
        ({"num_swap_blocks": -1}, ["num_swap_blocks", ">= 0", "-1"]),
        ({"long_prefill_token_threshold": -1}, ["long_prefill_token_threshold", ">= 0", "-1"]),
        ({"num_blocks": 2**40 + 1}, ["num_blocks", f"<= {2**40}", f"{2**40 + 1}"]),
        ({"block_size": 2**16 + 1}, ["block_size", "<= 65536", "65537"]),
        ({"num_threads": 1025}, ["num_threads", "<= 1024", "1025"]),
        ({"max_num_seqs": 10**5000}, ["max_num_seqs", f"<= {2**63 - 1}", "more than 80 digits"]),
        ({"seed": None}, ["seed", "integer", "None"]),
        ({"seed": "x"}, ["seed", "integer", "'x'"]),
        ({"seed": 2**63}, ["seed", f"<= {2**63 - 1}", f"{2**63}"]),
        ({"watermark": "x"}, ["watermark", "[0, 1)", "'x'"]),
        ({"watermark": False}, ["watermark", "[0, 1)", "False"]),
        ({"num_blocks": 1}, ["num_blocks", ">= 2", "1"]),
        ({"kv_cache_memory_bytes": 0}, ["kv_cache_memory_bytes", ">= 1", "0"]),
        ({"max_num_batched_tokens": 0}, ["max_num_batched_tokens", ">= 1", "0"]),
        ({"max_model_len": 1}, ["max_model_len", ">= 2", "1"]),
        ({"max_model_len": 0}, ["max_model_len", ">= 2", "0"]),
        ({"max_model_len": "long"}, ["max_model_len", ">= 2", "'long'"]),
        ({"start_timeout_s": -1}, ["start_timeout_s", "> 0", "-1"]),
        ({"execute_timeout_s": float("inf")}, ["execute_timeout_s", "at most 1,000,000", "inf"]),
        ({"shutdown_timeout_s": float("nan")}, ["shutdown_timeout_s", ">= 0", "nan"]),
        ({"shutdown_timeout_s": True}, ["shutdown_timeout_s", "seconds", "True"]),
        ({"start_timeout_s": 60}, ["start_timeout_s=60", "InProcessClient", "leave it out", "CoreProcessClient"]),
        ({"execute_timeout_s": 60}, ["execute_timeout_s=60", "InProcessClient", "leave it out", "SplitRunnerClient"]),
        (
            {"execute_timeout_s": 60, "client": CoreProcessClient},
            ["execute_timeout_s=60", "CoreProcessClient", "leave it out", "--client split_runner"],
        ),
        ({"start_timeout_s": "60"}, ["start_timeout_s", "seconds", "'60'"]),
        ({"watermark": 1.0}, ["watermark", "[0, 1)", "1.0", "0.01"]),
        ({"watermark": -0.1}, ["watermark", "[0, 1)", "-0.1"]),
        ({"watermark": float("nan")}, ["watermark", "[0, 1)", "nan"]),
        ({**SWAP, "blocks": SharedBlocks}, ["preemption_mode='swap'", "SharedBlocks", "PrivateBlocks", "'recompute'"]),
        ({**SWAP, "blocks": V0CachedBlocks}, ["preemption_mode='swap'", "V0CachedBlocks", "PrivateBlocks"]),
        (
            {**SWAP, "scheduler": UnifiedScheduler},
            ["preemption_mode='swap'", "'recompute'", "UnifiedScheduler"],
        ),
        ({**SWAP, "scheduler": ChunkedNoMixScheduler}, ["ChunkedNoMixScheduler", "'recompute'"]),
        ({"num_swap_blocks": 4}, ["num_swap_blocks=4", "preemption_mode='recompute'", "leave it out"]),
        (
            {"long_prefill_token_threshold": 9},
            ["long_prefill_token_threshold=9", "PhaseSplitScheduler"],
        ),
        ({"reserve_full_prompt": False}, ["reserve_full_prompt=False", "PhaseSplitScheduler", "leave it out"]),
        (
            {"long_prefill_token_threshold": 9, "scheduler": ChunkedNoMixScheduler},
            ["long_prefill_token_threshold=9", "ChunkedNoMixScheduler"],
        ),
        ({"preemption_mode": "swap"}, ["preemption_mode='swap'", "num_swap_blocks >= 1", "got 0"]),
    ],
)
def test_every_refusal_names_the_value_the_limit_and_the_fix(changes, words):
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        EngineConfig(**changes)
    message = str(refusal.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_model_len": 5000}, ["max_model_len=5000", "the model's 4096", "at most 4096"]),
        (
            {"num_blocks": 10},
            ["10 blocks of 16", "max_model_len=4096", "set max_model_len=144", "'auto'", "num_blocks"],
        ),
        (
            {"num_blocks": 200, "watermark": 0.3},
            ["200 blocks of 16", "max_model_len=4096", f"set max_model_len={(200 - 1 - 60) * 16}"],
        ),
        ({"num_blocks": 2, "block_size": 1}, ["2 blocks of 1", "too small for one request", "raise num_blocks"]),
        ({"num_blocks": 10, "watermark": 0.9, "max_model_len": "auto"}, ["10 blocks", "watermark=0.9", "num_blocks"]),
        (
            {"max_num_batched_tokens": 100, "scheduler": UnifiedScheduler},
            ["max_num_batched_tokens=100", "max_num_seqs=128", "raise it to 128", "lower max_num_seqs"],
        ),
        ({"max_num_seqs": 5000}, ["max_num_batched_tokens=4096", "max_num_seqs=5000", "raise it to 5000"]),
        (
            {"max_num_batched_tokens": 4094},
            [
                "max_num_batched_tokens=4094",
                "4095 tokens",
                "PhaseSplitScheduler",
                "raise it to 4095",
                "UnifiedScheduler",
            ],
        ),
        (
            {"long_prefill_token_threshold": 4097, "scheduler": UnifiedScheduler},
            ["long_prefill_token_threshold=4097", "max_model_len=4096", "lower it", "0 switches it off"],
        ),
    ],
)
def test_every_refusal_at_build_time_names_the_value_the_limit_and_the_fix(changes, words):
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        resolve(**changes)
    message = str(refusal.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("changes", [{"num_blocks": 10}, {"num_blocks": 300, "watermark": 0.2}, {"pool_blocks": 77}])
def test_the_length_that_a_refusal_suggests_is_the_longest_that_works(scheduler, changes):
    with pytest.raises(ValueError, match="set max_model_len=") as refusal:
        resolve(scheduler=scheduler, model_len=100_000, **changes)
    longest = int(str(refusal.value).split("set max_model_len=")[1].split()[0])
    assert resolve(scheduler=scheduler, model_len=100_000, **changes, max_model_len=longest).model_len == longest
    assert resolve(scheduler=scheduler, model_len=100_000, **changes, max_model_len="auto").model_len == longest
    with pytest.raises(ValueError, match="holds"):
        resolve(scheduler=scheduler, model_len=100_000, **changes, max_model_len=longest + 1)


def test_every_limit_on_an_answer_is_for_whoever_waits_for_one():
    assert EngineConfig(client=CoreProcessClient, start_timeout_s=60).start_timeout_s == 60
    assert EngineConfig(client=SplitRunnerClient, start_timeout_s=60, execute_timeout_s=60).execute_timeout_s == 60


def test_what_is_just_legal_is_accepted():
    assert resolve(max_num_batched_tokens=4095).budget == 4095
    assert resolve(scheduler=UnifiedScheduler, max_num_batched_tokens=128).budget == 128
    assert resolve(scheduler=UnifiedScheduler, long_prefill_token_threshold=4096).long_prefill_token_threshold == 4096
    assert resolve(num_blocks=3, block_size=1, max_model_len="auto", max_num_seqs=2, watermark=0.0).model_len == 2
    assert EngineConfig(**SWAP).preemption_mode == "swap"


# Numbers that are filled in


@pytest.mark.parametrize(
    ("scheduler", "device", "model_len", "budget", "watermark"),
    [
        (PhaseSplitScheduler, "cpu", 4096, 4096, 0.01),
        (PhaseSplitScheduler, "cuda", 1000, 2048, 0.01),
        (ChunkedNoMixScheduler, "cpu", 4096, 512, 0.0),
        (ChunkedNoMixScheduler, "rocm", 4096, 2048, 0.0),
        (UnifiedScheduler, "cpu", 4096, 512, 0.0),
        (UnifiedScheduler, "cuda", 4096, 2048, 0.0),
    ],
)
def test_a_scheduler_brings_its_own_budget_and_watermark(scheduler, device, model_len, budget, watermark):
    config = resolve(model_len=model_len, device=device, scheduler=scheduler)
    assert (config.budget, config.watermark, config.model_len) == (budget, watermark, model_len)
    assert config.watermark_blocks == int(watermark * 2000)
    assert config.num_blocks == 2000


def test_a_number_that_is_given_is_kept():
    config = resolve(max_num_batched_tokens=5000, watermark=0.5, num_blocks=999, max_model_len=700)
    assert (config.budget, config.watermark, config.num_blocks, config.model_len) == (5000, 0.5, 999, 700)
    assert config.watermark_blocks == 499


def test_auto_length_shrinks_to_the_pool_but_never_grows_past_the_model():
    assert resolve(num_blocks=10, max_model_len="auto", watermark=0.0).model_len == 144
    assert resolve(max_model_len="auto").model_len == 4096


def test_resolving_twice_changes_nothing():
    config = resolve(scheduler=UnifiedScheduler)
    assert config.resolve(model_len=4096, pool_blocks=5, device="cpu") == config


def test_a_config_that_is_not_resolved_has_no_numbers():
    config = EngineConfig()
    for name in ("budget", "model_len", "watermark_blocks"):
        with pytest.raises(AssertionError, match="resolve"):
            getattr(config, name)


def test_a_config_never_changes():
    with pytest.raises(FrozenInstanceError):
        EngineConfig().block_size = 8  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        STAGES["mine"] = EngineConfig()  # pyright: ignore[reportIndexIssue]


# Stages and seams

MOVED = {  # what each stage moves
    "chunked": {"scheduler"},
    "multiprocess": {"client"},
    "shared": {"blocks"},
    "v1": {"runner", "batch", "compile", "async_scheduling"},
}


def test_every_stage_is_one_change_of_the_one_above():
    assert next(iter(STAGES)) == "v0"
    for (_, above), (name, stage) in pairwise(STAGES.items()):
        moved = {f.name for f in fields(EngineConfig) if getattr(above, f.name) != getattr(stage, f.name)}
        assert moved, f"{name} changes nothing"
        assert moved <= MOVED[name]


def test_the_switch_is_a_class():
    assert STAGES["v0"] == EngineConfig()
    assert replace(STAGES["v0"], scheduler=UnifiedScheduler) == STAGES["chunked"]
    assert STAGES["shared"].blocks is SharedBlocks


@pytest.mark.parametrize("name", ["v2", "", "V0", [], None, 0])
def test_an_unknown_stage_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=re.escape(f"stage {name!r} is not known; use one of {', '.join(STAGES)}")):
        get_stage(name)


@pytest.mark.parametrize("stage", STAGES)
def test_every_class_of_a_stage_has_a_name_on_the_command_line(stage):
    config = get_stage(stage)
    for seam, classes in SEAMS.items():
        assert getattr(config, seam) in (None, *classes.values())  # None: the device chooses


def test_every_class_on_the_command_line_makes_a_config():
    for seam, classes in SEAMS.items():
        for cls in classes.values():
            assert getattr(replace(STAGES["v0"], **{seam: cls}), seam) is cls


def test_a_config_describes_itself_in_plain_values():
    described = describe_config(resolve(scheduler=UnifiedScheduler))
    assert described["scheduler"] == "UnifiedScheduler"
    assert described["blocks"] == PrivateBlocks.__name__
    assert described["max_num_batched_tokens"] == 512
    assert described["attention"] is None


def test_none_of_this_imports_torch():
    modules = ("config", "core", "client", "invariants", "runner", "lab.fakes")
    imports = ", ".join(f"nanoserve.{name}" for name in modules)
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
