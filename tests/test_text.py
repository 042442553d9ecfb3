"""Laws of tokenizing, detokenizing and stop strings: what is streamed is what is returned, and never taken back."""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import nanoserve.api.text as text_module
from nanoserve.api.text import IncrementalDetokenizer, OutputText, StopHit
from nanoserve.api.tokenizer import Tokenizer
from nanoserve.request import SamplingParams

R = "\ufffd"
NANOSTORY = Path(text_module.__file__).parents[1] / "models" / "nanostory"

SENTENCES = [
    "A small boat left the harbour, and nobody on the pier waved.",
    "Zoë's naïve café façade: déjà vu, coöperate, Ærø.",
    "Le\u0301o a\u0308rgerte sich u\u0308ber das Fru\u0308hstu\u0308ck.",
    "小さな船が港を出た。誰も手を振らなかった。",
    "작은 배가 항구를 떠났다.",
    "غادر القارب الصغير الميناء في الصباح.",
    "הסירה הקטנה עזבה את הנמל.",
    "👩‍🚀👨‍👩‍👧‍👦 and 🏳️‍🌈 met 🙂🙂🙂 in 🇫🇮.",
    "\tif x != 0:\r\n        return  [1,2]  # done",
    "ไม่มีใครโบกมือ नमस्ते दुनिया 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
]


def byte_level_backend() -> tokenizers.Tokenizer:
    """GPT-2 style: every token is a string of bytes, merges may join parts of two characters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES * 2, trainer)
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """Llama style: words with a leading mark for the space, single bytes for what is not in the vocabulary."""
    words = ["▁", "▁A", "▁boat", "▁left", "▁the", "boat", "s", "t", "A", ",", ".", "▁▁", "é", "▁世"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", ignore_merges=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def pieces_tokenizer(pieces: Sequence[str]) -> Tokenizer:
    """Token i is exactly the text `pieces[i]`; the pieces must differ."""
    backend = tokenizers.Tokenizer(models.WordLevel(vocab={piece: i for i, piece in enumerate(pieces)}))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


BYTE_LEVEL = Tokenizer(byte_level_backend())
BYTE_FALLBACK = Tokenizer(byte_fallback_backend())
STORY = Tokenizer.load(NANOSTORY)


def byte_spelling() -> list[str]:
    """GPT-2's character for each byte: itself where that can be seen, the others counted from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in range(256)]


def byte_ids(data: bytes) -> list[int]:
    """Single-byte tokens of the byte-level tokenizer."""
    vocab = BYTE_LEVEL._backend.get_vocab()
    spelling = byte_spelling()
    return [vocab[spelling[byte]] for byte in data]


def fallback_ids(data: bytes) -> list[int]:
    return [3 + byte for byte in data]


def stream(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    prompt: Sequence[int] = (),
    kind: type[IncrementalDetokenizer] = IncrementalDetokenizer,
) -> list[str]:
    """One piece per token, then the piece that settles what is pending."""
    detokenizer = kind(tokenizer, prompt)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


def ids_of(tokenizer: Tokenizer, max_size: int = 40) -> st.SearchStrategy[list[int]]:
    """Any ids: special tokens, and some outside the vocabulary, among them."""
    return st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=max_size)


def planted(law: Callable[..., None], *arguments: object) -> None:
    """The law must fail on this broken implementation."""
    with pytest.raises(AssertionError):
        law(*arguments)


# Detokenizing


def check_equals_whole(tokenizer: Tokenizer, token_ids: list[int], kind: type = IncrementalDetokenizer) -> None:
    """Undecodable bytes at the end may be missing, nothing else."""
    streamed = "".join(stream(tokenizer, token_ids, kind=kind))
    assert streamed.rstrip(R) == tokenizer.decode(token_ids).rstrip(R)


@settings(max_examples=200)
@given(ids_of(BYTE_LEVEL))
def test_every_random_id_sequence_streams_its_decoded_text(token_ids: list[int]) -> None:
    check_equals_whole(BYTE_LEVEL, token_ids)


@settings(max_examples=100)
@given(ids_of(STORY))
def test_every_random_id_sequence_of_the_embedded_model_streams_its_decoded_text(token_ids: list[int]) -> None:
    check_equals_whole(STORY, token_ids)


def test_every_byte_value_streams_its_decoded_text() -> None:
    everything = byte_ids(bytes(range(256)))
    assert len(set(everything)) == 256
    check_equals_whole(BYTE_LEVEL, everything)
    for byte in range(256):
        check_equals_whole(BYTE_LEVEL, byte_ids(bytes([byte])))
        check_equals_whole(BYTE_LEVEL, byte_ids(b"a" + bytes([byte]) + b"b"))


