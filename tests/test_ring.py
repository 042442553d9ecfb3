"""Laws of the shared-memory channel."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from nanoserve.ring import PeerGoneError, RingChannel


@pytest.fixture
def ends():
    ours, fds = RingChannel.create(capacity=1000)
    theirs = RingChannel.from_fds(*fds)
    yield ours, theirs
    ours.close(), theirs.close()


def test_messages_of_any_length_arrive_whole_and_in_order(ends):
    ours, theirs = ends
    rng = random.Random(0)
    sizes = [0, 1, 7, 8, 991, 992, 993, 999, 1000, 1001, 5000]
    messages = [os.urandom(rng.choice(sizes)) for _ in range(300)]
    writer = threading.Thread(target=lambda: [ours.send(m) for m in messages])
    writer.start()
    assert [theirs.recv(30) for _ in messages] == messages
    writer.join(30)
    assert not writer.is_alive()


def test_both_directions_are_independent(ends):
    ours, theirs = ends
    ours.send(b"plan")
    theirs.send(b"early")
    assert ours.recv(5) == b"early"
    assert theirs.recv(5) == b"plan"


def test_a_silent_peer_is_a_timeout(ends):
    with pytest.raises(TimeoutError):
        ends[0].recv(0.01)


def test_what_was_sent_before_a_death_is_still_read(ends):
    ours, theirs = ends
    theirs.send(b"last words")
    theirs.close()
    assert ours.recv(5) == b"last words"
    with pytest.raises(PeerGoneError):
        ours.recv(5)


def test_a_dead_peer_ends_a_full_ring(ends):
    ours, theirs = ends
    error: list[BaseException] = []

    def fill() -> None:
        try:
            ours.send(b"x" * 10_000)
        except PeerGoneError as gone:
            error.append(gone)

    writer = threading.Thread(target=fill)
    writer.start()
    theirs.close()
    writer.join(30)
    assert not writer.is_alive()
    assert error


def test_close_is_idempotent_and_leaves_no_name_behind():
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    ours, fds = RingChannel.create()
    theirs = RingChannel.from_fds(*fds)
    if before:
        assert set(Path("/dev/shm").iterdir()) - before == set()
    ours.close(), ours.close(), theirs.close()
