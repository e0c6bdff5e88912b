"""What blocks keep, chosen over the moments of a counted step, against counts of other programs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import autopar
from autopar.frontend.capture import capture
from autopar.ir.recomputation import NOTHING
from autopar.memory.program import ProgramMemory
from autopar.options import PlanOptions
from autopar.planning.option_lowering import OptionLowering
from autopar.planning.planner import make_setting
from autopar.planning.recomputation import Recomputer
from autopar.planning.recompute_request import Recompute, Request
from autopar.planning.schedule_search import Search
from autopar.planning.setting import MemoryLimit
from tests.models import families, zoo

MODELS = {"llama": families.llama, "bert": zoo.bert, "gpt2": zoo.gpt2}
CASES = [
    ("gpt2", 1, "1f1b", 4),
    ("gpt2", 2, "1f1b", 4),
    ("llama", 2, "zb_v", 8),
    ("llama", 2, "zb_h2", 4),
    ("bert", 2, "chimera", 4),
    ("gpt2", 4, "interleaved", 8),
]


@pytest.mark.parametrize(("kind", "num_devices", "schedule", "num_microbatches"), CASES)
def test_memory_of_other_choices_follows_from_one_count(
    kind: str, num_devices: int, schedule: str, num_microbatches: int
) -> None:
    """The fullest moment of every device, for drawn choices of all blocks."""
    model, batch = (
        {"llama": families.llama, "bert": zoo.bert, "gpt2": zoo.gpt2}[kind](num_layers=8),
        zoo.token_batch(0, batch=8),
    )
    cluster = autopar.Cluster.preset("a100-80", nodes=1, devices_per_node=num_devices)
    options = PlanOptions(
        num_stages=num_devices, schedule=schedule, num_microbatches=num_microbatches
    )
    setting = make_setting(capture(model, batch), cluster, options.space(num_devices))
    search = Search(setting).run()
    lowering = OptionLowering(search)
    option = replace(
        search.options[0], best=search.options[0].best.recomputing(NOTHING), is_decided=True
    )
    program, memories, _ = lowering.lower(option)
    traces = lowering.traces_of(option.best)
    recomputer = Recomputer(option.best, program, traces, cluster.device)
    plain = [block.points[0] for block in recomputer.blocks]
    draw = random.Random(f"{kind} {schedule}")
    for _ in range(4):
        picks = [draw.choice(block.points) for block in recomputer.blocks]
        recomputation = recomputer.recomputation(picks)
        other = replace(option, best=option.best.recomputing(recomputation), recomputes=True)
        expected = setting.counted(lowering.program(other))
        for device, memory in enumerate(memories):
            mine = recomputer.on(device)
            moments = recomputer.others(device, memory, plain)
            held = moments.bytes_of([picks[i].option for i in mine]) + moments.others_bytes
            peak = peak_of(expected[device])
            assert 0.98 * peak <= max(held) <= 1.05 * peak


def test_a_device_without_choices_that_does_not_fit_ends_the_search() -> None:
    """Its stage is frozen, so that its blocks keep nothing for a backward pass."""
    model = zoo.gpt2(num_layers=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.3" in name)
    cluster = autopar.Cluster.preset("a100-80", nodes=1, devices_per_node=2)
    options = PlanOptions(num_stages=2, schedule="1f1b", num_microbatches=4)
    setting = make_setting(capture(model, zoo.token_batch(0, batch=8)), cluster, options.space(2))
    search = Search(setting).run()
    lowering = OptionLowering(search)
    option = replace(
        search.options[0], best=search.options[0].best.recomputing(NOTHING), is_decided=True
    )
    program, memories, _ = lowering.lower(option)
    recomputer = Recomputer(option.best, program, lowering.traces_of(option.best), cluster.device)
    assert not recomputer.on(0)
    assert recomputer.on(1)
    limit = MemoryLimit(tensor_bytes=1, device_bytes=1)
    assert recomputer.within_memory(limit, lambda _: memories) is None
    assert not recomputer.fixed(Recompute(request=Request.BUDGET, size_bytes=2**40))


def peak_of(memory: ProgramMemory) -> int:
    return max(moment.size_bytes for moment in memory.moments)