@settings(max_examples=150)
@given(st.binary(max_size=40))
def test_every_random_byte_string_streams_its_decoded_text(data: bytes) -> None:
    check_equals_whole(BYTE_LEVEL, byte_ids(data))
    streamed = "".join(stream(BYTE_LEVEL, byte_ids(data)))
    assert streamed.rstrip(R) == data.decode(errors="replace").rstrip(R)


def check_character_after_garbage() -> None:
    for num_wrong in range(20):
        ids = byte_ids(b"\xff" * num_wrong + "🙂!".encode())
        assert "".join(stream(BYTE_LEVEL, ids)) == R * num_wrong + "🙂!"


def test_every_character_survives_however_many_wrong_bytes_come_before(monkeypatch: pytest.MonkeyPatch) -> None:
    check_character_after_garbage()
    monkeypatch.setattr(text_module, "_MAX_BYTES", 2)
    planted(check_character_after_garbage)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK, STORY], ids=["byte_level", "byte_fallback", "story"])
@settings(max_examples=60)
@given(st.one_of(st.sampled_from(SENTENCES), st.text(max_size=30)))
def test_every_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    if any(name in text for name in ("<|", "<s>", "</s>", "<unk>", "▁", R)):
        return
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert "".join(stream(tokenizer, token_ids)) == text


def check_no_half_character(kind: type = IncrementalDetokenizer) -> None:
    for tokenizer, spell in ((BYTE_LEVEL, byte_ids), (BYTE_FALLBACK, fallback_ids)):
        for sentence in SENTENCES:
            pieces = stream(tokenizer, spell(sentence.encode()), kind=kind)
            assert "".join(pieces) == sentence
            assert not any(R in piece for piece in pieces)
            assert all(len(piece) <= 1 for piece in pieces), "a character must come with its last byte"


def test_every_character_comes_whole_with_its_last_byte() -> None:
    check_no_half_character()

    class Hasty(IncrementalDetokenizer):
        def push(self, token_id: int) -> str:
            return super().push(token_id) + self.finish()

    planted(check_no_half_character, Hasty)


def check_continues_prompt(
    tokenizer: Tokenizer, token_ids: list[int], cut: int, kind: type = IncrementalDetokenizer
) -> None:
    """Prompt text (without a last, incomplete character) and output text make up the whole text."""
    whole = tokenizer.decode(token_ids)
    near = [tokenizer.decode(token_ids[:n]).rstrip(R) for n in range(max(cut - 3, 0), cut + 1)]
    prompt = max((text for text in near if R not in text), key=len)
    assert prompt + "".join(stream(tokenizer, token_ids[cut:], token_ids[:cut], kind)) == whole


@settings(max_examples=80)
@given(st.lists(st.sampled_from([*SENTENCES, "🙂", "世界", " A boat", "s"]), min_size=1, max_size=3), st.data())
def test_every_output_continues_its_prompt_wherever_it_is_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    for tokenizer, ids in (
        (BYTE_LEVEL, byte_ids(text.encode())),
        (BYTE_FALLBACK, fallback_ids(text.encode())),
        (BYTE_LEVEL, BYTE_LEVEL.encode(text)),
        (BYTE_FALLBACK, BYTE_FALLBACK.encode(text)),
        (STORY, STORY.encode(text)),
    ):
        check_continues_prompt(tokenizer, ids, data.draw(st.integers(0, len(ids))))


@settings(max_examples=150)
@given(ids_of(BYTE_LEVEL, 15), ids_of(BYTE_LEVEL, 15))
def test_every_output_holds_nothing_of_its_prompt(prompt: list[int], output: list[int]) -> None:
    """Also after garbage: U+FFFD that stand for bytes of the prompt are not the output's."""
    before = BYTE_LEVEL.decode(prompt).rstrip(R)
    whole = BYTE_LEVEL.decode(prompt + output).rstrip(R)
    assert whole.startswith(before)
    streamed = "".join(stream(BYTE_LEVEL, output, prompt)).rstrip(R)
    assert streamed.lstrip(R) == whole[len(before) :].lstrip(R)
    assert len(streamed) <= len(whole) - len(before)


