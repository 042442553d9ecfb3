"""llama.cpp in one process through llama-cpp-python's low-level calls, float32 weights and cache.

llama.cpp decodes batches that it is given; what goes into them is decided here, as its own server does: a token of
everyone who decodes, then prompts in order as far as the budget goes. Where all prompts begin with the same tokens, the
first prompt is computed alone and the others begin with a copy of its cache, as the prefix cache of an engine would.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import llama_cpp as llama
import numpy as np
from loads import Ids, Load, Stamps, run_steps
from make_gguf import make_gguf
from serve import own_stdout, parser, serve

FLOAT32 = 0  # of a cache's type
NO_FLASH = 0  # its flash attention rounds to float16 on a CPU, and is not faster on a float32 cache


@dataclass
class Request:
    """A request, in the place of llama.cpp's cache that it was given."""

    name: int
    place: int
    to_compute: Ids
    num_tokens: int
    position: int = 0
    out: Ids = field(default_factory=list)


class Engine:
    """For one load: room for all of its requests at once, each in its own part of the cache unless they share."""

    def __init__(self, model: object, load: Load, num_threads: int, budget: int) -> None:
        late = [load.late] if load.late else []
        requests = [*zip(load.prompts, load.num_tokens, strict=True), *late]
        longest = max(len(prompt) + count for prompt, count in requests)
        self._shared = count_shared(load.prompts)
        params = llama.llama_context_default_params()
        params.n_seq_max = len(requests)
        params.n_ctx = -(-longest // 256) * 256 * len(requests)
        self._budget = params.n_batch = params.n_ubatch = budget
        params.n_threads = params.n_threads_batch = num_threads
        params.type_k = params.type_v = FLOAT32
        params.flash_attn_type = NO_FLASH
        params.kv_unified = self._shared > 0 or load.late is not None
        if params.kv_unified:  # one cache for all: as many cells as there are tokens
            params.n_ctx = -(-sum(len(prompt) + count for prompt, count in requests) // 256) * 256
        self._context = llama.llama_init_from_model(model, params)
        assert self._context, "no context: is there memory for the cache?"
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._batch = llama.llama_batch_init(budget, 0, 1)
        self._places = list(range(len(requests)))
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._head: int | None = None  # the place whose cache others copy
        self.tokens: dict[int, Ids] = {}

    def add(self, name: int, prompt: Ids, num_tokens: int) -> None:
        request = Request(name, self._places.pop(0), list(prompt), num_tokens)
        self.tokens[name] = request.out
        self._waiting.append(request)

    def step(self) -> dict[int, int]:
        """One call of llama_decode: how many tokens each request got."""
        size, ends = 0, []
        for request in self._running:
            size = self._put(size, request, request.out[-1:], ends)
        for request in list(self._waiting):
            self._copy_prefix(request)
            chunk = request.to_compute[: self._budget - size]
            del request.to_compute[: len(chunk)]
            size = self._put(size, request, chunk, ends)
            if request.to_compute:
                break
            self._waiting.remove(request)
            self._running.append(request)
            if self._shared and self._head is None:
                break  # the others wait for its cache
        self._batch.n_tokens = size
        assert llama.llama_decode(self._context, self._batch) == 0, "llama_decode failed"
        for row, request in ends:
            logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, row), (self._vocab_size,))
            request.out.append(int(logits.argmax()))
            if self._shared and self._head is None:
                self._head = request.place
            if len(request.out) == request.num_tokens:
                self._running.remove(request)
                if request.place != self._head:
                    self._forget(request.place)
        return {request.name: 1 for _, request in ends}

    def _put(self, size: int, request: Request, ids: Ids, ends: list[tuple[int, Request]]) -> int:
        batch = self._batch
        for token_id in ids:
            batch.token[size], batch.pos[size], batch.n_seq_id[size] = token_id, request.position, 1
            batch.seq_id[size][0], batch.logits[size] = request.place, 0
            request.position += 1
            size += 1
        if ids and not request.to_compute:
            batch.logits[size - 1] = 1
            ends.append((size - 1, request))
        return size

    def _copy_prefix(self, request: Request) -> None:
        if self._head is not None and request.position == 0:
            llama.llama_memory_seq_cp(self._memory, self._head, request.place, 0, self._shared)
            request.position = self._shared
            del request.to_compute[: self._shared]

    def _forget(self, place: int) -> None:
        llama.llama_memory_seq_rm(self._memory, place, -1, -1)

    @property
    def _memory(self) -> object:
        return llama.llama_get_memory(self._context)

    def close(self) -> None:
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)


def count_shared(prompts: list[Ids]) -> int:
    """How many tokens they all begin with."""
    if len(prompts) < 2:
        return 0
    return next((i for i, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1), min(map(len, prompts)))


def main() -> None:
    args, answers = parser().parse_args(), own_stdout()
    silent = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    llama.llama_backend_init()
    path = make_gguf(Path(args.model))
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    assert model, f"{path} was not loaded"

    def stream(load: Load) -> tuple[Stamps, list[Ids]]:
        engine = Engine(model, load, args.threads, args.budget)
        stamps = run_steps(load, engine.add, engine.step)
        engine.close()
        return stamps, [engine.tokens[i] for i in sorted(engine.tokens)]

    def generate(load: Load) -> list[Ids]:
        return stream(load)[1]

    about = {"name": "llama-cpp-python", "version": version("llama-cpp-python")}
    serve(answers, about, args.vocab_size, generate, stream)


if __name__ == "__main__":
    main()
