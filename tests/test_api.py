"""``autopar.compile`` as users call it: local workers, torchrun, loss functions, replay."""

from __future__ import annotations

import copy
import functools
import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

import autopar
from autopar.runtime.compiled import Compiled
from tests.models.zoo import build, image_batch
from tests.oracles import loss_of

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
NUM_STEPS = 3


def eager(model, calls, schedule=None):
    model = copy.deepcopy(model)
    optimizer = SGD(list(model.parameters()))
    scheduler = schedule(optimizer) if schedule else None
    losses = []
    for call in calls:
        optimizer.zero_grad()
        loss = call(model)
        loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses, model


def assert_close_models(ours, theirs):
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_keyword_model_with_scheduler_and_copy_back(tmp_path):
    model, make_batch = build("gpt2")
    batches = [make_batch(seed) for seed in range(NUM_STEPS)]
    schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    expected, trained = eager(model, [lambda m, b=b: loss_of(m(**b)) for b in batches], schedule)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with autopar.compile(
        model, 2, example_inputs=batches[0], optimizer=SGD, lr_scheduler=schedule,
        mesh={"tp": 2}, constraints=[autopar.Force("tensor_parallel")], profile_limit_s=0,
    ) as compiled:  # fmt: skip
        losses = [compiled.train_step(**batch).item() for batch in batches]
        output = compiled(**batches[0])
        assert output.logits.shape == model(**batches[0]).logits.shape
        assert f"a step (median of the last {NUM_STEPS} steps), " in compiled.report()
        copied = copy.deepcopy(model)
        compiled.copy_to(copied)
        compiled.plan.to_json(tmp_path / "plan.json")
    assert losses == pytest.approx(expected, abs=1e-4)
    assert_close_models(copied, trained)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), "the user's model must stay as it is"


def test_plan_is_replayed_without_a_search(monkeypatch):
    model, make_batch = build("mlp")
    batch = make_batch(0)
    cluster = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=2)
    plan = autopar.plan(model, cluster, batch, constraints=[autopar.Force("zero3")])

    def no_search(*args, **kwargs):
        raise AssertionError("a replay must not search")

    monkeypatch.setattr("autopar.api.make_planned", no_search)
    expected, _ = eager(model, [lambda m: m(**batch)])
    with autopar.compile(model, 2, example_inputs=batch, optimizer=SGD, plan=plan) as compiled:
        assert compiled.train_step(**batch).item() == pytest.approx(expected[0], abs=1e-5)
        assert compiled.plan == plan


def test_micro_batches_train_as_the_whole_batch(tmp_path):
    model, make_batch = build("gpt2")
    batches = [make_batch(seed) for seed in range(NUM_STEPS)]
    for batch in batches:
        batch["labels"][1:3, 1:] = -100
    expected, trained = eager(model, [lambda m, b=b: loss_of(m(**b)) for b in batches])
    options = {"example_inputs": batches[0], "optimizer": SGD, "profile_limit_s": 0}
    with autopar.compile(model, 2, num_microbatches=2, **options) as compiled:
        losses = [compiled.train_step(**batch).item() for batch in batches]
        ours = copy.deepcopy(model)
        compiled.copy_to(ours)
        output = compiled(**batches[0])
        compiled.plan.to_json(tmp_path / "plan.json")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert_close_models(ours, trained)
    torch.testing.assert_close(output.logits, trained(**batches[0]).logits, rtol=1e-3, atol=1e-4)
    with autopar.compile(model, 2, plan=tmp_path / "plan.json", **options) as replayed:
        assert replayed.program.num_microbatches == 2
        assert replayed.train_step(**batches[0]).item() == losses[0]