@pytest.mark.parametrize(("tokenizer", "spell"), [(BYTE_LEVEL, byte_ids), (BYTE_FALLBACK, fallback_ids)])
def test_every_prompt_that_ends_within_a_character_stays_out_of_the_output(
    tokenizer: Tokenizer, spell: Callable[[bytes], list[int]]
) -> None:
    smile = "🙂".encode()
    letter = [tokenizer._backend.token_to_id("A")]
    for text in ("", "Hello ", "🙂🙂", "é"):
        for have in (1, 2, 3):
            prompt = spell(text.encode() + smile[:have])
            assert stream(tokenizer, spell(smile[have:] + b"!"), prompt)[-3:] == ["🙂", "!", ""]
            assert "".join(stream(tokenizer, letter, prompt)) == "A"
            assert "".join(stream(tokenizer, [], prompt)) == ""
            assert "".join(stream(tokenizer, [*spell(b"\xff"), *letter], prompt)) == f"{R}A"

    class Forgetful(IncrementalDetokenizer):
        def _seed(self, prompt_token_ids: Sequence[int]) -> None:
            self._window, self._read = list(prompt_token_ids), len(prompt_token_ids)

    planted(check_continues_prompt, tokenizer, spell(b"Hello " + smile + b"!"), 8, Forgetful)


def test_every_first_word_keeps_its_leading_space() -> None:
    ids = BYTE_FALLBACK.encode("A boat left")
    assert "".join(stream(BYTE_FALLBACK, ids[2:], ids[:2])) == " boat left"
    assert "".join(stream(BYTE_FALLBACK, ids[2:], [*ids[:2], *[2] * 50])) == " boat left"  # behind skipped tokens
    assert "".join(stream(BYTE_FALLBACK, [ids[1], *[2] * 50, *ids[2:]])) == "A boat left"

    class Unseeded(IncrementalDetokenizer):
        def _seed(self, prompt_token_ids: Sequence[int]) -> None:
            self._move([])

    planted(check_continues_prompt, BYTE_FALLBACK, ids, 2, Unseeded)


def test_every_rewritten_head_leaves_streamed_text_alone() -> None:
    """A wrong byte makes byte fallback turn the characters before it into U+FFFD; they are out already."""
    ids = [*fallback_ids("🙂🙂".encode()), *fallback_ids(b"\xf0"), *BYTE_FALLBACK.encode("A", add_special_tokens=False)]
    assert BYTE_FALLBACK.decode(ids) == R * 9 + " A"
    assert "".join(stream(BYTE_FALLBACK, ids)) == f"🙂🙂{R} A"


@settings(max_examples=100)
@given(ids_of(BYTE_FALLBACK, 60))
def test_every_readable_part_of_random_bytes_streams_with_byte_fallback(token_ids: list[int]) -> None:
    streamed = iter("".join(stream(BYTE_FALLBACK, token_ids)))
    readable = BYTE_FALLBACK.decode(token_ids).replace(R, "").lstrip(" ")
    assert all(char in streamed for char in readable), "what the whole text shows must come, in that order"


def test_every_id_outside_the_vocabulary_is_no_text() -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK, STORY):
        ids = tokenizer.encode("A boat left")
        strange = [tokenizer.vocab_size, tokenizer.vocab_size + 7, 2**31, 2**32, 2**60, -1]
        mixed = [token_id for pair in zip(ids, (strange * 9)[: len(ids)], strict=True) for token_id in pair]
        assert tokenizer.decode(mixed) == "".join(stream(tokenizer, mixed)) == "A boat left"


def test_every_special_token_is_skipped_unless_asked_for() -> None:
    ids = [*BYTE_LEVEL.encode("a"), 1, *BYTE_LEVEL.encode("b"), 0]
    assert [BYTE_LEVEL.decode(ids, skip) for skip in (True, False)] == ["ab", "a<|user|>b<|end|>"]
    for skip, text in ((True, "ab"), (False, "a<|user|>b<|end|>")):
        params = SamplingParams(skip_special_tokens=skip)
        output = OutputText(BYTE_LEVEL, params)
        output.append(ids, finished=True)
        assert output.text == text


class Counting(Tokenizer):
    """Counts the tokens that are decoded."""

    decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)


def check_cost(backend: Callable[[], tokenizers.Tokenizer], token_ids: list[int]) -> None:
    tokenizer = Counting(backend())
    detokenizer = IncrementalDetokenizer(tokenizer)
    costs = []
    for token_id in token_ids:
        before = tokenizer.decoded
        detokenizer.push(token_id)
        costs.append(tokenizer.decoded - before)
    assert max(costs) <= 60, f"a token took the decoding of {max(costs)}"


