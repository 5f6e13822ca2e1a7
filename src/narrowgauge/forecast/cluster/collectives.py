"""Time of collectives between GPUs: rings over NVLink within a node and over the network between nodes.

N GPUs on M nodes pass S bytes along a ring, S/N at a time. To gather them (or to sum and scatter them) takes N - 1
steps, in each of which every GPU sends and receives S/N:

    gather, scatter    t = start + hops + (N - 1)/N * S / B
    all-reduce         t = start + 2 * hops + 2 (N - 1)/N * S / B    both, one after the other

NCCL lays a ring for every network card, each through all GPUs of a node and out by that card, so that between nodes all
cards of a node carry the ring together, and inside of a node each GPU's NVLink does:

    B    = one node:   NVLink            several: min(NVLink, GPUs of a node * network of a GPU)
    hops = (N - M) * hop inside of a node + (M - 1) * hop between nodes

For an all-reduce NCCL takes a tree where that is sooner, which moves as much and has fewer hops: inside of a node, and
then log2(M) between nodes. Rates are those of ``hardware.toml`` times the shares it tells. One GPU alone passes nothing
on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from narrowgauge.errors import UsageError
from narrowgauge.hardware import Gpu, Interconnect, interconnect


@dataclass(frozen=True)
class Cluster:
    """So many GPUs of a kind, on so many nodes."""

    gpu: Gpu
    gpus: int = 1
    nodes: int = 1
    links: Interconnect | None = None
    """What else than the table's; None: the table's."""

    def __post_init__(self) -> None:
        for name, value in (("gpus", self.gpus), ("nodes", self.nodes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"--{name} {value}: there must be at least 1")
        if self.gpus % self.nodes:
            raise UsageError(f"--nodes {self.nodes} does not divide --gpus {self.gpus}: every node has as many GPUs")
        if self.per_node > self.gpu.node.gpus:
            least = -(-self.gpus // self.gpu.node.gpus)
            raise UsageError(
                f"--gpus {self.gpus} --nodes {self.nodes}: a node has up to {self.gpu.node.gpus} {self.gpu.name}, not "
                f"{self.per_node}; take --nodes {least} or more"
            )

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes

    @property
    def _links(self) -> Interconnect:
        return self.links or interconnect()

    @property
    def _by_nvlink(self) -> bool:
        return self.gpu.nvlink is not None and self.per_node <= self.gpu.node.linked

    @property
    def within(self) -> float:
        """Bytes per second and direction of a GPU to others of its node."""
        if self._by_nvlink:
            return (self.gpu.nvlink or 0.0) / 2 * self._links.nvlink_share[self.gpu.architecture]
        return self.gpu.node.pcie * self._links.pcie_share

    @property
    def between(self) -> float:
        """Bytes per second and direction of a node to others."""
        return self.per_node * self.gpu.node.network * self._links.network_share

    @property
    def bandwidth(self) -> float:
        """What a ring through all GPUs passes on, per second; 0 where there is none."""
        if self.gpus == 1:
            return 0.0
        rates = ([self.within] if self.per_node > 1 else []) + ([self.between] if self.nodes > 1 else [])
        return min(rates)

    @property
    def via(self) -> str:
        """Which link holds the ring up."""
        if self.gpus == 1:
            return "none"
        inside = "nvlink" if self._by_nvlink else "pcie"
        if self.nodes == 1:
            return inside
        return "network" if self.per_node == 1 or self.between < self.within else inside

    @property
    def latency_s(self) -> float:
        """Of one gather or scatter."""
        links = self._links
        hop = links.nvlink_hop_s if self._by_nvlink else links.pcie_hop_s
        return links.start_s + (self.gpus - self.nodes) * hop + (self.nodes - 1) * links.network_hop_s

    def gather_s(self, size: float) -> float:
        """Seconds until every GPU has all ``size`` bytes of which each had one part; or the sum of a part of them."""
        if self.gpus == 1 or not size:
            return 0.0
        return self.latency_s + self.sent(size) / self.bandwidth

    def all_reduce_s(self, size: float, pieces: int = 1) -> float:
        """Seconds until every GPU has the sum of all their ``size`` bytes, which go in so many pieces."""
        if self.gpus == 1 or not size:
            return 0.0
        return pieces * self.sum_latency_s + 2 * self.sent(size) / self.bandwidth

    @property
    def sum_latency_s(self) -> float:
        """Of one all-reduce: by a ring, or a tree."""
        links = self._links
        hop = links.nvlink_hop_s if self._by_nvlink else links.pcie_hop_s
        tree = (self.per_node - 1) * hop + math.log2(self.nodes) * links.network_hop_s
        return links.start_s + 2 * min(self.latency_s - links.start_s, tree)

    def sent(self, size: float) -> float:
        """What each GPU sends, and receives, of ``size`` bytes that are gathered or scattered."""
        return size * (self.gpus - 1) / self.gpus


def cluster_of(gpu: Gpu, gpus: int, nodes: int | None = None) -> Cluster:
    """So many GPUs, on as few nodes as hold them unless told."""
    if nodes is None and isinstance(gpus, int) and gpus > gpu.node.gpus:
        nodes = -(-gpus // gpu.node.gpus)
    return Cluster(gpu, gpus, 1 if nodes is None else nodes)
