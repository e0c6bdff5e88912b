"""Schedules of `torch.distributed.pipelining` as text, and its own judge of such text.

Private names of torch 2.13; only the tests of the exchange format compare with them.
"""

from __future__ import annotations

from typing import Any


class _StageStandIn:
    """The attributes of a pipeline stage that torch 2.13's schedule classes read at
    construction."""

    submod = None

    def __init__(self, stage: int, num_stages: int, rank: int, group_size: int) -> None:
        self.stage_index = stage
        self.num_stages = num_stages
        self.group_rank = rank
        self.group_size = group_size
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        self.stage_index_to_group_rank: dict[int, int] = {}


def pipeline_csv(
    class_name: str, *, num_devices: int, num_microbatches: int, stages_per_device: int = 1
) -> str:
    """The compute-only CSV of one of torch's own schedules, such as ``ZBVZeroBubble``.

    ``_PipelineSchedule._get_pipeline_order`` and ``.pipeline_order`` (2.13); reductions, which
    torch appends to some orders, are left out.
    """
    from torch.distributed.pipelining import schedules

    num_stages = num_devices * stages_per_device
    stages: Any = [
        _StageStandIn(stage, num_stages, 0, num_devices)
        for stage in range(0, num_stages, num_devices)
    ]
    schedule_class: Any = schedules.get_schedule_class(class_name)
    single = issubclass(schedule_class, schedules.PipelineScheduleSingle)
    built = schedule_class(
        stages[0] if single else stages, num_microbatches, loss_fn=lambda *_: None
    )
    order = built._get_pipeline_order() if single else built.pipeline_order
    rows = [
        ",".join("" if item is None else str(item) for item in order[rank] if _computes(item))
        for rank in range(num_devices)
    ]
    return "\n".join(rows) + "\n"


def _computes(item: Any) -> bool:
    return item is None or bool(item.is_compute_op)


def validate_pipeline_csv(text: str, *, num_stages: int, num_microbatches: int) -> None:
    """Validate a compute-only CSV with torch; raises its AssertionError or ValueError.

    ``_validate_schedule`` checks counts and orders a rank, ``_add_send_recv`` places the transfers,
    ``_simulate_comms_compute`` plays them and raises on a deadlock (2.13).
    """
    from torch.distributed.pipelining import schedules

    order: dict[int, list[Any]] = {
        rank: [schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(text.splitlines())
    }
    owner = schedules._validate_schedule(order, len(order), num_stages, num_microbatches)
    compute = {rank: [item for item in items if item] for rank, items in order.items()}
    full = schedules._add_send_recv(compute, owner.__getitem__, num_stages)
    schedules._simulate_comms_compute(full, owner.__getitem__, num_stages)
