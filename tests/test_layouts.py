"""Laws of the three layouts: the same tokens, the same refusals, the same ends, wherever the parts live."""

from __future__ import annotations

import threading

import pytest
from faulty import SlowRunner, children_of, collect, config_of, is_alive, request, wait_until

from nanoserve import messages
from nanoserve.blocks import PrivateBlocks, SharedBlocks
from nanoserve.client import EngineDeadError, InProcessClient
from nanoserve.config import SEAMS
from nanoserve.lab.fakes import reference_tokens
from nanoserve.record import JsonlRecorder
from nanoserve.scheduler import PhaseSplitScheduler, UnifiedScheduler

LAYOUTS = list(SEAMS["client"].values())
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@every_layout
def test_every_layout_emits_the_reference_tokens(layout):
    for scheduler, blocks in ((PhaseSplitScheduler, PrivateBlocks), (UnifiedScheduler, SharedBlocks)):
        with layout(config_of(scheduler=scheduler, blocks=blocks, max_num_seqs=4)) as client:
            requests = [request(f"r{i % 3}-{i}", num_prompt=17 + 7 * i) for i in range(8)]
            for r in requests:
                client.submit(r)
            tokens, ends = collect(client, len(requests))
        assert set(ends.values()) == {"length"}
        for r in requests:
            assert tokens[r.id] == reference_tokens(r.prompt_token_ids, 10), r.id


@every_layout
def test_close_leaves_nothing_behind_and_is_idempotent(layout):
    client = layout(config_of(SlowRunner))
    client.submit(request("a", max_tokens=500))
    client.poll(5)
    pids = [client._child.pid, *children_of(client._child.pid)] if layout is not InProcessClient else []
    client.close()
    client.close()
    wait_until(lambda: not any(map(is_alive, pids)), 5, f"children {pids} are gone")
    with pytest.raises(EngineDeadError):
        client.submit(request("b"))
    with pytest.raises(EngineDeadError):
        client.poll(0)


@every_layout
def test_an_abort_ends_a_request_once_and_gives_its_blocks_back(layout):
    with layout(config_of(SlowRunner)) as client:
        client.submit(request("a", max_tokens=900))
        client.submit(request("b", max_tokens=20))
        while not client.poll(5):
            pass
        client.abort(["a", "unknown"])
        client.abort(["a"])
        tokens, ends = collect(client, 2)
        assert ends == {"a": "abort", "b": "length"}
        assert tokens["b"] == reference_tokens(request("b").prompt_token_ids, 20)[-len(tokens["b"]) :]
        assert client.stats.num_running == 0
        assert client.stats.kv_cache_usage == 0


@every_layout
def test_a_live_id_is_refused_and_the_first_continues(layout):
    with layout(config_of(SlowRunner)) as client:
        client.submit(request("a"))
        with pytest.raises(ValueError, match="'a' is in use"):
            client.submit(request("a"))
        _, ends = collect(client, 1)
        assert ends == {"a": "length"}
        client.submit(request("a"))  # free again
        assert collect(client, 1)[1] == {"a": "length"}


@every_layout
def test_a_number_of_more_than_64_bits_is_refused_at_the_edge(layout):
    with layout(config_of()) as client:
        with pytest.raises(ValueError, match="64 bits"):
            client.submit(request("a", priority=2**70))
        client.submit(request("a"))
        assert collect(client, 1)[1] == {"a": "length"}


@every_layout
def test_a_utility_that_raises_is_its_callers_error_and_the_core_serves_on(layout):
    with layout(config_of(SlowRunner, blocks=SharedBlocks)) as client:
        with pytest.raises(RuntimeError, match="utility 'nonsense' is not known"):
            client.call("nonsense")
        client.submit(request("a", max_tokens=30))
        while not client.poll(5):
            pass
        assert client.call("reset_prefix_cache") is False  # in use
        assert collect(client, 1)[1] == {"a": "length"}
        assert client.call("reset_prefix_cache") is True


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_utility_call_works_while_another_thread_polls(layout):
    with layout(config_of(SlowRunner)) as client:
        client.submit(request("a", max_tokens=100))
        got = []
        poller = threading.Thread(target=lambda: got.append(collect(client, 1)))
        poller.start()
        for _ in range(5):
            assert client.call("reset_prefix_cache") in (True, False)
        poller.join(30)
        assert not poller.is_alive()
        tokens, _ = got[0]
        assert tokens["a"] == reference_tokens(request("a").prompt_token_ids, 100)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_an_unknown_or_malformed_message_is_ignored(layout):
    with layout(config_of()) as client:
        client._send(b"\x77", b"what?")
        client._send(messages.ADD, b"\xc1")
        client.submit(request("a"))
        assert collect(client, 1)[1] == {"a": "length"}


@every_layout
def test_an_idle_poll_waits_and_returns_nothing(layout):
    with layout(config_of()) as client:
        assert client.poll(0.01) == []


@every_layout
def test_a_slow_consumer_loses_nothing(layout):
    with layout(config_of()) as client:
        requests = [request(f"r{i}", max_tokens=200) for i in range(5)]
        for r in requests:
            client.submit(r)
        if layout is not InProcessClient:  # the core runs ahead while nobody polls
            wait_until(lambda: client._output.poll(100) > 0, 20, "outputs pile up")
        tokens, _ = collect(client, 5)
    for r in requests:
        assert tokens[r.id] == reference_tokens(r.prompt_token_ids, 200)


@every_layout
def test_every_layout_records_the_same_decisions(layout, tmp_path):
    path = tmp_path / "trace.jsonl"
    with layout(config_of(), JsonlRecorder(path)) as client:
        client.submit(request("a", num_prompt=600))
        collect(client, 1)
    lines = path.read_text().splitlines()
    assert '"version"' in lines[0]
    assert len(lines) == 1 + 2 + 9  # two chunks of a 600-token prompt, then nine decodes
    assert '"arrivals"' in lines[1]
