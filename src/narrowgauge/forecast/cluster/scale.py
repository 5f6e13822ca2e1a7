"""A step on N GPUs of M nodes: computation of each, what passes between them, and what of it computation hides.

Derived in docs/scale.md. ``links`` has the time of a collective, ``overlap`` when each begins, ``few`` the computation;
here they meet. A model of fewer than SHARDED_FROM parameters is copied (DDP), a larger one sharded (FSDP2), as
``narrowgauge train`` does. One GPU alone is the plain forecast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from narrowgauge.forecast.cluster import overlap
from narrowgauge.forecast.cluster.collectives import Cluster
from narrowgauge.forecast.cluster.overlap import Timeline, Work
from narrowgauge.forecast.cluster.shards import FP8, REDUCED_BYTES, Rank, gathered_bytes, outside_bytes
from narrowgauge.forecast.time.ceilings import LAUNCH_S, Ceilings
from narrowgauge.forecast.time.roofline import Cost, add_up, host_seconds, mfu_of
from narrowgauge.forecast.trace.extrapolate import Sample
from narrowgauge.forecast.trace.trace_step import Spread, Traced
from narrowgauge.ranks.distribute import SHARDED_FROM, reduces_every_microbatch

BUCKET_BYTES = 25 << 20
"""Gradients that DDP sums in one go (its ``bucket_cap_mb``)."""
PARALLEL = ("auto", "ddp", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Message:
    """All collectives of a kind in an update."""

    name: str
    count: int
    bytes: float
    """What one of them gathers or sums."""
    sent_bytes: float
    """What each GPU sends in all of them, and receives."""
    bandwidth: float
    """Bytes per second and direction of the ring they take."""
    via: str
    """The link that holds the ring up: nvlink, pcie or network."""
    ms: float
    exposed_ms: float
    """How much of it computation waits for."""

    @property
    def hidden_ms(self) -> float:
        return self.ms - self.exposed_ms


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A predicted update on several GPUs."""

    gpus: int
    nodes: int
    parallel: str
    """fsdp or ddp; none for one GPU."""
    batch: int
    """Of each GPU."""
    step_ms: float
    compute_ms: float
    """Of each GPU."""
    exposed_ms: float
    items_per_s: float
    """Of all GPUs."""
    mfu: float | None
    efficiency: float
    """Items a second and GPU against one GPU alone, whatever fits into it."""
    bound: str
    """computation, launches, or the link that holds communication up."""
    hidden_from_batch: int | None
    """The batch of a GPU from which a block's computation would hide its communication; None where none passes."""
    load: float = 0.0
    """How much of a block's computation its communication would fill: above 1 it cannot be hidden."""
    communication: list[Message] = field(default_factory=list)

    @property
    def communication_ms(self) -> float:
        return sum(message.ms for message in self.communication)


def decide(parallel: str, parameters: int) -> str:
    """fsdp or ddp for a model of that size."""
    if parallel != "auto":
        return parallel
    return "fsdp" if parameters > SHARDED_FROM else "ddp"


def predict_scaled(sample: Sample, ceilings: Ceilings, cluster: Cluster, parallel: str = "auto") -> Scaled:
    """An update on the cluster's GPUs, each with the sample's batch."""
    traced, costs = sample.traced, sample.costs(ceilings)
    alone = add_up(traced, costs)
    if cluster.gpus == 1:
        return Scaled(
            gpus=1, nodes=1, parallel="none", batch=traced.batch, step_ms=alone.step_ms, compute_ms=alone.device_ms,
            exposed_ms=0.0, items_per_s=alone.items_per_s, mfu=alone.mfu, efficiency=1.0, hidden_from_batch=None,
            bound="launches" if alone.bound == "launches" else "computation",
        )  # fmt: skip
    parallel = decide(parallel, sample.parameters)
    work = work_of(sample, costs, ceilings, cluster, parallel)
    sizes = messages_of(sample, parallel)
    if parallel == "fsdp":
        clock = overlap.run_shards(work)
    else:
        clock = overlap.run_copies(work, _bucketed(cluster, sizes["outside"]))
    seconds = max(clock.now, host_seconds(costs))
    items_per_s = traced.items * cluster.gpus / seconds
    messages = _describe(clock, sizes, cluster)
    exposed = sum(message.exposed_ms for message in messages)
    return Scaled(
        gpus=cluster.gpus,
        nodes=cluster.nodes,
        parallel=parallel,
        batch=traced.batch,
        step_ms=seconds * 1e3,
        compute_ms=work.compute * 1e3,
        exposed_ms=exposed,
        items_per_s=items_per_s,
        mfu=mfu_of(traced, items_per_s / cluster.gpus),
        efficiency=items_per_s / cluster.gpus / alone.items_per_s,
        bound="launches" if seconds > clock.now else cluster.via if _load(work, parallel) > 1 else "computation",
        hidden_from_batch=_hidden_from(work, parallel, traced.batch),
        load=_load(work, parallel),
        communication=messages,
    )


