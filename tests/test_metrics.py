"""Laws of the laboratory's figures: against examples worked by hand, and against the reference simulation."""

import random
from dataclasses import replace

import pytest
from fakes_records import VOCAB_SIZE, arrival, virtual_client
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.blocks import SharedBlocks
from nanoserve.config import EngineConfig
from nanoserve.lab.loadgen import drive
from nanoserve.lab.metrics import (
    Activity,
    GroupMetrics,
    RequestTimes,
    Spread,
    measure,
    median_of,
    percentile,
    request_times,
    spans,
    step_times,
)
from nanoserve.lab.stories import story
from nanoserve.lab.workload import (
    Arrival,
    Progress,
    Workload,
    long_prompt_among_decodes,
    random_tokens,
    shared_system_prompt,
    story_tokens,
)
from nanoserve.record import StepRecord
from nanoserve.scheduler import PhaseSplitScheduler, UnifiedScheduler

# --- Percentiles


@pytest.mark.parametrize(("percent", "expected"), [(1, 15), (5, 15), (30, 20), (40, 20), (50, 35), (99, 50), (100, 50)])
def test_percentiles_are_nearest_rank(percent: float, expected: float) -> None:
    assert percentile([35, 20, 15, 50, 40], percent) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_every_percentile_is_the_least_value_that_covers_its_share(values: list[float], percent: int) -> None:
    def covers(value: float) -> bool:
        return 100 * sum(other <= value for other in values) >= percent * len(values)

    assert percentile(values, percent) == min(value for value in values if covers(value))


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 50)
    with pytest.raises(ValueError, match=r"\(0, 100\], got 0"):
        percentile([1.0], 0)
    assert Spread.of([]) is None


# --- Latencies


def test_latencies_of_a_request_are_those_worked_by_hand() -> None:
    r = RequestTimes("a", 4, arrival_s=1.0, token_s=[3.0, 3.5, 4.0, 9.0], token_ids=[1, 2, 3, 4])
    assert r.ttft_s == 2.0
    assert r.itl_s == [0.5, 0.5, 5.0]
    assert r.tpot_s == 2.0  # (9 - 3) / 3


def test_a_request_without_tokens_has_no_latencies() -> None:
    waiting = RequestTimes("a", 4, arrival_s=1.0)
    assert (waiting.ttft_s, waiting.itl_s, waiting.tpot_s) == (None, [], None)
    assert GroupMetrics.of([waiting]) == GroupMetrics(1, None, None, None, None)


def test_a_freeze_shows_in_the_gaps_and_hides_in_the_mean() -> None:
    steady = [0.01 * i for i in range(100)]
    frozen = [*steady[:50], *(t + 1.0 for t in steady[50:])]
    group = GroupMetrics.of([RequestTimes("a", 1, 0.0, frozen, list(range(100)))])
    assert group.itl_s is not None
    assert group.tpot_s is not None
    assert group.itl_s.max == pytest.approx(1.01)
    assert group.tpot_s.max == pytest.approx(0.0201, abs=1e-4)
    assert group.slow_gap_share == pytest.approx(1 / 99)


def records_by_hand() -> list[StepRecord]:
    """Two requests, blocks of 4. `b` waits a step, is preempted in step 4, and finds four of its tokens in step 5."""
    return [
        StepRecord(
            step=1, start_s=1.0, launched_s=1.0, end_s=3.0, arrivals=[arrival("a", 6), arrival("b", 8, 0.5)],
            num_scheduled_tokens={"a": 6}, hit_tokens={"a": 0}, num_used_blocks=2, sampled={"a": [7]},
        ),
        StepRecord(
            step=2, start_s=3.0, launched_s=3.0, end_s=4.0, num_scheduled_tokens={"a": 1, "b": 5},
            hit_tokens={"b": 0}, num_used_blocks=4, sampled={"a": [8]},
        ),
        StepRecord(
            step=3, start_s=4.0, launched_s=4.0, end_s=5.0, num_scheduled_tokens={"a": 1, "b": 3},
            num_used_blocks=4, sampled={"a": [9], "b": [5]},
        ),
        StepRecord(
            step=4, start_s=5.0, launched_s=5.0, end_s=6.0, num_scheduled_tokens={"a": 1}, preempted=["b"],
            num_used_blocks=3, sampled={"a": [10]}, finished={"a": "length"},
        ),
        StepRecord(
            step=5, start_s=6.0, launched_s=6.0, end_s=8.0, num_scheduled_tokens={"b": 5}, hit_tokens={"b": 4},
            resumed=["b"], num_used_blocks=3, sampled={"b": [6]}, finished={"b": "length"},
        ),
    ]  # fmt: skip


