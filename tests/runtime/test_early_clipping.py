"""Clipping under an early update: by the norm of a second pass, or by that of the step before."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Force, InputError, NonFiniteError, Precision, StepError, Update
from tests.models.zoo import build
from tests.oracles import loss_of, to_double
from tests.runtime.ranks import run_ranks
from tests.runtime.test_counted_memory import Branches, Deep, Tables, bags, images, rows
from tests.runtime.test_early_update import Risky

pytestmark = pytest.mark.usefixtures("reused_workers")

NUM_STEPS, LIMIT = 5, 0.5
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
AdamW = functools.partial(torch.optim.AdamW, lr=1e-3)
QUICK = {"profile_limit_s": 0, "check_gradients": False}
Batch = dict[str, Tensor]


def eager(
    model: nn.Module, batches: Sequence[Batch], make: Any, *, by: str
) -> tuple[list[float], dict[str, Tensor]]:
    """The norms and the state of eager steps, clipped by their own norm or by the last one's."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    norms: list[Tensor] = []
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model(**batch)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        bound_by = norms[-1] if by == "last_norm" and norms else norm
        nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, torch.as_tensor(bound_by))
        optimizer.step()
        norms.append(norm)
    return [norm.item() for norm in norms], model.state_dict()


def compiled_by(
    by: str | None, model: nn.Module, batch: Batch, num: int = 1, **options: Any
) -> autopar.Compiled:
    update = Update(clipping=by) if by else None
    return autopar.compile(
        model, num, example_inputs=batch, update=update,
        **{"optimizer": SGD, "max_grad_norm": LIMIT, **QUICK, **options},
    )  # fmt: skip


def trained(compiled: autopar.Compiled, batches: Sequence[Batch]) -> list[float]:
    norms = []
    for batch in batches:
        compiled.train_step(**batch)
        assert compiled.grad_norm is not None
        norms.append(compiled.grad_norm.item())
    return norms


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-8, atol=1e-9, msg=name)


PLANS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "batch norm, alone": ("resnet", 1, {}),
    "data parallel": (
        "bert", 2, {"constraints": [Force("data_parallel")], "nonfinite": "ignore"}
    ),
    "ZeRO-3, micro-batches": (
        "gpt2", 2, {"constraints": [Force("zero3")], "num_microbatches": 2}
    ),
    "data and tensor parallel": ("gpt2", 4, {"mesh": {"dp": 2, "tp": 2}, "optimizer": AdamW}),
    "pipeline": ("gpt2", 4, {"num_stages": 2, "num_microbatches": 2, "mesh": {"dp": 2}}),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("plan", "by"),
    [
        *((plan, "second_pass") for plan in PLANS),
        *(
            (plan, "last_norm")
            for plan in ("batch norm, alone", "ZeRO-3, micro-batches", "pipeline")
        ),
    ],
)
def test_five_steps_equal_eager(plan: str, by: str) -> None:
    """Weights, norms, and batch statistics, which advance once a step."""
    name, num, options = PLANS[plan]
    model, make_batch = build(name)
    model = model.double()
    batches = [to_double(make_batch(step)) for step in range(NUM_STEPS)]
    norms, state = eager(model, batches, options.get("optimizer", SGD), by=by)
    assert max(norms) > LIMIT
    with compiled_by(by, model, batches[0], num, **options) as compiled:
        assert compiled.plan.update.clipping == by
        assert trained(compiled, batches) == pytest.approx(norms, rel=1e-8)
        assert_same(compiled.full_state_dict(), state)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.dropout(torch.relu(layer(x)), 0.3, True)
        return x.square().sum()


def test_both_passes_drop_the_same() -> None:
    batch = {"x": torch.ones(16, 32, dtype=torch.float64)}
    torch.manual_seed(0)
    model = Dropped().double()
    states = []
    for by in (None, "second_pass"):
        with compiled_by(by, model, batch, 2, seed=3) as compiled:
            assert min(trained(compiled, [batch] * 3)) > LIMIT
            states.append(compiled.full_state_dict())
    assert_same(states[1], states[0])


