"""What a notebook shows is the package's own source, aligned, readable without styles."""

from __future__ import annotations

import html
import inspect
import re

import pytest
from matplotlib.figure import Figure

from nanoserve.blocks import PrivateBlocks, SharedBlocks, V0CachedBlocks
from nanoserve.lab import show
from nanoserve.lab.show import show_diff, show_figure, show_source, source_of
from nanoserve.scheduler import PhaseSplitScheduler, UnifiedScheduler

PAIRS = [(PhaseSplitScheduler, UnifiedScheduler), (PrivateBlocks, SharedBlocks), (SharedBlocks, V0CachedBlocks)]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_every_line_of_both_sources_is_in_the_diff_once_and_in_order(left: type, right: type) -> None:
    diff = show_diff(left, right)
    for side, cls in (("left", left), ("right", right)):
        shown = [getattr(row, side) for row in diff.rows]
        assert [line for line in shown if line] == [line for line in source_of(cls).splitlines() if line]


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_every_mark_says_how_the_two_sides_differ(left: type, right: type) -> None:
    rows = show_diff(left, right).rows
    assert {row.mark for row in rows} > {" "}
    for row in rows:
        assert (row.mark == " ") == (row.left == row.right)
        assert row.mark != ">" or not row.left
        assert row.mark != "<" or not row.right


def test_every_word_is_in_the_html_and_in_the_plain_text() -> None:
    diff = show_diff(PhaseSplitScheduler, UnifiedScheduler, "schedule")
    page = html.unescape(re.sub(r"<[^>]*>", " ", diff._repr_html_()))
    expected = set(
        words(inspect.getsource(PhaseSplitScheduler.schedule) + inspect.getsource(UnifiedScheduler.schedule))
    )
    assert expected <= set(words(page))
    assert expected <= set(words(str(diff)))


def test_a_source_is_shown_whole_or_by_method() -> None:
    assert str(show_source(UnifiedScheduler)) == inspect.getsource(UnifiedScheduler).rstrip("\n")
    by_method = str(show_source(SharedBlocks, "lookup", "free"))
    assert by_method.startswith("class SharedBlocks:\n")
    for method in (SharedBlocks.lookup, SharedBlocks.free):
        assert inspect.getsource(method).rstrip("\n") in by_method
    assert "num_free_blocks" in str(show_source(PrivateBlocks, "num_free_blocks"))


def test_a_method_that_one_class_lacks_stands_alone() -> None:
    rows = show_diff(PrivateBlocks, SharedBlocks, "hash_block").rows
    assert {row.mark for row in rows} == {">"}


def test_bad_names_are_refused() -> None:
    with pytest.raises(ValueError, match="neither PrivateBlocks nor SharedBlocks defines 'look'"):
        show_diff(PrivateBlocks, SharedBlocks, "look")
    with pytest.raises(ValueError, match="does not define 'swap_out'"):
        show_source(SharedBlocks, "swap_out")
    with pytest.raises(ValueError, match="no Python source"):
        show_source(int)


def test_every_figure_is_a_small_png_with_its_title_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = Figure()
    figure.subplots().plot([1, 2])
    figure.suptitle("a title\nin two lines")
    image = show_figure(figure)
    assert image.data.startswith(b"\x89PNG")
    assert image.alt == "a title, in two lines"
    monkeypatch.setattr(show, "PNG_LIMIT", 100)
    with pytest.raises(ValueError, match="the limit is 100"):
        show_figure(figure)
