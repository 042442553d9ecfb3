"""The embedded model, from outside: how long `nanoserve serve` takes to be ready, and how fast `nanoserve generate` is.

Ready: from the process's start to the first answer of 200 to /health. Tokens a second: of one greedy answer; ours from
what comes out of the command's pipe, the first token to the last; transformers' over the whole call of `generate`, one
prompt of 16 tokens included, in a process that has done it before. They take turns, and have two cores: ours as it
starts by itself (a thread for a step, and what else it does on the other core), transformers' with two threads. Or they
have one thread for a step each.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from pathlib import Path

from line import Line, median_ratio
from peers.loads import make_load
from peers.peer import Peer
from server import COMMAND, environment, serving

from nanoserve.checkpoint import resolve_model_dir
from nanoserve.config import DEFAULT_MODEL

READY_S, TIMES_FASTER, NUM_CORES = 3.0, 5.0, 2
PROMPT = "Once upon a time"


def measure_start(rounds: int) -> list[Line]:
    times_s = [seconds_to_ready() for _ in range(1 + rounds)][1:]  # the first one fills caches
    detail = {"rounds_s": times_s}
    return [Line("nanoserve serve, nanostory: ready", statistics.median(times_s), "s", "<", READY_S, detail)]


def seconds_to_ready() -> float:
    with serving() as (_, ready_s):
        return ready_s


def tokens_per_s(threads: int | None, num_tokens: int) -> float:
    """None: as it starts by itself."""
    command = [*COMMAND, "generate", PROMPT, "--no-echo", "--ignore-eos", "--max-tokens", str(num_tokens)]
    command += ["--num-threads", str(threads)] if threads else []
    first_s = last_s = 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(threads)) as process:
        assert process.stdout is not None
        while os.read(process.stdout.fileno(), 2**16):
            last_s = time.perf_counter()
            first_s = first_s or last_s
    assert process.returncode == 0, f"{command} ended with {process.returncode}"
    return (num_tokens - 1) / (last_s - first_s)


def measure_generate(rounds: int, venvs: Path, threads: int | None) -> list[Line]:
    num_tokens = make_load("one", 1000).num_tokens[0]
    folder = resolve_model_dir(DEFAULT_MODEL)
    ours, theirs = [], []
    peer = Peer("transformers", venvs, folder, vocab_size=1000, threads=threads or NUM_CORES)
    try:
        peer.run("one")
        tokens_per_s(threads, num_tokens)
        for _ in range(rounds):
            ours.append(tokens_per_s(threads, num_tokens))
            theirs.append(num_tokens / peer.run("one")["seconds"])
    finally:
        peer.close()
    with_what = "1 thread for a step" if threads else f"{NUM_CORES} cores"
    what = f"nanoserve generate, nanostory, one row of {num_tokens} tokens, {with_what}"
    medians = {"nanoserve": statistics.median(ours), "transformers": statistics.median(theirs)}
    detail = {"tok_per_s": medians, "peer": peer.about, "rounds": {"nanoserve": ours, "transformers": theirs}}
    ratio = median_ratio(ours, theirs)
    return [Line(f"{what}: times transformers' tokens a second", ratio, "x", ">=", TIMES_FASTER, detail)]
