"""Measurement of collectives on an existing process group, kept in the profile store.

Every rank of the world calls ``measure_collectives`` at the same place. Groups of each asked size
are made so that they tile the world, as the groups of a mesh axis do, and all of them run the same
collective at once: what is measured is what a plan will meet, shared links included. On CPUs the
ranks also compute before each collective, as in a step: threads that a collective needs sleep, or
find every core taken. Each collective has other memory than the ones before it, as long as a cache
could hold that. They use the transport that the runtime would use
(`autopar.comm.transports.registry`).
"""

import itertools
import json
import math
import operator
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from autopar.comm.transports.base import Collectives, Messages, done
from autopar.comm.transports.registry import open_collectives, open_messages
from autopar.cost_models.cluster import Cluster
from autopar.cost_models.communication import (
    Collective,
    CommunicationModel,
    GroupShape,
    MeasuredCurve,
)
from autopar.cost_models.estimate import CostError
from autopar.cost_models.store import CollectiveTime, ProfileStore, StoreWarning

BETWEEN_S = 0.004
"""How long a rank computes before a collective, about the time of a few layers."""
DEFAULT_SIZES_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
ROUNDS = 3
"""How often all sizes are measured in turn, since disturbances of a host last for seconds."""
MAX_POOL_BYTES = 256 << 20
"""Limit on the memory for a rank's collectives, unless four pieces need more."""
_ALIGNMENT = 64
"""Alignment of a piece, in elements."""
MAX_SPREAD, MAX_REPEATS = 0.3, 2
"""Limits on the spread over rounds (interquartile range over median), and on extra rounds.

A time whose spread stays too large is marked noisy.
"""
_Row = tuple[str, str, int, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveGrid:
    """Collectives to measure: every kind with every number of bytes on groups of every size.

    ``group_sizes`` are divisors of the number of ranks, by default all, measured in blocks of
    neighbouring ranks and with the largest stride.
    """

    kinds: tuple[Collective, ...] = tuple(Collective)
    sizes_bytes: tuple[int, ...] = DEFAULT_SIZES_BYTES
    group_sizes: tuple[int, ...] | None = None

    def sizes_of(self, world: int) -> list[int]:
        """The sizes of groups that divide ``world``."""
        return [n for n in self.group_sizes or range(2, world + 1) if n > 1 and world % n == 0]


EVERY = CollectiveGrid()


def measured_model(cluster: Cluster, store: ProfileStore) -> CommunicationModel:
    """A model of ``cluster`` that uses the store's measured times."""
    return _model(cluster, _rows(cluster, store))


def _rows(cluster: Cluster, store: ProfileStore) -> list[_Row]:
    """Kind, group shape, bytes, seconds and spread of the entries of the store, in order.

    Unknown kinds, which a later version may have written, are omitted.
    """
    return [
        (kind, shape, times.size_bytes, times.time_s, times.spread)
        for (kind, shape), curve in store.collectives(cluster.backend).items()
        if kind in tuple(Collective)
        for times in curve
    ]


def _model(cluster: Cluster, rows: list[_Row]) -> CommunicationModel:
    points: dict[tuple[Collective, GroupShape], dict[int, float]] = {}
    noisy: dict[tuple[Collective, GroupShape], set[int]] = {}
    for kind, shape_text, size_bytes, time_s, spread in rows:
        shape = _shape_of(shape_text)
        if shape is None:
            warnings.warn(
                f"a time of {kind} is ignored: the group shape {shape_text!r} cannot be parsed",
                StoreWarning,
                stacklevel=3,
            )
            continue
        key = Collective(kind), shape
        points.setdefault(key, {})[size_bytes] = time_s
        if spread > MAX_SPREAD:
            noisy.setdefault(key, set()).add(size_bytes)
    curves = {
        key: MeasuredCurve(
            sizes_bytes=tuple(curve),
            times_s=_ascending([*curve.values()]),
            noisy_bytes=frozenset(noisy.get(key, ())),
        )
        for key, curve in points.items()
    }
    return CommunicationModel(cluster, curves)


def _shape_of(text: str) -> GroupShape | None:
    """Parse the JSON of a group shape; None if it is invalid."""
    try:
        found = tuple((fanout, sharing, link) for fanout, sharing, link in json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    sizes = (size for fanout, sharing, _ in found for size in (fanout, sharing))
    return found if all(isinstance(size, int) and size > 0 for size in sizes) else None


def _ascending(times_s: Sequence[float]) -> tuple[float, ...]:
    """Isotonic regression: the closest times by least squares that never decrease with size."""
    pools: list[list[float]] = []
    for time_s in times_s:
        pools.append([time_s])
        while len(pools) > 1 and statistics.mean(pools[-2]) > statistics.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return tuple(itertools.chain.from_iterable([statistics.mean(p)] * len(p) for p in pools))


def all_measured(
    cluster: Cluster,
    store: ProfileStore,
    grid: CollectiveGrid = EVERY,
) -> bool:
    """Whether the store has all times of `measure_collectives`."""
    model = CommunicationModel(cluster)
    world = cluster.num_devices
    shapes = [json.dumps(model.group_shape(t[0])) for t in _tilings(world, grid.sizes_of(world))]
    known = {row[:3] for row in _rows(cluster, store)}
    wanted = itertools.product((kind.value for kind in grid.kinds), shapes, grid.sizes_bytes)
    return known.issuperset(wanted)


def measure_collectives(
    cluster: Cluster,
    store: ProfileStore,
    grid: CollectiveGrid = EVERY,
    *,
    max_s: float = 0.1,
) -> CommunicationModel:
    """Measure what the store lacks, and return the model that uses it.

    Called by all ranks of the default process group with the same ``grid``. Each time is the median
    over `ROUNDS` rounds, or more if they differ. The time of a round is the mean over all
    repetitions but the slowest quarter (a step pays for slow ones too), and over the ranks, so that
    it includes waiting for the last rank; for messages in one direction it is that of the slowest
    rank. ``max_s`` limits the time per size, but each round has at least three repetitions. Raises
    CostError if there is no process group, or if its size or backend is not that of ``cluster``.
    """
    world = _check_world(cluster)
    model = CommunicationModel(cluster)
    known = {row[:3] for row in _from_rank_0(_rows(cluster, store))}
    for ranks_of in _tilings(world, grid.sizes_of(world)):
        groups = [dist.new_group(list(ranks)) for ranks in ranks_of]
        mine = next(i for i, ranks in enumerate(ranks_of) if dist.get_rank() in ranks)
        shape = json.dumps(model.group_shape(ranks_of[mine]))
        sweep = _Sweep(cluster, store, groups[mine], ranks_of[mine], shape, max_s / ROUNDS)
        missing = [
            (kind, size_bytes)
            for kind, size_bytes in itertools.product(grid.kinds, grid.sizes_bytes)
            if (kind.value, shape, size_bytes) not in known
        ]
        for kind, size_bytes in missing * ROUNDS:
            sweep.measure(kind, size_bytes)
        for _ in range(MAX_REPEATS):
            for kind, size_bytes in sweep.unsteady():
                sweep.measure(kind, size_bytes)
        sweep.close()
        for group in groups:
            dist.destroy_process_group(group)
    return _model(cluster, _from_rank_0(_rows(cluster, store)))


class _Sweep:
    """Measures the collectives of one group size; ``max_s`` limits each measurement."""

    def __init__(
        self,
        cluster: Cluster,
        store: ProfileStore,
        group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        shape: str,
        max_s: float,
    ) -> None:
        self.store, self.backend, self.shape = store, cluster.backend, shape
        self.group, self.ranks = group, ranks
        self.device, self.max_s = torch.device(cluster.device.kind), max_s
        self.collectives = open_collectives(group, cluster.device.kind)
        self.messages = open_messages(group, cluster.device.kind)
        most_bytes = MAX_POOL_BYTES, cluster.device.memory_bytes // 8
        self.pool = Pool(min(2 * cluster.device.cache_bytes, *most_bytes), self.device)
        self.found: dict[tuple[Collective, int], list[CollectiveTime]] = {}

    def measure(self, kind: Collective, size_bytes: int) -> None:
        """Measure one round; from the last round on, store the median and the spread."""
        found = self.found.setdefault((kind, size_bytes), [])
        if kind is Collective.SEND_RECV:
            run = _shift(size_bytes, self.messages, self.ranks, self.pool)
        elif kind is Collective.BROADCAST:
            run = _broadcast(size_bytes, self.group, self.ranks, self.pool)
        else:
            run = _operation(kind, size_bytes, self.collectives, len(self.ranks), self.pool)
        found.append(_measure(kind, size_bytes, run, self.device, self.max_s))
        if len(found) >= ROUNDS:
            middle = sorted(found, key=operator.attrgetter("time_s"))[len(found) // 2]
            times = replace(middle, spread=self._spread(found))
            # The number is the same on every rank, so ranks may share a store or not.
            self.store.put_collective(kind.value, self.shape, self.backend, times)

    def unsteady(self) -> list[tuple[Collective, int]]:
        """The measurements whose spread over rounds is too large."""
        return [key for key, found in self.found.items() if self._spread(found) > MAX_SPREAD]

    @staticmethod
    def _spread(rounds: Sequence[CollectiveTime]) -> float:
        low, median_s, high = statistics.quantiles(
            [times.time_s for times in rounds], n=4, method="inclusive"
        )
        return (high - low) / median_s if median_s else 0.0

    def close(self) -> None:
        self.collectives.close()
        self.messages.close()


def _check_world(cluster: Cluster) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        raise CostError(
            "measuring collectives needs a process group: call "
            "torch.distributed.init_process_group() on every rank first."
        )
    world = dist.get_world_size()
    if world != cluster.num_devices or not is_group_of(cluster):
        raise CostError(
            f"the cluster has {cluster.num_devices} devices on {cluster.backend}, the process "
            f"group {world} on {dist.get_backend_config()}; use Cluster.detect({world})."
        )
    return world


def is_group_of(cluster: Cluster) -> bool:
    """Whether the process group uses the cluster's backend for its devices.

    A group may have one backend per kind of device: ``cpu:gloo,cuda:nccl``.
    """
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    return backends.get(cluster.device.kind) == cluster.backend


def _from_rank_0(rows: list[_Row]) -> list[_Row]:
    """Rank 0's rows on every rank, since all must measure and use the same."""
    box: list[object] = [rows]
    dist.broadcast_object_list(box, src=0)
    agreed = box[0]
    assert isinstance(agreed, list)
    return agreed


def _tilings(world: int, sizes: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """The groups of each size that tile the world: of neighbours, and with the largest stride."""
    tilings = []
    for size in sizes:
        neighbours = [tuple(range(i, i + size)) for i in range(0, world, size)]
        stride = world // size
        spread = [tuple(range(i, world, stride)) for i in range(stride)]
        tilings.append(neighbours)
        if spread != neighbours:
            tilings.append(spread)
    return tilings


def _measure(
    kind: Collective,
    size_bytes: int,
    run: Callable[[], object],
    device: torch.device,
    max_s: float,
) -> CollectiveTime:
    is_mutual = kind not in (Collective.BROADCAST, Collective.SEND_RECV)
    num_products = _num_products(device) if is_mutual and device.type == "cpu" else 0
    square = torch.ones(256, 256)

    def once() -> tuple[float, float]:
        """Seconds of the collective, and of the whole sample."""
        begin = time.perf_counter()
        dist.barrier()
        for _ in range(num_products):
            torch.mm(square, square)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        end = time.perf_counter()
        taken_s = (_mean if is_mutual else _largest)(end - start, device)
        return taken_s, end - begin

    once()
    whole_s = _largest(once()[1], device)
    num_samples = max(3, min(8, int(max_s / max(whole_s, 1e-6))))
    samples = sorted(once()[0] for _ in range(num_samples))
    low, median_s, high = statistics.quantiles(samples, n=4)
    del samples[-math.ceil(num_samples / 4) :]  # with so few samples, the slowest would dominate
    return CollectiveTime(
        size_bytes=size_bytes,
        time_s=statistics.mean(samples),
        spread=(high - low) / median_s if median_s else 0.0,
        num_samples=len(samples),
    )


def _num_products(device: torch.device) -> int:
    """The number of products of small matrices that take a rank `BETWEEN_S`."""
    square = torch.ones(256, 256)
    torch.mm(square, square)
    start = time.perf_counter()
    for _ in range(4):
        torch.mm(square, square)
    product_s = _mean((time.perf_counter() - start) / 4, device)
    return max(1, round(BETWEEN_S / product_s))


def _mean(seconds: float, device: torch.device) -> float:
    """The mean of all ranks' times."""
    return _over_ranks(seconds, dist.ReduceOp.SUM, device) / dist.get_world_size()


def _largest(seconds: float, device: torch.device) -> float:
    return _over_ranks(seconds, dist.ReduceOp.MAX, device)


def _over_ranks(seconds: float, which: Any, device: torch.device) -> float:
    box = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(box, op=which)
    return float(box.item())


class Pool:
    """A cyclic pool of float32 memory, so that no piece is still in the cache when it is reused.

    The pool has at least ``size_bytes``, and four pieces. It is written once: untouched pages all
    map to one page of zeros, which stays in the cache.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self._device = device
        self._memory = self._made(size_bytes // 4)
        self._next = 0

    def take(self, numel: int) -> torch.Tensor:
        room = -(-max(1, numel) // _ALIGNMENT) * _ALIGNMENT
        if 4 * room > len(self._memory):
            self._memory = self._made(4 * room)
        if self._next + room > len(self._memory):
            self._next = 0
        taken = self._memory[self._next : self._next + numel]
        self._next += room
        return taken

    def _made(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, device=self._device).fill_(0.0)


def _operation(
    kind: Collective, size_bytes: int, collectives: Collectives, num_ranks: int, pool: Pool
) -> Callable[[], object]:
    """The collective on float32 buffers of ``size_bytes``, rounded up to whole shards."""
    shard = max(1, -(-size_bytes // (4 * num_ranks)))

    def full() -> torch.Tensor:
        return pool.take(shard * num_ranks)

    match kind:
        case Collective.ALL_REDUCE:
            return lambda: collectives.all_reduce(full())()
        case Collective.ALL_GATHER:
            return lambda: collectives.all_gather(full(), pool.take(shard))()
        case Collective.REDUCE_SCATTER:
            return lambda: collectives.reduce_scatter(full())()
        case _:
            assert kind is Collective.ALL_TO_ALL
            return lambda: collectives.all_to_all(full(), full())


def _broadcast(
    size_bytes: int, group: dist.ProcessGroup, ranks: tuple[int, ...], pool: Pool
) -> Callable[[], object]:
    numel = len(ranks) * max(1, -(-size_bytes // (4 * len(ranks))))
    return lambda: dist.broadcast(pool.take(numel), src=ranks[0], group=group)


def _shift(
    size_bytes: int, messages: Messages, ranks: tuple[int, ...], pool: Pool
) -> Callable[[], object]:
    """Every rank but the last sends to the next, as between neighbouring stages."""
    numel = max(1, size_bytes // 4)
    position = ranks.index(dist.get_rank())

    def run() -> None:
        sent = done
        if position + 1 < len(ranks):
            sent = messages.send(position + 1, [pool.take(numel)])
        if position > 0:
            messages.receive(position - 1, [pool.take(numel)])()
        sent()

    return run
