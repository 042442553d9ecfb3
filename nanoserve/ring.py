"""A two-way byte channel between two processes: a shared-memory ring each way, woken by a socket, never spinning.

Owns the memory and the waking; knows nothing of what the messages mean. The memory is anonymous (a memfd, or an
unlinked file), so that no exit of any kind can leave a segment behind. vLLM's counterpart is
`vllm/distributed/device_communicators/shm_broadcast.py: MessageQueue`. Laws: tests/test_ring.py.

    memory   [ written | read | waiting | bytes ... ]   parent -> child
             [ written | read | waiting | bytes ... ]   child -> parent
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import tempfile
import time

HEADER_BYTES = 24  # three counters of 64 bits
LENGTH = struct.Struct("<Q")
DEFAULT_CAPACITY = 4 << 20
RECHECK_S = 0.05  # a full ring is looked at again this often, whatever the wake-ups


class PeerGoneError(ConnectionError):
    """The process at the other end is gone."""


class Ring:
    """One direction: one process writes, one reads. The counters only grow; their difference is what is unread."""

    def __init__(self, memory: memoryview) -> None:
        self._counters = memory[:HEADER_BYTES].cast("Q")
        self._bytes = memory[HEADER_BYTES:]
        self.capacity = len(self._bytes)

    @property
    def num_unread(self) -> int:
        return self._counters[0] - self._counters[1]

    @property
    def writer_waits(self) -> bool:
        return bool(self._counters[2])

    @writer_waits.setter
    def writer_waits(self, waits: bool) -> None:
        self._counters[2] = waits

    def put(self, data: memoryview) -> int:
        """Copy in as much as there is room for; returns how many bytes that was."""
        written = self._counters[0]
        n = min(len(data), self.capacity - (written - self._counters[1]))
        start = written % self.capacity
        first = min(n, self.capacity - start)
        self._bytes[start : start + first] = data[:first]
        self._bytes[: n - first] = data[first:n]
        self._counters[0] = written + n
        return n

    def take(self, out: memoryview) -> int:
        """Copy out as much as is there; returns how many bytes that was."""
        read = self._counters[1]
        n = min(len(out), self._counters[0] - read)
        start = read % self.capacity
        first = min(n, self.capacity - start)
        out[:first] = self._bytes[start : start + first]
        out[first:n] = self._bytes[: n - first]
        self._counters[1] = read + n
        return n

    def release(self) -> None:
        self._counters.release()
        self._bytes.release()


class RingChannel:
    """One end of the channel. Messages are bytes of any length (longer than a ring: in parts); order is kept.

    One thread sends and one thread receives at a time.
    """

    def __init__(self, memory_fd: int, wake: socket.socket, *, is_child: bool) -> None:
        size = os.fstat(memory_fd).st_size
        self._map = mmap.mmap(memory_fd, size)
        os.close(memory_fd)
        self._view = memoryview(self._map)
        half = size // 2
        rings = Ring(self._view[:half]), Ring(self._view[half:])
        self._out, self._in = reversed(rings) if is_child else rings
        self._wake = wake
        self._wake.setblocking(False)

    @classmethod
    def create(cls, capacity: int = DEFAULT_CAPACITY) -> tuple[RingChannel, tuple[int, int]]:
        """The parent's end, and the file descriptors (memory, wake) that the child makes its end of."""
        capacity += -capacity % 8  # so that the second ring's counters are aligned
        memory_fd = _anonymous_memory(2 * (HEADER_BYTES + capacity))
        ours, theirs = socket.socketpair()
        return cls(os.dup(memory_fd), ours, is_child=False), (memory_fd, theirs.detach())

    @classmethod
    def from_fds(cls, memory_fd: int, wake_fd: int) -> RingChannel:
        """The child's end."""
        return cls(memory_fd, socket.socket(fileno=wake_fd), is_child=True)

    def send(self, data: bytes) -> None:
        """Blocks only while the ring is full. PeerGoneError when nobody is left to read."""
        for part in (LENGTH.pack(len(data)), data):
            rest = memoryview(part)
            while rest:
                n = self._out.put(rest)
                rest = rest[n:]
                if rest:
                    self._wait_for_room()
        self._notify()

    def _wait_for_room(self) -> None:
        self._notify()
        self._out.writer_waits = True
        while self._out.num_unread == self._out.capacity:
            self._wait(RECHECK_S)
        self._out.writer_waits = False

    def recv(self, timeout: float | None = None) -> bytes:
        """The next message; TimeoutError after that many seconds, PeerGoneError when none can come any more."""
        deadline = None if timeout is None else time.monotonic() + timeout
        header = bytearray(LENGTH.size)
        self._fill(memoryview(header), deadline)
        message = bytearray(LENGTH.unpack(header)[0])
        self._fill(memoryview(message), deadline)
        return bytes(message)

    def _fill(self, out: memoryview, deadline: float | None) -> None:
        while out:
            if n := self._in.take(out):
                out = out[n:]
                if self._in.writer_waits:
                    self._notify()
                continue
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError("no message in time")
            gone = not self._wait(left, raise_gone=False)
            if gone and not self._in.num_unread:  # what it wrote before it went is still there to read
                raise PeerGoneError("the process at the other end is gone")

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of wake-ups: it will wake up
            try:
                self._wake.send(b"\0")
            except (BrokenPipeError, ConnectionResetError) as error:
                raise PeerGoneError("the process at the other end is gone") from error

    def _wait(self, timeout: float | None, raise_gone: bool = True) -> bool:
        """Sleep until woken or out of time; False when the peer is gone."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if not poller.poll(None if timeout is None else max(0.0, timeout) * 1000):
            return True
        try:
            alive = self._wake.recv(4096) != b""
        except ConnectionResetError:
            alive = False
        if not alive and raise_gone:
            raise PeerGoneError("the process at the other end is gone")
        return alive

    def close(self) -> None:
        """Idempotent; the peer sees it as our death."""
        if self._wake.fileno() == -1:
            return
        self._wake.close()
        self._out.release()
        self._in.release()
        self._view.release()
        self._map.close()


def _anonymous_memory(size: int) -> int:
    """A file descriptor of shared memory without a name."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("nanoserve-ring")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd
