"""The report of a compiled model: that of its plan, and what was measured since.

In: the plan, the times of training steps, and the last profile. Out: text, a page, and figures, of
the same sections and figures as the plan's and the profile's own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from autopar.base.errors import InputError
from autopar.base.units import format_seconds
from autopar.plans.document import Plan
from autopar.plans.layout import Section, text_lines
from autopar.plans.page import Page
from autopar.runtime.profile import FIGURE_NAMES, Profile

IN_NOTEBOOKS = ("phases", "peak_memory")
"""The figures of a profile that a notebook shows, beside those of the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredReport:
    """A plan and what was measured: the wall times of the last steps, and a profile, if any.

    ``notes`` say what runs otherwise than planned.
    """

    plan: Plan
    notes: Sequence[str] = ()
    step_times_s: Sequence[float] = ()
    profile: Profile | None = None

    def text(self, detail: str = "screen") -> str:
        """The plan's report in this detail, then what was measured."""
        sections = [*self._measured(), *(self._details() if detail == "full" else ())]
        lines = [line for section in sections for line in text_lines(section)]
        return "\n".join([self.plan.report(detail), *self.notes, *lines])

    def page(self) -> Page:
        """The plan's page, with what was measured behind the model and the devices."""
        from autopar.plans.figures.catalog import figure_element  # imports matplotlib

        page, profile = self.plan.page(), self.profile
        figures = [*page.figures]
        if profile is not None:
            shown = [name for name in IN_NOTEBOOKS if name in profile.figures]
            figures += [
                figure_element(profile.figure(name)[0], profile.figures[name]().title)
                for name in shown
            ]
        facts, *others = page.sections
        notes = [Section(title="", notes=tuple(self.notes))] if self.notes else []
        return replace(
            page,
            sections=(facts, *notes, *self._measured(), *others),
            figures=tuple(figures),
            details=(*page.details, *self._details()),
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the page as one HTML file."""
        Path(path).write_text(self.page().to_html(), encoding="utf-8")

    def figure(self, name: str, others: Sequence[str] = ()) -> tuple[Any, Any]:
        """A figure of the plan or of the profile; ``others`` are names that the caller draws.

        Raises InputError for another, and for one that there is nothing to draw for.
        """
        from autopar.plans.figures.catalog import FIGURES, figures_of, no_figure

        if name in FIGURES:
            return self.plan.figure(name)
        made = () if self.profile is None else tuple(self.profile.figures)
        if self.profile is not None and name in made:
            return self.profile.figure(name)
        have = (*others, *figures_of(self.plan), *made)
        if name not in FIGURE_NAMES:
            raise no_figure(name, have, (*FIGURES, *FIGURE_NAMES))
        raise InputError(
            f"there is no figure {name!r} yet: nothing was measured; call compiled.profile(...) "
            f"with a batch first. There are {', '.join(have)}"
        )

    def _measured(self) -> list[Section]:
        """The time of a step, and the profile's tables that fit a screen."""
        found = []
        if self.step_times_s:
            step_time_s = statistics.median_low(self.step_times_s)
            num, predicted_s = len(self.step_times_s), self.plan.prediction.step_time_s
            steps = f"median of the last {num} steps" if num > 1 else "the first, which warms up"
            title = (
                f"measured: {format_seconds(step_time_s)} a step ({steps}), "
                f"{step_time_s / predicted_s:.2f}x the predicted"
            )
            found.append(Section(title=title))
        return found if self.profile is None else [*found, *self.profile.summary()]

    def _details(self) -> tuple[Section, ...]:
        return () if self.profile is None else self.profile.details()
