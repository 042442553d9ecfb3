"""Train the embedded default model nanostory: a byte-level BPE and a small Qwen3-shaped decoder, on one core.

Reads JSONL documents from --data, keeps checkpoints in --work, writes a Hugging Face style folder to --out.
A step follows from (seed, step number) alone, so a run resumed from a checkpoint repeats the unbroken one.
Knows nothing of the engine; --check compares the exported folder with transformers' Qwen3ForCausalLM.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import lzma
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

END = "<|endoftext|>"
END_ID = 0  # the first special token; also what every validation document starts from
TOKENS_PER_STEP = 4096
# The messages of a chat are the story so far: what the model said is continued in place,
# what anybody else says starts a new paragraph.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if not loop.first and message['role'] != 'assistant' %}{{ '\\n' }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of a Qwen3 config.json that decide shapes and numerics."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 100000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 16384


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, c.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        groups = self.c.num_attention_heads // self.c.num_key_value_heads
        q = self.q_norm(self.q_proj(x).view(b, t, -1, self.c.head_dim))  # [B, T, H, D]
        k = self.k_norm(self.k_proj(x).view(b, t, -1, self.c.head_dim))  # [B, T, K, D]
        v = self.v_proj(x).view(b, t, -1, self.c.head_dim)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token ids [B, T] to logits [B, T, V]; parameters are named as in Qwen3Model."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                scale = 1.0 if not name.endswith(("o_proj.weight", "down_proj.weight")) else 0.3
                nn.init.normal_(p, std=0.02 if name.startswith("embed") else scale * p.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        cos, sin = rope_table(self.c, ids.shape[1])
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def rope_table(c: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    inv_freq = c.rope_theta ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)
    angle = torch.arange(length).float()[:, None] * inv_freq  # [T, D/2]
    angle = torch.cat((angle, angle), dim=-1)[:, None, :]  # [T, 1, D], broadcast over heads
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by Newton-Schulz (Jordan et al. 2024).

    torch.optim.Muon iterates in bfloat16, which this kind of CPU has no fast path for; this one is float32
    and takes all matrices of one shape in one batch.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                updates = torch.stack([self._momentum(p, group["momentum"]) for p in params])
                lr = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(params, orthogonalise(updates), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-lr)

    def _momentum(self, p: nn.Parameter, beta: float) -> Tensor:
        assert p.grad is not None
        buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
        buffer.lerp_(p.grad, 1 - beta)
        return p.grad.lerp(buffer, beta)


def orthogonalise(g: Tensor) -> Tensor:
    """Five quintic Newton-Schulz steps on matrices [N, rows, columns]."""
    tall = g.shape[1] > g.shape[2]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def read_documents(data: Path, part: str) -> list[str]:
    """The `text` of every line of DIR/*part*.jsonl(.xz), in file order."""
    if not data.is_dir():
        raise ValueError(f"--data {data}: no such directory; give one with *train*.jsonl and *valid*.jsonl")
    files = sorted(p for ext in ("jsonl", "jsonl.xz") for p in data.glob(f"*{part}*.{ext}"))
    if not files:
        raise ValueError(f"--data {data}: holds no *{part}*.jsonl or *{part}*.jsonl.xz")
    texts: list[str] = []
    for path in files:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    text = json.loads(line)["text"]
                except (json.JSONDecodeError, KeyError, TypeError) as error:
                    raise ValueError(f"{path.name} line {number}: no JSON object with a `text`") from error
                if not isinstance(text, str) or not text:
                    raise ValueError(f"{path.name} line {number}: `text` must be a string that is not empty")
                texts.append(text)
    return texts


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; the whole byte alphabet is in the vocabulary, so that every string round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the training text is too small for a vocabulary of {vocab_size}; give more --data")
    assert tokenizer.token_to_id(END) == END_ID
    return tokenizer


class Windows:
    """Training batches as a pure function of (seed, step)."""

    def __init__(self, documents: list[list[int]], seed: int) -> None:
        self.stream = torch.tensor([i for ids in documents for i in (*ids, END_ID)])
        lengths = torch.tensor([0] + [len(ids) + 1 for ids in documents[:-1]])
        self.starts = lengths.cumsum(0)  # of each document in the stream
        self.seed = seed

    def batch(self, step: int) -> Tensor:
        """[rows, length + 1]; mostly 16 x 256; 512, 2048 and 4096 mixed in to train far positions.

        Half the rows begin with a document (half of those with the END before it), half anywhere.
        """
        length = 4096 if step % 64 == 63 else 2048 if step % 16 == 15 else 512 if step % 4 == 3 else 256
        rows = TOKENS_PER_STEP // length
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        at_start = self.starts[torch.randint(len(self.starts), (rows,), generator=rng)]
        at_start = at_start - torch.randint(2, (rows,), generator=rng)
        anywhere = torch.randint(len(self.stream), (rows,), generator=rng)
        first = torch.where(torch.rand(rows, generator=rng) < 0.5, at_start, anywhere)
        return self.stream[(first[:, None] + torch.arange(length + 1)) % len(self.stream)]


@torch.no_grad()
def bits_per_character(model: Decoder, documents: list[list[int]], num_characters: int) -> float:
    """Each document on its own, END before it as context, its own END among the predicted tokens."""
    nats = 0.0
    tensors = [torch.tensor([*ids, END_ID]) for ids in sorted(documents, key=len)]
    for i in range(0, len(tensors), 16):
        target = nn.utils.rnn.pad_sequence(tensors[i : i + 16], batch_first=True, padding_value=-1)
        logits = model(F.pad(target, (1, 0), value=END_ID)[:, :-1].clamp(min=0))
        nats += F.cross_entropy(logits.mT, target, ignore_index=-1, reduction="sum").item()
    return nats / math.log(2) / num_characters


def export(model: Decoder, tokenizer: Tokenizer, out: Path) -> None:
    """The folder every loader of Hugging Face checkpoints reads; weights in float16, head tied."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": p.detach().half().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    token_ids = {"eos_token_id": END_ID, "pad_token_id": END_ID}
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **asdict(model.c)}
    config |= {"rope_scaling": None, "use_sliding_window": False, "tie_word_embeddings": True}
    config |= {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
    config |= {"initializer_range": 0.02, "use_cache": True, "torch_dtype": "float16", **token_ids}
    text_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    text_config |= {"clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    text_config |= {"model_max_length": model.c.max_position_embeddings}
    for name, value in (("", config), ("generation_", token_ids), ("tokenizer_", text_config)):
        (out / f"{name}config.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def check(out: Path) -> None:
    """Hold the exported folder against transformers: logits, ids, every byte there and back."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fields = json.loads((out / "config.json").read_text())
    c = ModelConfig(**{name: fields[name] for name in ModelConfig.__slots__})
    model = Decoder(c)
    tensors = load_file(out / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): t.float() for name, t in tensors.items()})
    reference = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert type(reference).__name__ == "Qwen3ForCausalLM"
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(c.vocab_size, (2, 700), generator=rng)
    gap = (model(ids) - reference(ids).logits).abs().max().item()
    assert gap < 1e-4, f"logits differ from transformers by {gap}"

    tokenizer, hf = Tokenizer.from_file(str(out / "tokenizer.json")), AutoTokenizer.from_pretrained(out)
    absent = set(pre_tokenizers.ByteLevel.alphabet()) - set(tokenizer.get_vocab())
    assert not absent, f"bytes not in the vocabulary: {absent}"
    strings = [chr(i) for i in range(0x3000)] + ["na\u00efve \U0001f600\u200d\U0001f680 \u4f60\r\n\t  x\n\n"]
    for text in [*strings, "".join(strings)]:
        ids_of = tokenizer.encode(text).ids
        assert tokenizer.decode(ids_of) == text, repr(text)
        assert ids_of == hf(text).input_ids, repr(text)
    turns = [("user", "One"), ("assistant", " day."), ("user", "Then")]
    story = [{"role": role, "content": content} for role, content in turns]
    assert hf.apply_chat_template(story, tokenize=False) == "One day.\nThen"
    assert hf.eos_token_id == END_ID == reference.generation_config.eos_token_id

    far = torch.randint(c.vocab_size, (1, c.max_position_embeddings), generator=rng)
    assert model(far).isfinite().all(), f"a logit is not finite within {far.shape[1]} positions"
    print(f"check passed: largest logit gap {gap:.1e}; finite logits at {far.shape[1]} positions")


class Trainer:
    """Model, optimizers and history: what a checkpoint holds."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.model = Decoder(ModelConfig())
        matrices = [p for p in self.model.layers.parameters() if p.ndim == 2]
        self.rest = [p for p in self.model.parameters() if not any(p is m for m in matrices)]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.1),
            torch.optim.AdamW(self.rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01),
        ]
        self.peaks = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.history: list[dict[str, float]] = []

    def step(self, forward: Callable[[Tensor], Tensor], batch: Tensor, rate: float) -> float:
        loss = F.cross_entropy(forward(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.rest, 1.0)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    def save(self, path: Path) -> None:
        state = {"seed": self.seed, "model_config": asdict(self.model.c), "history": self.history}
        state |= {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path)
        if (state["seed"], state["model_config"]) != (self.seed, asdict(self.model.c)):
            raise ValueError(f"{path}: made with another seed or model shape; give another --work")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.history = state["history"]


def learning_rate_scale(step: int, total_steps: int, decay_steps: int) -> float:
    """Warm up over 100 steps, stay, then fall in a line to zero over the last `decay_steps`."""
    return min(1.0, (step + 1) / 100, (total_steps - step) / decay_steps)


def train(args: argparse.Namespace) -> None:
    train_texts, valid_texts = read_documents(args.data, "train"), read_documents(args.data, "valid")
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer_file, checkpoint_file = args.work / "tokenizer.json", args.work / "checkpoint.pt"
    if not tokenizer_file.exists():
        train_tokenizer(train_texts, ModelConfig().vocab_size).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    windows = Windows([e.ids for e in tokenizer.encode_batch(train_texts)], args.seed)
    valid = [e.ids for e in tokenizer.encode_batch(valid_texts)]
    trainer = Trainer(args.seed)
    if checkpoint_file.exists():
        trainer.load(checkpoint_file)
    # One static graph for each of the four window lengths; validation runs the plain module.
    forward = torch.compile(trainer.model, dynamic=False) if args.compile else trainer.model
    before = trainer.history[-1] if trainer.history else {"step": 0, "cpu_s": 0.0, "wall_s": 0.0}
    cpu_zero, wall_zero = time.process_time() - before["cpu_s"], time.perf_counter() - before["wall_s"]
    print(f"{len(train_texts)} documents, {len(windows.stream)} tokens; step {before['step']}", flush=True)
    losses, since_s = [], time.perf_counter()
    for step in range(int(before["step"]), args.total_steps):
        rate = learning_rate_scale(step, args.total_steps, args.decay_steps)
        losses.append(trainer.step(forward, windows.batch(step), rate))
        if (step + 1) % args.every and step + 1 != args.total_steps:
            continue
        tokens_per_s = len(losses) * TOKENS_PER_STEP / (time.perf_counter() - since_s)
        num_valid = len(valid) if step + 1 == args.total_steps else min(100, len(valid))
        bits = bits_per_character(trainer.model, valid[:num_valid], sum(map(len, valid_texts[:num_valid])))
        cpu_s, wall_s = time.process_time() - cpu_zero, time.perf_counter() - wall_zero
        row = {"step": step + 1, "train_loss": sum(losses) / len(losses), "valid_bits_per_character": bits}
        row |= {"valid_documents": num_valid, "tokens_per_s": tokens_per_s, "cpu_s": cpu_s, "wall_s": wall_s}
        trainer.history.append(row)
        trainer.save(checkpoint_file)
        print("  ".join(f"{name} {value:,.4g}" for name, value in row.items()), flush=True)
        losses, since_s = [], time.perf_counter()
    export(trainer.model, tokenizer, args.out)


def parse_arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    work, out = Path("build/nanostory-train"), Path(__file__).parents[1] / "nanoserve/models/nanostory"
    add = parser.add_argument
    add("--data", type=Path, help="directory with *train* and *valid* .jsonl or .jsonl.xz files")
    add("--work", type=Path, default=work, help="where tokenizer and checkpoint are kept")
    add("--out", type=Path, default=out, help="the folder to export to (or to check)")
    add("--total-steps", type=int, default=9100, help="of 4096 tokens each; lower it to decay early")
    add("--decay-steps", type=int, default=3100, help="last steps, with a falling learning rate")
    add("--every", type=int, default=250, help="steps between validations and checkpoints")
    add("--seed", type=int, default=0)
    add("--compile", action="store_true", help="torch.compile the forward and backward pass (needs g++)")
    add("--check", action="store_true", help="compare --out with transformers and leave")
    args = parser.parse_args()
    if not args.check and args.data is None:
        parser.error("--data DIR is required, unless --check is given")
    for name in ("total_steps", "decay_steps", "every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    return args


def keep_freed_memory() -> None:
    """glibc gives every large buffer back to the kernel, to fault it in again at the next step."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except OSError:
        return  # not glibc
    # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
    for option, value in ((-3, 2**31 - 1), (-1, 2**31 - 1), (-2, 2**28)):
        mallopt(option, value)


def main() -> int:
    args = parse_arguments()
    keep_freed_memory()
    torch.set_num_threads(1)
    try:
        check(args.out) if args.check else train(args)
    except (ValueError, OSError) as error:
        print(f"train_default_model.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
