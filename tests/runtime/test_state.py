"""Optimizers on shards, and state exported as DTensors, full tensors and checkpoints."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from autopar.base.errors import InputError, OptimizerError, WorkerError
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, R, S
from autopar.lowering.program import lower
from autopar.runtime.runners.local import LocalRunner
from autopar.runtime.state.checkpoint_writer import CheckpointWriter
from autopar.runtime.state.optimizers import ELEMENTWISE
from autopar.runtime.workers.group import WorkerGroup
from autopar.sharding.strategy import Analysis, Strategy
from tests.runtime.conftest import Groups
from tests.runtime.processes import process_steps, runner_of, stored_assignment

M2 = Mesh(("dp",), (2,))
M22 = Mesh(("dp", "tp"), (2, 2))
M4 = Mesh(("z",), (4,))


class Tied(nn.Module):
    """Tied weights, sizes that do not divide, a changing buffer; a parameter that is frozen, one
    that is unused and a scalar one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(7))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embedding(ids)).chunk(3, -1)
        hidden = self.norm(torch.tanh(q * k + v * self.frozen)) * self.scale
        return nn.functional.cross_entropy(self.head(hidden), labels)


def make_model() -> Tied:
    torch.manual_seed(1)
    return Tied().double()


def make_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, 11, (2, 8), generator=generator)
    return {"ids": ids, "labels": labels}


BATCHES = [make_batch(seed) for seed in range(5)]
STORED: dict[str, tuple[Mesh, dict[str, Placements]]] = {
    # Rows, the heads of a fused projection (a digit behind 3), columns.
    "2": (M2, {"qkv.weight": (S(0, 3),), "qkv.bias": (S(0, 3),), "embedding.weight": (S(1),)}),
    # Two digits of one dimension, in and against mesh order; one axis only; both dimensions.
    "2x2": (
        M22,
        {
            "qkv.weight": (S(0, 2), S(0)),
            "qkv.bias": (S(0, 6), S(0, 3)),
            "embedding.weight": (S(0), S(1)),
            "norm.weight": (S(0), S(0, 2)),
            "norm.bias": (R, S(0)),
            "unused": (S(0), S(0, 2)),
        },
    ),
    "4": (M4, {"qkv.weight": (S(0),), "embedding.weight": (S(0),), "unused": (S(0),)}),
    "whole": (M2, {}),
}
Make = Callable[[list[Any]], torch.optim.Optimizer]


@functools.cache
def lowered(stored: str) -> tuple[Any, Any]:
    mesh, placements = STORED[stored]
    captured = capture(make_model(), BATCHES[0])
    analysis = Analysis(captured.graph)
    strategy = Strategy(analysis, stored_assignment(analysis, mesh, placements))
    strategy.verify()
    return captured, lower(strategy)


def start(groups: Groups, stored: str, optimizer: Make | None, **options: Any) -> LocalRunner:
    captured, program = lowered(stored)
    group = groups(program.mesh.num_devices)
    return runner_of(group, captured, program, make_model(), optimizer=optimizer, **options)


def train(runner: LocalRunner, batches: Sequence[dict[str, Tensor]]) -> list[float]:
    captured, _ = lowered("2")
    return process_steps(runner, captured, batches).losses


def eager(
    make: Make, batches: Sequence[dict[str, Tensor]], scheduler: Any = None
) -> tuple[Tied, torch.optim.Optimizer, list[float]]:
    model = make_model()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    schedule = scheduler(optimizer) if scheduler else None
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            schedule.step(loss.item())
        elif schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return model, optimizer, losses


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


adamw = functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
SCHEDULERS = {
    "cosine": functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=4),
    "plateau": functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0),
}


