"""Predicts a step on N GPUs of M nodes: computation, communication, and how much of it computation hides.

Derived in docs/scale.md. ``collectives`` has the time of a collective, ``overlap`` when each runs, ``extrapolate`` the
computation; this module combines them. A model of fewer than SHARDED_FROM parameters is copied (DDP), a larger one
sharded (FSDP2), as ``narrowgauge train`` does. For a single GPU it is the plain forecast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from narrowgauge.forecast.cluster import overlap
from narrowgauge.forecast.cluster.collectives import Cluster
from narrowgauge.forecast.cluster.overlap import Timeline, Work
from narrowgauge.forecast.extrapolate import TracedModel
from narrowgauge.forecast.memory.rank_memory import (
    FP8,
    REDUCED_BYTES,
    RankMemory,
    get_gathered_bytes,
    get_outside_bytes,
)
from narrowgauge.forecast.time.reachable_rates import LAUNCH_S, ReachableRates
from narrowgauge.forecast.time.roofline import Cost, compute_mfu, sum_costs, sum_host_seconds
from narrowgauge.forecast.trace.trace_step import ShardSizes, Traced
from narrowgauge.ranks.distribute import SHARDED_FROM, reduces_every_microbatch

BUCKET_BYTES = 25 << 20
"""Gradients that DDP reduces in one call (its ``bucket_cap_mb``)."""
PARALLEL = ("auto", "ddp", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Message:
    """All collectives of one kind in an update."""

    name: str
    count: int
    bytes: float
    """Bytes that one of them gathers or reduces."""
    sent_bytes: float
    """Bytes that each GPU sends and receives in all of them."""
    bandwidth: float
    """Bytes per second and direction of the ring."""
    via: str
    """The link that limits the ring: nvlink, pcie or network."""
    ms: float
    exposed_ms: float
    """Milliseconds that computation waits for them."""

    @property
    def hidden_ms(self) -> float:
        return self.ms - self.exposed_ms


@dataclass(frozen=True, kw_only=True)
class ClusterStep:
    """A predicted update on several GPUs."""

    gpus: int
    nodes: int
    parallel: str
    """fsdp or ddp; none for one GPU."""
    batch: int
    """Per GPU."""
    step_ms: float
    compute_ms: float
    """Per GPU."""
    exposed_ms: float
    """Milliseconds that computation waits for communication."""
    items_per_s: float
    """Of all GPUs together."""
    mfu: float | None
    efficiency: float
    """Items per second and GPU, divided by those of a single GPU with unlimited memory."""
    bound: str
    """computation, launches, or the link that limits communication."""
    hidden_from_batch: int | None
    """The smallest batch per GPU whose computation hides the communication; None without communication."""
    load: float = 0.0
    """A block's communication divided by its computation: above 1 it cannot be hidden."""
    communication: list[Message] = field(default_factory=list)

    @property
    def communication_ms(self) -> float:
        return sum(message.ms for message in self.communication)


def choose_parallel(parallel: str, parameters: int) -> str:
    """fsdp or ddp: as given, or by the model's size for auto."""
    if parallel != "auto":
        return parallel
    return "fsdp" if parameters > SHARDED_FROM else "ddp"


def predict_cluster_step(
    traced_model: TracedModel, rates: ReachableRates, cluster: Cluster, parallel: str = "auto"
) -> ClusterStep:
    """Predict an update on a cluster; every GPU has the batch that was traced."""
    traced, costs = traced_model.traced, traced_model.costs(rates)
    alone = sum_costs(traced, costs)
    if cluster.gpus == 1:
        return ClusterStep(
            gpus=1, nodes=1, parallel="none", batch=traced.batch, step_ms=alone.step_ms, compute_ms=alone.device_ms,
            exposed_ms=0.0, items_per_s=alone.items_per_s, mfu=alone.mfu, efficiency=1.0, hidden_from_batch=None,
            bound="launches" if alone.bound == "launches" else "computation",
        )  # fmt: skip
    parallel = choose_parallel(parallel, traced_model.parameters)
    work = compute_work(traced_model, costs, rates, cluster, parallel)
    sizes = compute_message_bytes(traced_model, parallel)
    if parallel == "fsdp":
        clock = overlap.simulate_fsdp(work)
    else:
        clock = overlap.simulate_ddp(work, _time_buckets(cluster, sizes["outside"]))
    seconds = max(clock.now, sum_host_seconds(costs))
    items_per_s = traced.items * cluster.gpus / seconds
    messages = _describe(clock, sizes, cluster)
    exposed = sum(message.exposed_ms for message in messages)
    return ClusterStep(
        gpus=cluster.gpus,
        nodes=cluster.nodes,
        parallel=parallel,
        batch=traced.batch,
        step_ms=seconds * 1e3,
        compute_ms=work.compute * 1e3,
        exposed_ms=exposed,
        items_per_s=items_per_s,
        mfu=compute_mfu(traced, items_per_s / cluster.gpus),
        efficiency=items_per_s / cluster.gpus / alone.items_per_s,
        bound="launches"
        if seconds > clock.now
        else cluster.via
        if _compute_load(work, parallel) > 1
        else "computation",
        hidden_from_batch=_find_hiding_batch(work, parallel, traced.batch),
        load=_compute_load(work, parallel),
        communication=messages,
    )


