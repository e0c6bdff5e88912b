"""Models of ``transformers`` leave masks out of batches that mask nothing, as in eager mode."""

from __future__ import annotations

import copy
import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import autopar
from autopar.base.errors import InputError, PlanError
from autopar.cost_models import Cluster
from autopar.lowering.stages import names_in_other_graph, staged_blocks
from autopar.lowering.types import RankProgram
from autopar.planning.constraints import Force
from autopar.plans.document import Plan
from autopar.runtime.compiled import Compiled
from tests.effort import EXHAUSTIVE
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("reused_workers")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
Batch = dict[str, Tensor]
sgd = functools.partial(torch.optim.SGD, lr=0.1)


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).double()


def encoder() -> nn.Module:
    torch.manual_seed(0)
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**SIZES, **dropped)).double()


def text(seed: int, padded_rows: tuple[int, ...] = ()) -> Batch:
    ids = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in padded_rows:
        mask[row, 8:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def compiled_with(model: nn.Module, example: Batch, devices: int = 1, **options: Any) -> Compiled:
    found = autopar.compile(
        model, devices, example_inputs=example, optimizer=sgd, profile_limit_s=0, **options
    )
    assert isinstance(found, Compiled)
    return found


def has_masks(program: RankProgram) -> bool:
    """Whether an attention of the program applies a mask."""
    nodes = [node for kernel in program.kernels for node in kernel.forward.graph.nodes]
    found = [node for node in nodes if "scaled_dot_product" in str(node.target)]
    assert found
    given = [(*node.args[3:], *node.kwargs.values()) for node in found]
    return any(isinstance(x, fx.Node) for each in given for x in each)


def assert_trains_as_eager(
    compiled: Compiled,
    model: nn.Module,
    batches: list[Batch],
    *,
    evaluates_losses: bool = EXHAUSTIVE,
) -> None:
    reference = copy.deepcopy(model)
    optimizer = sgd(reference.parameters())
    for batch in batches:
        optimizer.zero_grad()
        expected = reference(**batch).loss
        expected.backward()
        optimizer.step()
        loss = compiled.train_step(**batch)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
        with torch.no_grad():
            without_labels = {k: v for k, v in batch.items() if k != "labels"}
            for given in (without_labels, *[batch] * evaluates_losses):
                got = compiled.eval()(**given).logits
                wanted = reference.eval()(**given).logits
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        compiled.train()
        reference.train()
    state = compiled.full_state_dict()
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)


