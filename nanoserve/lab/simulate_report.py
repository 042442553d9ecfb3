"""What `nanoserve simulate` tells, as data: one row a policy, nothing in it that differs between two equal runs.

`SimulateReport` *is* the schema of the JSON: `msgspec.json.decode(data, type=SimulateReport)` reads it back. Times are
whole microseconds of the virtual clock, shares in [0, 1], null where there is no such value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nanoserve.blocks import SharedBlocks
from nanoserve.lab.gpus import Memory, session_blocks
from nanoserve.lab.metrics import Spread
from nanoserve.lab.simulated import SimulatedRun
from nanoserve.lab.simulator import Host
from nanoserve.lab.study import Study
from nanoserve.record import describe_config
from nanoserve.request import Request, SamplingParams

SIMULATE_VERSION = 1
MAX_LISTED = 6  # requests whose first tokens are told one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    num_requests: int
    ttft_us: Spread | None
    itl_us: Spread | None
    worst_gap_us: Spread | None  # over requests


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReport:
    """One run."""

    policy: str
    config: dict[str, str | int | float | bool | None]
    itl_us: Spread | None  # over all gaps of all requests
    ttfts_us: list[int] | None  # of the watched group, where it is small
    ttft_us: Spread | None  # of that group
    groups: dict[str, GroupReport]
    end_us: int
    busy_us: int  # of the device
    num_steps: int
    num_tokens: int  # computed
    mean_running: float
    output_tokens: int
    output_tokens_per_s: float
    hit_rate: float
    peak_used_blocks: int
    num_preemptions: int
    num_refused: int  # could never fit

    @classmethod
    def of(cls, policy: str, run: SimulatedRun, ttft_group: str) -> PolicyReport:
        ttfts_us = run.ttfts_us(ttft_group)
        return cls(
            policy=policy,
            config=describe_config(run.config),
            itl_us=run.itl_us(),
            ttfts_us=ttfts_us if len(ttfts_us) <= MAX_LISTED else None,
            ttft_us=run.ttft_us(ttft_group),
            groups={group: _group(run, group) for group in run.groups},
            end_us=run.end_us,
            busy_us=run.busy_us,
            num_steps=run.num_steps,
            num_tokens=run.num_tokens,
            mean_running=run.mean_running,
            output_tokens=run.output_tokens,
            output_tokens_per_s=run.output_tokens_per_s,
            hit_rate=run.hit_rate,
            peak_used_blocks=run.peak_used_blocks,
            num_preemptions=run.num_preemptions,
            num_refused=run.num_refused,
        )


def _group(run: SimulatedRun, group: str) -> GroupReport:
    members = run.members(group)
    return GroupReport(
        num_requests=len(members),
        ttft_us=run.ttft_us(group),
        itl_us=run.itl_us(group),
        worst_gap_us=Spread.of(story.worst_gap_us for story in members if story.num_tokens > 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMemory:
    """Sessions behind one prefix, all resident at once: blocks and bytes with a copy each, and with one copy."""

    sessions: int
    prefix_len: int
    own_len: int
    block_size: int
    private_blocks: int
    shared_blocks: int  # counted in the real block manager
    block_bytes: int
    private_prefix_bytes: int
    shared_prefix_bytes: int
    pool_blocks: int
    private_fit: int  # sessions that the pool holds at once
    shared_fit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """One replica's memory, from data sheets."""

    gpus: str
    total_bytes: int
    use: float
    weight_bytes: int
    kv_bytes_per_token: int
    num_blocks: int

    @classmethod
    def of(cls, memory: Memory) -> MemoryReport:
        return cls(
            gpus=f"{memory.tp} x {memory.gpu.name}",
            total_bytes=memory.total_bytes,
            use=memory.use,
            weight_bytes=round(memory.model.weight_bytes(memory.dtype)),
            kv_bytes_per_token=memory.kv_bytes_per_token,
            num_blocks=memory.num_blocks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateReport:
    version: int
    nanoserve: str
    clock: str  # "simulated"
    workload: str
    claim: str
    parameters: Mapping[str, int]
    num_requests: int
    ttft_group: str
    seed: int
    costs: str
    host: Host
    block_size: int
    num_blocks: int
    memory: MemoryReport | None  # None: the costs name no hardware
    sessions: SessionMemory | None  # of a workload of sessions behind one prefix
    policies: list[PolicyReport]
    study: Study | None


def session_memory(memory: Memory, sessions: int, prefix_len: int, own_len: int) -> SessionMemory:
    """By hand for private copies, whose pool would need millions of blocks; counted for shared ones."""
    private, _ = session_blocks(prefix_len, own_len, memory.block_size)
    private_fit, shared_fit = memory.sessions(prefix_len, own_len)
    prefix_bytes = prefix_len * memory.kv_bytes_per_token
    return SessionMemory(
        sessions=sessions,
        prefix_len=prefix_len,
        own_len=own_len,
        block_size=memory.block_size,
        private_blocks=private * sessions,
        shared_blocks=count_shared_blocks(sessions, prefix_len, own_len, memory.block_size),
        block_bytes=memory.block_bytes,
        private_prefix_bytes=prefix_bytes * sessions,
        shared_prefix_bytes=prefix_bytes,
        pool_blocks=memory.num_blocks,
        private_fit=private_fit,
        shared_fit=shared_fit,
    )


def count_shared_blocks(sessions: int, prefix_len: int, own_len: int, block_size: int) -> int:
    """Blocks that `SharedBlocks` holds when all the sessions are resident."""
    private, own = session_blocks(prefix_len, own_len, block_size)
    blocks = SharedBlocks(private + sessions * own + 1, block_size)
    params = SamplingParams()
    for number in range(sessions):
        tokens = [1] * prefix_len + [2 + number] * own_len
        request = Request(str(number), params, prefix_len + own_len, 1, token_ids=tokens)
        hit = blocks.lookup(request)
        new = blocks.allocate(request, request.num_tokens - hit.num_tokens, hit)
        assert new is not None, f"session {number} did not fit beside the others in {blocks.num_blocks} blocks"
    return blocks.num_blocks - 1 - blocks.num_free_blocks
