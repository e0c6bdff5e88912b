"""NCCL's collectives between nodes: flat rings, and double binary trees for all-reduces.

In: how a group lies on the levels of a cluster. Out: seconds of an all-reduce, all-gather,
reduce-scatter or broadcast of S bytes on N ranks in n nodes.

- *Ring*: one ring over all ranks, in as many copies as the group has network adapters. Each node
  sends, and each device passes on, ``S (N - 1) / N`` bytes of an all-gather or reduce-scatter in
  ``N - 1`` steps, of which ``n - 1`` cross nodes; an all-reduce takes twice as many of both.
- *Tree* (all-reduce): a chain inside each node and two binary trees over the nodes, each for one
  half of the bytes. A device passes on ``2 S``; a node sends ``2 S``, or ``S`` where there are two.
  It takes ``2 (N / n - 1)`` steps inside nodes and ``2 ceil(log2 n)`` between them.

NCCL takes the algorithm whose time is less by its own model (src/graph/tuning.cc, the same tables
in versions 2.14 to 2.27). That model has links at their nominal rates, and trees at a fraction of
it that changes with every power of two. Its choice is reproduced and not improved, so an all-reduce
of more bytes can take less time where the choice changes.
"""

import math
from dataclasses import dataclass

from autopar.cost_models.hardware import Level
from autopar.cost_models.spans import Span, crossing_s