def list_cluster_sizes(cluster: Cluster) -> list[Cluster]:
    """Smaller clusters of the same kind: one GPU, then powers of two within a node, then of full nodes; itself last."""
    found = [Cluster(cluster.gpu, links=cluster.links)]
    count = 2 if cluster.nodes == 1 else cluster.per_node
    while count < cluster.gpus:
        nodes = max(1, count // cluster.per_node)
        if count > 1 and cluster.gpus % count == 0:
            found.append(Cluster(cluster.gpu, count, nodes, cluster.links))
        count *= 2
    return [*found, cluster]


def compute_shard_sizes(traced_model: TracedModel) -> ShardSizes:
    """The shard sizes of the whole model."""
    parts = traced_model.traced.shard_sizes
    assert parts is not None
    few = max(1, len(traced_model.traced.block_paths))
    in_blocks = parts.in_blocks * traced_model.blocks // few if traced_model.blocks else parts.in_blocks
    return ShardSizes(
        block=parts.block, in_blocks=in_blocks, outside=parts.outside, narrow=parts.narrow,
        copied=traced_model.parameters - in_blocks - parts.outside,
    )  # fmt: skip


def compute_message_bytes(traced_model: TracedModel, parallel: str) -> dict[str, float]:
    """Bytes of one collective, by kind."""
    traced, parts = traced_model.traced, compute_shard_sizes(traced_model)
    width, own = get_gathered_bytes(traced), get_outside_bytes(traced)
    if parallel == "fsdp":
        return {
            overlap.GATHER: parts.block * width,
            overlap.REGATHER: parts.block * width,
            overlap.SCATTER: parts.block * REDUCED_BYTES,
            overlap.GATHER_OUTSIDE: parts.outside * own,
            overlap.SCATTER_OUTSIDE: parts.outside * REDUCED_BYTES,
            overlap.AGREE: 4 * parts.copied,
        }
    gradient = 2 if parts.narrow else 4
    blocks = max(1, traced_model.blocks)
    copied_in_blocks = parts.copied if traced_model.blocks else 0
    block = (parts.in_blocks * gradient + 4 * copied_in_blocks) / blocks if traced_model.blocks else 0.0
    return {overlap.REDUCE: block, "outside": parts.outside * gradient + 4 * (parts.copied - copied_in_blocks)}


def compute_work(
    traced_model: TracedModel, costs: list[tuple[Cost, float]], rates: ReachableRates, cluster: Cluster, parallel: str
) -> Work:
    """The computation of one GPU, and the time of each collective."""
    traced, sizes = traced_model.traced, compute_message_bytes(traced_model, parallel)
    sharded = parallel == "fsdp"
    if sharded:
        costs = [(cost, times * _get_share(cost, traced, cluster.gpus)) for cost, times in costs]
    spent = _sum_by_position(costs, traced.block_paths)
    blocks, often = traced_model.blocks, traced.accumulate
    more = _estimate_copies(traced_model, rates) if sharded else {}
    each = max(1, blocks) * often
    messages = {
        name: cluster.all_reduce_s(size) if name == overlap.AGREE else cluster.gather_s(size)
        for name, size in sizes.items()
    }
    if not sharded:
        messages = {overlap.REDUCE: _time_buckets(cluster, sizes[overlap.REDUCE])}
    return Work(
        blocks=blocks,
        microbatches=often,
        sums_each=sharded and reduces_every_microbatch(traced_model.parameters, traced.gpu.memory_bytes),
        start=spent.get("forward, before", 0.0) / often + more.get("outside", 0.0),
        forward=spent.get("forward, blocks", 0.0) / each + more.get("forward", 0.0),
        head=spent.get("forward, after", 0.0) / often,
        head_backward=spent.get("backward, before", 0.0) / often,
        backward=spent.get("backward, blocks", 0.0) / each + more.get("backward", 0.0),
        end=spent.get("backward, after", 0.0) / often,
        step=spent.get("step", 0.0) + more.get("step", 0.0),
        messages=messages,
    )


def _get_share(cost: Cost, traced: Traced, gpus: int) -> float:
    """How much of a single GPU's operation one of several ranks does."""
    if cost.op.phase == "step":
        return max(1 / gpus, min(1.0, LAUNCH_S / cost.seconds)) if cost.seconds else 1.0
    made = [(traced.trace.blocks[piece.block], piece) for piece in cost.op.writes if piece.block >= 0]
    if made and all(block.is_copy and block.owner is not None and block.owner.part == "block" for block, _ in made):
        # Weights are gathered in 16 bits, cast per shard; FP8 copies are not kept, so both forward and backward cast.
        return 2.0 if any(piece.dtype in FP8 for _, piece in made) else 1 / gpus
    return 1.0


def _estimate_copies(traced_model: TracedModel, rates: ReachableRates) -> dict[str, float]:
    """Seconds of the copies that only ranks make.

    These are copies of gathered buffers into weights, of gradients into reduction buffers, and of weights into stacked
    ones; under a lean FP8 recipe also casts, which the optimizer writes on a single GPU.
    """
    traced, parts, rate = traced_model.traced, compute_shard_sizes(traced_model), rates.memory()
    width, own, block = get_gathered_bytes(traced), get_outside_bytes(traced), parts.block
    rank = RankMemory(traced, 2)
    stacked = {"forward": 0.0, "backward": 0.0}
    for op in traced.trace.of_step(1):
        if op.phase in stacked:
            stacked[op.phase] += 4.0 * rank.stacked(op) / max(1, len(traced.block_paths)) / traced.accumulate
    cast = 3.0 * block if traced.recipe.compute == "fp8" and parts.narrow else 0.0
    return {
        "forward": (2 * block * width + stacked["forward"] + cast) / rate,
        "backward": (2 * block * width + block * (width + REDUCED_BYTES) + stacked["backward"] + cast) / rate,
        "outside": 2 * parts.outside * own / rate,
        "step": parts.outside * (own + REDUCED_BYTES) / rate,
    }


def _sum_by_position(costs: list[tuple[Cost, float]], paths: list[str]) -> dict[str, float]:
    """Seconds before, in and after the blocks, of all microbatches; work between two blocks counts as in them."""
    inside = tuple(f"{path}." for path in paths)
    spent: dict[str, float] = {}
    start = 0
    while start < len(costs):
        phase = costs[start][0].op.phase
        end = start
        while end < len(costs) and costs[end][0].op.phase == phase:
            end += 1
        within = [i for i in range(start, end) if f"{costs[i][0].op.where}.".startswith(inside)] if inside else []
        for index in range(start, end):
            cost, times = costs[index]
            place = "before" if not within or index < within[0] else "after" if index > within[-1] else "blocks"
            key = "step" if phase == "step" else f"{phase}, {place}"
            spent[key] = spent.get(key, 0.0) + cost.seconds * times
        start = end
    return spent


def _time_buckets(cluster: Cluster, size: float) -> float:
    """Seconds to all-reduce gradients in buckets, as DDP does."""
    return cluster.all_reduce_s(size, math.ceil(size / BUCKET_BYTES))


def _describe(clock: Timeline, sizes: dict[str, float], cluster: Cluster) -> list[Message]:
    found = []
    for name in dict.fromkeys(kind for kind, _, _ in clock.sent):
        count, twice = clock.count(name), 2 if name in (overlap.REDUCE, overlap.AGREE) else 1
        total = sizes[name] * count if name != overlap.REDUCE else sizes[name] * (count - 1) + sizes["outside"]
        found.append(
            Message(
                name=name,
                count=count,
                bytes=total / count,
                sent_bytes=twice * cluster.sent(total),
                bandwidth=cluster.bandwidth,
                via=cluster.via,
                ms=clock.seconds(name) * 1e3,
                exposed_ms=clock.exposed(name) * 1e3,
            )
        )
    return found


def _compute_load(work: Work, parallel: str) -> float:
    """Communication during a block's forward or backward, divided by the computation that can hide it."""
    cost = work.messages.get
    if parallel == "ddp":
        return cost(overlap.REDUCE, 0.0) / work.backward if work.backward else 0.0
    if not work.forward or not work.backward:
        return 0.0
    behind = cost(overlap.REGATHER, 0.0) + cost(overlap.SCATTER, 0.0)
    return max(cost(overlap.GATHER, 0.0) / work.forward, behind / work.backward)


def _find_hiding_batch(work: Work, parallel: str, batch: int) -> int | None:
    """Computation grows with the batch, communication does not."""
    return max(1, math.ceil(batch * _compute_load(work, parallel))) if work.blocks else None
