"""Laws of the scenario library: each load is drawn from its seed alone, and shows what its claim says."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from nanoserve.lab import policies, studies, workload_files
from nanoserve.lab.costs import REFERENCE
from nanoserve.lab.gpus import GPUS, MODELS, Memory
from nanoserve.lab.policies import parse_policies, parse_policy
from nanoserve.lab.prompts import FIRST_PART_ID, OUTPUT_TOKEN, TokenRuns
from nanoserve.lab.scenarios import SCENARIOS, agents, cache_bursts, chat, few_shot, rag, system_prompt
from nanoserve.lab.simulated import SimulatedRun
from nanoserve.lab.simulator import complete_config, simulate
from nanoserve.lab.studies import (
    RATES,
    STUDIES,
    V0,
    V1,
    bursty_cache,
    capacity,
    length_classes,
    split,
)
from nanoserve.lab.study import SHARE_REQUIRED, Setup, Slo, Study
from nanoserve.lab.workload import Arrival, Workload
from nanoserve.lab.workload_files import read_workload, write_workload

SETUP = Setup(costs=REFERENCE, num_blocks=20_000)
DRAWN = [name for name in SCENARIOS if name not in ("long-prompt", "system-prompt-1000")]


def runs(name: str, policies: str | None = None, seed: int = 0, num_blocks: int = 80_000) -> list[SimulatedRun]:
    scenario = SCENARIOS[name]
    load = scenario.build(seed)
    named = parse_policies(policies or scenario.policies, max_num_seqs=scenario.max_num_seqs)
    full = [complete_config(p.config, max_model_len=load.longest, num_blocks=num_blocks) for p in named]
    return [simulate(config, load, REFERENCE) for config in full]


def encoded(load: Workload) -> bytes:
    return msgspec.json.encode(
        [(a.id, a.at_s, list(a.prompt_token_ids), a.max_tokens, a.follows) for a in load.arrivals]
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_seed_gives_the_same_load_every_time(name):
    build = SCENARIOS[name].build
    small = [a.prompt_token_ids.runs for a in build(7).arrivals]  # type: ignore[attr-defined]
    assert small == [a.prompt_token_ids.runs for a in build(7).arrivals]  # type: ignore[attr-defined]
    assert build(7).claim
    assert SCENARIOS[name].ttft_group in build(7).groups.values()


@pytest.mark.parametrize("name", DRAWN)
def test_another_seed_gives_another_load(name):
    assert encoded(SCENARIOS[name].build(1)) != encoded(SCENARIOS[name].build(2))


def test_another_seed_of_the_mix_gives_other_arrival_times():
    first, second = ({a.at_s for a in SCENARIOS["poisson-mix"].build(seed).arrivals} for seed in (0, 1))
    assert not first & second


# Claims


def test_long_prompts_freeze_decodes_until_they_are_cut():
    whole, *cut = runs("long-prompt")
    assert all(run.itl_us().max < whole.itl_us().max / 5 for run in cut)


def test_three_at_once_leave_p99_low_and_the_maximum_high():
    whole, unmixed, chunked, _ = runs("burst")
    assert whole.itl_us("stream").p99 < 10_000 < 1_000_000 < whole.itl_us("stream").max
    assert unmixed.itl_us("stream").max > 1_000_000, "chunks alone do not help"
    assert chunked.itl_us("stream").max < 30_000


def test_sessions_behind_a_system_prompt_compute_it_once():
    load = system_prompt(num_sessions=100)
    [policy] = parse_policies("unified:2048+shared", max_num_seqs=1000)
    shared = simulate(complete_config(policy.config, max_model_len=load.longest, num_blocks=80_000), load, REFERENCE)
    assert shared.num_tokens == 30_000 + 100 * (100 - 1)  # the newest token of a session has no KV
    assert shared.num_refused == shared.num_preemptions == 0


def test_a_prefix_cache_computes_the_new_message_alone():
    load = chat(num_sessions=20)
    named = [policy.config for policy in parse_policies(SCENARIOS["chat-multiturn"].policies)]
    full = [complete_config(config, max_model_len=load.longest, num_blocks=20_000) for config in named]
    private, _, shared = (simulate(config, load, REFERENCE) for config in full)
    assert shared.hit_rate > 0.85
    assert shared.num_tokens < private.num_tokens / 3
    assert shared.ttft_us("later turn").p50 < private.ttft_us("later turn").p50


@pytest.mark.parametrize(("load", "least"), [(few_shot(num_requests=200), 0.85), (agents(num_tasks=4), 0.85)])
def test_common_beginnings_are_computed_once(load, least):
    named = parse_policy("unified:2048+shared").config
    run = simulate(complete_config(named, max_model_len=load.longest, num_blocks=80_000), load, REFERENCE)
    assert run.hit_rate > least


def test_popular_documents_in_another_order_are_no_hit():
    """Four of five tokens are of documents that were seen before; far fewer are behind an equal beginning."""
    load, seen = rag(num_requests=120), set()
    known = total = 0
    for a in load.arrivals:
        for token_id, count in a.prompt_token_ids.runs:  # type: ignore[attr-defined]
            known, total = known + count * (token_id in seen), total + count
            seen.add(token_id)
    named = parse_policy("unified:2048+shared").config
    run = simulate(complete_config(named, max_model_len=load.longest, num_blocks=80_000), load, REFERENCE)
    assert run.hit_rate < known / total - 0.3


def test_a_turn_holds_the_answer_of_the_one_before():
    for load in (SCENARIOS["chat-multiturn"].build(3), SCENARIOS["agents"].build(3)):
        by_id = {a.id: a for a in load.arrivals}
        turns = [a for a in load.arrivals if a.follows]
        assert turns
        for turn in turns:
            before = by_id[turn.follows]
            prefix = [*before.prompt_token_ids, *[OUTPUT_TOKEN] * before.max_tokens]
            assert list(turn.prompt_token_ids)[: len(prefix)] == prefix


def test_an_engine_that_forgets_its_cache_is_seen_in_the_claims(monkeypatch):
    from nanoserve.block_pool import NO_HIT
    from nanoserve.blocks import SharedBlocks

    monkeypatch.setattr(SharedBlocks, "lookup", lambda manager, request: NO_HIT)
    with pytest.raises(AssertionError):
        test_a_prefix_cache_computes_the_new_message_alone()


# Studies


def rows(study: Study) -> dict[str, dict]:
    return {str(next(iter(row.values()))): row for row in study.rows}


def test_each_workaround_has_its_price_and_v1_needs_none():
    study = length_classes(SETUP, replicas=3, rate=6.0, until_s=8.0)
    ways = rows(study)
    v0, v1 = ways["v0, one pool"], ways["v1, one pool"]
    assert v0["held"] != "yes"
    assert v1["held"] == "yes"
    assert v1["replicas"] == v0["replicas"] == 3
    assert ways["v0, prompts under 6000"]["refused"] > 0
    assert ways["v0, twice the replicas"]["replicas"] == 6
    assert ways["v0, twice the replicas"]["held"] != "yes", "a long prompt freezes whoever is beside it"
    split_row = ways["v0, split by length"]
    assert split_row["emptiest"] < split_row["fullest"] / 2
    assert any("uniform:6000:14000" in line for line in study.assumptions)


def test_the_capacity_is_the_highest_rate_that_holds(monkeypatch):
    monkeypatch.setattr(studies, "MIN_REQUESTS", 60)
    study = capacity(SETUP, until_s=3.0, rates=RATES[12:24:3])
    for row in study.rows:
        if row["replicas"] is not None:
            assert row["met"] >= SHARE_REQUIRED
            assert row["rate"] in RATES
            assert row["replicas"] * row["rate"] >= 1000 > (row["replicas"] - 1) * row["rate"]
    best = {(row["policy"], row["slo"]): row["rate"] for row in study.rows}
    tight = str(Slo(2000, 50))
    assert isinstance(best[V1, tight], float)
    assert not isinstance(best[V0, tight], float) or best[V0, tight] < best[V1, tight]


def test_bursts_waste_half_a_block_a_request_and_evict_what_is_asked_for_again():
    study = bursty_cache(SETUP)
    managers = rows(study)
    assert all(6 < row["waste_tokens"] < 9 for row in study.rows)
    assert managers["private"]["hit_rate"] == managers["private"]["evictions"] == 0
    assert managers["shared"]["hit_rate"] > 0.5
    assert managers["shared"]["evictions"] > 0
    assert all(row["preemptions"] > 0 for row in study.rows)


def test_every_study_says_what_it_rests_on():
    assert set(STUDIES) == {"length-classes", "capacity", "bursty-cache"}
    assert any(str(REFERENCE) in line for line in SETUP.assumptions())


def test_a_request_without_a_token_misses_every_slo():
    load = cache_bursts(num_bursts=1, burst_size=4)
    config = complete_config(parse_policy("unified:2048").config, max_model_len=load.longest, num_blocks=10)
    run = simulate(config, load, REFERENCE)
    assert run.num_refused == 4
    assert Slo(10**6, 10**6).share(run.members()) == 0


def test_replicas_share_all_arrivals_between_them():
    load = cache_bursts(num_bursts=1)
    parts = split(load, 5, lambda place, _: place % 4)
    assert len(parts) == 4, "a replica without work is left out"
    assert sorted(a.id for part in parts for a in part.arrivals) == sorted(a.id for a in load.arrivals)


# Policies


def test_a_policy_names_classes_and_overrides_its_stage():
    from nanoserve.blocks import PrivateBlocks, SharedBlocks, V0CachedBlocks
    from nanoserve.client import CoreProcessClient, InProcessClient
    from nanoserve.scheduler import PhaseSplitScheduler, UnifiedScheduler

    v1 = parse_policy("v1", blocks=PrivateBlocks).config
    assert (v1.scheduler, v1.client, v1.blocks) == (UnifiedScheduler, CoreProcessClient, SharedBlocks)
    assert v1.async_scheduling
    plain = parse_policy("phase_split:4096", blocks=SharedBlocks).config
    assert (plain.scheduler, plain.blocks, plain.max_num_batched_tokens) == (PhaseSplitScheduler, SharedBlocks, 4096)
    full = parse_policy("unified:512+v0_cached+inproc+ahead").config
    assert (full.blocks, full.client, full.async_scheduling) == (V0CachedBlocks, InProcessClient, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fifo:512", "'fifo' is no scheduler and no stage; use one of phase_split"),
        ("unified:many", "has the budget 'many'; write tokens a step, such as unified:512"),
        ("unified:0", "has the budget '0'"),
        ("unified:512+paged", "has the part 'paged', which is not known; use one of private"),
        ("unified:512,unified:512", "names unified:512 twice"),
        (" , ", "names none"),
        ("unified+private+shared", "has two parts for blocks, private and shared; leave one out"),
        ("v1+private+private", "has two parts for blocks, private and private"),
        ("unified+inproc+core_process", "has two parts for client, inproc and core_process"),
        ("unified+ahead+ahead", "has two parts for async_scheduling, ahead and ahead"),
        ("unified+shared+inproc+private", "has two parts for blocks, shared and private"),
    ],
)
def test_a_policy_that_is_not_known_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_policies(text)


def test_a_policy_whose_last_part_wins_is_seen(monkeypatch):
    def fold(text, parts):
        return {field: value for part in parts for field, value in policies._part(text, part).items()}

    monkeypatch.setattr(policies, "_parts", fold)
    with pytest.raises(pytest.fail.Exception):
        test_a_policy_that_is_not_known_is_refused("unified+private+shared", "two parts")


# Files


def test_a_workload_survives_its_file(tmp_path):
    path = tmp_path / "load.jsonl"
    for name in ("chat-multiturn", "agents", "cache-bursts"):
        load = SCENARIOS[name].build(1)
        write_workload(load, path)
        assert encoded(read_workload(path)) == encoded(load)


def test_named_parts_of_a_file_are_shared_and_others_are_not(tmp_path):
    path = tmp_path / "load.jsonl"
    path.write_text(
        '{"max_tokens": 2, "parts": [["system", 40], ["", 8]]}\n\n'
        '{"max_tokens": 2, "parts": [["system", 40], ["", 8]], "at_s": 1, "group": "late"}\n'
        '{"max_tokens": 2, "prompt_len": 40}\n{"max_tokens": 2, "prompt": [5, 6, 7], "id": "own"}\n'
    )
    first, second, third, fourth = (list(a.prompt_token_ids) for a in read_workload(path).arrivals)
    assert first[:40] == second[:40]
    assert first[40] != second[40]
    assert third[0] not in (*first, *second)
    assert fourth == [5, 6, 7]
    assert read_workload(path).arrivals[3].id == "own"


def test_a_trace_in_mooncakes_form_shares_blocks_with_equal_ids(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 2500, "input_length": 1400, "output_length": 5, "hash_ids": [0, 1, 3]}\n'
        '{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 4], "type": "chat"}\n'
    )
    load = read_workload(path)
    a, b, c = (list(x.prompt_token_ids) for x in load.arrivals)
    assert (len(a), len(b), len(c)) == (1100, 1400, 1100)
    assert a[:1024] == b[:1024]
    assert a[1024] != b[1024]
    assert c[512] != a[512]
    assert load.arrivals[1].at_s == 2.5
    named = parse_policy("unified:2048+shared").config
    run = simulate(complete_config(named, max_model_len=load.longest, num_blocks=500), load, REFERENCE)
    assert run.hit_tokens == 1024 + 512


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"max_tokens": 2}', "one of `prompt`, `prompt_len` and `parts`"),
        ('{"max_tokens": 0, "prompt_len": 4}', "max_tokens must be an integer >= 1"),
        ('{"max_tokens": 2, "prompt_len": -4}', "prompt_len must be an integer >= 1"),
        ('{"max_tokens": 2, "prompt": []}', "`prompt` is empty"),
        ('{"max_tokens": 2, "prompt": [-3]}', "token ids >= 0 and <= 2147483647, got -3"),
        ('{"max_tokens": 2, "prompt": [2147483648]}', "token ids >= 0 and <= 2147483647, got 2147483648"),
        ('{"max_tokens": 2, "parts": [[2147483648, 1]]}', "a part must be a name or a token id >= 0 and <="),
        ('{"max_tokens": 2, "prompt_len": 10000001}', "prompt_len must be an integer >= 1 and <= 10000000"),
        ('{"max_tokens": 10000001, "prompt_len": 1}', "max_tokens must be an integer >= 1 and <= 10000000"),
        ('{"max_tokens": 2, "parts": [["a", 9000000], ["b", 9000000]]}', "length of `parts` must be .* got 18000000"),
        ('{"max_tokens": 2, "prompt_len": 4, "at_s": 1e300}', "at_s must be a finite number >= 0 and <= 1e.10, got"),
        ('{"timestamp": 1e300, "input_length": 4, "output_length": 3, "hash_ids": [0]}', "timestamp must be a finite"),
        ('{"timestamp": 0, "input_length": 4, "output_length": 3, "hash_ids": [-1]}', "hash_ids must be >= 0"),
        ('{"timestamp": 0, "input_length": 4, "output_length": 3, "hash_ids": [9999999999]}', "hash_ids must be"),
        ("[" * 100_000, "it is nested too deeply for a request"),
        ('{"max_tokens": 2, "prompt_len": 1' + "0" * 5000 + "}", ""),
        ('{"max_tokens": 2, "prompt": "words"}', "Expected `array"),
        ('{"max_tokens": 2, "prompt_len": 4, "at_s": -1}', "at_s must be a finite number >= 0"),
        ('{"max_tokens": 2, "prompt_len": 4, "colour": 1}', "unknown field `colour`"),
        ('{"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [0]}', "1 hash_ids do not fit"),
        ("{", "Input data was truncated"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "load.jsonl"
    path.write_text('{"max_tokens": 1, "prompt_len": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"load\.jsonl, line 2: .*" + message):
        read_workload(path)


def test_a_file_that_asks_for_more_than_fits_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "load.jsonl"
    path.write_text('{"max_tokens": 10000000, "prompt_len": 10000000}\n' * 51)
    with pytest.raises(ValueError, match=r"load\.jsonl asks for 1,020,000,000 tokens in all, and 1,000,000,000 are"):
        read_workload(path)
    monkeypatch.setattr(workload_files, "MAX_TOKENS", 10**20)
    assert len(read_workload(path).arrivals) == 51


def test_a_length_that_is_not_checked_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(workload_files, "_length", lambda name, value: value)
    line = '{"max_tokens": 2, "parts": [["a", 9000000], ["b", 9000000]]}'
    with pytest.raises(pytest.fail.Exception):
        test_a_bad_line_is_named(tmp_path, line, "length of `parts`")


def test_an_empty_file_and_a_turn_before_its_session_are_refused(tmp_path):
    path = tmp_path / "load.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no request"):
        read_workload(path)
    path.write_text(
        '{"max_tokens": 1, "prompt_len": 1, "follows": "a"}\n{"max_tokens": 1, "prompt_len": 1, "id": "a"}\n'
    )
    with pytest.raises(ValueError, match="follows 'a', which does not come before it"):
        read_workload(path)


def test_runs_are_the_list_that_they_stand_for():
    runs = TokenRuns([(5, 3), (7, 2)])
    assert list(runs) == [5, 5, 5, 7, 7]
    assert (len(runs), runs[3], runs[-3:], runs[3::-1]) == (5, 7, [5, 7, 7], [7, 5, 5, 5])
    with pytest.raises(ValueError, match="a run must be"):
        TokenRuns([(5, 0)])
    assert FIRST_PART_ID > 262_144, "above the vocabularies in use"


def test_a_workload_of_progress_has_no_file(tmp_path):
    from nanoserve.lab.workload import Progress

    a = Arrival(id="a", group="g", prompt_token_ids=[1], max_tokens=4)
    b = Arrival(id="b", group="h", prompt_token_ids=[1], max_tokens=4, after=Progress("g", 2))
    load = Workload(name="x", claim="", watched="g", seed=0, parameters={}, arrivals=[a, b])
    with pytest.raises(ValueError, match="waits for the progress of a group"):
        write_workload(load, tmp_path / "x")
    with pytest.raises(ValueError, match="`follows` and `after`"):
        replace(load, arrivals=[a, replace(b, follows="a")])


def test_a_larger_gpu_holds_more():
    small, large = (Memory(model=MODELS["llama-3-8b"], gpu=GPUS[name]).num_blocks for name in ("l4", "h100"))
    assert small < large