def test_loss_function_positional_inputs_and_first_call():
    model, make_batch = build("mlp")
    batch = make_batch(0)
    x, y = batch["x"], batch["y"]
    expected, _ = eager(model, [lambda m: F.cross_entropy(m(x), y)] * 2)
    with autopar.compile(
        model, 2, loss_fn=F.cross_entropy, optimizer=SGD, mesh={"dp": 2},
        constraints=[autopar.Force("data_parallel")], profile_limit_s=0,
    ) as compiled:  # fmt: skip
        assert isinstance(compiled, Compiled)
        with pytest.raises(AttributeError, match="nothing is compiled yet"):
            compiled.report()
        with pytest.raises(autopar.InputError, match="needs the whole batch"):
            compiled.train_step(x, y, local=True)
        losses = [compiled.train_step(x, y).item() for _ in range(2)]
        assert compiled.plan.cluster.num_devices == 2
    assert losses == pytest.approx(expected, abs=1e-5)


def test_batch_norm_statistics_come_back():
    model, _ = build("resnet")
    batch = image_batch(0)
    _, trained = eager(model, [lambda m: m(**batch).loss])
    with autopar.compile(
        model, 2, example_inputs=batch, optimizer=SGD, mesh={"dp": 2},
        constraints=[autopar.Force("data_parallel")], profile_limit_s=0,
    ) as compiled:  # fmt: skip
        compiled.train_step(**batch)
        state = compiled.full_state_dict()
    for name, buffer in trained.named_buffers():
        torch.testing.assert_close(state[name], buffer, rtol=1e-4, atol=1e-5)


SCRIPT = """
    import functools, json, os, pathlib, sys
    import torch
    sys.path.insert(0, {root!r})
    import autopar
    from tests.models.zoo import build

    model, make_batch = build("bert")
    batches = [make_batch(seed) for seed in range(3)]
    compiled = autopar.compile(
        model, "cpu", example_inputs=batches[0], profile_limit_s=0,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        mesh={{"dp": 2}}, constraints=[autopar.Force("zero3")],
    )
    losses = [compiled.train_step(**batch).item() for batch in batches]
    kinds = sorted({{type(v).__name__ for v in compiled.state_dict().values()}})
    ids = batches[0]["input_ids"][:3]
    logits = compiled.eval()(input_ids=ids).logits
    compiled.copy_to(model)
    off = (logits - model.eval()(input_ids=ids).logits).abs().max().item()
    compiled.close()
    pathlib.Path({folder!r}, os.environ["RANK"]).write_text(json.dumps([losses, kinds, off]))
"""


def test_same_script_under_torchrun(tmp_path):
    model, make_batch = build("bert")
    batches = [make_batch(seed) for seed in range(NUM_STEPS)]
    expected, _ = eager(model, [lambda m, b=b: loss_of(m(**b)) for b in batches])
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(root=root, folder=str(tmp_path))))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
            f"--master-port={port}", str(script),
        ],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    results = [json.loads((tmp_path / rank).read_text()) for rank in ("0", "1")]
    for losses, kinds, off_in_evaluation in results:
        assert losses == pytest.approx(expected, abs=1e-4)
        assert "DTensor" in kinds
        assert off_in_evaluation < 1e-5


@pytest.mark.parametrize("name", ["mlp", "lstm", "gpt2", "bert", "resnet"])
def test_float32_models_train_on_workers_as_in_eager(name):
    model, make_batch = build(name)
    batches = [make_batch(seed) for seed in range(NUM_STEPS)]
    expected, _ = eager(model, [lambda m, b=b: loss_of(m(**b)) for b in batches])
    with autopar.compile(
        model, 2, example_inputs=batches[0], optimizer=SGD, profile_limit_s=0
    ) as compiled:
        losses = [compiled.train_step(**batch).item() for batch in batches]
    assert losses == pytest.approx(expected, abs=2e-4)


class Thirds(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return (self.linear(x) * (torch.ones(4) / 3)).square().mean()


def test_workers_compute_in_the_default_dtype_of_the_script():
    torch.set_default_dtype(torch.float64)
    try:
        model, x = Thirds(), torch.randn(8, 4)
        expected, _ = eager(model, [lambda m: m(x)] * 2)
        with autopar.compile(
            model, 2, example_inputs=x, optimizer=SGD, profile_limit_s=0
        ) as compiled:
            losses = [compiled.train_step(x).item() for _ in range(2)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert losses == pytest.approx(expected, rel=1e-13)
