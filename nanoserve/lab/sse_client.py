"""A small HTTP/1.1 client on asyncio's streams, for servers that answer with events. Needs no package.

One connection a request, so that hundreds of streams share nothing but the event loop. Follows no redirect and
knows no proxy: what is asked for one address never goes to another. Waits as long as the caller lets it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

READ_BYTES = 1 << 16
MAX_LINE = 1 << 16  # of a chunk's header
MAX_BODY = 1 << 22  # of an answer that is read whole


class HttpError(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {body[:500].decode(errors='replace')}")
        self.status = status


class BrokenStreamError(ConnectionError):
    """The connection ended before the answer did."""


class ProtocolError(ValueError):
    """What came is not HTTP/1.1."""


@dataclass(frozen=True, slots=True)
class Address:
    """A server, and the path that its API begins with."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Of http[s]://HOST[:PORT][/PREFIX]; a last /v1 is dropped. Raises ValueError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{url!r} is not a URL ({error}); write it like http://127.0.0.1:8000.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not the URL of a server; write it like http://127.0.0.1:8000.")
        if parts.username is not None:
            raise ValueError("the URL holds a user name; a key goes into --api-key, or NANOSERVE_API_KEY.")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class ChunkedBody:
    """`Transfer-Encoding: chunked`, fed in pieces of any size. Trailers are not read."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._chunk_end: int | None = None  # in the buffer, with the line end behind the chunk; None: at its header
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """What has become whole. Raises ProtocolError."""
        self._buffer += data
        out = bytearray()
        while not self.done and (self._chunk_end is not None or self._read_header()):
            if self._chunk_end is None or len(self._buffer) < self._chunk_end:
                break
            out += self._buffer[: self._chunk_end - 2]
            del self._buffer[: self._chunk_end]
            self._chunk_end = None
        return bytes(out)

    def _read_header(self) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > MAX_LINE:
                raise ProtocolError("a chunk of the answer has no header.")
            return False
        header = bytes(self._buffer[:end]).split(b";")[0].strip()
        del self._buffer[: end + 2]
        try:
            size = int(header, 16)
        except ValueError:
            raise ProtocolError(f"{header[:40]!r} is not the size of a chunk.") from None
        self.done = size == 0
        self._chunk_end = None if self.done else size + 2
        return not self.done


class EventParser:
    """Server-sent events, fed in pieces of any size; only their `data` is kept."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that has become whole."""
        self._buffer += data
        events: list[bytes] = []
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(bytes(line[5:]).removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events


async def post_events(
    address: Address, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> AsyncGenerator[bytes]:
    """The data of each event of the answer, as it comes.

    Raises OSError when there is no connection, HttpError for another answer than 200, BrokenStreamError, ProtocolError.
    """
    parser = EventParser()
    async with _answer(address, "POST", path, headers or {}, body) as parts:
        async for part in parts:
            for event in parser.feed(part):
                yield event


async def get(address: Address, path: str, headers: Mapping[str, str] | None = None) -> bytes:
    """The body of the answer; raises as `post_events`."""
    async with _answer(address, "GET", path, headers or {}) as parts:
        return await _whole(parts)


@asynccontextmanager
async def _answer(
    address: Address, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> AsyncGenerator[AsyncGenerator[bytes]]:
    """The parts of a 200's body."""
    context = ssl.create_default_context() if address.tls else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context, limit=READ_BYTES)
    try:
        writer.write(_request(address, method, path, headers, body) + body)
        await writer.drain()
        status, fields = await _read_head(reader)
        async with aclosing(_body(reader, fields)) as parts:
            if status != 200:
                raise HttpError(status, await _whole(parts))
            yield parts
    except (ConnectionResetError, BrokenPipeError, asyncio.IncompleteReadError) as error:
        raise BrokenStreamError("the connection ended before the answer did.") from error
    finally:
        writer.transport.abort()  # at once, also when the caller has lost patience


def _request(address: Address, method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    fields = {
        "Host": address.authority,
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **headers,
    }
    lines = [f"{method} {address.prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The status, and the header fields by their names in lower case."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise ProtocolError("the header of the answer has no end.") from None
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    words = first.split(None, 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise ProtocolError(f"{first[:40]!r} is not the first line of an HTTP/1.1 answer.")
    fields = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip()
    return int(words[1]), fields


async def _body(reader: asyncio.StreamReader, fields: Mapping[str, str]) -> AsyncGenerator[bytes]:
    if fields.get("transfer-encoding", "").lower() == "chunked":
        chunked = ChunkedBody()
        while not chunked.done:
            if not (data := await reader.read(READ_BYTES)):
                raise BrokenStreamError("the connection ended in the middle of the answer.")
            if part := chunked.feed(data):
                yield part
        return
    length = fields.get("content-length", "")
    left = int(length) if length.isdigit() else None  # None: until the connection ends
    while left != 0 and (data := await reader.read(READ_BYTES)):
        left = None if left is None else left - len(data)
        yield data
    if left:
        raise BrokenStreamError(f"the connection ended {left} bytes before the answer did.")


async def _whole(parts: AsyncGenerator[bytes]) -> bytes:
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > MAX_BODY:
            raise ProtocolError(f"the answer is longer than {MAX_BODY} bytes.")
    return bytes(body)
