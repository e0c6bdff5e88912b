"""Drawn programs: once captured, each equals eager mode or is rejected.

`make test` draws 100, and 33 more that have buffers and are trained for some steps;
``make exhaustive`` draws 3,000, and 1,000.
"""

from __future__ import annotations

import collections
import os
import warnings

import pytest
import torch

import autopar
from autopar.base.errors import AutoparError, CaptureError, GradientError
from autopar.frontend.capture import Captured, capture
from autopar.frontend.checking.gradients import compare_with_eager
from autopar.frontend.checking.trial import Trial, off_by
from autopar.frontend.reader import is_random
from autopar.frontend.signature import Arguments
from autopar.ir.mesh import Mesh
from autopar.sharding.strategy import Analysis, Strategy
from tests.effort import EXHAUSTIVE
from tests.models.drawn_buffers import BATCHES, Stateful, draw_stateful
from tests.models.drawn_programs import INPUT, Drawn, draw
from tests.oracles import (
    assert_same,
    lockstep_steps,
    random_assignment,
    reference_steps,
    sgd,
    state_of,
)

NUM_PROGRAMS = 3000 if EXHAUSTIVE else 100
FIRST = int(os.environ.get("AUTOPAR_FIRST_DRAWN_PROGRAM", "0"))
TOLERANCE = 1e-8
MOST_REFUSED = 0.1
STRIDE = 10
"""One in so many is split too."""
NUM_WITH_BUFFERS = NUM_PROGRAMS // 3
COMPILED_STRIDE = 5
"""One with buffers in so many is compiled too."""
ONCE_WRONG_SPLIT = (460, 520, 1720, 2120, 2980)
"""Strided views of a value that is cut out of padding; zero gradients; complex32 gradients."""


def ended(model: Drawn) -> str:
    """The outcome of ``autopar.compile``: ``equal``, ``refused ...``, or an error."""
    names = [name for name, _ in model.named_parameters()]
    try:
        captured = capture(model, (INPUT,))
    except AutoparError as error:
        return "refused by capture: " + " ".join(str(error).split())[:160]
    try:
        compare_with_eager(captured, model, (INPUT,))
    except GradientError as error:
        return "refused by the gradient check: " + " ".join(str(error).split())[:160]
    trial = Trial(captured, model, None, Arguments((INPUT,), {}), torch.device("cpu"), names)
    got, expected = trial.of_graph(), trial.eager()
    quantities = {"the loss": (got.loss, expected.loss)}
    quantities |= {n: (got.gradients[n], expected.gradients[n]) for n in names}
    for name, (ours, theirs) in quantities.items():
        off, size = off_by(ours, theirs)
        if not off <= TOLERANCE * max(size, 1):
            return f"WRONG: {name} is off by {off:.3g} of {size:.3g}"
    return "equal"


@pytest.mark.filterwarnings("ignore")
def test_no_drawn_program_is_silently_wrong():
    found: dict[str, list[str]] = collections.defaultdict(list)
    for seed in range(FIRST, FIRST + NUM_PROGRAMS):
        model = draw(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            end = ended(model)
        found[end].append(f"{seed}: {model}")
    for end, programs in sorted(found.items()):
        print(len(programs), end, programs[0])
    wrong = {end: programs for end, programs in found.items() if end.startswith("WRONG")}
    assert not wrong
    refused = sum(len(programs) for end, programs in found.items() if end.startswith("refused"))
    assert refused <= MOST_REFUSED * NUM_PROGRAMS, f"{refused} of {NUM_PROGRAMS} are refused"


@pytest.mark.filterwarnings("ignore")
def test_drawn_programs_split_at_random_are_what_eager_mode_computes():
    compared = 0
    for seed in (*range(FIRST, FIRST + NUM_PROGRAMS, STRIDE), *ONCE_WRONG_SPLIT):
        model = draw(seed)
        if ended(model) != "equal":
            continue
        captured = capture(model, {"x": INPUT})
        if any(is_random(op.target) for op in captured.graph.ops):
            continue
        analysis = Analysis(captured.graph)
        strategy = Strategy(analysis, random_assignment(analysis, Mesh(("a",), (2,)), seed))
        got = lockstep_steps(strategy, captured, state_of(model), [{"x": INPUT}])
        expected = reference_steps(model, [{"x": INPUT}])
        torch.testing.assert_close(got.losses, expected.losses, rtol=1e-9, atol=1e-9)
        for name, gradient in expected.gradients.items():
            off, size = off_by(got.gradients[name], gradient)
            assert off <= TOLERANCE * max(size, 1), f"{seed}: {name}"
        compared += 1
    assert compared >= NUM_PROGRAMS // STRIDE // 2 + len(ONCE_WRONG_SPLIT)


def test_drawn_programs_with_buffers_train_as_eager_mode() -> None:
    """On one device and two, in lockstep; in part by `autopar.compile`, with early updates too."""
    refused, num_compiled = [], 0
    for seed in range(FIRST, FIRST + NUM_WITH_BUFFERS):
        model = draw_stateful(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                captured = capture(model, {"x": INPUT})
                compare_with_eager(captured, model, {"x": INPUT})
            except (CaptureError, GradientError) as error:
                refused.append(f"{seed}: {model}: {' '.join(str(error).split())[:160]}")
                continue
        if any(is_random(op.target) for op in captured.graph.ops):
            continue
        _compare_in_lockstep(captured, model, seed)
        if seed % COMPILED_STRIDE == 0:
            _compare_compiled(model, update="early" if seed % 2 else "at_end")
            num_compiled += 1
    print(*refused, sep="\n")
    assert len(refused) <= MOST_REFUSED * NUM_WITH_BUFFERS
    assert num_compiled >= NUM_WITH_BUFFERS // COMPILED_STRIDE // 2


def _batches() -> list[dict[str, torch.Tensor]]:
    """Batches of their own for each run: a model may keep one, and write into it later."""
    return [{"x": x.clone()} for x in BATCHES]


def _compare_in_lockstep(captured: Captured, model: Stateful, seed: int) -> None:
    analysis = Analysis(captured.graph)
    expected = reference_steps(model, _batches())
    for num_devices in (1, 2):
        assignment = random_assignment(analysis, Mesh(("a",), (num_devices,)), seed)
        got = lockstep_steps(Strategy(analysis, assignment), captured, state_of(model), _batches())
        try:
            assert_same(got, expected, tolerance=TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{seed} on {num_devices} devices: {model}") from error


def _compare_compiled(model: Stateful, update: str) -> None:
    expected = reference_steps(model, _batches())
    with autopar.compile(
        model, ["cpu"], example_inputs={"x": INPUT}, optimizer=sgd, profile_limit_s=0,
        update=update,
    ) as compiled:  # fmt: skip
        losses = [compiled.train_step(**batch).item() for batch in _batches()]
        state = compiled.full_state_dict()
    torch.testing.assert_close(losses, expected.losses, rtol=TOLERANCE, atol=TOLERANCE)
    for name, tensor in {**expected.weights, **expected.buffers}.items():
        torch.testing.assert_close(
            state[name], tensor, rtol=TOLERANCE, atol=TOLERANCE, check_dtype=False, msg=str(model)
        )