def test_request_times_are_the_ends_of_the_steps_that_sampled() -> None:
    requests = request_times(records_by_hand())
    assert requests["a"].token_s == [3.0, 4.0, 5.0, 6.0]
    assert requests["b"] == RequestTimes("b", 8, 0.5, [5.0, 8.0], [5, 6], 0, "length")


def test_every_step_of_every_request_has_its_activity() -> None:
    seen = {
        (span.request_id, span.step): (str(span.activity), span.num_prompt_tokens) for span in spans(records_by_hand())
    }
    assert seen == {
        ("a", 1): ("prefill", 6),
        ("b", 1): ("waiting", 0),
        ("a", 2): ("decode", 0),
        ("b", 2): ("prefill", 5),
        ("a", 3): ("decode", 0),
        ("b", 3): ("prefill", 3),
        ("a", 4): ("decode", 0),
        ("b", 4): ("preempted", 0),
        ("b", 5): ("prefill", 4),  # of its nine tokens four were found, four more are prompt, one is output
    }


def test_run_figures_are_those_worked_by_hand() -> None:
    metrics = measure(records_by_hand(), {"b": "late"})
    assert metrics.duration_s == 8.0  # first arrival at 0
    assert metrics.output_tokens == 6
    assert metrics.output_tokens_per_s == 6 / 8
    assert metrics.prompt_tokens == 14
    assert metrics.prompt_tokens_computed == 18  # four of b's twice
    assert metrics.hit_rate == 0.0  # a hit after a preemption is not counted
    assert metrics.peak_used_blocks == 4
    assert metrics.num_steps == 5
    assert metrics.step_s == Spread(count=5, mean=7 / 5, p50=1.0, p99=2.0, max=2.0)
    late = metrics.groups["late"]
    assert late.ttft_s == Spread(1, 4.5, 4.5, 4.5, 4.5)
    assert late.itl_s == Spread(1, 3.0, 3.0, 3.0, 3.0)
    everyone = metrics.groups["all"]
    assert everyone.num_requests == 2
    assert everyone.itl_s == Spread(4, 1.5, 1.0, 3.0, 3.0)


def test_nothing_to_measure_is_said() -> None:
    with pytest.raises(ValueError, match="no arrival"):
        measure([])


def test_medians_are_taken_figure_by_figure() -> None:
    one, two, three = (Spread(5, mean, p50, 1.0, 2.0) for mean, p50 in ((1.0, 9.0), (2.0, 8.0), (3.0, 1.0)))
    assert median_of([one, two, three]) == Spread(5, 2.0, 8.0, 1.0, 2.0)
    assert median_of([{"a": one}, {"a": None}]) == {"a": None}
    assert median_of([1, 2, 3, 9]) == 2


# --- Figures of real schedulers on a virtual clock

ids_from = random_tokens(VOCAB_SIZE)


def reference_load() -> Workload:
    """Eight decodes from the start; four long prompts, 800 ms apart."""
    rng = random.Random(0)
    decodes = [
        Arrival(id=f"d{i}", group="decode", prompt_token_ids=ids_from(rng, 20), max_tokens=200) for i in range(8)
    ]
    prompts = [
        Arrival(id=f"p{q}", group="long", prompt_token_ids=ids_from(rng, 16384), max_tokens=4, at_s=0.1 + 0.8 * q)
        for q in range(4)
    ]
    return Workload(
        name="reference", claim="", watched="decode", headlines=(), seed=0, parameters={}, arrivals=decodes + prompts
    )


