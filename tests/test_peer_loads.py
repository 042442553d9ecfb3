"""Laws of the loads that engines are compared on: the same for everybody, driven the same way, gaps that are counted
where a late prompt could have caused them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "peers"))  # what runners elsewhere import it from

import loads


@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_every_load_is_the_same_each_time_and_as_its_name_says(name):
    load = loads.make_load(name, 500)
    assert load == loads.make_load(name, 500)
    assert len(load.prompts) == len(load.num_tokens) == {"w1": 32, "w2": 64, "w3": 8}[name]
    assert all(loads.FIRST_ID <= token < 500 for prompt in load.prompts for token in prompt)
    shared = {tuple(prompt[:1024]) for prompt in load.prompts}
    assert len(shared) == (1 if name == "w2" else len(load.prompts))
    assert (load.late is not None) == (name == "w3")


def test_every_request_is_added_once_and_the_late_one_when_all_have_enough_tokens():
    load = loads.Load([[1], [2]], [5, 6], late=([3] * 9, 2), after=3)
    got: dict[int, int] = {}
    added: list[tuple[int, int]] = []

    def add(i: int, prompt: list[int], count: int) -> None:
        added.append((i, min(got.values(), default=0)))
        got[i] = 0

    def step() -> dict[int, int]:
        for i in got:
            got[i] += 1
        return dict.fromkeys(got, 1)

    stamps = loads.run_steps(load, add, step)
    assert added == [(0, 0), (1, 0), (-1, 3)]
    assert {i: len(times) >= count for (i, times), count in zip(stamps.of.items(), (5, 6, 2), strict=True)} == {
        0: True,
        1: True,
        -1: True,
    }


def test_every_gap_is_counted_where_the_late_prompt_could_have_caused_it():
    streams = {0: [1.0, 1.1, 1.2, 1.9, 2.0], 1: [1.0, 1.1, 1.2, 1.6, 2.5]}
    found = loads.gaps(loads.Stamps({**streams, -1: [2.0, 9.0]}, late_at=1.3))
    assert {name: round(ms) for name, ms in found.items()} == {"decode_ms": 100, "max_gap_ms": 900, "late_ttft_ms": 700}
