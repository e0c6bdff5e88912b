"""DualPipe (DeepSeek-V3, 2024): two pipelines in opposite directions with split backwards.

Device d has stage d of the pipeline that goes down and stage D-1-d of the one that goes up, each
with half of the micro-batches. Bubble (D/2-1)(F&B + B - 3W) seconds, D+1 activations, weights
twice. The two halves of an overlapped pair F&B are written one after the other; played so, the
forward's output leaves before the backward starts and the bubble is (D/2-1)(F + I - W).
"""

from autopar.schedules.action import Action, Kind
from autopar.schedules.schedule import PipelineShape, Schedule, schedule_of
from autopar.schedules.shapes import require, require_even_stages


class _Writer:
    """Appends the next forward, backward or deferred W of the near and far pipeline."""

    def __init__(self, shape: PipelineShape, device: int) -> None:
        half = shape.num_microbatches // 2
        upper = device >= shape.num_devices // 2
        self.replicas = (1, 0) if upper else (0, 1)
        self.stages = tuple(
            shape.num_devices - 1 - device if replica else device for replica in self.replicas
        )
        self.first = tuple(replica * half for replica in self.replicas)
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.deferred: list[Action] = []
        self.order: list[Action] = []

    def _action(self, side: int, kind: Kind, count: int) -> Action:
        return Action(
            self.stages[side], kind, self.first[side] + count, replica=self.replicas[side]
        )

    def forward(self, side: int) -> None:
        self.order.append(self._action(side, Kind.F, self.forwards[side]))
        self.forwards[side] += 1

    def backward(self, side: int, *, split: bool = False) -> None:
        kind = Kind.I if split else Kind.B
        self.order.append(self._action(side, kind, self.backwards[side]))
        if split:
            self.deferred.append(self._action(side, Kind.W, self.backwards[side]))
        self.backwards[side] += 1

    def weight(self) -> None:
        self.order.append(self.deferred.pop(0))


def dualpipe(*, num_stages: int, num_microbatches: int) -> Schedule:
    """One stage a device and direction. Needs an even D, an even N and N >= 2D."""
    require_even_stages("dualpipe", num_stages)
    require(
        num_microbatches % 2 == 0 and num_microbatches >= 2 * num_stages,
        f"dualpipe needs an even num_microbatches of at least 2 * num_stages, got "
        f"{num_microbatches} for {num_stages} stages",
        f"use num_microbatches={max(2 * num_stages, num_microbatches + num_microbatches % 2)}",
    )
    half = num_microbatches // 2
    shape = PipelineShape(
        num_microbatches=num_microbatches,
        placement=(tuple(range(num_stages)), tuple(reversed(range(num_stages)))),
        replica_of=(0,) * half + (1,) * half,
    )
    orders = [_device_order(shape, device) for device in range(num_stages)]
    return schedule_of("dualpipe", shape, orders)


def _device_order(shape: PipelineShape, device: int) -> list[Action]:
    """Near is the pipeline that enters on this half of the devices, far the other."""
    near, far = 0, 1
    depth = min(device, shape.num_devices - 1 - device)
    inner = shape.num_devices // 2 - 1 - depth  # devices between this one and the middle
    writer = _Writer(shape, device)
    for _ in range(2 * inner):
        writer.forward(near)
    for _ in range(depth + 1):
        writer.forward(near)
        writer.forward(far)
    for _ in range(inner):
        writer.backward(far, split=True)
        writer.weight()
        writer.forward(far)
    for _ in range(shape.num_microbatches // 2 - shape.num_devices + depth + 1):
        writer.forward(near)
        writer.backward(far)
        writer.forward(far)
        writer.backward(near)
    for _ in range(inner):
        writer.backward(far)
        writer.forward(far)
        writer.backward(near)
    _drain(writer, depth, inner)
    return writer.order


def _drain(writer: _Writer, depth: int, inner: int) -> None:
    """The last backwards: whole at first, then split, their W's filling the end."""
    near, far = 0, 1
    turn = (depth + 1) // 2
    for count in range(depth + 1):
        split_far = count > turn or (count == turn and depth % 2 == 1)
        writer.backward(far, split=split_far)
        writer.backward(near, split=count >= turn)
    for _ in range(inner):
        writer.weight()
        writer.backward(near, split=True)
    while writer.deferred:
        writer.weight()
