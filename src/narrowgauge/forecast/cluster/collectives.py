"""Time of collectives between GPUs: rings over NVLink within a node and over the network between nodes.

N GPUs on M nodes send S bytes around a ring, S/N at a time. An all-gather or a reduce-scatter takes N - 1 steps. In
each of them every GPU sends and receives S/N:

    all-gather, reduce-scatter    t = start + hops + (N - 1)/N * S / B
    all-reduce                    t = start + 2 * hops + 2 (N - 1)/N * S / B    both, one after the other

NCCL builds one ring per network card. It runs through all GPUs of a node and leaves it by that card. Between nodes
the cards of a node share the traffic, and within a node each GPU's NVLink carries it:

    B    = one node:   NVLink            several: min(NVLink, GPUs of a node * network of a GPU)
    hops = (N - M) * hop within a node + (M - 1) * hop between nodes

For an all-reduce NCCL uses a tree where that is faster. It sends as many bytes over fewer hops: those within a node,
and log2(M) between nodes. Rates are those of ``hardware.toml`` times the shares given there. One GPU sends nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from narrowgauge.errors import UsageError
from narrowgauge.hardware import Gpu, Interconnect, interconnect


@dataclass(frozen=True)
class Cluster:
    """A number of equal GPUs on a number of nodes."""

    gpu: Gpu
    gpus: int = 1
    nodes: int = 1
    links: Interconnect | None = None
    """Replaces the table's interconnect where given."""

    def __post_init__(self) -> None:
        for name, value in (("gpus", self.gpus), ("nodes", self.nodes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"--{name} {value}: must be at least 1")
        if self.gpus % self.nodes:
            raise UsageError(
                f"--nodes {self.nodes} does not divide --gpus {self.gpus}: all nodes must have the same number of GPUs"
            )
        if self.per_node > self.gpu.node.gpus:
            least = -(-self.gpus // self.gpu.node.gpus)
            raise UsageError(
                f"--gpus {self.gpus} --nodes {self.nodes}: a node has up to {self.gpu.node.gpus} {self.gpu.name}, not "
                f"{self.per_node}; use --nodes {least} or more"
            )

    @property
    def per_node(self) -> int:
        """GPUs of a node."""
        return self.gpus // self.nodes

    @property
    def _links(self) -> Interconnect:
        return self.links or interconnect()

    @property
    def _by_nvlink(self) -> bool:
        return self.gpu.nvlink is not None and self.per_node <= self.gpu.node.linked

    @property
    def within(self) -> float:
        """Bytes per second and direction between a GPU and others in its node."""
        if self._by_nvlink:
            return (self.gpu.nvlink or 0.0) / 2 * self._links.nvlink_share[self.gpu.architecture]
        return self.gpu.node.pcie * self._links.pcie_share

    @property
    def between(self) -> float:
        """Bytes per second and direction between a node and others."""
        return self.per_node * self.gpu.node.network * self._links.network_share

    @property
    def bandwidth(self) -> float:
        """Bytes per second around the ring through all GPUs; 0 for a single GPU."""
        if self.gpus == 1:
            return 0.0
        rates = ([self.within] if self.per_node > 1 else []) + ([self.between] if self.nodes > 1 else [])
        return min(rates)

    @property
    def via(self) -> str:
        """Which link limits the ring: nvlink, pcie or network; none for a single GPU."""
        if self.gpus == 1:
            return "none"
        inside = "nvlink" if self._by_nvlink else "pcie"
        if self.nodes == 1:
            return inside
        return "network" if self.per_node == 1 or self.between < self.within else inside

    @property
    def latency_s(self) -> float:
        """Latency of one all-gather or reduce-scatter."""
        links = self._links
        hop = links.nvlink_hop_s if self._by_nvlink else links.pcie_hop_s
        return links.start_s + (self.gpus - self.nodes) * hop + (self.nodes - 1) * links.network_hop_s

    def gather_s(self, size: float) -> float:
        """Seconds of an all-gather or a reduce-scatter of ``size`` bytes."""
        if self.gpus == 1 or not size:
            return 0.0
        return self.latency_s + self.sent(size) / self.bandwidth

    def all_reduce_s(self, size: float, pieces: int = 1) -> float:
        """Seconds of an all-reduce of ``size`` bytes, in so many separate calls."""
        if self.gpus == 1 or not size:
            return 0.0
        return pieces * self.sum_latency_s + 2 * self.sent(size) / self.bandwidth

    @property
    def sum_latency_s(self) -> float:
        """Latency of one all-reduce: the lower of a ring's and a tree's."""
        links = self._links
        hop = links.nvlink_hop_s if self._by_nvlink else links.pcie_hop_s
        tree = (self.per_node - 1) * hop + math.log2(self.nodes) * links.network_hop_s
        return links.start_s + 2 * min(self.latency_s - links.start_s, tree)

    def sent(self, size: float) -> float:
        """Bytes that each GPU sends and receives in an all-gather or reduce-scatter of ``size`` bytes."""
        return size * (self.gpus - 1) / self.gpus


def make_cluster(gpu: Gpu, gpus: int, nodes: int | None = None) -> Cluster:
    """A cluster of so many GPUs; by default on as few nodes as hold them."""
    if nodes is None and isinstance(gpus, int) and gpus > gpu.node.gpus:
        nodes = -(-gpus // gpu.node.gpus)
    return Cluster(gpu, gpus, 1 if nodes is None else nodes)