def test_every_token_costs_the_same_however_long_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    chinese = "".join(chr(0x4E00 + i) for i in range(300))
    cases = [
        (byte_level_backend, byte_ids(b"\xff" * 400)),  # never a character
        (byte_level_backend, byte_ids(f"{R}".encode() * 200)),  # U+FFFD as such
        (byte_level_backend, [0] * 400),  # skipped
        (byte_level_backend, byte_ids(chinese.encode())),
        (byte_fallback_backend, fallback_ids(b"\x80" * 400)),
        (byte_fallback_backend, fallback_ids(b"\xff" + chinese.encode())),
    ]
    for backend, ids in cases:
        check_cost(backend, ids)
    monkeypatch.setattr(text_module, "_MAX_PENDING", 10**9)
    planted(check_cost, byte_level_backend, byte_ids(b"\xff" * 400))


def test_every_token_that_straddles_characters_still_streams() -> None:
    """Tokens whose ends are never the end of a character: the text must come, and come before the end."""
    chinese = "".join(chr(0x4E00 + 7 * i) for i in range(60)).encode()
    chunks = [chinese[:1], *(chinese[i : i + 3] for i in range(1, len(chinese) - 2, 3)), chinese[-2:]]
    spelling = byte_spelling()
    words = ["".join(spelling[byte] for byte in chunk) for chunk in chunks]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab))
    backend.decoder = decoders.ByteLevel()
    pieces = stream(Tokenizer(backend), [vocab[word] for word in words])
    assert "".join(pieces) == chinese.decode()
    assert max(map(len, pieces)) <= 12


def test_every_decoder_fault_leaves_the_request_alive(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Tokenizer):
        faults = 0

        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            if self.faults:
                self.faults -= 1
                raise RuntimeError("broken state")
            return super().decode(token_ids, skip_special_tokens)

    ids = byte_ids(b"abcdef")
    for faults, text in ((1, "abcdef"), (2, "abdef"), (4, "abef")):
        tokenizer = Faulty(byte_level_backend())
        detokenizer = IncrementalDetokenizer(tokenizer)
        pieces = [detokenizer.push(token_id) for token_id in ids[:2]]
        tokenizer.faults = faults
        pieces += [detokenizer.push(token_id) for token_id in ids[2:]]
        assert "".join(pieces) == text
    assert "broken state" in caplog.text
    tokenizer.faults = 1
    assert detokenizer.finish() == ""
    tokenizer.faults = 1
    assert "".join(stream(tokenizer, ids, ids)) == "abcdef"


# Stop strings


def run_output(
    tokenizer: Tokenizer,
    params: SamplingParams,
    chunks: Sequence[Sequence[int]],
    kind: type[OutputText] = OutputText,
    stop_token: bool = False,
) -> tuple[OutputText, list[str], list[int]]:
    """Feeds the chunks as an engine would; returns the output, its deltas, and the ids that belong to it."""
    output = kind(tokenizer, params)
    deltas, shown, kept = [], "", []
    for i, chunk in enumerate(chunks):
        last = i == len(chunks) - 1
        hit = output.append(chunk, last and stop_token, finished=last)
        kept += chunk[: hit.num_tokens] if hit else chunk
        deltas.append(output.delta(output.ended))
        so_far = output.so_far(output.ended)
        assert so_far == "".join(deltas)
        assert so_far.startswith(shown)
        shown = so_far
        if output.ended:
            break
    return output, deltas, kept


def naive_stop(
    pieces: Sequence[str], stop: Sequence[str], min_tokens: int, include: bool
) -> tuple[str, str | None, int]:
    """(text, stop string, tokens kept) by looking at every end of every prefix of the whole text."""
    text = ""
    for num_tokens, piece in enumerate(pieces, start=1):
        before, text = len(text), text + piece
        for end in range(before + 1, len(text) + 1):
            for candidate in stop:
                if min(num_tokens, len(pieces) - 1) > min_tokens and text[:end].endswith(candidate):
                    cut = end if include else end - len(candidate)
                    return text[:cut], candidate, min(num_tokens, len(pieces) - 1)
    return text, None, len(pieces) - 1


def split(token_ids: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    start = 0
    for size in sizes:
        yield list(token_ids[start : start + size])
        start += size
    yield list(token_ids[start:])


def check_stop(
    tokenizer: Tokenizer,
    token_ids: list[int],
    params: SamplingParams,
    sizes: Sequence[int],
    kind: type[OutputText] = OutputText,
) -> None:
    pieces = stream(tokenizer, token_ids)
    text, stop, num_tokens = naive_stop(pieces, params.stop, params.min_tokens, params.include_stop_str_in_output)
    output, deltas, kept = run_output(tokenizer, params, list(split(token_ids, sizes)), kind)
    assert output.text == text
    assert "".join(deltas) == text
    assert (output.stop_hit.stop if output.stop_hit else None) == stop
    assert kept == token_ids[:num_tokens]


PIECES = ["a", "b", "ab", "ba", "aab", " ", "bab b", "é", "🙂"]
AB = pieces_tokenizer(PIECES)
stop_lists = st.lists(st.text("ab é🙂", min_size=1, max_size=4), max_size=3)


@settings(max_examples=250)
@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=20),
    stop_lists,
    st.integers(0, 6),
    st.booleans(),
    st.lists(st.integers(0, 4), max_size=6),
)
def test_every_stop_string_ends_the_text_where_a_naive_search_ends_it(
    token_ids: list[int], stop: list[str], min_tokens: int, include: bool, sizes: list[int]
) -> None:
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=None, include_stop_str_in_output=include)
    check_stop(AB, token_ids, params, sizes)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
