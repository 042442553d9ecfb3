"""Laws of the cost models and the memory arithmetic: the worked numbers, and a fit that finds what it was made of."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import combinations, pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.api import cli
from nanoserve.blocks import PrivateBlocks, SharedBlocks
from nanoserve.config import EngineConfig
from nanoserve.lab import calibrate, held_out
from nanoserve.lab.calibrate import Measured, fit, least_squares, measured_steps
from nanoserve.lab.costs import Linear, Roofline, StepLoad, Table, attention_of, parse_costs, read_table
from nanoserve.lab.gpus import GPUS, MODELS, Memory, format_bytes, get_gpu, get_model, session_blocks
from nanoserve.lab.held_out import compare, simulated_again
from nanoserve.lab.scenarios import chat, length_mix
from nanoserve.lab.simulate_report import count_shared_blocks
from nanoserve.lab.simulator import Host, complete_config, simulate
from nanoserve.record import JsonlRecorder, ListRecorder, StepRecord
from nanoserve.scheduler import PhaseSplitScheduler, UnifiedScheduler


def memory(dtype: str = "bf16", **fields) -> Memory:
    return Memory(model=MODELS["llama-3-70b"], gpu=GPUS["h100"], **{"tp": 8, "dtype": dtype, **fields})


PREFILL = StepLoad(16_384, 1, 16_384, attention_of(0, 16_384))


# Roofline: the check of semantics.md, section 10


@pytest.mark.parametrize(
    ("dtype", "prefill_ms", "weights_ms", "chunk_ms"), [("bf16", 561, 6.6, 15.2), ("fp8", 281, 3.3, 7.6)]
)
def test_the_roofline_gives_the_checked_figures(dtype, prefill_ms, weights_ms, chunk_ms):
    roofline = Roofline(memory(dtype))
    assert round(roofline.step_us(PREFILL) / 1e3) == prefill_ms
    assert round(roofline.memory_s(StepLoad(0, 0)) * 1e3, 1) == weights_ms
    assert round(roofline.compute_s(StepLoad(512, 1)) * 1e3, 1) == chunk_ms  # of the matrix products alone
    assert roofline.knee_tokens == pytest.approx(221, abs=1)


def test_below_the_knee_a_step_costs_its_bytes_and_above_it_its_operations():
    roofline = Roofline(memory())
    assert roofline.step_us(StepLoad(8, 8, 800, 800)) == round(roofline.memory_s(StepLoad(8, 8, 800, 800)) * 1e6)
    assert roofline.step_us(PREFILL) == round(roofline.compute_s(PREFILL) * 1e6)


@given(st.integers(1, 4000), st.integers(0, 4000), st.integers(1, 4))
def test_chunks_do_the_attention_of_the_whole_prompt(num_tokens, num_computed, chunks):
    cut = [num_tokens * i // chunks for i in range(chunks + 1)]
    parts = sum(attention_of(num_computed + a, b - a) for a, b in pairwise(cut))
    assert parts == attention_of(num_computed, num_tokens)
    assert parts == sum(range(num_computed + 1, num_computed + num_tokens + 1))


def test_forgotten_attention_is_seen_in_the_prefill():
    assert round(Roofline(memory()).step_us(PREFILL._replace(attention=0)) / 1e3) != 561


def test_linear_costs_are_exact():
    assert Linear(8000, 30).step_us(StepLoad(16_384, 1)) == 8000 + 30 * 16_384


# Data sheets


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_published_size_of_every_model_follows_from_its_shape(model):
    assert model.count_params() == pytest.approx(model.num_params, rel=0.015)


def test_the_figures_of_nanostory_are_those_of_its_checkpoint():
    from nanoserve.checkpoint import read_model_config

    config, model = read_model_config("nanostory"), MODELS["nanostory"]
    for name in ("hidden_size", "intermediate_size", "vocab_size", "num_heads", "num_kv_heads", "num_layers"):
        theirs = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}.get(name, name)
        theirs = {"num_layers": "num_hidden_layers"}.get(theirs, theirs)
        mine = getattr(model, name)
        assert mine == json.loads((_folder() / "config.json").read_text())[theirs]
    assert config.vocab_size == model.vocab_size


def _folder():
    from nanoserve.checkpoint import resolve_model_dir

    return resolve_model_dir("nanostory")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_every_gpu_is_twice_as_fast_in_fp8_where_it_has_it(gpu):
    if gpu.flops["fp8"] is None:
        with pytest.raises(ValueError, match="dtype='fp8' is not known to a100; use one of fp32, bf16"):
            gpu.flops_of("fp8")
    else:
        assert gpu.flops_of("fp8") == pytest.approx(2 * gpu.flops_of("bf16"), rel=0.01)
    assert gpu.source


# Memory: section 3.10 and the numbers by hand


def test_the_story_of_a_thousand_sessions():
    assert session_blocks(30_000, 100, 16) == (1882, 7)
    assert count_shared_blocks(1000, 30_000, 100, 16) == 8875
    replica = memory()
    assert replica.kv_bytes_per_token == 327_680
    assert format_bytes(8875 * replica.block_bytes) == "46.5 GB"
    assert format_bytes(1_882_000 * replica.block_bytes) == "9.87 TB"
    assert format_bytes(30_000 * replica.kv_bytes_per_token) == "9.83 GB"
    assert format_bytes(1000 * 30_000 * replica.kv_bytes_per_token) == "9.83 TB"
    assert replica.sessions(30_000, 100) == (44, 11_579)
    assert replica.sessions(30_000, 100, 8876)[0] == 4


@given(st.integers(1, 12), st.integers(0, 100), st.integers(1, 40))
def test_the_real_manager_counts_what_the_arithmetic_says(sessions, prefix_len, own_len):
    _, own = session_blocks(prefix_len, own_len, 4)
    assert count_shared_blocks(sessions, prefix_len, own_len, 4) == prefix_len // 4 + sessions * own


def test_a_manager_that_shares_nothing_is_seen(monkeypatch):
    from nanoserve.block_pool import NO_HIT

    monkeypatch.setattr(SharedBlocks, "lookup", lambda manager, request: NO_HIT)
    with pytest.raises(AssertionError, match="did not fit"):
        count_shared_blocks(10, 320, 16, 16)


def test_kv_stays_in_bf16_beside_fp8_weights_unless_told_otherwise():
    assert memory("fp8").kv_bytes_per_token == memory().kv_bytes_per_token
    assert memory("fp8", kv_dtype="fp8").kv_bytes_per_token * 2 == memory().kv_bytes_per_token
    assert Memory(model=MODELS["qwen3-0.6b"], gpu=GPUS["l4"]).kv_bytes_per_token == 114_688


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: memory(tp=1).num_blocks, "needs 141.2 GB for its weights, and 1 x h100 at 90% use have 72.0 GB"),
        (lambda: memory(use=1.5), r"memory use must be in \(0, 1\], got 1.5"),
        (lambda: memory(tp=0), "tp must be an integer >= 1"),
        (lambda: memory("int4").block_bytes, "dtype='int4' is not known; use one of fp32, bf16, fp8"),
        (lambda: get_gpu("v100"), "gpu 'v100' is not known; use one of a100"),
        (lambda: get_model("gpt-2"), "model 'gpt-2' has no figures here; use one of llama-3-8b"),
        (lambda: Roofline(memory(), flops_share=0), r"flops_share of a roofline must be in \(0, 1\], got 0"),
        (lambda: Linear(-1, 3), "base_us of linear costs must be microseconds >= 0"),
        (lambda: Linear(0, 0), "at least 1 microsecond"),
        (lambda: parse_costs("linear:8000"), "write linear:8000,30"),
        (lambda: parse_costs("magic"), "costs 'magic' are not known; write linear:BASE,TOKEN"),
    ],
)
def test_bad_figures_are_one_line(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("count", "text"),
    [(9.8304e9, "9.83 GB"), (46.53e9, "46.5 GB"), (141.2e9, "141 GB"), (9.8304e12, "9.83 TB"), (512, "512 B")],
)
def test_bytes_are_told_in_three_digits(count, text):
    assert format_bytes(count) == text


def test_names_are_found_whatever_the_case():
    assert get_gpu("RTX 4090") is GPUS["rtx4090"]
    assert get_model("Llama-3-70B") is MODELS["llama-3-70b"]


# Fitting

TRUE = Table(knot_tokens=[1, 512], knot_us=[911, 6532], request_us=25, context_us=0.02, attention_us=0.003)
HOST = Host(step_us=150)


def recorded_run(load, costs, host=None, **fields) -> ListRecorder:
    recorder = ListRecorder()
    named = {"scheduler": UnifiedScheduler, "blocks": SharedBlocks, "max_num_batched_tokens": 512, **fields}
    config = complete_config(EngineConfig(**named), max_model_len=load.longest, num_blocks=5000)
    simulate(config, load, costs, host, observer=recorder)
    return recorder


@pytest.fixture(scope="module")
def recorded() -> list[StepRecord]:
    return recorded_run(chat(1, num_sessions=8), TRUE).records


def test_a_fit_finds_the_costs_that_a_run_was_made_with(recorded):
    """Hits and chunks included: what a step computed is read from its record."""
    table = fit(measured_steps(recorded))
    assert table.median_error < 0.002
    for name in ("request_us", "context_us", "attention_us"):
        assert getattr(table, name) == pytest.approx(getattr(TRUE, name), rel=0.05)
    for num_tokens in (1, 7, 64, 300, 512, 2000):
        assert table.tokens_us(num_tokens) == pytest.approx(900 + 11 * num_tokens, rel=0.01)
    assert table.gap_us == 0


def test_the_recorder_of_a_context_is_the_runner_of_a_context():
    """Two ways to the same counts: the runner's while it runs, and the fit's from the records."""
    heard = []

    class Listening(Linear):
        needs_context = True

        def step_us(self, load):
            heard.append(load)
            return 1000

    recorder = recorded_run(chat(2, num_sessions=8), Listening(1, 1))
    assert [step.load for step in measured_steps(recorder.records)] == heard


def test_steps_that_are_far_off_do_not_move_the_fit(recorded):
    steps = list(measured_steps(recorded))
    busy = [replace(step, us=step.us * 50) if i % 40 == 0 else step for i, step in enumerate(steps)]
    table = fit(busy)
    assert table.tokens_us(256) == pytest.approx(TRUE.tokens_us(256), rel=0.02)
    assert table.num_steps == len(steps) - len(steps[::40])


def padded_steps() -> list[Measured]:
    """A graph padded to 64 tokens costs the same up to there."""
    loads = [StepLoad(n, n, 40 * n, 40 * n) for n in range(1, 257)] * 3
    return [Measured(load, 1000 + 20 * max(load.num_tokens, 64), 100.0) for load in loads]


def test_a_bend_in_what_tokens_cost_is_between_two_knots():
    table = fit(padded_steps())
    assert table.gap_us == 100
    for num_tokens in (10, 30, 120, 250):
        load = StepLoad(num_tokens, num_tokens, 40 * num_tokens, 40 * num_tokens)
        assert table.step_us(load) == pytest.approx(1000 + 20 * max(num_tokens, 64), rel=0.05)


def test_two_knots_are_too_few_for_a_bend(monkeypatch):
    monkeypatch.setattr(calibrate, "_knots", lambda tokens: [1.0, 256.0])
    assert fit(padded_steps()).median_error > 0.05


def noisy(steps: list[Measured]) -> list[Measured]:
    """As a machine is: a step may take a third longer than most, and none takes a third less."""
    rng = random.Random(0)
    return [replace(step, us=step.us * (0.9 + min(0.4, rng.expovariate(6)))) for step in steps]


def fitted_over_measured(steps: list[Measured]) -> float:
    table = fit(steps)
    return sum(table.step_us(step.load) for step in steps) / sum(step.us for step in steps)


def test_a_fitted_run_is_as_long_as_the_measured_one(recorded):
    assert fitted_over_measured(noisy(list(measured_steps(recorded)))) == pytest.approx(1, abs=0.01)


def test_weighing_slow_steps_less_is_seen_in_the_length_of_a_run(recorded, monkeypatch):
    monkeypatch.setattr(calibrate, "NUM_PASSES", 1)
    assert fitted_over_measured(noisy(list(measured_steps(recorded)))) < 0.98


@given(
    st.lists(st.lists(st.integers(-4, 4), min_size=3, max_size=3), min_size=3, max_size=7),
    st.lists(st.integers(-9, 9), min_size=7, max_size=7),
)
def test_least_squares_is_the_best_of_every_choice_of_columns(rows, sums):
    a, b = np.array(rows, dtype=float), np.array(sums[: len(rows)], dtype=float)
    found = least_squares(a, b)
    best = np.linalg.norm(b)
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            x = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, np.linalg.norm(a[:, chosen] @ x - b))
    assert (found >= 0).all()
    assert np.linalg.norm(a @ found - b) == pytest.approx(best, abs=1e-6)


def test_few_steps_are_refused():
    with pytest.raises(ValueError, match="3 steps are too few to fit costs to; record at least 20"):
        fit([Measured(StepLoad(1, 1), 1000.0, None)] * 3)


# Held-out runs

POLICIES = [
    {},
    {"max_num_seqs": 3},
    {"scheduler": PhaseSplitScheduler, "blocks": PrivateBlocks, "max_num_batched_tokens": None},
    {"num_blocks": 300},
    {"async_scheduling": True},
]


def decisions(records: list[StepRecord]) -> list[tuple]:
    """Of each step: when it ended, counted from the first arrival, in microseconds, and what it did."""
    start_s = min(request.arrival_s for record in records for request in record.arrivals)
    return [
        (round((r.end_s - start_s) * 1e6), r.num_scheduled_tokens, r.hit_tokens, r.preempted, r.new_blocks, r.left_out)
        for r in records
    ]


def same_again(fields: dict) -> bool:
    """Whether a simulated run, taken for a recorded one, is the same once more."""
    costs = msgspec.structs.replace(TRUE, gap_us=HOST.step_us)
    run = recorded_run(chat(3, num_sessions=8), costs, HOST, **fields)
    return decisions(simulated_again(run.header, run.records, costs)) == decisions(run.records)


@pytest.mark.parametrize("fields", POLICIES)
def test_a_recorded_run_is_simulated_with_its_own_config_and_arrivals(fields):
    assert same_again(fields)


@pytest.mark.parametrize("change", [{"max_num_batched_tokens": 256}, {"max_num_seqs": 2}, {"num_blocks": 200}])
def test_a_simulation_with_another_config_is_seen(monkeypatch, change):
    as_recorded = held_out.recorded_config
    monkeypatch.setattr(held_out, "recorded_config", lambda header: replace(as_recorded(header), **change))
    assert not same_again({})


def test_arrivals_that_are_not_the_recorded_ones_are_seen(monkeypatch):
    as_recorded = held_out.recorded_load

    def late(records):
        load = as_recorded(records)
        return replace(load, arrivals=[replace(a, at_s=a.at_s * 1.01) for a in load.arrivals])

    monkeypatch.setattr(held_out, "recorded_load", late)
    assert not same_again({})


def held_out_errors(recorded: list[StepRecord]) -> list[float]:
    """Of a load with other lengths than those fitted to, run with the true costs, under both policies."""
    table = fit(measured_steps(recorded))
    errors = []
    for fields in ({}, POLICIES[2]):
        run = recorded_run(length_mix(5, rate=4, until_s=3), TRUE, **fields)
        errors += [abs(off) for off in compare(run.header, run.records, table).errors.values() if off is not None]
    return errors


def test_a_held_out_run_is_simulated_without_an_error_where_costs_are_what_was_fitted(recorded):
    errors = held_out_errors(recorded)
    assert len(errors) == 2 * len(held_out.COMPARED)
    assert max(errors) < 0.01


def test_a_fit_that_does_not_look_at_attention_is_seen_in_held_out_runs(recorded, monkeypatch):
    monkeypatch.setattr(calibrate, "attention_of", lambda start, n: 0)
    assert max(held_out_errors(recorded)) > 0.05


def test_a_fit_that_overlooks_hits_is_seen_in_held_out_runs(recorded, monkeypatch):
    blind = [msgspec.structs.replace(record, hit_tokens={}) for record in recorded]
    assert max(held_out_errors(blind)) > 0.02


def test_a_trace_without_a_token_is_refused():
    with pytest.raises(ValueError, match="no request that got a token"):
        held_out.recorded_load([StepRecord(step=1, start_s=0, launched_s=0, end_s=1)])


# The command


def trace(tmp_path, name="run.jsonl", **fields):
    recorder = JsonlRecorder(tmp_path / name)
    load = chat(1, num_sessions=3)
    named = replace(EngineConfig(scheduler=UnifiedScheduler), max_num_batched_tokens=512, **fields)
    simulate(complete_config(named, max_model_len=load.longest, num_blocks=5000), load, TRUE, observer=recorder)
    recorder.close()
    return recorder.path


def test_calibrate_writes_what_simulate_reads(tmp_path, capsys):
    out = tmp_path / "costs.json"
    assert cli.main(["calibrate", str(trace(tmp_path)), "--out", str(out)]) == 0
    assert "error of a step: median" in capsys.readouterr().out
    table = parse_costs(f"table:{out}")
    assert table == read_table(out)
    words = ["simulate", "--workload", "long-prompt", "--costs", f"table:{out}", "--policies", "unified:512"]
    assert cli.main(words) == 0
    assert "table fitted to" in capsys.readouterr().out


def test_calibrate_compares_with_runs_that_it_was_not_fitted_to(tmp_path, capsys):
    out, other = tmp_path / "costs.json", str(trace(tmp_path, "other.jsonl", max_num_seqs=2))
    words = ["calibrate", str(trace(tmp_path)), "--out", str(out), "--check", other]
    assert cli.main(words) == 0
    assert f"{other}: mean_itl_ms" in capsys.readouterr().out
    assert cli.main([*words, "--json"]) == 0
    [check] = json.loads(capsys.readouterr().out)["checks"].values()
    assert set(check["errors"]) == set(held_out.COMPARED)
    assert max(map(abs, check["errors"].values())) < 0.01


def test_a_run_of_another_model_is_not_compared_with(tmp_path, capsys):
    other = trace(tmp_path, "other.jsonl", model="elsewhere")
    words = ["calibrate", str(trace(tmp_path)), "--out", str(tmp_path / "x"), "--check", str(other)]
    assert cli.main(words) == 2
    assert "has a run of elsewhere on simulated" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"request_us": -1.0},
        {"knot_tokens": [3.0, 2.0]},
        {"knot_tokens": [3.0]},
        {"knot_us": [-1.0, 1.0]},
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, change):
    path = tmp_path / "costs.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(TRUE, **change)))
    with pytest.raises(ValueError, match=r"costs\.json has"):
        read_table(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a table of costs"):
        read_table(path)


def test_overlapping_steps_and_different_engines_are_refused(tmp_path, capsys):
    ahead = trace(tmp_path, "ahead.jsonl", async_scheduling=True)
    assert cli.main(["calibrate", str(ahead), "--out", str(tmp_path / "x")]) == 2
    assert "one step ahead" in capsys.readouterr().err
    assert cli.main(["calibrate", str(ahead), str(trace(tmp_path)), "--out", str(tmp_path / "x")]) == 2
    assert "2 different engines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"client": "Pigeon"}, "line 1: config.client is none of InProcessClient"),
        (
            {"num_blocks": 2**39},
            "cannot be simulated: the trace: its config cannot be had again: num_blocks=549755813888",
        ),
        ({"max_model_len": "auto"}, "max_model_len='auto' is not of type int"),
    ],
)
def test_every_run_that_cannot_be_simulated_is_told_by_name(change, message, tmp_path, capsys):
    whole = trace(tmp_path)
    lines = whole.read_bytes().splitlines(keepends=True)
    header = json.loads(lines[0])
    header["config"] |= change
    (other := tmp_path / "other.jsonl").write_bytes(b"".join([json.dumps(header).encode() + b"\n", *lines[1:]]))
    out = tmp_path / "x"
    assert cli.main(["calibrate", str(whole), "--out", str(out), "--check", str(other)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(other) in err
    assert message in err
    assert not out.exists()


def test_a_run_without_its_arrivals_is_not_compared_with(tmp_path, capsys):
    lines = (whole := trace(tmp_path)).read_bytes().splitlines(keepends=True)
    (other := tmp_path / "other.jsonl").write_bytes(b"".join([lines[0], *lines[30:]]))
    assert cli.main(["calibrate", str(whole), "--out", str(tmp_path / "x"), "--check", str(other)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(r"other\.jsonl, line [0-9]+: sampled names '.+', which never arrived in it", err)


def test_a_run_that_is_compared_with_unseen_is_seen(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "_compared", lambda path, *run: compare(*run))
    with pytest.raises(KeyError):
        test_a_run_without_its_arrivals_is_not_compared_with(tmp_path, capsys)
