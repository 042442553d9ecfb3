"""The other end of compare.py: a runner reads names of loads, runs them on its engine, and answers with JSON lines.

Needs nothing but Python. Whatever an engine prints goes to stderr, so that answers stay alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TextIO

from loads import Ids, Load, Stamps, make_load

Generate = Callable[[Load], list[Ids]]
Stream = Callable[[Load], tuple[Stamps, list[Ids]]]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser()
    found.add_argument("--model", required=True)
    found.add_argument("--vocab-size", type=int, required=True)
    found.add_argument("--threads", type=int, required=True)
    found.add_argument("--budget", type=int, required=True, help="tokens a step")
    return found


def own_stdout() -> TextIO:
    """Where answers go; from now on, whatever else is printed goes to stderr. Before an engine is imported."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, about: dict[str, Any], vocab_size: int, generate: Generate, stream: Stream | None) -> None:
    """Until stdin ends. `generate` for loads that start all at once; `stream` for one with a late request, if the
    engine tells of tokens as they come."""

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    small = make_load("w1", vocab_size)
    generate(replace(small, prompts=small.prompts[:4], num_tokens=[4] * 4))
    answer(**about, streams=stream is not None)
    for line in sys.stdin:
        load = make_load(line.strip(), vocab_size)
        start_s = time.perf_counter()
        if load.late is None:
            tokens, stamps = generate(load), None
        else:
            assert stream is not None, "this engine does not tell of tokens as they come"
            stamps, tokens = stream(load)
        lasted_s = time.perf_counter() - start_s
        answer(seconds=lasted_s, tokens=tokens, stamps=stamps and [list(stamps.of.items()), stamps.late_at])