@settings(max_examples=80)
@given(st.data(), st.lists(st.integers(0, 5), max_size=8))
def test_every_stop_string_ends_random_bytes_where_a_naive_search_ends_them(
    tokenizer: Tokenizer, data: st.DataObject, sizes: list[int]
) -> None:
    """Also when only the settling at the end completes it, and with U+FFFD in it."""
    token_ids = data.draw(ids_of(tokenizer))
    whole = "".join(stream(tokenizer, token_ids))
    start = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    stop = [text for text in (whole[start : start + data.draw(st.integers(1, 4))],) if text]
    check_stop(tokenizer, token_ids, SamplingParams(stop=[*stop, "zz"], max_tokens=None), sizes)


@settings(max_examples=60)
@given(ids_of(BYTE_LEVEL, 25), st.lists(st.integers(0, 5), max_size=8))
def test_every_split_into_appends_gives_the_same_text(token_ids: list[int], sizes: list[int]) -> None:
    params = SamplingParams(stop=["a", "the", "🙂"], max_tokens=None)
    whole, _, kept_whole = run_output(BYTE_LEVEL, params, [token_ids])
    parts, _, kept_parts = run_output(BYTE_LEVEL, params, list(split(token_ids, sizes)))
    assert (whole.text, kept_whole) == (parts.text, kept_parts)
    assert (whole.stop_hit is None) == (parts.stop_hit is None)


class NoHoldBack(OutputText):
    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        super().__init__(tokenizer, params)
        self._held_back = 0


class NoReach(OutputText):
    def _find_stop(self, region: str, num_old: int) -> tuple[str, int] | None:
        found = super()._find_stop(region[num_old:], 0)
        return found and (found[0], found[1] + num_old)


class ListOrder(OutputText):
    def _find_stop(self, region: str, num_old: int) -> tuple[str, int] | None:
        for stop in self._stop:
            start = region.find(stop, max(num_old - len(stop) + 1, 0))
            if start >= 0:
                return stop, start + len(stop)
        return None


class Impatient(OutputText):
    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        super().__init__(tokenizer, params)
        self._min_tokens = 0


class KeepsSurplus(OutputText):
    def append(self, new_token_ids: Sequence[int], *args: bool, **kwargs: bool) -> StopHit | None:
        hit = super().append(new_token_ids, *args, **kwargs)
        return hit and StopHit(hit.stop, len(new_token_ids))


@pytest.mark.parametrize("kind", [NoHoldBack, NoReach, ListOrder, Impatient, KeepsSurplus])
def test_every_planted_stop_bug_dies(kind: type[OutputText]) -> None:
    params = SamplingParams(stop=["bab b", "aa", "é"], min_tokens=2, max_tokens=None)
    cases = [
        ([0, 0, 1, 1, 0, 0, 1], [1] * 7),
        ([4, 1, 0, 7, 0, 0, 8], [3, 4]),
        ([5, 5, 6], [1, 1, 1]),
        ([1, 5, 0], [1]),
    ]
    cases += [([1, 5, 1, 3, 5, 1, 4], [2, 2, 3])]
    if kind is ListOrder:
        params = SamplingParams(stop=["b b", "ab"], max_tokens=None)
    for ids, sizes in cases:
        check_stop(AB, ids, params, sizes)

    def law() -> None:
        for ids, sizes in cases:
            check_stop(AB, ids, params, sizes, kind)

    planted(law)


WORKED = ["Hel", "lo S", "TO", "P!"]


@pytest.mark.parametrize(
    ("include", "deltas", "text"),
    [(False, ["", "Hell", "o ", ""], "Hello "), (True, ["Hel", "lo S", "TO", "P"], "Hello STOP")],
)
def test_every_worked_example_streams_as_written(include: bool, deltas: list[str], text: str) -> None:
    params = SamplingParams(stop=["STOP"], include_stop_str_in_output=include)
    output, seen, kept = run_output(pieces_tokenizer(WORKED), params, [[0], [1], [2], [3]])
    assert (seen, output.text, kept) == (deltas, text, [0, 1, 2, 3])
    assert output.stop_hit == StopHit("STOP", 1)