@pytest.mark.parametrize(
    ("scheduler", "budget", "itl_us", "ttft_us", "end_us"),
    [
        (PhaseSplitScheduler, 16384, (8240, 507790, 507790), (502960, 507450, 503700, 499950), 3651000),
        (UnifiedScheduler, 256, (15680, 15680, 15680), (1054000, 1288880, 1508080, 1710910), 4235000),
        (UnifiedScheduler, 512, (23360, 23360, 23360), (766880, 771610, 768100, 764590), 3619000),
        (UnifiedScheduler, 1024, (8240, 38720, 38720), (635040, 639770, 636260, 632750), 3619000),
        (UnifiedScheduler, 2048, (8240, 69440, 69440), (569120, 573850, 570340, 566830), 3619000),
    ],
)
def test_figures_agree_with_the_reference_simulation(
    scheduler: type, budget: int, itl_us: tuple[int, ...], ttft_us: tuple[int, ...], end_us: int
) -> None:
    config = EngineConfig(
        scheduler=scheduler, num_blocks=20000, max_model_len=16388, max_num_batched_tokens=budget, watermark=0.0
    )
    client, clock, records = virtual_client(config, cost_s=lambda num_tokens: (8000 + 30 * num_tokens) * 1e-6)
    load = reference_load()
    drive(client, load, clock=clock, sleep=clock.sleep)

    itl = measure(records, load.groups).groups["decode"].itl_s
    assert itl is not None
    assert [round(value * 1e6) for value in (itl.p50, itl.p99, itl.max)] == list(itl_us)
    ttft = [r.ttft_s for name, r in request_times(records).items() if name.startswith("p")]
    assert [round(value * 1e6) for value in ttft if value is not None] == list(ttft_us)
    assert round(records[-1].end_s * 1e6) == end_us


SMALL = EngineConfig(
    scheduler=UnifiedScheduler, num_blocks=600, max_model_len=1024, max_num_batched_tokens=128, watermark=0.0
)


def run_virtually(config: EngineConfig, load: Workload) -> list[StepRecord]:
    client, clock, records = virtual_client(config, cost_s=lambda num_tokens: 0.01)
    drive(client, load, clock=clock, sleep=clock.sleep)
    return records


def test_tokens_computed_plus_tokens_hit_are_all_prompt_tokens() -> None:
    load = shared_system_prompt(ids_from, num_requests=12, prefix_len=512, tail_len=20, output_tokens=80)
    private = measure(run_virtually(SMALL, load))
    assert private.prompt_tokens_computed == private.prompt_tokens == 12 * 532
    assert private.hit_rate == 0
    shared = measure(run_virtually(replace(SMALL, blocks=SharedBlocks), load))
    assert shared.prompt_tokens_computed == 512 + 12 * 20  # the prefix once: 32 full blocks are found eleven times
    assert shared.hit_rate == 11 * 512 / (12 * 532)
    assert shared.peak_used_blocks < private.peak_used_blocks / 3


@pytest.mark.parametrize("swap_blocks", [0, 64])
def test_a_preemption_computes_again_and_a_swap_does_not(swap_blocks: int) -> None:
    config = EngineConfig(
        scheduler=PhaseSplitScheduler,
        num_blocks=13,
        max_model_len=128,
        max_num_batched_tokens=128,
        watermark=0.0,
        preemption_mode="swap" if swap_blocks else "recompute",
        num_swap_blocks=swap_blocks,
    )
    load = shared_system_prompt(ids_from, num_requests=2, prefix_len=40, tail_len=10, output_tokens=60)
    records = run_virtually(config, load)
    assert any(record.preempted for record in records)
    assert any(span.activity is Activity.PREEMPTED for span in spans(records))
    metrics = measure(records)
    if swap_blocks:
        assert metrics.prompt_tokens_computed == metrics.prompt_tokens
    else:
        assert metrics.prompt_tokens_computed > metrics.prompt_tokens


# --- Workloads


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