class TestOptimizers:
    @pytest.mark.sampled(6)
    @pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
    def test_element_wise_ones_work_on_shards(self, groups: Groups, kind: Any) -> None:
        make = functools.partial(kind, lr=0.05)
        runner = start(groups, "2", make)
        losses = train(runner, BATCHES[:3])
        model, _, expected = eager(make, BATCHES[:3])
        assert losses == pytest.approx(expected, rel=1e-9)
        assert_close(runner.full_state_dict(), model.state_dict())

    @pytest.mark.parametrize("name", SCHEDULERS)
    def test_with_a_learning_rate_schedule(self, groups: Groups, name: str) -> None:
        runner = start(groups, "2x2", adamw, lr_scheduler=SCHEDULERS[name])
        losses = train(runner, BATCHES)
        model, optimizer, expected = eager(adamw, BATCHES, SCHEDULERS[name])
        assert losses == pytest.approx(expected, rel=1e-9)
        assert_close(runner.full_state_dict(), model.state_dict())
        (group,) = runner.optimizer_state_dict()["param_groups"]
        assert group["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
        assert group["lr"] != 0.05

    @pytest.mark.parametrize(
        "make",
        [
            functools.partial(torch.optim.Adafactor, lr=0.1),
            functools.partial(type("Unknown", (torch.optim.SGD,), {}), lr=0.1),
        ],
        ids=["Adafactor", "unknown"],
    )
    def test_others_are_refused_where_a_parameter_is_split(self, groups: Groups, make: Any) -> None:
        name = make.func.__name__
        with pytest.raises(OptimizerError, match=rf"'embedding\.weight'(.|\n)*{name}(.|\n)*AdamW"):
            start(groups, "2", make)
        runner = start(groups, "whole", make)
        losses = train(runner, BATCHES[:2])
        assert losses == pytest.approx(eager(make, BATCHES[:2])[2], rel=1e-9)

    def test_muon_is_refused_where_a_parameter_is_split(self, groups: Groups) -> None:
        def muon(parameters: list[Any]) -> torch.optim.Optimizer:
            return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.1)

        with pytest.raises(OptimizerError, match="Muon"):
            start(groups, "2", muon)

    def test_lbfgs_is_refused_everywhere(self, groups: Groups) -> None:
        with pytest.raises(OptimizerError, match="several times"):
            start(groups, "whole", torch.optim.LBFGS)

    def test_sparse_adam_is_refused_everywhere(self, groups: Groups) -> None:
        with pytest.raises(OptimizerError, match="takes sparse gradients"):
            start(groups, "whole", torch.optim.SparseAdam)

    def test_tensors_from_elsewhere_are_refused(self, groups: Groups) -> None:
        own = nn.Parameter(torch.ones(2))
        with pytest.raises(OptimizerError, match="was not given"):
            start(groups, "2", lambda parameters: torch.optim.SGD([*parameters, own], lr=0.1))

    def test_something_else_is_refused(self, groups: Groups) -> None:
        with pytest.raises(OptimizerError, match="returned a list"):
            start(groups, "2", lambda parameters: parameters)  # type: ignore[arg-type,return-value]

    def test_what_gets_no_gradient_has_no_state(self, groups: Groups) -> None:
        runner = start(groups, "4", adamw)
        train(runner, BATCHES[:1])
        model, optimizer, _ = eager(adamw, BATCHES[:1])
        names = {id(p): n for n, p in model.named_parameters()}
        state = runner.optimizer_state_dict()["state"]
        assert set(state) == {names[id(p)] for p in optimizer.state}
        assert "unused" not in state
        assert "frozen" not in state
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items():
                torch.testing.assert_close(state[names[id(parameter)]][key], value)


class TestStateDict:
    @pytest.mark.parametrize("stored", STORED)
    def test_it_is_the_models_own(self, groups: Groups, stored: str) -> None:
        model = make_model()
        state = start(groups, stored, None).full_state_dict()
        assert list(state) == list(model.state_dict())
        assert "head.weight" in state
        for key, tensor in model.state_dict().items():
            assert torch.equal(state[key], tensor), key
        other = make_model()
        other.load_state_dict(state)

    @pytest.mark.parametrize("stored", STORED)
    def test_torch_makes_the_same_of_the_dtensors(self, groups: Groups, stored: str) -> None:
        runner = start(groups, stored, adamw)
        train(runner, BATCHES[:2])
        model, optimizer, _ = eager(adamw, BATCHES[:2])
        group = groups(STORED[stored][0].num_devices)
        names = {id(p): n for n, p in model.named_parameters()}
        moments = {
            f"{names[id(p)]}.{key}": value
            for p, entries in optimizer.state.items()
            for key, value in entries.items()
            if value.dim()
        }
        for by_rank in (group.call("full_tensors", "state_dict"), [runner.full_state_dict()]):
            for full in by_rank:
                for key, tensor in full.items():
                    torch.testing.assert_close(tensor, model.state_dict()[key])
        for full in group.call("full_tensors", "optimizer"):
            assert set(full) == set(moments)
            for key, tensor in full.items():
                torch.testing.assert_close(tensor, moments[key])

    def test_dtensors_carry_the_axis_names(self, groups: Groups) -> None:
        start(groups, "2x2", None)
        described = groups(4).call("described")[0]
        assert described["embedding.weight"] == ("(Shard(dim=0), Shard(dim=1))", ("dp", "tp"))
        assert described["norm.bias"] == ("(Replicate(), Shard(dim=0))", ("dp", "tp"))
        # Against mesh order: redistributed to what torch writes as nested splits.
        assert described["qkv.weight"] == ("(Shard(dim=0), Shard(dim=0))", ("dp", "tp"))

    @pytest.mark.parametrize("stored", STORED)
    def test_dtensors_load_back(self, groups: Groups, stored: str) -> None:
        start(groups, stored, None)
        assert all(groups(STORED[stored][0].num_devices).call("reload_as_dtensors"))

    def test_loading_whole_state(self, groups: Groups) -> None:
        model, _, _ = eager(adamw, BATCHES[:2])
        runner = start(groups, "2x2", adamw)
        runner.load_state_dict(model.state_dict())
        assert_close(runner.full_state_dict(), model.state_dict())

    def test_a_state_that_does_not_fit(self, groups: Groups) -> None:
        runner = start(groups, "2", None)
        state = runner.full_state_dict()
        del state["scale"]
        with pytest.raises(InputError, match=r"missing \['scale'\], unknown \['other'\]"):
            runner.load_state_dict({**state, "other": torch.ones(1)})
        state = {**state, "scale": torch.ones(2)}
        with pytest.raises(InputError, match=r"'scale' has shape \(2,\)"):
            runner.load_state_dict(state)
        with pytest.raises(InputError, match="no checkpoint"):
            runner.load("/")

    def test_the_callers_model_is_left_alone(self, groups: Groups) -> None:
        captured, program = lowered("whole")
        model = make_model()
        before = copy.deepcopy(model.state_dict())
        runner = runner_of(groups(2), captured, program, model, optimizer=adamw)
        train(runner, BATCHES[:1])
        assert_close(model.state_dict(), before)


class Dying(CheckpointWriter):
    """A process that ends when its data is written, before it tells any rank."""

    def write_data(self, *args: Any) -> Any:
        super().write_data(*args).wait()
        os._exit(9)


class Saver:
    """Each rank's own tensor, as one checkpoint."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank

    def save(self, path: str, value: float, dies: bool = False) -> None:
        kind = Dying if dies and self.rank == 1 else CheckpointWriter
        dcp.save({str(self.rank): torch.full((5000,), value)}, storage_writer=kind(path, {}))


def read_by_torch(state: dict[str, Any], path: Path) -> None:
    """The state as ``torch.distributed.checkpoint`` reads safetensors files, in place."""
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


class TestCheckpoints:
    @pytest.mark.parametrize(("saved", "loaded"), [("2", "2x2"), ("2x2", "2"), ("2", "4")])
    def test_training_goes_on_elsewhere(
        self, groups: Groups, tmp_path: Path, saved: str, loaded: str
    ) -> None:
        cosine = SCHEDULERS["cosine"]
        first = start(groups, saved, adamw, lr_scheduler=cosine)
        losses = train(first, BATCHES[:2])
        first.save(tmp_path / "checkpoint")
        second = start(groups, loaded, adamw, lr_scheduler=cosine)
        second.load(tmp_path / "checkpoint")
        losses += train(second, BATCHES[2:])
        model, _, expected = eager(adamw, BATCHES, cosine)
        assert losses == pytest.approx(expected, rel=1e-9)
        assert_close(second.full_state_dict(), model.state_dict())

    def test_plain_tools_read_them(self, groups: Groups, tmp_path: Path) -> None:
        runner = start(groups, "2x2", adamw)
        train(runner, BATCHES[:2])
        runner.save(tmp_path)
        model = make_model()
        state = {"model": model.state_dict()}
        read_by_torch(state, tmp_path)
        assert_close(state["model"], runner.full_state_dict())

    def test_what_cannot_be_written_or_read_costs_nothing(
        self, groups: Groups, tmp_path: Path
    ) -> None:
        runner = start(groups, "2", adamw)
        losses = train(runner, BATCHES[:2])
        with pytest.raises(InputError, match=r"cannot be written to .*File name too long"):
            runner.save(tmp_path / ("x" * 300))
        runner.save(tmp_path)
        losses += train(runner, BATCHES[2:3])
        largest = max(tmp_path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
        content = largest.read_bytes()
        largest.write_bytes(content[: len(content) // 2])
        with pytest.raises(InputError, match=r"has .* bytes instead of"):
            runner.load(tmp_path)
        largest.unlink()
        with pytest.raises(InputError, match=r"is missing; nothing was loaded"):
            runner.load(tmp_path)
        flipped = bytearray(content)
        flipped[-1] ^= 1
        largest.write_bytes(flipped)
        with pytest.raises(InputError, match=r"does not have its checksum"):
            runner.load(tmp_path)
        losses += train(runner, BATCHES[3:])
        assert losses == pytest.approx(eager(adamw, BATCHES)[2], rel=1e-9)
        largest.write_bytes(content)
        runner.load(tmp_path)
        assert train(runner, BATCHES[2:]) == losses[2:]

    def test_a_save_that_dies_leaves_the_one_before(self, tmp_path: Path) -> None:
        with WorkerGroup(2, service=Saver, threads_per_worker=1) as group:
            group.call("save", str(tmp_path), 1.0)
            before = {file.name for file in tmp_path.iterdir()}
            with pytest.raises(WorkerError, match="worker 1"):
                group.call("save", str(tmp_path), 2.0, True)
        assert before < {file.name for file in tmp_path.iterdir()}  # what it had written
        state = {"0": torch.zeros(5000), "1": torch.zeros(5000)}
        read_by_torch(state, tmp_path)
        assert all(torch.equal(part, torch.ones(5000)) for part in state.values())
        with WorkerGroup(2, service=Saver, threads_per_worker=1) as group:
            group.call("save", str(tmp_path), 3.0)
        assert len(list(tmp_path.iterdir())) == 3
        read_by_torch(state, tmp_path)
        assert all(torch.equal(part, torch.full((5000,), 3.0)) for part in state.values())

    def test_optimizer_state_goes_on_elsewhere(self, groups: Groups) -> None:
        first = start(groups, "2", adamw)
        losses = train(first, BATCHES[:2])
        weights, moments = first.full_state_dict(), first.optimizer_state_dict()
        second = start(groups, "2x2", adamw)
        second.load_state_dict(weights)
        second.load_optimizer_state_dict(moments)
        losses += train(second, BATCHES[2:])
        model, _, expected = eager(adamw, BATCHES)
        assert losses == pytest.approx(expected, rel=1e-9)
        assert_close(second.full_state_dict(), model.state_dict())


class TestWhatDoesNotFit:
    """It is rejected by name, nothing is loaded, and training continues unchanged."""

    BROKEN: ClassVar[dict[str, tuple[Any, str]]] = {
        "no groups": (lambda s: {"state": {}}, "needs 'state' and 'param_groups'"),
        "no mapping": (lambda s: [1], "has list, but needs"),
        "torch's own": (
            lambda s: {"state": {0: {}}, "param_groups": [{"params": [0]}]},
            r"other parameter groups: \[\[0\]\] instead of",
        ),
        "no list": (lambda s: {**s, "param_groups": None}, "other parameter groups: None"),
        "unknown name": (
            lambda s: {**s, "state": {"head.bias": {}}},
            r"entries for \['head.bias'\].*compiled.optimizer_state_dict",
        ),
        "another kind": (
            lambda s: {**s, "state": {"scale": {"momentum_buffer": torch.ones(())}}},
            r"'scale' has \['momentum_buffer'\], but this optimizer keeps \['exp_avg'",
        ),
        "no number": (
            lambda s: {**s, "param_groups": [{**s["param_groups"][0], "lr": "x"}]},
            "'lr' of a group of the optimizer state is 'x'; it must be of the kind of 0.05",
        ),
        "a part": (
            lambda s: {
                **s,
                "state": {
                    **s["state"],
                    "qkv.weight": {**s["state"]["qkv.weight"], "exp_avg": torch.ones(12, 8)},
                },
            },
            r"'exp_avg' in the optimizer state of 'qkv.weight' has shape \(12, 8\)",
        ),
    }

    @pytest.mark.parametrize("kind", BROKEN)
    @pytest.mark.parametrize("num_steps", [0, 1])
    def test_optimizer_state(self, groups: Groups, kind: str, num_steps: int) -> None:
        change, message = self.BROKEN[kind]
        other = start(groups, "2", adamw)
        train(other, BATCHES[:1])
        state = other.optimizer_state_dict()
        runner = start(groups, "2", adamw)
        losses = train(runner, BATCHES[:num_steps])
        with pytest.raises(InputError, match=message):
            runner.load_optimizer_state_dict(change(state))
        losses += train(runner, BATCHES[num_steps:3])
        model, _, expected = eager(adamw, BATCHES[:3])
        assert losses == pytest.approx(expected, rel=1e-9)
        assert_close(runner.full_state_dict(), model.state_dict())

    def test_no_optimizer(self, groups: Groups) -> None:
        runner = start(groups, "2", None)
        with pytest.raises(OptimizerError, match="there is no optimizer"):
            runner.optimizer_state_dict()
        with pytest.raises(OptimizerError, match="there is no optimizer"):
            runner.load_optimizer_state_dict({"state": {}, "param_groups": []})
        assert runner.full_state_dict()

    def test_model_state_that_is_none(self, groups: Groups) -> None:
        runner = start(groups, "2", None)
        with pytest.raises(InputError, match="a list, not a mapping"):
            runner.load_state_dict([1])  # type: ignore[arg-type]
        with pytest.raises(InputError, match="'scale' is a float, not a tensor"):
            runner.load_state_dict({**runner.full_state_dict(), "scale": 1.0})  # type: ignore[dict-item]
        meta = {n: t.to("meta") for n, t in runner.full_state_dict().items()}
        with pytest.raises(InputError, match="on the meta device"):
            runner.load_state_dict(meta)
        assert runner.full_state_dict()

    @pytest.mark.parametrize("path", [None, 3, ""])
    def test_a_path_that_is_none(self, groups: Groups, path: Any) -> None:
        runner = start(groups, "2", None)
        for act in (runner.save, runner.load):
            with pytest.raises(InputError, match="pass the name of a folder"):
                act(path)
        assert runner.full_state_dict()

    def test_groups_that_depend_on_what_a_device_has(self, groups: Groups) -> None:
        def make(parameters: list[Any]) -> torch.optim.Optimizer:
            large = [p for p in parameters if p.numel() > 100]
            small = [p for p in parameters if p.numel() <= 100]
            return torch.optim.SGD([{"params": large}, {"params": small, "lr": 0.1}], lr=0.2)

        with pytest.raises(OptimizerError, match=r"'qkv.weight'.*must not depend on sizes"):
            start(groups, "2", make)
        runner = start(groups, "whole", make)
        assert train(runner, BATCHES) == pytest.approx(eager(make, BATCHES)[2], rel=1e-9)

    def test_a_checkpoint_cannot_be_written_onto_a_file(
        self, groups: Groups, tmp_path: Path
    ) -> None:
        runner = start(groups, "2", adamw)
        (tmp_path / "file").write_text("mine")
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(InputError, match=r"cannot save to .*file' is a file"):
                runner.save(path)
        assert (tmp_path / "file").read_text() == "mine"
        runner.save(tmp_path / "new" / "folder")
        runner.load(tmp_path / "new" / "folder")

    def test_a_checkpoint_of_another_optimizer_or_broken(
        self, groups: Groups, tmp_path: Path
    ) -> None:
        plain, sgd = tmp_path / "plain", functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        start(groups, "2", None).save(plain)
        other = start(groups, "2", sgd)
        train(other, BATCHES[2:4])
        other.save(tmp_path / "sgd")
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "autopar.json").write_bytes(b"nothing")
        runner = start(groups, "2", adamw)
        for name, message in [
            ("plain", "does not fit"),
            ("sgd", "same kind"),
            ("broken", "cannot be read"),
        ]:
            with pytest.raises(InputError, match=message):
                runner.load(tmp_path / name)
        losses = train(runner, BATCHES[:2])
        _, _, expected = eager(adamw, BATCHES[:2])
        assert losses == pytest.approx(expected, rel=1e-9)

    def test_state_made_by_fewer_steps_is_split_as_the_parameter(self, groups: Groups) -> None:
        """Entries that this rank does not hold yet are sharded all the same."""
        momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        first = start(groups, "2", momentum)
        losses = train(first, BATCHES[:2])
        weights, state = first.full_state_dict(), first.optimizer_state_dict()
        second = start(groups, "2x2", functools.partial(torch.optim.SGD, lr=0.1))
        second.load_state_dict(weights)
        second.load_optimizer_state_dict(state)
        losses += train(second, BATCHES[2:])
        _, _, expected = eager(momentum, BATCHES)
        assert losses == pytest.approx(expected, rel=1e-9)