def test_every_stop_string_of_several_that_ends_first_wins_then_the_first_listed() -> None:
    tokenizer = pieces_tokenizer(["xabcd"])
    for stop, winner, text in (
        (["abcd", "bc"], "bc", "xa"),
        (["bc", "abc"], "bc", "xa"),
        (["abc", "bc"], "abc", "x"),
        (["d", "x"], "x", ""),
    ):
        output, _, _ = run_output(tokenizer, SamplingParams(stop=stop), [[0]])
        assert output.stop_hit == StopHit(winner, 1)
        assert output.text == text


def test_every_min_tokens_counts_tokens_not_matches() -> None:
    """A match may begin in the text of the first min_tokens tokens, but not end there."""
    tokenizer = pieces_tokenizer(["xx", "a", "b", "ab"])
    for ids, min_tokens, text, stop in (
        ([3, 0], 1, "abxx", None),
        ([1, 2], 1, "", "ab"),
        ([1, 2], 2, "ab", None),
        ([3, 3, 0], 1, "ab", "ab"),
    ):
        output, _, _ = run_output(tokenizer, SamplingParams(stop=["ab"], min_tokens=min_tokens), [ids])
        assert output.text == text
        assert (output.stop_hit.stop if output.stop_hit else None) == stop


@pytest.mark.parametrize("include", [False, True])
def test_every_stop_token_is_counted_but_text_only_on_request(include: bool) -> None:
    tokenizer = pieces_tokenizer(["one ", "two ", "\n"])
    params = SamplingParams(include_stop_str_in_output=include)
    output, deltas, kept = run_output(tokenizer, params, [[0], [1, 2]], stop_token=True)
    assert output.text == "".join(deltas) == ("one two \n" if include else "one two ")
    assert (kept, output.num_tokens, output.stop_hit) == ([0, 1, 2], 3, None)


def test_every_stop_string_in_the_last_allowed_token_wins_over_length() -> None:
    output = OutputText(pieces_tokenizer(["a", "STOP"]), SamplingParams(stop=["STOP"], max_tokens=2))
    assert output.append([0, 1], finished=True) == StopHit("STOP", 2)
    assert (output.text, output.ended) == ("a", True)


def test_every_pending_text_is_settled_at_the_end_without_undecodable_bytes() -> None:
    spelling = byte_spelling()
    words = ["g", f"o{spelling[0xF0]}", spelling[0x9F]]
    backend = tokenizers.Tokenizer(models.WordLevel(vocab={word: i for i, word in enumerate(words)}))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    ids = [0, 1, 2]
    output, deltas, _ = run_output(tokenizer, SamplingParams(), [[token_id] for token_id in ids])
    assert (output.text, deltas) == ("go", ["g", "", "o"])
    output, deltas, _ = run_output(tokenizer, SamplingParams(stop=["go"]), [ids])
    assert (output.text, deltas, output.stop_hit) == ("", [""], StopHit("go", 3))
    output = OutputText(tokenizer, SamplingParams())
    output.append(ids)
    assert (output.delta(False), output.delta(True), output.delta(True), output.text) == ("g", "o", "", "go")


def test_every_token_after_the_end_is_ignored() -> None:
    output = OutputText(AB, SamplingParams(stop=["b"]))
    assert output.append([0, 1, 0]) == StopHit("b", 2)
    assert output.append([0, 1]) is None
    assert (output.text, output.num_tokens, output.delta(True)) == ("a", 2, "a")


def test_every_output_without_detokenizing_has_no_text() -> None:
    output = OutputText(None, SamplingParams(detokenize=False))
    assert output.append([1, 2, 3], finished=True) is None
    assert (output.text, output.delta(True), output.num_tokens, output.ended) == ("", "", 3, True)


# The tokenizer


TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {% if message.role not in ['system', 'user', 'assistant'] %}
        {{ raise_exception('unknown role ' ~ message.role) }}
    {% endif %}
    {% if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}{% endgeneration %}{% continue %}
    {% endif %}