@pytest.mark.parametrize("build", [long_prompt_among_decodes, shared_system_prompt])
@pytest.mark.parametrize("source", [ids_from, story_tokens(words)], ids=["random", "stories"])
def test_every_workload_is_its_seeds(build, source) -> None:
    assert build(source, seed=3) == build(source, seed=3)
    assert build(source, seed=3) != build(source, seed=4)


def test_every_story_is_its_seeds() -> None:
    assert story(random.Random(5)) == story(random.Random(5)) != story(random.Random(6))
    assert "{" not in story(random.Random(5))


def test_lengths_and_prefixes_are_exactly_those_asked_for() -> None:
    load = shared_system_prompt(story_tokens(words), num_requests=5, prefix_len=100, tail_len=7, output_tokens=3)
    prompts = [a.prompt_token_ids for a in load.arrivals]
    assert {len(prompt) for prompt in prompts} == {107}
    assert len({tuple(prompt[:100]) for prompt in prompts}) == 1
    assert load.longest == 110
    assert load.num_output_tokens == 15


def test_long_prompts_land_when_every_stream_has_come_so_far() -> None:
    load = long_prompt_among_decodes(
        ids_from, num_streams=3, stream_tokens=60, num_long=2, long_prompt_len=500, long_tokens=4
    )
    records = run_virtually(SMALL, load)
    emitted = dict.fromkeys(load.groups, 0)
    landed = {}
    for record in records:
        for r in record.arrivals:
            landed[r.id] = min(emitted[name] for name, group in load.groups.items() if group == "stream")
        for request_id, tokens in record.sampled.items():
            emitted[request_id] += len(tokens)
    assert landed["long-0"] == 5
    assert landed["long-1"] == 22


@pytest.mark.parametrize(
    ("after", "complaint"),
    [(Progress("a", 9), "waits for 9 tokens of every 'a' request, but one emits 8"), (Progress("x", 1), "one emits 0")],
)
def test_an_arrival_that_could_never_be_due_is_refused(after: Progress, complaint: str) -> None:
    arrivals = [
        Arrival(id="0", group="a", prompt_token_ids=[1], max_tokens=8),
        Arrival(id="1", group="b", prompt_token_ids=[1], max_tokens=8, after=after),
    ]
    with pytest.raises(ValueError, match=complaint):
        Workload(name="w", claim="", watched="a", headlines=(), seed=0, parameters={}, arrivals=arrivals)


def test_a_request_that_ends_early_stops_the_load() -> None:
    load = shared_system_prompt(ids_from, num_requests=1, prefix_len=1020, tail_len=10, output_tokens=4)
    with pytest.raises(RuntimeError, match=r"session-0 ended \(length\) after 0 of 4 tokens"):
        run_virtually(SMALL, load)


def test_a_timed_arrival_counts_from_when_it_was_due() -> None:
    arrivals = [
        Arrival(id="busy", group="a", prompt_token_ids=[1, 2], max_tokens=3),
        Arrival(id="timed", group="a", prompt_token_ids=[1, 2], max_tokens=1, at_s=0.015),
        Arrival(id="late", group="a", prompt_token_ids=[1, 2], max_tokens=1, at_s=5.0),
    ]
    load = Workload(name="w", claim="", watched="a", headlines=(), seed=0, parameters={}, arrivals=arrivals)
    requests = request_times(run_virtually(SMALL, load))
    assert requests["timed"].ttft_s == pytest.approx(0.015)  # due within step 2, served by step 3
    assert requests["late"].arrival_s == 5.0
    assert requests["late"].ttft_s == pytest.approx(0.01)


def test_steps_that_overlap_are_not_counted_twice():
    """One step ahead, step 2 is decided while step 1 still runs."""
    records = [
        StepRecord(step=1, start_s=0.0, launched_s=0.0, end_s=4.0, num_scheduled_tokens={"a": 1}),
        StepRecord(step=2, start_s=1.0, launched_s=1.0, end_s=6.0, num_scheduled_tokens={"a": 1}),
        StepRecord(step=3, start_s=7.0, launched_s=7.0, end_s=9.0, num_scheduled_tokens={"a": 1}),
    ]
    assert step_times(records) == [4.0, 2.0, 2.0]
