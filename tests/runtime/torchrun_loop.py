"""The script of each rank in test_classic_loop.py: a loop of calls, backward() and updates."""

from __future__ import annotations

import gc

import torch

from autopar.runtime.step.loop import LoopRuntime
from tests.runtime.test_classic_loop import (
    assert_trains_as_eager,
    compile_two,
    net,
    one_cycle,
    rows,
)


def main() -> None:
    model = net()
    batches = [[rows(10 * step + part) for part in range(2)] for step in range(5)]
    with compile_two(model, batches[0][0]) as compiled:
        how = {"max_norm": 0.1, "make_scheduler": one_cycle}
        reference = assert_trains_as_eager(compiled, model, batches, **how)
        compiled(*rows(0)).backward()
        reference(*rows(0)).backward()
        gradients = compiled.gradients()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(gradients[name].full_tensor(), parameter.grad)
        runtime = compiled._runner.runtime
        assert isinstance(runtime, LoopRuntime)
        for seed in range(3):  # losses that are dropped do not keep gradients
            compiled(*rows(seed))
            gc.collect()
        assert len(runtime._computed) == 1


if __name__ == "__main__":
    main()
