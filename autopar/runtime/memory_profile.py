"""The peak memory of measured training steps, by rank, beside the prediction.

In: the bytes that each rank counted, and the plan. Out: a table and a figure of both.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.base.units import format_bytes
from autopar.plans.bars import Bars, Series, Unit
from autopar.plans.layout import Section
from autopar.plans.parts import PlanFields
from autopar.plans.summary import needed_bytes

MOST_RANKS = 8
"""The table and the figure have so many ranks: those with the highest peaks."""
_ON_CPU = (
    "Tensors are counted in further steps. The process: the most resident memory since before the "
    "weights were loaded."
)
_ON_GPU = (
    "Tensors: the bytes requested of the allocator. Allocated: its peak since before the weights "
    "were loaded, as it rounds sizes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One kind of memory in bytes: predicted of the fullest device, and measured by rank."""

    name: str
    predicted_bytes: int
    measured_bytes: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Measured on the fullest rank over predicted."""
        return max(self.measured_bytes) / self.predicted_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Peak bytes by rank: ``tensor_bytes`` of tensors, ``growth_bytes`` of a CPU process, or of the
    device's allocator, since before the weights were loaded."""

    tensor_bytes: tuple[int, ...]
    growth_bytes: tuple[int, ...]

    def rows(self, plan: PlanFields) -> tuple[MemoryRow, ...]:
        """Both beside what the plan predicts."""
        tensors = sum(plan.prediction.memory_bytes.values())
        grown = MemoryRow(
            name="process grows by", predicted_bytes=needed_bytes(plan),
            measured_bytes=self.growth_bytes,
        )  # fmt: skip
        if plan.prediction.resident_bytes is None:
            grown = MemoryRow(
                name="allocated", predicted_bytes=tensors, measured_bytes=self.growth_bytes
            )
        return (
            MemoryRow(name="tensors", predicted_bytes=tensors, measured_bytes=self.tensor_bytes),
            grown,
        )

    @property
    def _fullest(self) -> list[int]:
        """The ranks with the highest peaks, in order."""
        by_size = sorted(range(len(self.tensor_bytes)), key=lambda r: -self.tensor_bytes[r])
        return sorted(by_size[:MOST_RANKS])

    def section(self, plan: PlanFields) -> Section:
        """The table of the report."""
        ranks = self._fullest
        return Section(
            title="peak memory of a device",
            columns=("", "predicted", *(f"rank {rank}" for rank in ranks), "ratio"),
            rows=tuple(
                (
                    row.name,
                    format_bytes(row.predicted_bytes),
                    *(format_bytes(row.measured_bytes[rank]) for rank in ranks),
                    f"{row.ratio:.2f}",
                )
                for row in self.rows(plan)
            ),
            notes=(_ON_GPU if plan.prediction.resident_bytes is None else _ON_CPU,),
        )

    def bars(self, plan: PlanFields) -> Bars:
        """The numbers of the figure."""
        rows = self.rows(plan)
        sizes = {"predicted": [row.predicted_bytes for row in rows]}
        for rank in self._fullest:
            sizes[f"measured on rank {rank}"] = [row.measured_bytes[rank] for row in rows]
        return Bars(
            title=f"Peak memory of a device: tensors {rows[0].ratio:.2f}x the predicted",
            unit=Unit.BYTES, rows=tuple(row.name for row in rows),
            series=tuple(
                Series(name=name, values=tuple(found), texts=tuple(map(format_bytes, found)))
                for name, found in sizes.items()
            ),
        )  # fmt: skip