# Fitted, with the ramp of the A100's links, to all-reduces of 10 kB to 64 MiB inside A100 nodes
# (microsoft/vidur) and to what nccl-tests report at 1 GiB.
_RAMP_POWER = 0.3
# Rates of trees over that of rings. Between two nodes 1.2 by Vidur's all-reduces (1.07 on another
# network: NVIDIA/nccl-tests issue 22); between more, 150 of 190 GB/s (five nodes of H100,
# NVIDIA/nccl issue 1368) and 37 of 44 GB/s (eight of V100, issue 319).
_TREE_RATE_OF_TWO, _TREE_RATE = 1.2, 0.8
# NCCL's own: rates of trees over what their links could, and the delay of large rings in Simple.
_BELIEVED_TREE_RATE = 0.92
_PLATEAU = 1.4
_NODE_RATE = 0.8
"""NCCL's rate of NVLink over the nominal one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Protocol:
    """One of NCCL's protocols, with the figures of tuning.cc unless stated otherwise.

    Steps of rings and trees, inside a node and between nodes, take ``ring_inner_s`` etc. more than
    the latency of their link. ``rate`` is the fraction of the links' rate that data moves at;
    large all-reduces by rings take ``plateau`` times their steps. NCCL itself believes in the
    fractions ``believed`` (ring, tree), that algorithms start in ``starts_s``, and that trees of
    64 bytes and each doubling reach ``corrections`` of their rate.
    """

    ring_inner_s: float
    ring_outer_s: float
    tree_inner_s: float
    tree_outer_s: float
    rate: float
    plateau: float
    believed: tuple[float, float]
    starts_s: tuple[float, float]
    corrections: tuple[float, ...]


_LL = _Protocol(
    ring_inner_s=0.9e-6, ring_outer_s=0.0, tree_inner_s=0.9e-6, tree_outer_s=1e-6,
    # Fitted to Vidur's all-reduces between two nodes; NCCL believes in a quarter.
    rate=0.42, plateau=1.0, believed=(0.25, 1 / 3.8), starts_s=(6.6e-6, 6.8e-6),
    corrections=(1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8,
                 0.9, 1, 1, 1, 1),
)  # fmt: skip
_LL128 = _Protocol(
    ring_inner_s=1.7e-6, ring_outer_s=0.0, tree_inner_s=1.05e-6, tree_outer_s=4.5e-6,
    rate=0.92, plateau=1.0, believed=(0.92, 0.9375), starts_s=(14e-6, 14e-6),
    corrections=(1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9,
                 0.9, 0.9, 0.9, 1, 1),
)  # fmt: skip
_SIMPLE = _Protocol(
    ring_inner_s=3.2e-6, ring_outer_s=10e-6, tree_inner_s=27.8e-6, tree_outer_s=24e-6,
    rate=1.0, plateau=_PLATEAU, believed=(1.0, 1.0), starts_s=(8.4e-6, 0.0),
    corrections=(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6,
                 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """A level that a group spans: seconds of a byte out of each unit, and the ramp."""

    byte_s: float
    ramp_bytes: float

    def seconds(self, moved_bytes: float, size_bytes: int) -> float:
        return moved_bytes * self.byte_s * ramp(self.ramp_bytes, size_bytes)


def ramp(ramp_bytes: float, size_bytes: int) -> float:
    """How much longer a collective takes than at the rate of large ones."""
    return 1 + (ramp_bytes / size_bytes) ** _RAMP_POWER if ramp_bytes else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AcrossNodes:
    """A group of ``num_ranks`` in ``num_nodes`` nodes.

    ``inner`` and ``outer`` are the levels inside and between nodes that it spans, with their
    latencies; ``ring_rate`` and ``tree_rate`` the bytes per second that NCCL believes in.
    """

    num_ranks: int
    num_nodes: int
    inner: tuple[_Link, ...]
    outer: tuple[_Link, ...]
    inner_latency_s: float
    outer_latency_s: float
    tree_over_ring: float
    ring_rate: float
    tree_rate: float
    protocols: tuple[_Protocol, ...]

    def gather_s(self, size_bytes: int) -> float:
        """Seconds of an all-gather or reduce-scatter of ``size_bytes``."""
        return self._ring_s(size_bytes * (self.num_ranks - 1) / self.num_ranks, size_bytes, 1)

    def broadcast_s(self, size_bytes: int) -> float:
        """Seconds of a broadcast of ``size_bytes``."""
        return self._ring_s(size_bytes, size_bytes, 1)

    def all_reduce_s(self, size_bytes: int) -> float:
        """Seconds of an all-reduce of ``size_bytes`` by the algorithm that NCCL takes."""
        if self.takes_tree(size_bytes):
            return self.tree_s(size_bytes)
        moved = 2 * size_bytes * (self.num_ranks - 1) / self.num_ranks
        return self._ring_s(moved, size_bytes, 2)

    def takes_tree(self, size_bytes: int) -> bool:
        """Whether NCCL all-reduces ``size_bytes`` by trees."""
        row = max(0, min(size_bytes.bit_length() - 7, len(_SIMPLE.corrections) - 1))
        ring_s = tree_s = math.inf
        for protocol in self.protocols:
            believed = protocol.believed
            steps_s = protocol.starts_s[0] + self._ring_steps_s(protocol, 2, self.num_nodes)
            rate = self.ring_rate * believed[0]
            ring_s = min(ring_s, steps_s * protocol.plateau + size_bytes / rate)
            steps_s = protocol.starts_s[1] + self._tree_steps_s(protocol)
            rate = self.tree_rate * believed[1] * protocol.corrections[row]
            tree_s = min(tree_s, steps_s + size_bytes / rate)
        return tree_s < ring_s

    def _ring_s(self, moved: float, size_bytes: int, rounds: int) -> float:
        transfer_s = max(link.seconds(moved, size_bytes) for link in (*self.inner, *self.outer))
        return min(
            self._ring_steps_s(protocol, rounds, self.num_nodes - 1)
            * (protocol.plateau if rounds == 2 else 1.0)
            + transfer_s / protocol.rate
            for protocol in self.protocols
        )

    def tree_s(self, size_bytes: int) -> float:
        """Seconds of an all-reduce of ``size_bytes`` by trees."""
        sent = size_bytes if self.num_nodes == 2 else 2 * size_bytes
        transfer_s = max(
            *(link.seconds(2 * size_bytes, size_bytes) for link in self.inner),
            *(link.seconds(sent, size_bytes) / self.tree_over_ring for link in self.outer),
            0.0,
        )
        return min(
            self._tree_steps_s(protocol) + transfer_s / protocol.rate for protocol in self.protocols
        )

    def _ring_steps_s(self, protocol: _Protocol, rounds: int, crossings: int) -> float:
        inner = rounds * (self.num_ranks - 1 - crossings)
        return inner * (self.inner_latency_s + protocol.ring_inner_s) + rounds * crossings * (
            self.outer_latency_s + protocol.ring_outer_s
        )

    def _tree_steps_s(self, protocol: _Protocol) -> float:
        inner = 2 * (self.num_ranks // self.num_nodes - 1)
        outer = 2 * math.ceil(math.log2(self.num_nodes))
        return inner * (self.inner_latency_s + protocol.tree_inner_s) + outer * (
            self.outer_latency_s + protocol.tree_outer_s
        )


def across_nodes(
    levels: tuple[Level, ...], num_node_levels: int, spans: tuple[Span, ...]
) -> AcrossNodes | None:
    """How a group lies on ``levels``, the first ``num_node_levels`` of which are inside a node.

    None for a group in one node.
    """
    pairs = list(zip(levels, spans))
    inner = [pair for pair in pairs[:num_node_levels] if pair[1].fanout > 1]
    outer = [pair for pair in pairs[num_node_levels:] if pair[1].fanout > 1]
    if not outer:
        return None
    num_ranks = math.prod(span.fanout for span in spans)
    num_nodes = math.prod(span.fanout for _, span in outer)
    network_rate = min(_nominal_rate(*pair) for pair in outer)
    node_rate = min((_NODE_RATE * _nominal_rate(*pair) for pair in inner), default=math.inf)
    # Trees over two nodes send half as much between them as inside.
    tree_network = 2 * network_rate if inner and num_nodes == 2 else network_rate
    direct = all(level.is_direct for level, _ in outer)
    return AcrossNodes(
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        inner=tuple(_link(*pair) for pair in inner),
        outer=tuple(_link(*pair) for pair in outer),
        inner_latency_s=max((level.latency_s for level, _ in inner), default=0.0),
        outer_latency_s=max(level.latency_s for level, _ in outer),
        tree_over_ring=_tree_over_ring(num_nodes, max(level.efficiency for level, _ in outer)),
        ring_rate=min(network_rate, node_rate) * num_ranks / (2 * (num_ranks - 1)),
        tree_rate=_BELIEVED_TREE_RATE * min(tree_network, node_rate) / 2,
        protocols=(_LL, _LL128, _SIMPLE) if direct else (_LL, _SIMPLE),
    )


def _link(level: Level, span: Span) -> _Link:
    return _Link(
        byte_s=crossing_s(level, span, 1.0) / level.efficiency, ramp_bytes=level.ramp_bytes
    )


def _nominal_rate(level: Level, span: Span) -> float:
    """Bytes per second that one group alone could send out of a unit."""
    device = level.device_bandwidth_bytes_per_s
    whole = level.bandwidth_bytes_per_s
    return min(whole, span.members * device) if device else whole


def _tree_over_ring(num_nodes: int, efficiency: float) -> float:
    """The rate of trees over that of rings, which no link exceeds."""
    return min(_TREE_RATE_OF_TWO, 1 / efficiency) if num_nodes == 2 else _TREE_RATE