COUNTED = {
    "deep, alone": (Deep, rows, 1, {}),
    "branches, alone": (Branches, images, 1, {}),
    "tables, data parallel": (Tables, bags, 2, {"constraints": [Force("data_parallel")]}),
    "deep, ZeRO-3": (Deep, rows, 2, {"constraints": [Force("zero3")]}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "by"),
    [
        ("deep, alone", "second_pass"),
        ("branches, alone", "second_pass"),
        ("tables, data parallel", "second_pass"),
        ("deep, ZeRO-3", "last_norm"),
    ],
)
def test_counted_is_held(case: str, by: str) -> None:
    make_model, make_batch, num, options = COUNTED[case]
    torch.manual_seed(0)
    with compiled_by(by, make_model(), make_batch(), num, optimizer=AdamW, **options) as compiled:
        held = max(compiled.peak_tensor_bytes(**make_batch()))
        counted = compiled.plan.prediction.memory_bytes
        update = compiled.plan.update
    assert update.gradient_bytes_at_end > update.gradient_bytes
    own = sum(counted.values()) - counted["inputs"]
    assert own == pytest.approx(held, rel=0.01)


def test_a_second_pass_is_in_the_predicted_time() -> None:
    cluster = autopar.Cluster.preset("a100-80", nodes=1, devices_per_node=2)

    def planned(**options: Any) -> autopar.Plan:
        return autopar.plan(Deep(512), cluster, {"x": torch.ones(64, 512)}, **options)

    data_parallel = {"constraints": [Force("data_parallel")]}
    for options in (data_parallel, {"num_stages": 2, "num_microbatches": 2}):
        once = planned(update="early", **options)
        twice = planned(update=Update(clipping="second_pass"), **options)
        one, two = once.prediction, twice.prediction
        assert two.update_s == pytest.approx(one.update_s)
        assert twice.update.gradient_bytes == once.update.gradient_bytes
        for name in ("forward_s", "backward_s", "communication_s"):
            # Inputs are copied once.
            assert getattr(two, name) == pytest.approx(2 * getattr(one, name), rel=0.02), name
        assert two.step_time_s < 2 * one.step_time_s
        assert twice.is_pipeline or twice.search.bound_s <= two.step_time_s * (1 + 1e-6)
        assert twice.search.gap == pytest.approx(once.search.gap, abs=1e-3)
        assert "a first pass" in " ".join(twice.report("full").split())
        assert autopar.Plan.from_json(twice.to_json()) == twice
    by_last = planned(update=Update(clipping="last_norm"))
    assert by_last.prediction.step_time_s == planned(update="early").prediction.step_time_s


def risky(by: str | None, **options: Any) -> autopar.Compiled:
    torch.manual_seed(0)
    return compiled_by(by, Risky(), {"x": torch.ones(2, 4)}, **options)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    """Its gradients are known to be not finite before the first update."""
    with risky("second_pass") as compiled:
        compiled.train_step(x=torch.ones(2, 4))
        before = compiled.full_state_dict()
        with pytest.raises(NonFiniteError, match="Nothing has changed"):
            compiled.train_step(x=torch.zeros(2, 4))
        after = compiled.full_state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    with risky("second_pass", nonfinite="skip") as compiled:
        compiled.train_step(x=torch.ones(2, 4))
        compiled.train_step(x=torch.zeros(2, 4))
        assert compiled.num_skipped_steps == 1
        after = compiled.full_state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_by_the_last_norm_only_the_first_step_can_be_undone() -> None:
    with risky("last_norm") as compiled:
        with pytest.raises(NonFiniteError, match="Nothing has changed"):
            compiled.train_step(x=torch.zeros(2, 4))
        compiled.train_step(x=torch.ones(2, 4))
        with pytest.raises(NonFiniteError, match="Weights have changed"):
            compiled.train_step(x=torch.zeros(2, 4))


def test_scaled_gradients_that_overflow_are_skipped_as_at_the_end() -> None:
    """In float16, with a first scale at which gradients overflow."""
    torch.manual_seed(0)
    model, batch = Deep(64), {"x": torch.randn(8, 64)}
    found = []
    for by in (None, "second_pass"):
        with compiled_by(
            by, model, batch, 2, precision=Precision(compute="fp16", loss_scale=2.0**18)
        ) as compiled:
            losses = [compiled.train_step(**batch).item() for _ in range(8)]
            found.append((losses, compiled.loss_scale, compiled.num_skipped_steps))
            state = compiled.full_state_dict()
    at_end, early = found
    assert early == (pytest.approx(at_end[0], rel=1e-5), *at_end[1:])
    assert 0 < early[2] < 8
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(8, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(x)).square().mean()


