"""Recomputation as users ask for it: trained, replayed, counted and reported."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.base.errors import InputError, PlanError
from autopar.plans.document import Plan
from autopar.runtime.host.peak_memory import PeakTensors
from tests.effort import EXHAUSTIVE
from tests.models.zoo import build, optimizer_of
from tests.oracles import Trained, assert_same, reference_steps, to_double
from tests.runtime.processes import counted_bytes
from tests.runtime.test_counted_memory import Branches, images

NUM_STEPS = 5
MODULES = {
    "gpt2": ["transformer.h.0", "transformer.h.1.mlp"],
    "bert": ["bert.encoder.layer.1"],
    "llama": ["model.layers"],
}


pytestmark = pytest.mark.usefixtures("reused_workers")


@functools.cache
def data(kind: str) -> tuple[nn.Module, list[dict[str, Tensor]], Trained]:
    model, make_batch = build(kind)
    model = model.double()
    batches = [to_double(make_batch(step)) for step in range(NUM_STEPS)]
    return model, batches, reference_steps(model, batches, optimizer_of(kind))


def compiled_for(kind: str, num_devices: int, **options: Any) -> Any:
    model, batches, _ = data(kind)
    return autopar.compile(
        model, num_devices, example_inputs=batches[0], optimizer=optimizer_of(kind),
        profile_limit_s=0, check_gradients=False, **options,
    )  # fmt: skip


def check_counted(compiled: Any, batch: dict[str, Tensor], tolerance: float = 0.01) -> None:
    """The tensors that the processes hold take what the plan counted.

    The workers are reused: what an earlier program left may be released in the first step.
    """
    held = min(max(compiled.peak_tensor_bytes(**batch)) for _ in range(2))
    assert counted_bytes(compiled) == pytest.approx(held, rel=tolerance)


def check(kind: str, compiled: Any) -> None:
    """It trains as eager does, and its tensors take what the plan counted."""
    _, batches, expected = data(kind)
    losses, gradients = [], {}
    for batch in batches:
        losses.append(compiled.train_step(**batch).item())
        gradients = gradients or compiled.gradients()
    weights = compiled.full_state_dict()
    got = Trained(
        losses=losses, gradients=gradients,
        weights={name: weights[name] for name in expected.weights},
        buffers={name: weights[name] for name in expected.buffers if name in weights},
    )  # fmt: skip
    reference = Trained(
        losses=expected.losses, gradients=expected.gradients, weights=expected.weights,
        buffers={name: expected.buffers[name] for name in got.buffers},
    )  # fmt: skip
    assert_same(got, reference, tolerance=5e-6)
    if kind != "resnet":  # the scratch of convolutions in double precision is not counted
        check_counted(compiled, batches[0])


REQUESTS = ("full", 0.4, "modules")
EVERY = [(kind, request, n) for kind in MODULES for request in REQUESTS for n in (1, 2, 4)]
SOME = [EVERY[i] for i in (0, 4, 8, 11, 15, 19, 23, 25)]
"""Each model, request and number of devices with two others."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "request_", "num_devices"), EVERY if EXHAUSTIVE else SOME)
def test_what_is_asked_for_trains_as_eager(kind: str, request_: Any, num_devices: int) -> None:
    recompute = MODULES[kind] if request_ == "modules" else request_
    compiled = compiled_for(kind, num_devices, recompute=recompute)
    assert compiled.plan.recomputation
    assert "recomputation" in str(compiled.report())
    check(kind, compiled)


def needed_bytes(kind: str, recompute: Any) -> int:
    plan = compiled_for(kind, 1, recompute=recompute).plan
    return sum(plan.prediction.memory_bytes.values())


def test_micro_batches_take_the_place_of_recomputation() -> None:
    """They are searched by default, at the prices of ops measured for them."""
    model, batches, _ = data("gpt2")
    budget = autopar.MemoryBudget(int(0.9 * needed_bytes("gpt2", "none")))
    compiled = autopar.compile(
        model, 1, example_inputs=batches[0], optimizer=optimizer_of("gpt2"), recompute="none",
        update="at_end", constraints=budget, profile_limit_s=1,
    )  # fmt: skip
    assert compiled.plan.schedule.num_microbatches > 1
    check("gpt2", compiled)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["gpt2", "resnet"])
