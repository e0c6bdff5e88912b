"""DualPipe (DeepSeek-V3, 2024): two pipelines in opposite directions with split backwards.

Device d has stage d of the pipeline that goes down and stage D-1-d of the one that goes up, each
with half of the micro-batches: D+1 activations, and two copies of the weights. In the steady state
a device overlaps a forward of one pipeline with a backward of the other, the pair F&B.

With ``overlap`` a pair runs on the two compute streams, F on the side stream, at the cost given by
``CoRun`` in the simulation. With ``CoRun(end_together=True)``, which models interleaved kernels,
and F = I, the largest idle time of a device is the paper's (D/2-1)(F&B + B - 3W) seconds for every
W and slowdown; at F < I it is a little less, because in the paper a pair starts together while here
its forward may start first.

Without ``overlap`` a pair is F followed by B on the main stream. The forward's output is then sent
before the backward starts, and the bubble is (D/2-1)(F + I - W) seconds.
"""

from autopar.schedules.action import Action, Kind
from autopar.schedules.generators.shapes import require, require_even_stages
from autopar.schedules.schedule import PipelineShape, Resource, Schedule, Step, step


class _Writer:
    """Appends the next forward, backward, pair or deferred W of the near or far pipeline."""

    def __init__(self, shape: PipelineShape, device: int, overlap: bool) -> None:
        half = shape.num_microbatches // 2
        upper = device >= shape.num_devices // 2
        self.replicas = (1, 0) if upper else (0, 1)
        self.stages = tuple(
            shape.num_devices - 1 - device if replica else device for replica in self.replicas
        )
        self.first = tuple(replica * half for replica in self.replicas)
        self.overlap = overlap
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.deferred: list[Action] = []
        self.steps: list[Step] = []
        self.last_main: Action | None = None
        self.last_side: Action | None = None  # set if the next main step has to wait for it

    def _action(self, side: int, kind: Kind, count: int) -> Action:
        return Action(
            self.stages[side], kind, self.first[side] + count, replica=self.replicas[side]
        )

    def _next_forward(self, side: int) -> Action:
        self.forwards[side] += 1
        return self._action(side, Kind.F, self.forwards[side] - 1)

    def _main(self, action: Action) -> None:
        self.steps.append(step(action, after=self.last_side))
        self.last_main, self.last_side = action, None

    def forward(self, side: int) -> None:
        self._main(self._next_forward(side))

    def backward(self, side: int, *, split: bool = False) -> None:
        kind = Kind.I if split else Kind.B
        self._main(self._action(side, kind, self.backwards[side]))
        if split:
            self.deferred.append(self._action(side, Kind.W, self.backwards[side]))
        self.backwards[side] += 1

    def pair(self, forward_side: int) -> None:
        """A forward of one pipeline with a backward of the other; the next step waits for both."""
        if not self.overlap:
            self.forward(forward_side)
            self.backward(1 - forward_side)
            return
        forward = self._next_forward(forward_side)
        self.steps.append(step(forward, Resource.SIDE, after=self.last_main))
        self.backward(1 - forward_side)
        self.last_side = forward

    def weight(self) -> None:
        self._main(self.deferred.pop(0))


def dualpipe(*, num_stages: int, num_microbatches: int, overlap: bool = False) -> Schedule:
    """One stage per device and direction; with ``overlap``, pairs run on two streams.

    Raises ScheduleError unless D is even, N is even and N >= 2D.
    """
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
    devices = tuple(_device_steps(shape, device, overlap) for device in range(num_stages))
    return Schedule(name="dualpipe", shape=shape, devices=devices)


def _device_steps(shape: PipelineShape, device: int, overlap: bool) -> tuple[Step, ...]:
    """The steps of a device; near is the pipeline that starts in this half of the devices."""
    near, far = 0, 1
    depth = min(device, shape.num_devices - 1 - device)
    inner = shape.num_devices // 2 - 1 - depth  # devices between this one and the middle
    writer = _Writer(shape, device, overlap)
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
        writer.pair(near)
        writer.pair(far)
    for _ in range(inner):
        writer.backward(far)
        writer.pair(far)
    _drain(writer, depth, inner)
    return tuple(writer.steps)


def _drain(writer: _Writer, depth: int, inner: int) -> None:
    """The last backwards: first unsplit, then split, with their W's at the end."""
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
