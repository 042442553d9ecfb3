"""The wire between a front end and an engine core: msgpack, one type byte and a payload. No pickle.

Owns encodings; knows no sockets. Requests travel whole, once; outputs are differences. An integer of more than 64
bits cannot be encoded and is refused where it is encoded: at the edge.
"""

from __future__ import annotations

from typing import Any

import msgspec

from nanoserve.request import EngineOutput, EngineRequest

# to the core: [type, payload]
ADD = b"\x00"  # EngineRequest
ABORT = b"\x01"  # list of ids
UTILITY = b"\x02"  # UtilityCall
# from the core: [type, payload], or [DEAD, reason]
OUTPUTS = b"\x10"  # CoreOutputs
DEAD = b"ENGINE_CORE_DEAD"


class UtilityCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of one of the core's utilities (`EngineCore.utilities`)."""

    call_id: int
    method: str
    args: list[Any]


class UtilityResult(msgspec.Struct, frozen=True, array_like=True):
    call_id: int
    value: Any = None
    error: str | None = None


class SchedulerStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine after a step. Counts of tokens and preemptions are totals since it was built."""

    num_running: int = 0
    num_waiting: int = 0  # swapped and preempted ones included
    kv_cache_usage: float = 0.0  # share of the pool, 0 to 1
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0


class CoreOutputs(msgspec.Struct, frozen=True, array_like=True):
    """What a core has to say after one or more steps."""

    outputs: list[EngineOutput]
    stats: SchedulerStats | None = None
    results: list[UtilityResult] = []


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode

_payloads: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
    ADD: msgspec.msgpack.Decoder(EngineRequest),
    ABORT: msgspec.msgpack.Decoder(list[str]),
    UTILITY: msgspec.msgpack.Decoder(UtilityCall),
    OUTPUTS: msgspec.msgpack.Decoder(CoreOutputs),
}


def decode(kind: bytes, payload: bytes) -> Any:
    """The payload of a message; None for a type byte that is not known here. msgspec.DecodeError if it is malformed."""
    decoder = _payloads.get(kind)
    return None if decoder is None else decoder.decode(payload)


def encode_request(request: EngineRequest) -> bytes:
    """ValueError, naming the request, if an integer in it has more than 64 bits."""
    try:
        return encode(request)
    except OverflowError:
        raise ValueError(f"request {request.id!r} holds an integer of more than 64 bits; use a smaller one.") from None
