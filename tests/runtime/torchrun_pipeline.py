"""The script of each rank in test_pipeline_plans.py: train a pipeline and compare on every rank."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import autopar
from tests.models.zoo import build
from tests.oracles import reference_steps, to_double

adamw = functools.partial(torch.optim.AdamW, lr=0.01)


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    model, make_batch = build("gpt2")
    model = model.double()
    batches = [to_double(make_batch(seed)) for seed in range(3)]
    compiled = autopar.compile(
        model, 2, example_inputs=batches[0], optimizer=adamw, profile_limit_s=0,
        num_stages=2, num_microbatches=2,
    )  # fmt: skip
    losses = [compiled.train_step(**batch).item() for batch in batches]
    expected = reference_steps(model, batches, adamw)
    torch.testing.assert_close(losses, expected.losses, rtol=2e-6, atol=2e-6)
    for name, weight in compiled.full_state_dict().items():
        if name in expected.weights:
            torch.testing.assert_close(weight, expected.weights[name], rtol=1e-4, atol=1e-4)
    own = compiled.state_dict()
    assert all(isinstance(tensor, DTensor) for tensor in own.values())
    assert "transformer.wte.weight" in own  # tied to the head: both stages have a copy
    assert ("transformer.wpe.weight" in own) == (rank == 0)
    compiled.save(folder / "checkpoint")
    after = compiled.train_step(**batches[0]).item()
    compiled.load(folder / "checkpoint")
    assert compiled.train_step(**batches[0]).item() == after
    check_nan_in_one_stage(compiled, batches[0])
    compiled.load(folder / "checkpoint")
    assert compiled.train_step(**batches[0]).item() == after
    logits = compiled.eval()(input_ids=batches[0]["input_ids"]).logits
    assert logits.shape == (4, 8, 32)
    compiled.close()
    (folder / f"rank{rank}.json").write_text(json.dumps([*losses, after]))


def check_nan_in_one_stage(compiled: autopar.Compiled, batch: dict[str, torch.Tensor]) -> None:
    poisoned = compiled.full_state_dict()
    name = "transformer.h.1.ln_1.weight"
    poisoned[name][3] = torch.nan
    compiled.load_state_dict(poisoned)
    with pytest.raises(autopar.NonFiniteError, match=f"parameter {name!r} has nan") as raised:
        compiled.train_step(**batch)
    assert str(raised.value.block).startswith("transformer.h.1")
    assert raised.value.microbatch == 0
    after = compiled.full_state_dict()
    torch.testing.assert_close(after, poisoned, rtol=0, atol=0, equal_nan=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