@pytest.mark.parametrize("options", [{}, {"num_stages": 2, "num_microbatches": 2}])
def test_an_op_that_raises_changes_nothing(options: dict[str, Any]) -> None:
    batch = {"x": torch.arange(8).reshape(4, 2)}
    with compiled_by("second_pass", Looked(), batch, 2, **options) as compiled:
        compiled.train_step(**batch)
        before = compiled.full_state_dict()
        with pytest.raises(StepError, match="nothing has changed on any rank"):
            compiled.train_step(x=torch.tensor([[0, 1], [2, 3], [4, 5], [6, 9]]))
        after = compiled.full_state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        compiled.train_step(**batch)


def test_a_resumed_run_clips_by_the_same_norms(tmp_path: Path) -> None:
    model, make_batch = build("mlp")
    batches = [make_batch(step) for step in range(4)]
    options = {"constraints": [Force("zero3")]}
    with compiled_by("last_norm", model, batches[0], 2, **options) as compiled:
        trained(compiled, batches[:2])
        compiled.save(tmp_path)
        norms = trained(compiled, batches[2:])
        expected = compiled.full_state_dict()
        compiled.load(tmp_path)  # the same run goes back
        assert trained(compiled, batches[2:]) == norms
    with compiled_by("last_norm", model, batches[0], 2, **options) as resumed:
        resumed.load(tmp_path)
        assert trained(resumed, batches[2:]) == norms
        state = resumed.full_state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_checkpoint_without_a_norm_is_clipped_by_a_second_pass(tmp_path: Path) -> None:
    model, make_batch = build("mlp")
    batches = [make_batch(step) for step in range(2)]
    with compiled_by(None, model, batches[0]) as compiled:
        compiled.train_step(**batches[0])
        compiled.save(tmp_path)
        compiled.train_step(**batches[1])
        expected = compiled.full_state_dict()
    with compiled_by("last_norm", model, batches[0]) as resumed:
        trained(resumed, batches)
        resumed.load(tmp_path)  # and forgets the norm that it had
        resumed.train_step(**batches[1])
        state = resumed.full_state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-7, msg=name)


def test_under_torchrun_as_with_local_workers(tmp_path: Path) -> None:
    model, make_batch = build("mlp")
    batches = [make_batch(step) for step in range(3)]
    norms, state = eager(model, batches, SGD, by="second_pass")
    run_ranks(2, "tests.runtime.torchrun_early_clipping", str(tmp_path))
    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for one in found:
        assert one["norms"] == pytest.approx(norms, rel=1e-4)
        for name, tensor in state.items():
            torch.testing.assert_close(one["state"][name], tensor, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("norm", ["NaN", "-1.0", '"2"', "1"])
def test_a_damaged_norm_is_refused(tmp_path: Path, norm: str) -> None:
    model, make_batch = build("mlp")
    batch = make_batch(0)
    with compiled_by("last_norm", model, batch) as compiled:
        compiled.train_step(**batch)
        compiled.save(tmp_path)
        (manifest,) = tmp_path.glob("*.json")
        text = manifest.read_text()
        assert compiled.grad_norm is not None
        written = repr(compiled.grad_norm.item())
        assert written in text
        manifest.write_text(text.replace(written, norm))
        with pytest.raises(InputError):
            compiled.load(tmp_path)


def test_what_clips_nothing_or_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="without max_grad_norm"):
        risky("second_pass", max_grad_norm=None)
    with pytest.raises(InputError, match=r"clipping is 'second_pass' with when='at_end'"):
        Update(when="at_end", clipping="second_pass")
    with pytest.raises(InputError, match="clipping is 'norm'; it is"):
        Update(clipping="norm")
    with pytest.raises(InputError, match="cannot be skipped"):
        risky("last_norm", nonfinite="skip")
    with pytest.raises(InputError, match="precision='bf16'"):
        risky("last_norm", precision="fp16")
    for clipping, limit in ((None, LIMIT), ("last_norm", None)):
        plan = autopar.plan(
            Risky(), autopar.Cluster.preset("cpu", nodes=1, devices_per_node=1),
            {"x": torch.ones(2, 4)}, update=Update(clipping=clipping),
        )  # fmt: skip
        with pytest.raises(InputError, match="max_grad_norm"):
            risky(None, plan=plan, max_grad_norm=limit)
