"""From token ids to the text a user sees: incremental detokenizing, stop strings, hold-back.

`IncrementalDetokenizer` turns one id after the other into text that is never taken back; `OutputText` adds the end
of the text: the token that stopped the engine, stop strings, and the characters a stream must hold back for them.
Offline and streaming front ends use the same object, so they agree. Does not know the engine: whoever owns the
request aborts it there when `append` reports a stop string (`tests/test_text.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from nanoserve.api.tokenizer import Tokenizer
from nanoserve.request import SamplingParams

__all__ = ["IncrementalDetokenizer", "OutputText", "StopHit", "Tokenizer"]

logger = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"  # what undecodable bytes become
_CONTEXT = 5  # prompt tokens that the first window starts with
_MAX_BYTES = 4  # of one character; also: tokens that it may be spread over
_MAX_PENDING = 8  # tokens that may wait for the rest of a character: twice what a character can need


class IncrementalDetokenizer:
    """Text of a growing sequence, one token at a time, at a cost that does not depend on its length.

        ids     ... a a a | b b | c
        window        [---head---|  ]      text = decode(window); new text = text after head

    What a token looks like depends on its neighbours (a leading space, a character spread over several ids), so a
    window of tokens is decoded again and only what follows `head`, its text that is already out, is new. While the
    text ends with U+FFFD the last character may be incomplete: nothing is emitted, the next tokens complete it.
    Mirrors `detokenize_incrementally` of `vllm/transformers_utils/detokenizer_utils.py` (prefix and read offset are
    the window's start and `_read`). Unlike vLLM: a prompt that ends within a character never shows in the output
    (vllm#48853), a run of bytes that never become a character is cut so that the window stays short, and text
    before trailing undecodable bytes is not lost at the end.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._read = 0  # leading tokens of the window whose text is accounted for; the others are pending
        self._head = ""  # the window's text that is out, or belongs to the prompt
        self._owed = 0  # U+FFFD at the start of the output that stand for bytes of the prompt
        try:
            self._seed(prompt_token_ids)
        except Exception as error:  # a decoder's fault must not end a request: vllm#17448
            logger.warning("decoding the prompt's last tokens failed, the text starts without them: %s", error)
            self._reset()

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete. Never raises for any id."""
        if self._tokenizer.is_silent(token_id, self._skip_special_tokens):
            return ""
        for _ in range(2):
            try:
                return self._step(token_id)
            except Exception as error:  # as above
                logger.warning("decoding token %d failed, the window starts anew: %s", token_id, error)
                self._reset()
        return ""

    def finish(self) -> str:
        """The text still pending, without undecodable bytes at its end. The detokenizer is spent afterwards."""
        try:
            delta = self._new_text(self._decode(self._window)).rstrip(REPLACEMENT)
        except Exception as error:  # as above
            logger.warning("decoding the last tokens failed, their text is lost: %s", error)
            delta = ""
        delta = self._without_owed(delta)
        self._reset()
        return delta

    def _reset(self) -> None:
        self._window, self._read, self._head, self._owed = [], 0, "", 0

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)

    def _step(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        settled = len(text) > len(self._head) and not text.endswith(REPLACEMENT)
        if settled:
            delta = self._new_text(text)
            self._move(self._window[self._read :])
        elif len(self._window) - self._read > _MAX_PENDING:
            delta = self._cut(text)
        else:
            return ""
        return self._without_owed(delta)

    def _new_text(self, text: str) -> str:
        """What follows `head` in `text`, the window's text. A decoder may rewrite the head (byte fallback turns a
        whole run of bytes into U+FFFD once one of them is wrong); then one token is the context, or none."""
        if text.startswith(self._head):
            return text[len(self._head) :]
        context, pending = self._window[max(self._read - 1, 0) : self._read], self._window[self._read :]
        head, text = self._decode(context), self._decode(context + pending)
        return text[len(head) :] if head and text.startswith(head) else self._decode(pending)

    def _cut(self, text: str) -> str:
        """Emits a pending run that is too long to be one character, all but a last U+FFFD (that may become one)."""
        delta = self._new_text(text)
        held = REPLACEMENT if delta.endswith(REPLACEMENT) else ""
        self._move(self._window[-_MAX_BYTES:])
        if held and self._head.endswith(held):
            self._head = self._head[: -len(held)]
            return delta[: -len(held)]
        return delta

    def _move(self, window: list[int]) -> None:
        self._window, self._read, self._head = window, len(window), self._decode(window)

    def _without_owed(self, delta: str) -> str:
        while self._owed and delta.startswith(REPLACEMENT):
            delta, self._owed = delta[1:], self._owed - 1
        if delta:
            self._owed = 0
        return delta

    def _seed(self, prompt_token_ids: Sequence[int]) -> None:
        """Makes the prompt's last tokens the first window. It should start and end between two characters: tokens at
        its end that are part of one wait for the output to complete it."""
        window: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if not self._tokenizer.is_silent(token_id, self._skip_special_tokens):
                window.insert(0, token_id)
            if len(window) == _CONTEXT + _MAX_BYTES - 1:
                break
        for num_partial in range(min(_MAX_BYTES, len(window))):
            read = len(window) - num_partial
            for start in range(min(_MAX_BYTES, read)):
                head = self._decode(window[start:read])
                if REPLACEMENT not in head:
                    self._window, self._read, self._head = window[start:], read - start, head
                    if num_partial:
                        self._hide_partial(num_partial)
                    return
        self._window, self._read = window, len(window)
        self._hide_partial(0)

    def _hide_partial(self, num_partial: int) -> None:
        """Leaves nothing of the prompt to emit, but what the output makes of its last, incomplete bytes."""
        text = self._decode(self._window)
        whole = text.rstrip(REPLACEMENT)
        if num_partial and not whole.startswith(self._head):  # they spoil whole characters before them (byte fallback)
            self._owed = num_partial
            return
        self._head, self._owed = whole, len(text) - len(whole)
        if not num_partial:
            self._read -= min(self._owed, _MAX_BYTES - 1)


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string was completed. Only the first `num_tokens` ids of that `append` belong to the output; whoever
    collects ids and logprobs drops the rest."""

    stop: str
    num_tokens: int


class OutputText:
    """The text of one output while it grows: what a user may see of it, and where it ends.

    Stop strings are searched per token, in the new text and the `len(stop) - 1` characters before it. A match must
    be completed by a token after the first `min_tokens`. The match that ends first wins, then the order of
    `params.stop`. Mirrors `BaseIncrementalDetokenizer` of `vllm/v1/engine/detokenizer.py`. Unlike vLLM, of several
    matches in one token the first to end wins (there: the order of the list), and the tokens after the completing
    one are dropped.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """`tokenizer` may be None only with `params.detokenize=False`: the text then stays empty."""
        self._detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize:
            assert tokenizer is not None, "params.detokenize needs a tokenizer"
            self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stop = list(params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._reach = max(map(len, self._stop), default=1) - 1  # characters before new text that a match may use
        self._held_back = 0 if self._include_stop else self._reach
        self._pieces: list[str] = []
        self._num_chars = 0
        self._tail = ""  # the last `_reach` characters
        self._unsent: list[str] = []
        self._num_sent = 0
        self.num_tokens = 0
        self.ended = False
        self.stop_hit: StopHit | None = None

    @property
    def text(self) -> str:
        """All text so far, cut at a stop string; final once `ended`."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def append(
        self, new_token_ids: Sequence[int], finished_by_stop_token: bool = False, *, finished: bool = False
    ) -> StopHit | None:
        """Adds tokens; returns where a stop string ended the text, if one did: it wins over any other reason.

        `finished_by_stop_token`: the last id is the EOS or stop token that ended the request; it is text only with
        `include_stop_str_in_output`. `finished`: the request ended in any way, so that pending text is settled.
        After the end, tokens are ignored.
        """
        if self.ended:
            return None
        hidden = finished_by_stop_token and not self._include_stop
        for i, token_id in enumerate(new_token_ids, start=1):
            self.num_tokens += 1
            if self._detokenizer is None or (hidden and i == len(new_token_ids)):
                continue
            self._extend(self._detokenizer.push(token_id), i)
            if self.ended:
                return self.stop_hit
        if finished or finished_by_stop_token:
            self._finish(len(new_token_ids))
        return self.stop_hit

    def delta(self, finished: bool) -> str:
        """Text to send now that was not sent before. While more may come, the last `max(len(stop)) - 1` characters
        are held back, for they may become part of a stop string. Concatenated, the deltas are `text`."""
        if finished:
            self._finish(0)
        unsent = "".join(self._unsent)
        free = len(unsent) if self.ended else max(len(unsent) - self._held_back, 0)
        self._unsent = [unsent[free:]]
        self._num_sent += free
        return unsent[:free]

    def so_far(self, finished: bool) -> str:
        """All text that may be shown now: as `delta`, for streams that send everything each time."""
        if finished:
            self._finish(0)
        return self.text if self.ended else self.text[: max(self._num_chars - self._held_back, 0)]

    def _finish(self, num_tokens: int) -> None:
        """Settles the pending text, which may complete a stop string."""
        if not self.ended and self._detokenizer is not None:
            self._extend(self._detokenizer.finish(), num_tokens)
        self.ended = True

    def _extend(self, piece: str, num_tokens: int) -> None:
        """Adds the text of the `num_tokens`-th token of this append, and ends the text if a stop string is in it."""
        if not piece:
            return
        self._pieces.append(piece)
        self._unsent.append(piece)
        self._num_chars += len(piece)
        if not self._stop:
            return
        region = self._tail + piece
        if self.num_tokens > self._min_tokens and (match := self._find_stop(region, len(self._tail))):
            stop, end = match
            cut = end if self._include_stop else end - len(stop)
            self._cut(self._num_chars - len(region) + cut)
            self.stop_hit, self.ended = StopHit(stop, num_tokens), True
        self._tail = region[len(region) - min(self._reach, len(region)) :]

    def _find_stop(self, region: str, num_old: int) -> tuple[str, int] | None:
        """The stop string in `region` that ends first, and where; it must end after the first `num_old` characters."""
        first: tuple[str, int] | None = None
        for stop in self._stop:
            start = region.find(stop, max(num_old - len(stop) + 1, 0))
            if start >= 0 and (first is None or start + len(stop) < first[1]):
                first = stop, start + len(stop)
        return first

    def _cut(self, length: int) -> None:
        assert length >= self._num_sent, f"text was sent up to {self._num_sent} but ends at {length}"
        text = self.text[:length]
        self._pieces, self._unsent, self._num_chars = [text], [text[self._num_sent :]], length