def sizes_up_to(cluster: Cluster) -> list[Cluster]:
    """One GPU, then twice as many each time: within a node, then node by node as they are filled; the cluster last."""
    found = [Cluster(cluster.gpu, links=cluster.links)]
    count = 2 if cluster.nodes == 1 else cluster.per_node
    while count < cluster.gpus:
        nodes = max(1, count // cluster.per_node)
        if count > 1 and cluster.gpus % count == 0:
            found.append(Cluster(cluster.gpu, count, nodes, cluster.links))
        count *= 2
    return [*found, cluster]


def spread_of(sample: Sample) -> Spread:
    """How many parameters of the whole model are where."""
    parts = sample.traced.spread
    assert parts is not None
    few = max(1, len(sample.traced.block_paths))
    in_blocks = parts.in_blocks * sample.blocks // few if sample.blocks else parts.in_blocks
    return Spread(
        block=parts.block, in_blocks=in_blocks, outside=parts.outside, narrow=parts.narrow,
        copied=sample.parameters - in_blocks - parts.outside,
    )  # fmt: skip


def messages_of(sample: Sample, parallel: str) -> dict[str, float]:
    """Bytes of one collective of each kind."""
    traced, parts = sample.traced, spread_of(sample)
    width, own = gathered_bytes(traced), outside_bytes(traced)
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
    blocks = max(1, sample.blocks)
    copied_in_blocks = parts.copied if sample.blocks else 0
    block = (parts.in_blocks * gradient + 4 * copied_in_blocks) / blocks if sample.blocks else 0.0
    return {overlap.REDUCE: block, "outside": parts.outside * gradient + 4 * (parts.copied - copied_in_blocks)}


def work_of(
    sample: Sample, costs: list[tuple[Cost, float]], ceilings: Ceilings, cluster: Cluster, parallel: str
) -> Work:
    """Computation of one GPU and the time of each collective."""
    traced, sizes = sample.traced, messages_of(sample, parallel)
    sharded = parallel == "fsdp"
    if sharded:
        costs = [(cost, times * _share(cost, traced, cluster.gpus)) for cost, times in costs]
    spent = _by_place(costs, traced.block_paths)
    blocks, often = sample.blocks, traced.accumulate
    more = _handling(sample, ceilings) if sharded else {}
    each = max(1, blocks) * often
    messages = {
        name: cluster.all_reduce_s(size) if name == overlap.AGREE else cluster.gather_s(size)
        for name, size in sizes.items()
    }
    if not sharded:
        messages = {overlap.REDUCE: _bucketed(cluster, sizes[overlap.REDUCE])}
    return Work(
        blocks=blocks,
        microbatches=often,
        sums_each=sharded and reduces_every_microbatch(sample.parameters, traced.gpu.memory_bytes),
        start=spent.get("forward, before", 0.0) / often + more.get("outside", 0.0),
        forward=spent.get("forward, blocks", 0.0) / each + more.get("forward", 0.0),
        head=spent.get("forward, behind", 0.0) / often,
        head_backward=spent.get("backward, before", 0.0) / often,
        backward=spent.get("backward, blocks", 0.0) / each + more.get("backward", 0.0),
        end=spent.get("backward, behind", 0.0) / often,
        step=spent.get("step", 0.0) + more.get("step", 0.0),
        messages=messages,
    )


def _share(cost: Cost, traced: Traced, gpus: int) -> float:
    """How much of an operation of one GPU alone a rank of several does."""
    if cost.op.phase == "step":
        return max(1 / gpus, min(1.0, LAUNCH_S / cost.seconds)) if cost.seconds else 1.0
    made = [(traced.trace.blocks[piece.block], piece) for piece in cost.op.writes if piece.block >= 0]
    if made and all(block.is_copy and block.owner is not None and block.owner.part == "block" for block, _ in made):
        # Weights arrive in 16 bits, cast shard by shard; in FP8 they are cast forward and, not kept, backward again.
        return 2.0 if any(piece.dtype in FP8 for _, piece in made) else 1 / gpus
    return 1.0


def _handling(sample: Sample, ceilings: Ceilings) -> dict[str, float]:
    """Seconds to copy what was gathered into weights, gradients into what is summed, and weights that are used as one
    below each other; in FP8 under a lean recipe also casts, which the optimizer writes on one GPU."""
    traced, parts, rate = sample.traced, spread_of(sample), ceilings.memory()
    width, own, block = gathered_bytes(traced), outside_bytes(traced), parts.block
    rank = Rank(traced, 2)
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


def _by_place(costs: list[tuple[Cost, float]], paths: list[str]) -> dict[str, float]:
    """Seconds before, in and behind the blocks, of all microbatches; whatever runs between two blocks is in them."""
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
            place = "before" if not within or index < within[0] else "behind" if index > within[-1] else "blocks"
            key = "step" if phase == "step" else f"{phase}, {place}"
            spent[key] = spent.get(key, 0.0) + cost.seconds * times
        start = end
    return spent


def _bucketed(cluster: Cluster, size: float) -> float:
    """Seconds to sum gradients bucket by bucket, as DDP does."""
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


def _load(work: Work, parallel: str) -> float:
    """What passes during a block, forward or backward, against the computation that could hide it."""
    cost = work.messages.get
    if parallel == "ddp":
        return cost(overlap.REDUCE, 0.0) / work.backward if work.backward else 0.0
    if not work.forward or not work.backward:
        return 0.0
    behind = cost(overlap.REGATHER, 0.0) + cost(overlap.SCATTER, 0.0)
    return max(cost(overlap.GATHER, 0.0) / work.forward, behind / work.backward)


def _hidden_from(work: Work, parallel: str, batch: int) -> int | None:
    """In proportion: computation grows with the batch, communication does not."""
    return max(1, math.ceil(batch * _load(work, parallel))) if work.blocks else None