<{{ message.role }}>{{ {'text': message.content} | tojson }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}{{ pad_token }}"""

CHAT = [
    {"role": "system", "content": "be <brief> & naïve"},
    {"role": "user", "content": "世界?"},
    {"role": "assistant", "content": " yes\n"},
    {"role": "user", "content": "why"},
]


def write_folder(
    folder: Path, backend: tokenizers.Tokenizer, config: dict[str, object], files: dict[str, object] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config.json": config, **(files or {})}.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


LLAMA_CONFIG: dict[str, object] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False},
    "eos_token": "</s>",
    "pad_token": None,
    "unk_token": "<unk>",
    "additional_special_tokens": ["<|tool|>"],
    "added_tokens_decoder": {
        "1": {"content": "<s>", "special": True},
        "273": {"content": "<|plain|>", "special": False},
    },
    "chat_template": TEMPLATE,
    "model_max_length": 10**30,
}


def test_every_folder_loads_as_transformers_loads_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = "A boat<s> left</s> the<|tool|> 世<|plain|> 🙂"
    for i, extra in enumerate(({}, {"add_bos_token": False, "add_eos_token": True})):
        folder = write_folder(tmp_path / str(i), byte_fallback_backend(), {**LLAMA_CONFIG, **extra})
        ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ours.encode(text), skip) == theirs.decode(theirs.encode(text), skip_special_tokens=skip)
        assert ours.vocab_size == len(theirs)
        assert ours.eos_token_id == theirs.eos_token_id
        for prompt in (True, False):
            rendered = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
            assert ours.apply_chat_template(CHAT, prompt) == rendered
        chat = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(CHAT) == chat
        assert chat.count(1) == 1, "one BOS: the template's"
    theirs = AutoTokenizer.from_pretrained(NANOSTORY)
    assert STORY.encode(SENTENCES[3]) == theirs.encode(SENTENCES[3])
    assert STORY.apply_chat_template(CHAT) == theirs.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )


def test_every_folder_without_tokenizer_json_is_converted_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = byte_level_backend()
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<|end|>",
        "bos_token": "<|end|>",
        "unk_token": "<|end|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    converted = Tokenizer.load(tmp_path)
    assert converted.encode(SENTENCES[0]) == BYTE_LEVEL.encode(SENTENCES[0])
    assert converted.eos_token_id == 0
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"no tokenizer\.json.*pip install transformers"):
        Tokenizer.load(tmp_path)


def test_every_usual_load_does_without_torch_and_transformers() -> None:
    code = (
        "import sys, pathlib; from nanoserve.api.text import Tokenizer;"
        f"t = Tokenizer.load(pathlib.Path({str(NANOSTORY)!r}));"
        "t.apply_chat_template([{'role': 'user', 'content': 'x'}]);"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_eos_id_of_the_folder_ends_a_generation(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, object], dict[str, object], int | None, tuple[int, ...]]] = [
        ({"eos_token": "<|user|>"}, {"generation_config.json": {"eos_token_id": [0, 1, 7]}}, 1, (0, 7)),
        ({}, {"generation_config.json": {"eos_token_id": [7, 0]}, "config.json": {"eos_token_id": 9}}, 7, (0,)),
        ({}, {"generation_config.json": {"eos_token_id": None}, "config.json": {"eos_token_id": 9}}, 9, ()),
        ({"eos_token": "no such token"}, {}, None, ()),
        ({}, {}, None, ()),
    ]
    for i, (config, files, eos, others) in enumerate(cases):
        if config.get("eos_token") == "no such token":
            eos = BYTE_LEVEL.vocab_size  # named, so it is added, as transformers does
        tokenizer = Tokenizer.load(write_folder(tmp_path / str(i), byte_level_backend(), config, files))
        assert (tokenizer.eos_token_id, tokenizer.extra_stop_ids) == (eos, others)
    assert STORY.all_eos_ids == (0,)


def test_every_training_setting_that_cuts_or_pads_is_switched_off(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.load(write_folder(tmp_path, backend, {}))
    assert tokenizer.encode(SENTENCES[0]) == BYTE_LEVEL.encode(SENTENCES[0])


def test_every_source_of_a_chat_template_is_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "listed"}]
    cases: list[tuple[dict[str, object], dict[str, object], str]] = [
        ({"chat_template": "config"}, {}, "config"),
        ({"chat_template": "config"}, {"chat_template.jinja": "file"}, "file"),
        ({"chat_template": named}, {}, "listed"),
        (
            {"eos_token": "<|end|>", "chat_template": "{{ eos_token }}{{ bos_token }}{{ strftime_now('%%') }}"},
            {},
            "<|end|>%",
        ),
    ]
    for i, (config, files, text) in enumerate(cases):
        tokenizer = Tokenizer.load(write_folder(tmp_path / str(i), byte_level_backend(), config, files))
        assert tokenizer.apply_chat_template(CHAT) == text


def test_every_bad_chat_is_refused_with_its_place() -> None:
    good = {"role": "user", "content": "x"}
    for messages, place in (
        ([], "messages must be a non-empty list"),
        ("hello", "messages must be a non-empty list"),
        ([good, "hello"], r"messages\[1\] must look like"),
        ([{"role": "user"}], r"messages\[0\]\.content must be a string, got None"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content must be a string"),
        ([{"role": "", "content": ""}], r"messages\[0\]\.role must be a string"),
        ([good, {**good, "tool_calls": []}], r"messages\[1\]\.tool_calls is not supported"),
    ):
        with pytest.raises(ValueError, match=place):
            STORY.apply_chat_template(messages)
    bare = Tokenizer(byte_level_backend(), name="base-model")
    with pytest.raises(ValueError, match=r"base-model has no chat template; add chat_template\.jinja"):
        bare.apply_chat_template([good])


def test_every_template_runs_in_a_sandbox_and_its_refusal_is_a_value_error() -> None:
    for source, reason in (
        (TEMPLATE, "unknown role wizard"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused"),
        ("{{ messages[0].content + 1 }}", "refused"),
        ("{{ 1 / 0 }}", "refused"),
        ("{{ range(10 ** 400) }}", "refused"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refused"),
        ("{% for %}", "not valid"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "not valid"),
    ):
        tokenizer = Tokenizer(byte_level_backend(), chat_template=source)
        with pytest.raises(ValueError, match=reason):
            tokenizer.apply_chat_template([{"role": "wizard", "content": "x"}])


def test_every_broken_folder_is_refused_with_file_and_fix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere' does not exist"):
        Tokenizer.load(tmp_path / "nowhere")
    folder = write_folder(tmp_path / "a", byte_level_backend(), {})
    for name, content, reason in (
        ("generation_config.json", '{"eos_token_id": ["x"]}', "eos_token_id in .*generation_config.json must be"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json must hold a JSON object, got list"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", '{"a":' + "[" * 200_000, "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "tokenizer_config.json: added_tokens_decoder"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "a"}}', "tokenizer_config.json: .*'x'"),
        ("tokenizer_config.json", '{"extra_special_tokens": 5}', "tokenizer_config.json: extra_special_tokens"),
        ("tokenizer_config.json", '{"additional_special_tokens": [[]]}', "json: additional_special_tokens"),
        ("tokenizer_config.json", r'{"extra_special_tokens": ["\ud800"]}', "tokenizer_config.json: "),
        ("tokenizer_config.json", r'{"eos_token": "\ud800"}', "tokenizer_config.json: "),
        ("tokenizer_config.json", '{"chat_template": [1]}', "chat_template in .*tokenizer_config.json must be text"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template in .*tokenizer_config.json must be text"),
        ("tokenizer.json", '{"version": "1.0"', "tokenizer.json is not a tokenizer"),
    ):
        kept = (folder / name).read_text() if (folder / name).exists() else "{}"
        (folder / name).write_text(content)
        with pytest.raises(ValueError, match=reason):
            Tokenizer.load(folder)
        (folder / name).write_text(kept)
    for text in ("\ud800", None):
        with pytest.raises(ValueError, match="valid Unicode"):
            STORY.encode(text)


def test_every_bad_word_is_blocked_with_and_without_a_leading_space() -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK, STORY):
        for word in ("boat", " boat", "left the", "🙂", "s"):
            sequences = tokenizer.bad_words_token_ids([word])
            assert tokenizer.encode(word.strip(), add_special_tokens=False) in sequences
            spaced = tokenizer.encode(f" {word.strip()}", add_special_tokens=False)
            assert any(spaced[-len(ids) :] == ids for ids in sequences)
            assert len(sequences) <= 2
    for word in (" ", "\t"):
        with pytest.raises(ValueError, match="no tokens; remove it"):
            BYTE_LEVEL.bad_words_token_ids(["ok", word])


def test_every_append_handles_the_new_text_only() -> None:
    """What an output looks at per token (window, tail, unsent text) stays small while the text grows."""
    rng = random.Random(0)
    output = OutputText(BYTE_LEVEL, SamplingParams(stop=["never there", "nor there"], max_tokens=None))
    deltas, sizes = [], []
    for _ in range(2000):
        output.append([rng.randrange(2, BYTE_LEVEL.vocab_size)])
        deltas.append(output.delta(False))
        assert output._detokenizer is not None
        sizes.append(sum(map(len, output._unsent)) + len(output._tail) + len(output._detokenizer._window))
    assert max(sizes) < 100
    assert "".join(deltas) + output.delta(True) == output.text
    assert len(output.text) > 2000
