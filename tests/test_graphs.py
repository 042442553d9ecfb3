"""Laws of dispatch: every step gets the smallest graph that holds it, or none; the dispatcher alone decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.graphs import (
    Dispatcher,
    GraphKey,
    GraphMode,
    GraphSupport,
    default_sizes,
    given_sizes,
    supported,
)

WHOLE, PIECES = GraphMode.FULL, GraphMode.PIECEWISE


def test_the_default_sizes_are_those_of_vllm():
    sizes = default_sizes(256, 8192)
    assert len(sizes) == 51
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[-1] == 512
    assert default_sizes(8, 8192) == (1, 2, 4, 8, 16)
    assert default_sizes(5, 512) == (1, 2, 4, 5, 8)
    assert default_sizes(128, 256)[-1] == 256
    assert default_sizes(4, 4) == (1, 2, 4)
    assert default_sizes(1000, 8192)[-1] == 512  # more seats than the largest: they are not a size


@pytest.mark.parametrize(
    ("num_tokens", "size"),
    [(3, 4), (9, 16), (100, 104), (250, 256), (257, 272), (264, 272), (500, 512), (513, None)],
)
def test_every_step_is_padded_to_the_next_of_51_sizes(num_tokens, size):
    sizes = default_sizes(256, 8192)
    for mode in (GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE):
        key = Dispatcher(mode, sizes, 256).dispatch(num_tokens, is_uniform=False)
        assert key == (GraphKey(PIECES, size) if size else None)
    key = Dispatcher(GraphMode.FULL, sizes, 256).dispatch(num_tokens, is_uniform=True)
    assert key == (GraphKey(WHOLE, size) if size else None)
    if num_tokens <= 256:
        key = Dispatcher(GraphMode.FULL_DECODE_ONLY, sizes, 256).dispatch(num_tokens, is_uniform=True)
        assert key == GraphKey(WHOLE, size or 0, is_uniform=True)


MODES = {
    GraphMode.NONE: (None, None),
    GraphMode.PIECEWISE: (GraphKey(PIECES, 8), GraphKey(PIECES, 8)),
    GraphMode.FULL: (GraphKey(WHOLE, 8), GraphKey(WHOLE, 8)),
    GraphMode.FULL_DECODE_ONLY: (GraphKey(WHOLE, 8, is_uniform=True), None),
    GraphMode.FULL_AND_PIECEWISE: (GraphKey(WHOLE, 8, is_uniform=True), GraphKey(PIECES, 8)),
}


@pytest.mark.parametrize("mode", GraphMode)
def test_every_mode_has_its_graphs(mode):
    dispatcher = Dispatcher(mode, (1, 2, 4, 8, 16), 8)
    decode, mixed = MODES[mode]
    assert dispatcher.dispatch(5, is_uniform=True) == decode
    assert dispatcher.dispatch(5, is_uniform=False) == mixed
    assert dispatcher.dispatch(17, is_uniform=False) is None


@given(
    mode=st.sampled_from(GraphMode),
    sizes=st.lists(st.integers(1, 600), min_size=1),
    max_num_seqs=st.integers(1, 300),
    num_tokens=st.integers(1, 700),
    is_uniform=st.booleans(),
)
def test_every_dispatch_is_the_smallest_graph_that_exists_and_fits(mode, sizes, max_num_seqs, num_tokens, is_uniform):
    dispatcher = Dispatcher(mode, sizes, max_num_seqs)
    if is_uniform:
        num_tokens = min(num_tokens, max_num_seqs)  # a decode has a seat for each of its rows
    key = dispatcher.dispatch(num_tokens, is_uniform)
    fitting = [k for k in dispatcher.keys if k.size >= num_tokens and k.is_uniform <= is_uniform]
    captured = mode is not GraphMode.NONE and (is_uniform or mode is not GraphMode.FULL_DECODE_ONLY)
    if not captured or num_tokens > max(sizes):
        assert key is None
    else:
        assert key is not None, "a graph fits, and none was dispatched"
        assert key in dispatcher.keys
        assert key.size == min(k.size for k in fitting)
        whole = [k for k in fitting if k.size == key.size and k.mode is WHOLE]
        assert (key.mode is WHOLE) == bool(whole), "the whole pass is replayed wherever it was captured"


@given(st.sampled_from(GraphMode), st.lists(st.integers(1, 600), min_size=1), st.integers(1, 300))
def test_every_capture_goes_from_large_to_small(mode, sizes, max_num_seqs):
    captured = [key.size for key in Dispatcher(mode, sizes, max_num_seqs).keys]
    assert captured == sorted(captured, reverse=True)


def test_every_mode_is_downgraded_to_what_the_attention_backend_can_do():
    never, decode, always = GraphSupport.NEVER, GraphSupport.UNIFORM_DECODE, GraphSupport.ALWAYS
    assert all(supported(mode, always) is mode for mode in GraphMode)
    assert supported(GraphMode.FULL, decode) is GraphMode.FULL_AND_PIECEWISE
    assert all(supported(mode, decode) is mode for mode in GraphMode if mode is not GraphMode.FULL)
    assert supported(GraphMode.FULL, never) is GraphMode.PIECEWISE
    assert supported(GraphMode.FULL_AND_PIECEWISE, never) is GraphMode.PIECEWISE
    assert supported(GraphMode.FULL_DECODE_ONLY, never) is GraphMode.NONE


def test_a_list_of_sizes_is_sorted_without_repeats_or_what_no_step_has():
    assert given_sizes([8, 2, 8, 600, 1], 512) == (1, 2, 8)
    with pytest.raises(ValueError, match=r"graph_sizes=\[600\] holds no size from 1 to max_num_batched_tokens=512"):
        given_sizes([600], 512)