BATCHES = [text(0), text(1, (1,)), text(2), text(3, (0, 3)), text(4)]
SETUPS: dict[str, dict[str, Any]] = {
    "one device": {"devices": 1},
    "data parallel": {"devices": 2, "constraints": Force("data_parallel")},
    "tensor parallel": {"devices": 2, "constraints": Force("tensor_parallel")},
    "pipeline": {"devices": 2, "num_stages": 2, "num_microbatches": 2},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("make", [decoder, encoder])
def test_batches_with_and_without_padding(make: Any, setup: str) -> None:
    model = make()
    with compiled_with(model, BATCHES[0], **SETUPS[setup]) as compiled:
        assert compiled.plan.graph.full_masks == ("attention_mask",)
        assert not has_masks(compiled.program)
        assert "attention_mask int64[4, 12] of ones" in str(compiled.plan.report())
        evaluates_losses = EXHAUSTIVE or setup == "one device"
        assert_trains_as_eager(compiled, model, BATCHES, evaluates_losses=evaluates_losses)


def test_a_padded_example_is_for_all_masks(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder()
    with compiled_with(model, BATCHES[1]) as compiled:
        assert compiled.plan.graph.full_masks == ()
        assert has_masks(compiled.program)
        with caplog.at_level(logging.INFO, logger="autopar"):
            assert_trains_as_eager(compiled, model, BATCHES)
    assert "compiled for" not in caplog.text


def test_padding_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder()
    with compiled_with(model, BATCHES[0]) as compiled, caplog.at_level(logging.INFO, "autopar"):
        for batch in (BATCHES[1], BATCHES[3], text(5, (2,))):
            compiled.train_step(**batch)
        assert compiled.step_time_s is not None  # they have the example's sizes
        with pytest.raises(
            InputError, match=r"needs a batch.* attention_mask int64\[4, 12\] of ones"
        ):
            compiled.profile()
        with pytest.raises(InputError, match=r"attention_mask .* of ones.* so pass such a batch"):
            compiled.profile(**BATCHES[1])
    assert caplog.text.count("compile with one of them as example_inputs") == 1
    what = "a batch with masks that are not all ones (attention_mask)"
    assert caplog.text.count(f"compiled for {what}") == 1


def test_a_program_with_masks_serves_all_batches_of_its_shape(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Batches padded to their longest text: nothing is compiled after the first epoch."""
    model = decoder()
    cut = [
        {k: x[:, :n] for k, x in text(n, rows).items()} for n in (9, 10, 11) for rows in ((), (1,))
    ]
    with compiled_with(model, BATCHES[0]) as compiled, caplog.at_level(logging.INFO, "autopar"):
        assert_trains_as_eager(compiled, model, cut)
        assert caplog.text.count("compiled for a batch of other shapes") == 6
        for batch in cut:
            compiled.train_step(**batch)
        assert caplog.text.count("compiled for a batch of other shapes") == 6


def test_a_block_of_another_name_recomputes_too() -> None:
    model = encoder()
    with compiled_with(model, BATCHES[0], recompute="full") as compiled:
        recomputed = set(compiled.plan.recomputed.blocks)
        assert "bert.embeddings" in recomputed
        masked = autopar.capture(model, BATCHES[1]).graph
        names = names_in_other_graph(autopar.capture(model, BATCHES[0]).graph, masked)
        assert names["bert.embeddings"] == masked.blocks[1].name == "bert"
        assert set(names.values()) == {block.name for block in staged_blocks(masked)}
        assert_trains_as_eager(compiled, model, BATCHES)


def test_a_plan_says_which_masks_are_left_out(tmp_path: Path) -> None:
    """It is replayed for them, whatever the example's mask."""
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=1)
    for example, masks in ((BATCHES[0], ("attention_mask",)), (BATCHES[1], ())):
        plan = autopar.plan(decoder(), cluster, example, optimizer=sgd)
        assert Plan.from_json(plan.to_json()).graph.full_masks == masks
        path = tmp_path / "plan.json"
        path.write_text(plan.to_json())
        for other in (BATCHES[0], BATCHES[1]):
            model = decoder()
            with compiled_with(model, other, plan=path) as compiled:
                assert compiled.plan.graph.full_masks == masks
                assert_trains_as_eager(compiled, model, [other, BATCHES[2], BATCHES[3]])


class Peculiar(nn.Module):
    """Reads its mask itself too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder()

    def forward(self, batch: Batch) -> Any:
        loss = self.inner(**batch).loss
        return loss * batch["attention_mask"].to(loss.dtype).mean()


def test_a_mask_that_is_read_elsewhere_too() -> None:
    model = Peculiar()
    reference = copy.deepcopy(model)
    with compiled_with(model, {"batch": BATCHES[0]}) as compiled:
        assert compiled.plan.graph.full_masks == ("batch.attention_mask",)
        for batch in BATCHES[:2]:
            wanted = reference(batch=batch).detach()
            with torch.no_grad():
                torch.testing.assert_close(compiled(batch=batch), wanted, rtol=1e-6, atol=0)


def test_models_that_can_have_one_program_apply_all_masks() -> None:
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=1)
    for options in ({"offload": True}, {"batch_norm": "local"}):
        plan = autopar.plan(decoder(), cluster, BATCHES[0], optimizer=sgd, **options)
        assert plan.graph.full_masks == ()
    with autopar.compile([decoder(), decoder()], 1, [BATCHES[0]] * 2, optimizer=sgd) as array:
        losses = array.train_step([BATCHES[1], BATCHES[0]])
    wanted = [decoder()(**batch).loss.item() for batch in (BATCHES[1], BATCHES[0])]
    assert [float(loss) for loss in losses] == pytest.approx(wanted, rel=1e-6)


def test_offloading_by_default_applies_all_masks() -> None:
    gpu = Cluster.preset("h100-sxm", nodes=1, devices_per_node=1)
    plan = functools.partial(
        autopar.plan, decoder(), gpu, BATCHES[0], optimizer=sgd, num_microbatches=1
    )
    assert plan().graph.full_masks == ("attention_mask",)
    needed = min(
        sum(plan(recompute="full", update=when).prediction.memory_bytes.values())
        for when in ("early", "at_end")
    )
    tight = plan(constraints=autopar.MemoryBudget(int(0.9 * needed)))
    assert tight.offload is not None
    assert tight.graph.full_masks == ()
    document = json.loads(tight.to_json())
    document["graph"]["full_masks"] = ["attention_mask"]
    with pytest.raises(PlanError, match=r"graph\.full_masks: .* has to apply all masks"):
        Plan.from_json(json.dumps(document))


def test_ranks_with_shards_agree_on_the_program() -> None:
    run_ranks(2, "tests.runtime.torchrun_full_masks")
