"""Laws of `nanoserve simulate`: the worked tables come from the command, equal commands write equal bytes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nanoserve.api import cli
from nanoserve.lab import simulate
from nanoserve.lab.costs import Table
from nanoserve.lab.simulate_report import SimulateReport
from nanoserve.lab.simulate_tables import micro
from nanoserve.lab.simulated import SimulatedRun
from nanoserve.lab.workload_files import write_workload
from nanoserve.record import read_trace

REFERENCE = ["--workload", "long-prompt", "--costs", "linear:8000,30"]
POLICIES = "phase_split:16384,unified:256,unified:512,unified:1024,unified:2048"
TABLE = """
phase_split:16384 8 240 507 790 507 790 502 960, 507 450, 503 700, 499 950 3 651 000
unified:256 15 680 15 680 15 680 1 054 000, 1 288 880, 1 508 080, 1 710 910 4 235 000
unified:512 23 360 23 360 23 360 766 880, 771 610, 768 100, 764 590 3 619 000
unified:1024 8 240 38 720 38 720 635 040, 639 770, 636 260, 632 750 3 619 000
unified:2048 8 240 69 440 69 440 569 120, 573 850, 570 340, 566 830 3 619 000
"""


def run(*words: str) -> int:
    try:
        return cli.main(["simulate", *words])
    except SystemExit as end:
        return int(end.code or 0)


def report(capsys: pytest.CaptureFixture[str], *words: str) -> SimulateReport:
    assert run(*words, "--json") == 0
    return msgspec.json.decode(capsys.readouterr().out, type=SimulateReport)


def test_the_command_prints_the_reference_table(capsys):
    assert run(*REFERENCE, "--policies", POLICIES) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for row in TABLE.strip().splitlines():
        assert row in lines
    assert "Simulated:" in shown
    assert "simulated, linear:8000,30, 20,000 blocks of 16" in shown


def test_a_planted_bug_leaves_the_reference_table(capsys, monkeypatch):
    from nanoserve.lab.costs import Linear

    monkeypatch.setattr(Linear, "step_us", lambda costs, load: 8001 + 30 * load.num_tokens)
    with pytest.raises(AssertionError):
        test_the_command_prints_the_reference_table(capsys)


def test_equal_commands_write_equal_bytes(tmp_path, capsys):
    files = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        words = ["--workload", "cache-bursts", "--policies", "unified:2048+shared", "--num-gpu-blocks-override", "400"]
        assert run(*words, "--record", str(folder / "run.jsonl"), "--out", str(folder / "out.json")) == 0
        files.append([(folder / "run.jsonl").read_bytes(), (folder / "out.json").read_bytes(), capsys.readouterr().out])
    assert files[0] == files[1]


def test_each_of_several_policies_gets_a_trace(tmp_path):
    assert run(*REFERENCE, "--policies", "unified:512,v0", "--record", str(tmp_path / "run.jsonl")) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["run-unified-512.jsonl", "run-v0.jsonl"]
    header, records = read_trace(tmp_path / names[0])
    assert header.config["scheduler"] == "UnifiedScheduler"
    assert records[-1].end_s == 3.619


def test_another_seed_gives_other_arrivals(capsys):
    words = ["--workload", "poisson-mix", "--policies", "unified:2048"]
    first, second = (report(capsys, *words, "--seed", seed) for seed in ("0", "1"))
    assert first.num_requests != second.num_requests
    assert first.policies[0].end_us != second.policies[0].end_us


@pytest.mark.slow
def test_a_thousand_sessions_in_the_memory_of_eight_gpus(capsys):
    words = ["--workload", "system-prompt-1000", "--gpu", "h100", "--tp", "8", "--model", "llama-3-70b"]
    assert run(*words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "a copy each 1,882,000 9.87 TB 9.83 TB 44" in shown
    assert "shared 8,875 46.5 GB 9.83 GB 11,579" in shown


def test_gpu_flags_mean_a_roofline(capsys):
    told = report(capsys, "--workload", "long-prompt", "--gpu", "l4", "--model", "llama-3-8b", "--policies", "v1")
    assert told.costs.startswith("roofline of llama-3-8b on 1 x l4, bf16")
    assert told.memory is not None
    assert told.num_blocks == told.memory.num_blocks == told.policies[0].config["num_blocks"]


def test_the_report_names_what_it_was_asked(capsys):
    words = [*REFERENCE, "--policies", "unified:512", "--blocks", "shared", "--max-num-seqs", "6"]
    told = report(capsys, *words, "--front-end-us", "30", "--host-step-us", "500", "--block-size", "32")
    [row] = told.policies
    assert (row.config["blocks"], row.config["max_num_seqs"], row.config["block_size"]) == ("SharedBlocks", 6, 32)
    assert (told.host.step_us, told.host.front_end_us) == (500, 30)
    assert told.clock == "simulated"
    assert row.ttfts_us is not None
    assert len(row.ttfts_us) == 4


def test_the_host_makes_steps_longer(capsys):
    words = [*REFERENCE, "--policies", "unified:2048"]
    plain, slow = report(capsys, *words), report(capsys, *words, "--host-step-us", "1000")
    assert slow.policies[0].itl_us.p50 == plain.policies[0].itl_us.p50 + 1000


def test_a_file_of_arrivals_is_a_workload(tmp_path, capsys):
    from nanoserve.lab.scenarios import long_prompt

    path = tmp_path / "load.jsonl"
    write_workload(long_prompt(), path)
    words = ["--costs", "linear:8000,30", "--policies", "unified:512"]
    told = report(capsys, "--workload", str(path), *words)
    [expected] = report(capsys, *REFERENCE, "--policies", "unified:512").policies
    assert told.policies[0].itl_us == expected.itl_us
    assert told.policies[0].end_us == expected.end_us


def test_refused_requests_are_told(tmp_path, capsys):
    path = tmp_path / "load.jsonl"
    path.write_text('{"max_tokens": 2, "prompt_len": 900}\n{"max_tokens": 2, "prompt_len": 20}\n')
    words = ["--costs", "linear:8000,30", "--policies", "unified:512", "--num-gpu-blocks-override", "20"]
    assert run("--workload", str(path), *words) == 0
    assert "unified:512: 1 requests could never fit" in capsys.readouterr().out


REFUSED_AT_ONCE = '{"max_tokens": 2, "prompt_len": 400000}\n'


def told_of_a_load_that_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> SimulateReport:
    path = tmp_path / "load.jsonl"
    path.write_text(REFUSED_AT_ONCE)
    return report(capsys, "--workload", str(path), "--costs", "linear:8000,30", "--policies", "unified:512")


def test_a_load_that_is_refused_at_once_is_told(tmp_path, capsys):
    [row] = told_of_a_load_that_is_refused(tmp_path, capsys).policies
    assert (row.num_refused, row.output_tokens, row.output_tokens_per_s, row.end_us) == (1, 0, 0, 0)


def test_a_rate_that_forgets_that_no_time_may_pass_is_seen(tmp_path, capsys, monkeypatch):
    rate = property(lambda run: run.output_tokens / run.end_us * 1e6)
    monkeypatch.setattr(SimulatedRun, "output_tokens_per_s", rate)
    with pytest.raises(ZeroDivisionError):
        told_of_a_load_that_is_refused(tmp_path, capsys)


def test_a_pool_of_more_blocks_than_an_engine_takes_by_itself_is_capped_and_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(simulate, "MAX_POOL_BLOCKS", 1000)
    words = ["--workload", "burst", "--gpu", "b200", "--model", "nanostory", "--policies", "unified:2048"]
    assert run(*words, "--json") == 0
    out, err = capsys.readouterr()
    told = msgspec.json.decode(out, type=SimulateReport)
    assert told.num_blocks == told.policies[0].config["num_blocks"] == 1000
    assert "7,910,034 blocks fit in the memory, and the pool has 1,000" in err
    assert err.count("\n") == 1


def test_a_pool_that_is_not_capped_is_seen(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(simulate, "min", max, raising=False)
    monkeypatch.setattr(
        simulate, "_runs", lambda args, costs, host: pytest.fail(f"{simulate._num_blocks(args, costs)}")
    )
    with pytest.raises(pytest.fail.Exception, match="7910034"):
        test_a_pool_of_more_blocks_than_an_engine_takes_by_itself_is_capped_and_said(tmp_path, capsys, monkeypatch)


def test_a_table_of_endless_costs_is_one_line(tmp_path, capsys):
    endless = Table(knot_tokens=[1.0], knot_us=[1e308], request_us=1e308, context_us=0, attention_us=0)
    (tmp_path / "costs.json").write_bytes(msgspec.json.encode(endless))
    assert run("--workload", "burst", "--costs", f"table:{tmp_path}/costs.json") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "takes longer than a clock can tell" in err


@pytest.mark.parametrize("study", ["bursty-cache"])
def test_a_study_prints_its_assumptions_and_its_table(study, capsys):
    assert run("--workload", study, "--costs", "linear:8000,30") == 0
    shown = capsys.readouterr().out
    assert "Assumptions:" in shown
    assert "blocks evicted" in shown
    assert "linear:8000,30" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "nothing"], "'nothing' is no scenario and no file; use one of long-prompt"),
        ([*REFERENCE, "--gpu", "h100"], "--gpu is of a roofline, and --costs is 'linear:8000,30'"),
        (["--workload", "burst", "--gpu", "v100"], "gpu 'v100' is not known"),
        (["--workload", "burst", "--gpu", "a100", "--tp", "8", "--dtype", "fp8"], "dtype='fp8' is not known to a100"),
        (["--workload", "burst", "--gpu", "l4"], "llama-3-70b in bf16 needs 141.2 GB"),
        (["--workload", "burst", "--efficiency", "fast"], "'fast' is not a pair of shares; write 0.6,0.8"),
        (["--workload", "burst", "--costs", "linear:x"], "write linear:8000,30"),
        (["--workload", "burst", "--costs", "table:missing.json"], "missing.json: No such file"),
        ([*REFERENCE, "--policies", "fifo"], "'fifo' is no scheduler and no stage"),
        ([*REFERENCE, "--policies", "unified:64"], "max_num_batched_tokens=64 is smaller than max_num_seqs=128"),
        ([*REFERENCE, "--tp", "0"], "0 is not an integer >= 1"),
        ([*REFERENCE, "--host-step-us", "-1"], "step_us must be microseconds >= 0"),
        ([*REFERENCE, "--out", "missing/out.json"], "is in a folder that does not exist"),
        (["--workload", "capacity", "--policies", "v0"], "--policies means nothing to capacity"),
        (["--workload", "capacity", "--record", "x"], "--record means nothing to capacity"),
        (["--workload", "capacity", "--check-invariants"], "--check-invariants is not for capacity"),
        ([*REFERENCE, "--num-gpu-blocks-override", "1000000000000"], "1000000000000 is more than the simulator keeps"),
        ([*REFERENCE, "--num-gpu-blocks-override", "1048577"], "give at most 1048576, or a larger --block-size"),
        (["--workload", "bursty-cache", "--num-gpu-blocks-override", "1048577"], "is more than the simulator keeps"),
        (["--workload", "burst", "--costs", "table:"], "costs 'table:' are not known"),
        (["--workload", "burst", "--efficiency", "5e-324,5e-324"], "a step takes longer than a clock can tell"),
        ([*REFERENCE, "--policies", "unified+private+shared"], "has two parts for blocks, private and shared"),
        ([], "required: --workload"),
    ],
)
def test_bad_input_is_one_line(words, message, capsys):
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_seed_of_a_file_is_refused(tmp_path: Path, capsys):
    path = tmp_path / "load.jsonl"
    path.write_text('{"max_tokens": 2, "prompt_len": 9}\n')
    assert run("--workload", str(path), "--seed", "3") == 2
    assert "--seed 3 means nothing to a file" in capsys.readouterr().err


def test_help_names_every_workload(capsys):
    assert run("--help") == 0
    shown = " ".join(capsys.readouterr().out.split()).replace("- ", "-")  # names may be wrapped at their hyphens
    for name in ("long-prompt", "system-prompt-1000", "length-classes", "capacity", "bursty-cache"):
        assert name in shown


@pytest.mark.parametrize(("us", "text"), [(8240, "8 240"), (1_054_000, "1 054 000"), (7, "7"), (None, "-")])
def test_microseconds_are_told_in_groups_of_three(us, text):
    assert micro(us) == text
