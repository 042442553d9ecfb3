"""A load of streamed completions, all at once, from a process of its own that yields to everybody else.

    python stream_load.py URL BODIES.json ANSWERS.json

BODIES: a list of request bodies. ANSWERS: {"answers": [{text, events, finish_reason, completion_tokens, ttft_s}, or
{error}], "wall_s", "cpu_s"}, in the same order.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from nanoserve.lab.sse_client import Address, post_events

NICENESS = 10
LIMIT_S = 600.0


async def stream(address: Address, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    start_s = time.monotonic()
    answer: dict[str, Any] = {"text": "", "events": 0, "finish_reason": None, "completion_tokens": None}
    try:
        last = b""
        async for last in post_events(address, "/v1/completions", data):
            if last == b"[DONE]":
                continue
            answer["events"] += 1
            chunk = json.loads(last)
            answer["completion_tokens"] = chunk["usage"] and chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                answer.setdefault("ttft_s", time.monotonic() - start_s)
                answer["text"] += choice["text"]
                answer["finish_reason"] = choice["finish_reason"]
        return answer if last == b"[DONE]" else {"error": f"the stream ended with {last[:500]!r}"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


async def load(address: Address, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.gather(*(stream(address, body) for body in bodies))


def main(url: str, bodies: str, answers: str) -> None:
    os.nice(NICENESS)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    found = asyncio.run(load(Address.parse(url), json.loads(Path(bodies).read_text())))
    wall_s, cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
    Path(answers).write_text(json.dumps({"answers": found, "wall_s": wall_s, "cpu_s": cpu_s}))


if __name__ == "__main__":
    main(*sys.argv[1:])
