"""Lines per so many training steps: their numbers, their logger, and who writes them."""

from __future__ import annotations

import functools
import logging
import re
import subprocess
import sys

import pytest
import torch

import autopar
from autopar.base.errors import InputError
from autopar.runtime.step_log import StepLog
from tests.models.zoo import build

LINE = re.compile(
    r"step (\d+), loss ([\d.]+), ([\d.]+) (s|ms|us) a step, ([\d,]+) tokens/s, ([\d.]+)% MFU, "
    r"[\d.]+ (?:[KMG]i)?B a device"
)


def test_every_second_step_has_a_line_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    model, make_batch = build("gpt2")
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with (
        autopar.compile(model, 1, make_batch(0), optimizer=sgd, profile_limit_s=0.0) as compiled,
        caplog.at_level(logging.INFO, "autopar"),
    ):
        compiled.train_step(**make_batch(0))
        compiled.log_every(2)
        losses = [compiled.train_step(**make_batch(n)).item() for n in range(5)]
        p = compiled.plan.prediction
    found = [LINE.fullmatch(r.getMessage()) for r in caplog.records if r.name == "autopar.training"]
    assert len(found) == 2
    for line, number in zip(found, (2, 4)):
        assert line is not None
        step_s = float(line[3]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[line[4]]
        assert int(line[1]) == number
        assert float(line[2]) == pytest.approx(losses[number - 1], abs=1e-4)
        ratio = p.step_time_s / step_s
        assert p.tokens_per_s is not None
        assert int(line[5].replace(",", "")) == pytest.approx(p.tokens_per_s * ratio, rel=0.02)
        assert float(line[6]) == pytest.approx(100 * p.model_flops_utilisation * ratio, abs=0.1)


def test_other_ranks_are_silent_and_steps_of_other_shapes_are_not_timed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from tests.test_reports import planned

    plan, called = planned("DDP"), []
    loss = torch.tensor(1.5)
    caplog.clear()

    def memory() -> list[int]:
        called.append(1)
        return [5 << 20, 3 << 20]

    with caplog.at_level(logging.INFO, "autopar"):
        silent = StepLog(1, plan, memory, speaks=False)
        silent.after_step(loss, 1.0, is_planned=True)
        assert (called, caplog.records) == ([1], [])
        speaker = StepLog(1, plan, memory, speaks=True)
        speaker.after_step(loss, 9.0, is_planned=False)
    assert caplog.messages == ["step 1, loss 1.5000, 5.00 MiB a device"]
    for wrong in (0, 2.5, True, "3"):
        with pytest.raises(InputError, match="every so many training steps"):
            StepLog(wrong, plan, memory, speaks=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("configured", [False, True])
def test_lines_are_printed_once_where_logging_is_not_configured(configured: bool) -> None:
    code = "import logging, torch\n"
    if configured:
        code += "logging.basicConfig(format='mine: %(message)s')\n"
    code += (
        "from types import SimpleNamespace as N\n"
        "from autopar.runtime.step_log import StepLog\n"
        "p = N(step_time_s=1.0, tokens_per_s=None, samples_per_s=8.0, model_flops_utilisation=0)\n"
        "log = StepLog(1, N(prediction=p), lambda: [1 << 30], speaks=True)\n"
        "log.after_step(torch.tensor(2.0), 0.5, is_planned=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    prefix = "mine: " * configured
    line = "step 1, loss 2.0000, 500.00 ms a step, 16 samples/s, 1.00 GiB a device\n"
    assert (done.stdout, done.stderr) == ("", prefix + line)
