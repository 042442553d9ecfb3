"""What --quantization int8 does to a model's answers: beside float32, on the same token ids.

    python benchmarks/quantization.py [CHECKPOINT ...] [--out benchmarks/results/quantization.json]

For nanostory on stories of its own (sampled in float32), for each checkpoint on the prompts of W1: the largest
difference of a logit and how large logits are, the share of written tokens that int8 would have chosen greedily at the
same place, and for how many tokens greedy answers stay the same; for stories also their perplexity.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from micro import make_batch, make_cache
from peers.loads import Ids, make_load
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.attention import TorchAttention
from nanoserve.machine import describe_machine
from nanoserve.model import Decoder
from nanoserve.packed_linear import pack_linears
from nanoserve.weights import load_model

STORIES, STORY_LEN = 64, 200


@dataclass(frozen=True)
class Answers:
    """Prompts, and what float32 writes after each."""

    prompts: list[Ids]
    written: list[Ids]


@dataclass(frozen=True)
class Found:
    model: str
    tokens: int
    largest_logit: float
    max_error: float
    mean_error: float
    argmax_alike: float  # of places, after what float32 wrote
    greedy_alike: float  # of greedy tokens: those before the first difference of each answer
    perplexity_float32: float
    perplexity_int8: float


def generate(
    model: str, prompts: list[Ids], lens: Sequence[int], quantization: str | None, temperature: float
) -> list[Ids]:
    with LLM(model, device="cpu", quantization=quantization) as llm:
        params = [
            SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, seed=i) for i, n in enumerate(lens)
        ]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def logits_of(model: Decoder, ids: Ids) -> Tensor:
    config, n, backend = model.config, len(ids), TorchAttention()
    batch, num_blocks = make_batch([(n, n)])
    cache = make_cache(config.num_layers, num_blocks, config.num_kv_heads, config.head_dim)

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, /) -> Tensor:
        backend.store(k_TKD, v_TKD, cache, layer, batch.slot_mapping_T)
        return backend.attend(q_THD, cache, layer, batch)

    return model.logits(model(torch.tensor(ids), torch.arange(n), attend))


def compare(name: str, answers: Answers, greedy_alike: float) -> Found:
    models = load_model(name), load_model(name)
    for model, quantization in zip(models, (None, "int8"), strict=True):
        pack_linears(model, quantization)
    largest, errors, alike, losses = 0.0, [], [], ([], [])
    for prompt, written in zip(answers.prompts, answers.written, strict=True):
        both = [logits_of(model, prompt + written)[len(prompt) - 1 : -1] for model in models]
        largest = max(largest, both[0].abs().max().item())
        errors.append((both[1] - both[0]).abs())
        alike.append(both[0].argmax(-1) == both[1].argmax(-1))
        for loss, logits_TV in zip(losses, both, strict=True):
            loss.append(torch.nn.functional.cross_entropy(logits_TV, torch.tensor(written), reduction="none"))
    perplexities = [torch.cat(loss).mean().exp().item() for loss in losses]
    max_error, mean_error = max(e.max().item() for e in errors), torch.stack([e.mean() for e in errors]).mean().item()
    share = torch.cat(alike).double().mean().item()
    return Found(
        Path(name).name,
        sum(map(len, answers.written)),
        largest,
        max_error,
        mean_error,
        share,
        greedy_alike,
        *perplexities,
    )


def alike_until(first: Ids, second: Ids) -> int:
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))


def measure(name: str) -> Found:
    is_story = name == "nanostory"
    vocab_size = load_model(name).config.vocab_size
    load = make_load("w1", vocab_size)
    prompts = [[0]] * STORIES if is_story else load.prompts
    lens = [STORY_LEN] * STORIES if is_story else load.num_tokens
    written = generate(name, prompts, lens, None, temperature=float(is_story))
    if is_story:  # greedy stories would all be one: each goes on from a part of its own
        starts = [story[: STORY_LEN // 4] for story in written]
        prompts_of_greedy, lens_of_greedy = starts, [STORY_LEN // 2] * STORIES
    else:
        prompts_of_greedy, lens_of_greedy = prompts, lens
    greedy = [generate(name, prompts_of_greedy, lens_of_greedy, form, 0.0) for form in (None, "int8")]
    same = sum(alike_until(a, b) for a, b in zip(*greedy, strict=True)) / sum(lens_of_greedy)
    return compare(name, Answers(prompts, written), same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="*")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "quantization.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        found = [measure(name) for name in ("nanostory", *args.checkpoints)]
    for one in found:
        print(one)
    result = {
        "what": "answers in int8 beside those in float32",
        "machine": msgspec.to_builtins(describe_machine()),
        "found": [asdict(one) for one in found],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
