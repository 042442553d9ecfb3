"""Laws of what benchmarks make of their figures: a promise holds or not, neighbours are compared with each other, and
a floor lies between the products that were measured."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "peers"))

import compare
import floor
import line_costs
import lines
from line import Line, median_ratio, table

from nanoserve.record import StepRecord


@pytest.mark.parametrize(
    ("relation", "found", "holds"),
    [("<=", 1.25, True), ("<=", 1.251, False), ("<", 3.0, False), (">=", 5.0, True), (">=", 4.99, False)],
)
def test_every_line_holds_exactly_within_its_limit(relation, found, holds):
    line = Line("a ratio", found, "x", relation, {"<": 3.0, "<=": 1.25, ">=": 5.0}[relation])
    assert line.holds is holds
    assert table("lines", [line]).splitlines()[-1].endswith("| yes |" if holds else "| NO |")


def test_every_figure_without_a_limit_promises_nothing():
    line = Line("a share", 0.034, "%")
    assert line.holds is None
    assert line.cells == ["a share", "3.40%", "", ""]


def test_every_ratio_is_of_neighbours():
    slow_rounds = [2.0, 20.0, 2.0]  # the machine was busy in the second one, for both
    assert median_ratio([2.2, 22.0, 2.2], slow_rounds) == pytest.approx(1.1)
    with pytest.raises(ValueError, match="longer"):
        median_ratio([1.0], slow_rounds)


def test_every_round_has_every_form_and_another_order_than_the_one_before():
    forms = ["a", "b", "c"]
    orders = [line_costs.in_order(forms, number) for number in range(6)]
    assert all(sorted(order) == forms for order in orders)
    assert all(before != after for before, after in pairwise(orders))
    assert {order[0] for order in orders} == set(forms)


@pytest.fixture
def a_floor(monkeypatch):
    """Of a model whose fastest products take a millisecond a row, as do those of a row that samples, and whose token of
    keys and values takes 0.1 ms."""
    forms = {"slow": 2.0, "fast": 1.0}
    monkeypatch.setattr(floor, "Products", lambda _: SimpleNamespace(forms=lambda rows: rows))
    monkeypatch.setattr(floor, "take_turns", lambda rows, _: {name: rows * ms for name, ms in forms.items()})
    monkeypatch.setattr(floor, "matrices", lambda _: [])
    monkeypatch.setattr(floor, "last_matrices", lambda _: [])
    config = SimpleNamespace(kv_bytes_per_token=lambda _: 1e5)
    return floor.Floor(SimpleNamespace(config=config), floor.Rates(100.0, 1.0), 1)


@pytest.mark.parametrize("rows", [1, 3, 24, 100, 512])
def test_every_floor_lies_between_its_neighbours(a_floor, rows):
    assert a_floor.of_rows(rows, 0) == pytest.approx(rows)
    assert a_floor.of_rows(512, rows) == pytest.approx(512 + rows)


def test_every_step_reads_the_keys_that_its_rows_have_by_then(a_floor):
    def record(step: int, counts: dict[str, int], hits: dict[str, int], sampled: str) -> StepRecord:
        times = {"start_s": 0.0, "launched_s": 0.0, "end_s": 0.0}
        ids = {request_id: [7] for request_id in sampled}
        return StepRecord(step=step, num_scheduled_tokens=counts, hit_tokens=hits, sampled=ids, **times)

    steps = [
        record(1, {"a": 10}, {"a": 0}, "a"),
        record(2, {"a": 1, "b": 4}, {"b": 16}, "a"),
        record(3, {}, {}, ""),
        record(4, {"b": 1}, {}, "b"),
    ]
    expected = [10 + 1 + 1.0, 5 + 1 + 0.1 * (11 + 20), 0, 1 + 1 + 0.1 * 21]
    assert a_floor.of_steps(steps) == pytest.approx(expected)


def found(load: str, budget: int = 512, **seconds: list[float]) -> dict:
    rounds = [
        {name: {"seconds": all_s[i]} for name, all_s in seconds.items()}
        for i in range(len(next(iter(seconds.values()))))
    ]
    return {
        "limits": {load: {"budget": budget, "threads": 2}},
        "peers": {name: {"name": name, "version": "1"} for name in seconds},
        "requests_alike": {load: {"reference": "x", "requests": 2, **dict.fromkeys(seconds, 2)}},
        "rounds": {load: rounds},
    }


def test_every_run_joins_or_takes_the_place_of_the_rounds_of_its_own_load_and_peer():
    kept: dict = {}
    compare.merge(kept, found("w1", ours=[1.0, 2.0, 3.0], theirs=[4.0, 4.0, 5.0]), more=False)
    compare.merge(kept, found("w2", ours=[7.0]), more=False)
    compare.merge(kept, found("w1", ours=[9.0, 9.0]), more=True)
    assert kept["medians"]["w1"] == {"ours": {"seconds": 3.0}, "theirs": {"seconds": 4.0}}
    assert kept["medians"]["w2"] == {"ours": {"seconds": 7.0}}
    compare.merge(kept, found("w1", ours=[5.0]), more=False)
    assert kept["medians"]["w1"] == {"theirs": {"seconds": 4.0}, "ours": {"seconds": 5.0}}
    assert "| w1 | 512 | ours 1 | 1 |" in compare.table(kept)
    compare.merge(kept, found("w1", 4096, ours=[6.0]), more=True)  # rounds of other limits are no neighbours
    assert kept["medians"]["w1"] == {"ours": {"seconds": 6.0}}
    assert "| w1 | 4096 | ours 1 | 1 |" in compare.table(kept)
    assert kept["medians"]["w2"] == {"ours": {"seconds": 7.0}}


def test_every_count_of_tokens_alike_is_beside_the_reference_that_is_named():
    kept: dict = {}
    compare.merge(kept, found("w1", ours=[1.0], theirs=[1.0]), more=False)
    later = found("w1", ours=[1.0])
    compare.merge(kept, later, more=True)
    assert kept["requests_alike"]["w1"] == {"reference": "x", "requests": 2, "ours": 2, "theirs": 2}
    later["requests_alike"]["w1"] = {"reference": "y", "requests": 2, "ours": 1}
    compare.merge(kept, later, more=True)
    assert kept["requests_alike"]["w1"] == {"reference": "y", "requests": 2, "ours": 1}
    assert [row.split(" | ")[-1] for row in compare.table(kept).splitlines()[2:]] == ["1 of 2 |", " |"]


def test_every_peer_is_counted_beside_another_in_its_worst_round_or_not_at_all(tmp_path):
    (tmp_path / "qwen3-30m").mkdir()
    args = SimpleNamespace(cache=tmp_path)
    same, other = [[1, 2], [3]], [[1, 2], [4]]
    assert compare.agreement("30m", "w1", {"nanoserve": [same]}, args) == {"reference": None}
    beside = {"nanoserve": [same, other], "vllm": [same, same]}
    assert compare.agreement("30m", "w1", beside, args) == {"reference": "vllm", "requests": 2, "nanoserve": 1}
    now = compare.agreement("30m", "w1", {"transformers": [same], "nanoserve": [same]}, args)
    assert now == {"reference": "transformers", "requests": 2, "nanoserve": 2}
    later = compare.agreement("30m", "w1", {"nanoserve": [other]}, args)
    assert later == {"reference": "transformers", "requests": 2, "nanoserve": 1}


def run_compare(monkeypatch, tmp_path: Path, *more: str) -> list[str]:
    """The peers' turns of a run of the command, with peers that answer at once."""
    turns: list[str] = []

    class AtOnce:
        def __init__(self, name: str, *args: object) -> None:
            self.name, self.about = name, {"name": name, "version": "1", "streams": True}

        def run(self, load: str) -> dict:
            turns.append(self.name)
            return {"seconds": 1.0, "stamps": None, "tokens": [[1]]}

        def close(self) -> None:
            pass

    monkeypatch.setattr(compare, "Peer", AtOnce)
    monkeypatch.setattr(compare, "make_checkpoint", lambda shape, cache: tmp_path)
    words = ["--cache", str(tmp_path), "--venvs", str(tmp_path), "--out", str(tmp_path / "peers.json")]
    chosen = ["--models", "30m", "--loads", "w1", "--peers", "nanoserve", "vllm", "llama", *more]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words, *chosen])
    compare.main()
    return turns


