"""Peak bytes of gradients: all kept, released tensor by tensor, and by rows of large tensors.

    python -m benchmarks.early_update            # the networks that the targets name
    python -m benchmarks.early_update --final    # also a group that is looked at only at the end

Every network has its full size. The memory model predicts the peak over graphs captured on the meta
device, for one device. ``counted`` are the gradients that a training step with real tensors holds
at once; its batch is small, as they do not depend on it. What is saved is relative to all gradients
kept once, without the copy that adding the two contributions to a tied weight takes.

Baselines: the sequential update, after the backward pass; and the double-buffered update, which
writes to a second copy of the weights, so that it need not wait for their last read. ``THESIS``
has the figures of the thesis that introduced the update delayed until the last read.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.cost_models import Cluster
from autopar.cost_models.update import OptimizerSpec
from autopar.frontend.capture import Captured, capture
from autopar.lowering.early import default_tile_bytes, with_early_update
from autopar.lowering.training import lower_training
from autopar.lowering.types import RankProgram
from autopar.memory.program import program_memory
from autopar.sharding.strategy import Analysis, unsplit
from autopar.testing.lockstep import LockstepMachine, LockstepRun
from autopar.testing.lockstep_updates import LockstepUpdates
from benchmarks import networks
from benchmarks.setting import setting

RESULT = Path(__file__).parent / "results" / "early_update.json"
WHOLE = 1 << 62
SGD = OptimizerSpec(num_states=0, is_fused=True)


TARGETS: dict[str, tuple[networks.Network, float]] = {
    "resnet50": (networks.resnet50, 0.90),
    "bert, untied head": (functools.partial(networks.bert, tie_word_embeddings=False), 0.90),
    "bert, tied head": (networks.bert, 0.78),
    "vgg16": (networks.vgg16, 0.75),
    "alexnet": (networks.alexnet, 0.75),
}
"""Networks, and the share of gradient memory that is to be saved."""
FINAL: dict[str, networks.Network] = {
    "inception_v3": networks.inception_v3,
    "densenet121": networks.densenet121,
    "gpt2": networks.gpt2,
    "vit": networks.vit,
    "mobilenet_v2": networks.mobilenet_v2,
}
THESIS = {
    "saved_at_most": 0.75,
    "one_whole_tensor": {"vgg16": 0.257, "alexnet": 0.382, "resnet50": 0.908},
}
"""The share saved that the thesis reports, and by network that of one buffer for its largest
gradient."""


def lowered(graph: Captured) -> RankProgram:
    """The program of one device."""
    return lower_training(unsplit(Analysis(graph.graph)))


class CountingMachine(LockstepMachine):
    """Counts the bytes of the gradients that are alive."""

    def __init__(self, program: RankProgram) -> None:
        super().__init__(program.mesh)
        steps = [step.module for k in program.kernels for step in k.weight_steps if step.grads]
        wholes = [k.backward_weight for k in program.kernels if k.backward_weight is not None]
        self.makers = {id(module) for module in (*steps, *wholes)}
        self.now = self.most = 0

    def run(self, module: fx.GraphModule, arguments: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        results = super().run(module, arguments)
        for result in results if id(module) in self.makers else ():
            self._count(result)
        return results

    def add_in(self, dtype: torch.dtype, left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
        total = super().add_in(dtype, left, right)
        self._count(total)
        return total

    def _count(self, shards: list[Tensor]) -> None:
        for tensor in shards:
            self.now += tensor.nbytes
            weakref.finalize(tensor, self._release, tensor.nbytes)
        self.most = max(self.most, self.now)

    def _release(self, size_bytes: int) -> None:
        self.now -= size_bytes


def counted(program: RankProgram, graph: Captured, model: nn.Module, batch: Any) -> int:
    """The most bytes of gradients at once in a training step."""
    named = [*model.named_parameters(), *model.named_buffers()]
    run = LockstepRun(program, graph.graph, {n: t.detach() for n, t in named})
    (rank,) = run.ranks
    machine = rank.executor.machine = CountingMachine(program)
    updaters = []
    if program.early is not None:
        updaters = [LockstepUpdates(rank, program, lambda ps: torch.optim.SGD(ps, lr=1e-4))]
    (result,) = run.steps(graph.signature.flatten((), batch), updaters)
    del result
    return machine.most


def small(batch: networks.Batch) -> networks.Batch:
    """Two rows of a batch, of at most 64 tokens."""
    return {k: v[:2, :64] if v.dim() == 2 else v[:2] for k, v in batch.items()}


def measured(name: str, make: networks.Network) -> dict[str, Any]:
    device = Cluster.preset("cpu", nodes=1, devices_per_node=1).device
    with torch.device("meta"):
        model, batch = make()
    program = lowered(capture(model.train(), batch))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    torch.manual_seed(0)
    model, batch = make()
    batch = small(batch)
    graph = capture(model.train(), batch)
    real = lowered(graph)
    row: dict[str, Any] = {
        "parameter_bytes": weights,
        "tile_bytes": default_tile_bytes(program),
    }
    forms: dict[str, Callable[[RankProgram], RankProgram]] = {
        "sequential": lambda p: p,
        "early, whole tensors": lambda p: with_early_update(p, tile_bytes=WHOLE),
        "early, rows": with_early_update,
    }
    for form, change in forms.items():
        predicted = program_memory(change(program), device, optimizer=SGD).gradient_bytes
        found = counted(change(real), graph, copy.deepcopy(model), batch)
        row[form] = {"predicted_bytes": predicted, "counted_bytes": found}
    kept = row["kept_bytes"] = sum(
        p.numel() * p.element_size() for p in model.parameters() if p.requires_grad
    )
    for form in forms:
        row[form]["saved"] = round(1 - row[form]["predicted_bytes"] / kept, 4)
        row[form]["saved_as_counted"] = round(1 - row[form]["counted_bytes"] / kept, 4)
    whole = row["early, whole tensors"]["predicted_bytes"]
    row["double-buffered"] = {
        "predicted_bytes": whole,
        "second_copy_of_weights_bytes": weights,
        "saved": round(1 - (whole + weights) / kept, 4),
    }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--final", action="store_true", help="also the group kept for the end")
    arguments = parser.parse_args()
    document: dict[str, Any] = {
        **setting("torch", "transformers", "numpy"),
        "thesis": THESIS,
        "networks": {},
        "final": {},
    }
    for name, (make, target) in TARGETS.items():
        row = document["networks"][name] = {"target": target, **measured(name, make)}
        show(name, row)
    if arguments.final:
        for name, make in FINAL.items():
            row = document["final"][name] = measured(name, make)
            show(name, row)
    RESULT.write_text(json.dumps(document, indent=2) + "\n")


def show(name: str, row: dict[str, Any]) -> None:
    rows, whole = row["early, rows"], row["early, whole tensors"]
    double = row["double-buffered"]
    asked = f", asked {row['target']:.0%}" if "target" in row else ""
    print(
        f"{name}: all gradients {row['kept_bytes'] / 1e6:.1f} MB, early "
        f"{rows['predicted_bytes'] / 1e6:.1f} MB (counted {rows['counted_bytes'] / 1e6:.1f}): "
        f"{rows['saved']:.1%} less{asked}; whole tensors {whole['saved']:.1%} less; "
        f"double-buffered, with its second copy of the weights, {-double['saved']:.1%} more",
        flush=True,
    )


if __name__ == "__main__":
    main()