def test_as_little_is_recomputed_as_the_memory_asks_for(kind: str) -> None:
    """Nothing where everything fits, else less than with recompute="full"."""
    most, least = needed_bytes(kind, "none"), needed_bytes(kind, "full")
    assert least < most
    roomy = compiled_for(kind, 1, constraints=autopar.MemoryBudget(most))
    assert not roomy.plan.recomputation
    full = compiled_for(kind, 1, recompute="full").plan
    budget = autopar.MemoryBudget((most + least) // 2)
    tight = compiled_for(kind, 1, constraints=budget, num_microbatches=1)
    assert sum(tight.plan.prediction.memory_bytes.values()) <= budget.size_bytes
    assert roomy.plan.prediction.step_time_s < tight.plan.prediction.step_time_s
    assert tight.plan.prediction.step_time_s < full.prediction.step_time_s
    check(kind, tight)
    replayed = compiled_for(kind, 1, plan=Plan.from_json(tight.plan.to_json()))
    assert replayed.plan == tight.plan
    check(kind, replayed)


def peak_with_checkpoints(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """The peak bytes of a step of SGD in eager mode, every layer of the model checkpointed."""
    for layers in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
        for layer in layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    peak = PeakTensors(torch.device("cpu"))
    peak.start()
    model(**batch).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    return peak.stop()


LAYERS = {"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 384}
BERT = transformers.BertConfig(vocab_size=256, num_hidden_layers=3, **LAYERS)
GPT2 = transformers.GPT2Config(vocab_size=256, n_layer=3, n_embd=96, n_head=4, use_cache=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make", "config"),
    [(transformers.BertForMaskedLM, BERT), (transformers.GPT2LMHeadModel, GPT2)],
    ids=["bert", "gpt2"],
)
def test_all_recomputed_takes_no_more_than_checkpoints_of_every_layer(
    make: Any, config: Any
) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (8, 128))
    model, batch = make(config), {"input_ids": ids, "labels": ids}
    compiled = autopar.compile(
        model, 1, example_inputs=batch, recompute="full", profile_limit_s=0, update="at_end",
        optimizer=functools.partial(torch.optim.SGD, lr=1e-3), check_gradients=False,
    )  # fmt: skip
    held = min(max(compiled.peak_tensor_bytes(**batch)) for _ in range(2))
    assert held <= peak_with_checkpoints(model, batch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("request_", ["full", 0.5])
def test_recomputed_convolutions_are_counted(request_: Any) -> None:
    torch.manual_seed(0)
    compiled = autopar.compile(
        Branches(), 1, example_inputs=images(), recompute=request_, profile_limit_s=0,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1), check_gradients=False,
    )  # fmt: skip
    check_counted(compiled, images(), tolerance=0.03)  # the scratch of convolutions is estimated


def test_more_of_a_budget_is_less_recomputation() -> None:
    times, sizes = [], []
    for fraction in (0.0, 0.3, 0.6, 1.0):
        plan = compiled_for("gpt2", 1, recompute=fraction).plan
        times.append(plan.prediction.step_time_s)
        sizes.append(sum(plan.prediction.memory_bytes.values()))
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 4
    assert sizes[0] < sizes[-1]


def test_dropout_is_the_same_with_and_without() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.GELU(), nn.Linear(32, 8), nn.Tanh())
          for _ in range(3))
    )  # fmt: skip
    x, y = torch.randn(8, 8), torch.randn(8, 8)

    def losses(recompute: Any) -> list[float]:
        compiled = autopar.compile(
            model, 2, example_inputs=(x, y), loss_fn=nn.functional.mse_loss, seed=5,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1), recompute=recompute,
            profile_limit_s=0, mesh={"x": 2}, constraints=autopar.Force("data_parallel"),
        )  # fmt: skip
        return [compiled.train_step(x, y).item() for _ in range(3)]

    assert losses("full") == losses("none")


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        (["transformer.h.7"], r"'transformer.h.7', which is no module that the model calls"),
        (["transfomer.h"], r"named_modules\(\); did you mean 'transformer\.h'\?$"),
        (64, r"recompute=64: the activations kept .* take at least [\d,]+ bytes"),
    ],
)
def test_the_impossible_is_refused_by_name(recompute: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compiled_for("gpt2", 1, recompute=recompute)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": ["transformer.h.9"]}, r"\$\.recomputation.*'transformer.h.9' is no block"),
        ({"kept": ["gelu_99"]}, r"'gelu_99' is no value"),
        ({"kept_bytes": -1}, r"\$\.recomputation\[0\]\.kept_bytes: it cannot be negative"),
    ],
)
def test_a_plan_that_keeps_what_is_not_there_is_refused(
    change: dict[str, Any], message: str
) -> None:
    plan = compiled_for("gpt2", 1, recompute="full").plan
    document = json.loads(plan.to_json())
    document["recomputation"][0].update(change)
    with pytest.raises(PlanError, match=message):
        compiled_for("gpt2", 1, plan=Plan.from_json(json.dumps(document)))