def test_every_peer_begins_a_round_in_turn(monkeypatch, tmp_path):
    turns = run_compare(monkeypatch, tmp_path, "--rounds", "4")
    assert turns[::3] == ["nanoserve", "vllm", "llama", "nanoserve"]
    assert all(set(turns[i : i + 3]) == set(turns) for i in range(0, 12, 3))


@pytest.mark.parametrize("other", [("--budget", "4096"), ("--threads", "1")])
def test_rounds_of_other_limits_are_refused_before_anything_runs(other, monkeypatch, tmp_path, capsys):
    run_compare(monkeypatch, tmp_path, "--rounds", "1")
    kept = (tmp_path / "peers.json").read_text()
    with pytest.raises(SystemExit):
        run_compare(monkeypatch, tmp_path, "--rounds", "1", "--more", *other)
    assert "'budget': 512, 'threads': 2" in capsys.readouterr().err
    assert (tmp_path / "peers.json").read_text() == kept
    assert len(run_compare(monkeypatch, tmp_path, "--rounds", "1", "--more")) == 3


def test_a_line_beside_a_peer_is_of_the_rounds_in_which_both_took_turns(tmp_path):
    """The machine of one run is not that of the next."""
    kept: dict = {}
    compare.merge(kept, found("w1", nanoserve=[1.0, 1.0, 1.0]), more=False)
    compare.merge(kept, found("w1", nanoserve=[20.0, 30.0], vllm=[10.0, 10.0]), more=True)
    for a_round in kept["rounds"]["w1"]:
        for figures in a_round.values():
            figures["output_tok_per_s"] = figures["seconds"]
    path = tmp_path / "peers.json"
    path.write_text(json.dumps({"models": {"30m": kept}}))
    (line,) = lines.beside_peers(path)
    assert (line.found, line.holds, line.what.endswith("2 rounds")) == (2.5, True, True)


def test_a_planted_ratio_of_medians_is_seen():
    """What `median_ratio` is not: with a busy round on one side of the middle it says something else."""
    ours, theirs = [1.0, 10.0, 10.0], [1.0, 10.0, 1.0]
    assert median_ratio(ours, theirs) == 1.0
    assert sorted(ours)[1] / sorted(theirs)[1] == 10.0
