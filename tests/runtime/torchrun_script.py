"""The script of each rank in test_spmd.py: train, and compare with eager PyTorch."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.base.errors import InputError, NonFiniteError
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.ir.placement import R, S
from autopar.lowering.program import lower
from autopar.runtime.compiled import Compiled
from autopar.runtime.options import RunOptions
from autopar.runtime.state.shards import local_part
from autopar.sharding.strategy import Analysis, Strategy
from tests.models.zoo import build
from tests.oracles import loss_of, random_assignment, to_double
from tests.runtime.processes import lower_forward, stored_assignment

MAX_GRAD_NORM = 0.1
adamw = functools.partial(torch.optim.AdamW, lr=0.01)


def main(folder: Path, *, with_batch_split: bool) -> None:
    rank = int(os.environ["RANK"])
    model, make_batch = build("mlp")
    model = model.double()
    torch.manual_seed(100 + rank)  # ranks need not agree on their own random numbers
    batches = [to_double(make_batch(seed)) for seed in range(4)]
    captured = capture(model, batches[0])
    analysis = Analysis(captured.graph)
    mesh = Mesh(("dp",), (int(os.environ["WORLD_SIZE"]),))
    if with_batch_split:
        stored = {"x": (S(0),), "y": (S(0),), "layers.0.weight": (S(1),)}
        strategy = Strategy(analysis, stored_assignment(analysis, mesh, stored))
    else:
        strategy = Strategy(analysis, random_assignment(analysis, mesh, 3))
    program = lower(strategy)
    compiled = Compiled(
        captured=captured,
        program=program,
        forward_program=lambda: lower(strategy, training=False),
        lower_forward=lower_forward(mesh),
        plan=None,
        devices=[torch.device("cpu")] * mesh.num_devices,
        model=model,
        options=RunOptions(optimizer=adamw, max_grad_norm=MAX_GRAD_NORM),
    )
    reference = build("mlp")[0].double()
    optimizer = adamw(reference.parameters())
    for step, batch in enumerate(batches):
        torch.testing.assert_close(compiled(**batch), loss_of(reference(**batch)).detach())
        if with_batch_split and step % 2:
            parts = {k: local_part(v, (S(0),), mesh, rank) for k, v in batch.items()}
            loss = compiled.train_step(**parts, local=True)
        else:
            loss = compiled.train_step(**batch)
        optimizer.zero_grad()
        expected = loss_of(reference(**batch))
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_GRAD_NORM)
        assert norm > MAX_GRAD_NORM
        torch.testing.assert_close(compiled.grad_norm, norm)
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
    check_state(compiled, reference, rank)
    check_evaluation(compiled, reference, batches[1])
    if with_batch_split:
        check_wrong_parts(compiled, batches[0])
        check_evaluation_of_parts(compiled, reference, batches[1], rank)
        check_nan_in_one_part(compiled, batches[0], rank)
    compiled.save(folder / "checkpoint")
    weights = compiled.full_state_dict()
    compiled.train_step(**batches[0])
    compiled.load(folder / "checkpoint")
    for key, tensor in compiled.full_state_dict().items():
        assert torch.equal(tensor, weights[key]), key
    compiled.close()
    assert not dist.is_initialized()
    (folder / f"rank{rank}.json").write_text(json.dumps(loss.item()))


def check_state(compiled: Compiled, reference: torch.nn.Module, rank: int) -> None:
    state = compiled.state_dict()
    assert list(state) == list(reference.state_dict())
    for key, tensor in reference.state_dict().items():
        assert isinstance(state[key], DTensor)
        assert state[key].device_mesh.mesh_dim_names == ("dp",)
        torch.testing.assert_close(state[key].full_tensor(), tensor)
        torch.testing.assert_close(compiled.full_state_dict()[key], tensor)
    plain = build("mlp")[0].double()
    compiled.copy_to(plain)
    torch.testing.assert_close(plain.state_dict(), dict(reference.state_dict()))


def check_evaluation(
    compiled: Compiled, reference: torch.nn.Module, batch: dict[str, torch.Tensor]
) -> None:
    reference.eval()
    compiled.eval()
    x = batch["x"]
    torch.testing.assert_close(compiled(**batch), reference(**batch).detach())
    torch.testing.assert_close(compiled(x=x), reference(x).detach())
    torch.testing.assert_close(compiled(x[:3]), reference(x[:3]).detach())
    reference.train()
    compiled.train()


def check_evaluation_of_parts(
    compiled: Compiled, reference: torch.nn.Module, batch: dict[str, torch.Tensor], rank: int
) -> None:
    parts = {k: local_part(v, (S(0),), compiled.program.mesh, rank) for k, v in batch.items()}
    torch.testing.assert_close(compiled.eval()(**parts, local=True), reference(**batch).detach())
    for wrong in (batch, {"x": parts["x"]}):
        with pytest.raises(InputError, match=r"pass the global batch, without local=True"):
            compiled(**wrong, local=True)
    compiled.train()


def check_wrong_parts(compiled: Compiled, batch: dict[str, torch.Tensor]) -> None:
    with pytest.raises(InputError, match=r"own part.*batch, x: \(4, 16\).*part is x: \(2, 16\)"):
        compiled.train_step(**batch, local=True)
    assert compiled.program.inputs[0].placements != (R,)


def check_nan_in_one_part(compiled: Compiled, batch: dict[str, torch.Tensor], rank: int) -> None:
    weights = compiled.full_state_dict()
    parts = {k: local_part(v, (S(0),), compiled.program.mesh, rank) for k, v in batch.items()}
    if rank == 1:
        parts["x"] = parts["x"].clone()
        parts["x"][0, 0] = torch.nan
    with pytest.raises(
        NonFiniteError, match=r"'x' has nan on rank 1 of 2\nfirst nan: read .* on rank 1"
    ):
        compiled.train_step(**parts, local=True)
    for key, tensor in compiled.full_state_dict().items():
        assert torch.equal(tensor, weights[key]), key


if __name__ == "__main__":
    main(Path(sys.argv[1]), with_batch_split=sys.argv[2] == "split")
