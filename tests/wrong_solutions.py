"""Plausible wrong answers to the exercises, as small differences to the right ones, with the law that each breaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Wrong(NamedTuple):
    """In the solution, `old` becomes `new`."""

    what: str
    law: str
    old: str
    new: str

    def of(self, solution: str) -> str:
        assert self.old in solution, f"{self.what}: {self.old!r} is not in the solution any more"
        return solution.replace(self.old, self.new, 1)


_SEARCH = """(low + high + 1) // 2
        if measure(middle).gap_ms <= max_gap_ms:
            low = middle
        else:
            high = middle - 1"""
_FIRST_THAT_BREAKS = """(low + high) // 2
        if measure(middle).gap_ms < max_gap_ms:
            low = middle + 1
        else:
            high = middle"""

WRONG: Mapping[int, list[Wrong]] = {
    1: [
        Wrong(
            "decodes-beside-prompts",
            "policy",
            "        else:\n            self._decode",
            "        if True:\n            self._decode",
        ),
        Wrong("no-reason", "plan", 'Reason("paused", behind=first)', 'Reason("budget")'),
        Wrong("no-seats", "plan", " or len(self.running) >= self.max_num_seqs", ""),
        Wrong("hits-ignored", "plan", "n = request.num_tokens - hit.num_tokens", "n = request.num_tokens"),
        Wrong("no-watermark", "policy", "draft, self.watermark_blocks)", "draft, 0)"),
        Wrong("longest-ignored", "limits", "request.num_tokens > min(", "request.num_tokens >= min("),
        Wrong("never-ignored", "limits", "min(self.max_model_len, self.budget)", "self.max_model_len"),
        Wrong("reasons-of-now", "plan", "running_before = list(self.running)", "running_before = self.running"),
        Wrong("reasons-by-request", "plan", "(r.id for r in running_before)", "running_before"),
        Wrong(
            "stops-at-the-ignored", "limits", "request)\n                continue", "request)\n                return"
        ),
        Wrong("budget-of-all-steps", "limits", "n > draft.budget", "n > self.budget"),
    ],
    2: [
        Wrong("never-goes-on", "policy", "for request in list(self.running):", "for request in []:"),
        Wrong(
            "output-means-decode",
            "policy",
            "request.num_behind == 1 and request.num_output_tokens",
            "request.num_output_tokens",
        ),
        Wrong(
            "not-cut",
            "plan",
            "min(request.num_tokens - hit.num_tokens, draft.budget)",
            "request.num_tokens - hit.num_tokens",
        ),
        Wrong(
            "one-behind-means-decode",
            "policy",
            "request.num_behind == 1 and request.num_output_tokens + request.num_placeholders > 0",
            "request.num_behind == 1",
        ),
        Wrong("admits-after-a-preemption", "policy", " and not draft.preempted", ""),
        Wrong("no-watermark", "policy", "self.watermark_blocks if self.running else 0", "0"),
        Wrong("hits-ignored", "plan", "request.num_tokens - hit.num_tokens", "request.num_tokens"),
        Wrong("longest-admitted", "limits", "request.num_tokens >= self", "request.num_tokens > self"),
        Wrong("never-ignored", "limits", " or not self.blocks.fits(request.num_tokens)", ""),
    ],
    3: [
        Wrong(
            "running-not-cut",
            "plan",
            "            n = min(n, draft.budget)\n            if n == 0",
            "            if n == 0",
        ),
        Wrong(
            "whole-prompts",
            "progress",
            "            n = min(n, draft.budget)\n            watermark",
            "            if n > draft.budget:\n                break\n            watermark",
        ),
        Wrong(
            "waiting-first",
            "plan",
            "while index < len(self.running) and draft.budget > 0:",
            "while index < len(self.running) and draft.budget > 0 and not self.waiting:",
        ),
        Wrong(
            "walks-over-a-copy",
            "plan",
            "while index < len(self.running) and draft.budget > 0:\n            request = self.running[index]",
            "for request in list(self.running):",
        ),
        Wrong("admits-after-a-preemption", "policy", " and not draft.preempted", ""),
        Wrong("no-watermark", "policy", "self.watermark_blocks if self.running else 0", "0"),
        Wrong("hits-ignored", "plan", "request.num_tokens - hit.num_tokens", "request.num_tokens"),
        Wrong("longest-admitted", "limits", "request.num_tokens >= self", "request.num_tokens > self"),
        Wrong("never-ignored", "limits", " or not self.blocks.fits(request.num_tokens)", ""),
    ],
    4: [
        Wrong("one-too-many", "promise", "return low", "return low + 1"),
        Wrong("on-the-safe-side", "first token", "return low", "return 8"),
        Wrong("almost-kept", "first token", "<= max_gap_ms", "< max_gap_ms"),
        Wrong("first-that-breaks", "promise", _SEARCH, _FIRST_THAT_BREAKS),
        Wrong("one-by-one", "thrift", "middle = (low + high + 1) // 2", "middle = low + 1"),
    ],
    5: [
        Wrong("no-parent", "keys", "body = parent + self._pack(", "body = self._pack("),
        Wrong("no-extra-keys", "keys", "if extra :=", "if extra := [] and"),
        Wrong(
            "ambiguous",
            "keys",
            "self._pack(*request.token_ids[start : start + self.block_size])",
            '"".join(map(str, request.token_ids[start : start + self.block_size])).encode()',
        ),
        Wrong("of-the-request", "keys", "body = parent +", "body = request.id.encode() + parent +"),
        Wrong("pythons-own", "keys", "hashlib.sha256(body).digest()", "hash(body).to_bytes(8, signed=True)"),
    ],
    6: [
        Wrong("left-in-the-queue", "counts", "self.pool.remove(block)", "pass"),
        Wrong("head-first", "queue", "in reversed(request.block_ids)", "in request.block_ids"),
        Wrong("all-appended", "queue", "self._put_back(block)", "self.pool.append(block)"),
        Wrong(
            "freed-while-held",
            "counts",
            "if block.ref == 0 and block.block_hash is None",
            "if block.block_hash is None or block.ref",
        ),
    ],
    7: [
        Wrong("whole-prompt", "lengths", "(request.num_tokens - 1)", "request.num_tokens"),
        Wrong("goes-on-behind-a-miss", "lengths", "break", "continue"),
        Wrong(
            "one-block-less",
            "lengths",
            "(request.num_tokens - 1) // self.block_size",
            "(request.num_tokens - 1) // self.block_size - 1",
        ),
    ],
    8: [
        Wrong("newest-first", "work", "heapq.heappop(self._eviction_order)", "self._eviction_order.pop()"),
        Wrong("keeps-the-hash", "blocks", "self._drop_hash(block)", "pass"),
        Wrong(
            "stale-entries",
            "work",
            "if block is not None and block.last_accessed == last_accessed",
            "if block is not None",
        ),
    ],
    9: [
        Wrong("the-bug", "work", "request.num_behind == 0", "request.num_behind == 0 or request.num_output_tokens > 0"),
        Wrong("not-on-its-way", "plan", "request.num_placeholders += samples", "pass"),
    ],
    10: [
        Wrong(
            "one-block-too-late",
            "tokens",
            "first = num_computed_tokens // self.block_size",
            "first = num_computed_tokens // self.block_size + 1",
        ),
        Wrong("all-forgotten", "hits", "first = num_computed_tokens // self.block_size", "first = 0"),
    ],
    11: [
        Wrong("behind-the-graph", "tokens", "buffer[num_tokens:size]", "buffer[size:]"),
        Wrong("tokens-lost", "tokens", "buffer[num_tokens:size]", "buffer[:size]"),
    ],
    12: [
        Wrong("another-number", "calls", "UtilityResult(call.call_id, error=f", "UtilityResult(0, error=f"),
        Wrong("dies-of-nonsense", "nonsense", "except msgspec.DecodeError as error", "except KeyError as error"),
        Wrong(
            "no-abort",
            "aborts",
            "self.core.abort(item)  # at once: the step that runs will honour it",
            "continue",
        ),
        Wrong("not-at-once", "aborts", "self.core.abort(item)  # at once: the step that runs will honour it", "pass"),
        Wrong("not-again", "aborts", "self.core.abort(item)  # again", "pass  # again"),
        Wrong("serves-to-the-end", "shutdown", "if self._deadline is not None:", "if False:"),
        Wrong("one-kind-of-error", "calls", "except Exception as error", "except ValueError as error"),
    ],
    13: [
        Wrong("place-not-in-block", "slots", "slot % BLOCK_SIZE *", "slot *"),
        Wrong("padding-stored", "padding", "if slot < 0:\n        return", "if slot < 0:\n        slot = slot + 1"),
        Wrong(
            "unmasked",
            "shapes",
            "(head_K < NUM_HEADS) & (dim_D < HEAD_DIM)",
            "(head_K < NUM_HEADS) & (dim_D < TILE_DIM)",
        ),
        Wrong(
            "one-stride-for-both",
            "strides",
            "v_ptr + token * v_stride_t + head_K * v_stride_k",
            "v_ptr + token * k_stride_t + head_K * k_stride_k",
        ),
    ],
    14: [
        Wrong("not-itself", "decode", "+ place_P <= position", "+ place_P < position"),
        Wrong("no-rescale", "causal", "rescale = tl.exp(greatest - new_greatest)", "rescale = 1.0"),
        Wrong(
            "other-groups",
            "groups",
            "kv_head, num_kv_heads = head // GROUP,",
            "kv_head, num_kv_heads = head % (num_heads // GROUP),",
        ),
        Wrong(
            "reads-behind-the-end",
            "strangers",
            "v_PD = tl.load(values_ptr + offset_PD, mask=mask_PD, other=0.0)",
            "v_PD = tl.load(values_ptr + offset_PD)",
        ),
    ],
    15: [
        Wrong("next-larger", "best", "bisect_left(self.sizes, num_tokens)", "bisect_left(self.sizes, num_tokens + 1)"),
        Wrong("too-small", "fits", "self.sizes[place]", "self.sizes[max(place - 1, 0)]"),
        Wrong(
            "never-captured",
            "captured",
            "return next((key for key in candidates if key in self._keys), None)",
            "return candidates[0]",
        ),
    ],
    16: [
        Wrong("shortest-first", "progress", "request.num_tokens - 4 * waited", "request.num_tokens"),
        Wrong("first-come", "fairness", "request.num_tokens - 4 * waited", "-waited"),
    ],
}
