"""Text to token ids and back, the chat template, and the ids that end a generation: what a model folder says of them.

`tokenizer.json` is read with the `tokenizers` library alone, since importing transformers costs seconds; only a
folder without that file takes the detour. Does not know requests or streams: see `text.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

    from nanoserve.api.chat_template import ChatTemplate

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_ID = 2**32 - 1  # the library's ids are unsigned 32-bit


class Tokenizer:
    """A fast tokenizer with what serving needs around it. `Tokenizer.load` is the usual way to one.

    Thread-safe: nothing changes after construction. BOS and EOS are added as the post-processor in tokenizer.json
    says; like transformers 5, `add_bos_token` beside it is not read. Unlike transformers, nor is
    `clean_up_tokenization_spaces`: it would rewrite text that was already streamed.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
        name: str = "model",
    ) -> None:
        """`named_tokens`: `bos_token`, `eos_token`, ... as text; `eos_ids`: the main one first; `name`: for errors."""
        self._backend = backend
        self._named_tokens = dict(named_tokens or {})
        self._chat_source = chat_template
        self._name = name
        self.all_eos_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_ids))
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """The tokenizer of a model folder, in Hugging Face's layout. Raises ValueError naming the file and the fix."""
        model_dir = Path(model_dir)
        if not model_dir.is_dir():
            raise ValueError(f"model folder {str(model_dir)!r} does not exist; give a folder with tokenizer.json.")
        config = _read_json(model_dir / "tokenizer_config.json")
        named = _named_tokens({**_read_json(model_dir / "special_tokens_map.json"), **config})
        chat_template = _chat_source(model_dir, config)
        if (model_dir / "tokenizer.json").is_file():
            backend = _read_backend(model_dir / "tokenizer.json")
            try:
                _register_tokens(backend, config, named)
            except (ValueError, TypeError) as error:  # TypeError: the library's, for text that is not Unicode
                raise ValueError(f"{model_dir / 'tokenizer_config.json'}: {error}; download it again.") from None
        else:
            backend = _convert_backend(model_dir)
        return cls(
            backend,
            named_tokens=named,
            eos_ids=_eos_ids(model_dir, backend, named),
            chat_template=chat_template,
            name=model_dir.name,
        )

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's `eos_token`, or else the first that the model's configs list; it ends with no stop_reason."""
        return self.all_eos_ids[0] if self.all_eos_ids else None

    @property
    def extra_stop_ids(self) -> tuple[int, ...]:
        """Further ids that end a generation (`generation_config.json` may list several), unless `ignore_eos`."""
        return self.all_eos_ids[1:]

    @cached_property
    def max_chars_per_token(self) -> int:
        """No token spells more characters than this (byte-level spellings have one a byte)."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. `add_special_tokens=False` for what a chat template wrote: it has its own BOS."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise ValueError(
                f"text must be a string of valid Unicode (no lone surrogates), got {text!r:.60}."
            ) from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids. Undecodable bytes become U+FFFD; an id outside the vocabulary is no text."""
        known = [i for i in token_ids if 0 <= i <= _MAX_ID]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id (not text: a byte of a character may stand alone), or None."""
        return self._backend.id_to_token(token_id) if 0 <= token_id <= _MAX_ID else None

    def is_silent(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether the id is no text wherever it stands: a skipped special token, or outside the vocabulary."""
        return (skip_special_tokens and token_id in self.special_ids) or self.token(token_id) is None

    @property
    def has_chat_template(self) -> bool:
        return self._chat_source is not None

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        if self._chat_source is None:
            raise ValueError(
                f"{self._name} has no chat template; add chat_template.jinja to its folder, or send a plain prompt "
                "(LLM.generate, /v1/completions)."
            )
        from nanoserve.api.chat_template import ChatTemplate

        return ChatTemplate(self._chat_source, self._named_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text of a chat. Encode it with `add_special_tokens=False`, or use `encode_chat`.

        Raises ValueError for bad messages, and for a model without a template, naming the fix.
        """
        return self._chat_template.render(messages, add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """The prompt ids of a chat, with no BOS but the template's own."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt), add_special_tokens=False)

    def bad_words_token_ids(self, bad_words: Sequence[str]) -> list[list[int]]:
        """Token sequences that spell the words, at the start of a text and after a space.

        Mirrors `SamplingParams.update_from_tokenizer` of `vllm/sampling_params.py`. Unlike vLLM, which drops the
        spaced form when it has another length (vllm#32557: the word then gets through), it is kept unless it ends
        with the plain one and so is blocked already. Raises ValueError for a word without tokens.
        """
        sequences: list[list[int]] = []
        for word in bad_words:
            plain, spaced = (self.encode(prefix + word.lstrip(), add_special_tokens=False) for prefix in ("", " "))
            if not word.strip() or not plain:
                raise ValueError(f"bad_words holds {word!r}, which has no tokens; remove it.")
            sequences.append(plain)
            if spaced[-len(plain) :] != plain:
                sequences.append(spaced)
        return sequences


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}; download it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}; download it again.")
    return content


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {error}; download it again.") from None
    backend.no_truncation()  # settings of a training run; they would cut prompts silently
    backend.no_padding()
    return backend


def _convert_backend(model_dir: Path) -> tokenizers.Tokenizer:
    """For folders with a sentencepiece model, or vocab and merges, but no tokenizer.json."""
    fix = "save it once with AutoTokenizer.from_pretrained(...).save_pretrained(...), which writes tokenizer.json"
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError(
            f"{model_dir} has no tokenizer.json, and converting its tokenizer needs transformers; "
            f"pip install transformers sentencepiece, or {fix}."
        ) from None
    try:
        backend = getattr(AutoTokenizer.from_pretrained(str(model_dir)), "backend_tokenizer", None)
    except (ImportError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{model_dir} has no tokenizer.json, nor one that can be converted: {reason:.200}") from None
    if backend is None:
        raise ValueError(f"{model_dir} has no tokenizer.json and no fast tokenizer; {fix}.")
    return backend


def _content(token: object) -> str | None:
    """A token in a config is its text, or an object that holds it."""
    value = token.get("content") if isinstance(token, Mapping) else token
    return value if isinstance(value, str) and value else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _content(config.get(name)) for name in _NAMED_TOKENS}
    return {name: text for name, text in named.items() if text is not None}


def _entries(config: Mapping[str, Any], key: str) -> Mapping[Any, Any]:
    """A key's object, or its list by position; each entry a token. Raises ValueError that names the key."""
    value = config.get(key) or {}
    entries = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(entries, Mapping) or not all(
        entry is None or isinstance(entry, str | Mapping) for entry in entries.values()
    ):
        raise ValueError(f"{key} must hold tokens (text, or objects with content), got {value!r:.80}")
    return entries


def _register_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Adds the tokens that only tokenizer_config.json knows, and marks its special ones as such."""
    from tokenizers import AddedToken

    present = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    listed = sorted(_entries(config, "added_tokens_decoder").items(), key=lambda item: int(item[0]))
    extra = [*_entries(config, "additional_special_tokens").values()]
    extra += _entries(config, "extra_special_tokens").values()
    special = dict.fromkeys([*named.values(), *filter(None, map(_content, extra))])
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    tokens: dict[str, AddedToken] = {}  # in the order in which new ones get their ids
    for _, entry in listed:
        if text := _content(entry):
            entry = entry if isinstance(entry, Mapping) else {}
            is_special = bool(entry.get("special", False)) or text in special
            kept = {flag: bool(entry[flag]) for flag in flags if flag in entry}
            tokens[text] = AddedToken(text, special=is_special, **kept)
    for text in special:
        if text not in tokens and text not in present:
            tokens[text] = AddedToken(text, special=True, normalized=False)
    backend.add_tokens([token for text, token in tokens.items() if present.get(text) != token.special])


def _eos_ids(model_dir: Path, backend: tokenizers.Tokenizer, named: Mapping[str, str]) -> list[int]:
    """The tokenizer's eos, then those of generation_config.json, or where it has none, of config.json."""
    ids: list[int] = []
    if "eos_token" in named and (own := backend.token_to_id(named["eos_token"])) is not None:
        ids.append(own)
    for file in ("generation_config.json", "config.json"):
        listed = _read_json(model_dir / file).get("eos_token_id")
        if listed is None:
            continue
        listed = listed if isinstance(listed, list) else [listed]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in listed):
            raise ValueError(
                f"eos_token_id in {model_dir / file} must be a token id or a list of them, got {listed!r}."
            )
        return ids + listed
    return ids


def _chat_source(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or else tokenizer_config.json's template (of several, the one named default)."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}; download it again.") from None
    source = config.get("chat_template")
    if isinstance(source, list) and all(isinstance(entry, Mapping) for entry in source):
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise ValueError(
            f"chat_template in {model_dir / 'tokenizer_config.json'} must be text, or a list of objects with name and "
            f"template, got {source!r:.80}; download it again."
        )
    return source
