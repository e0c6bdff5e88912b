"""Training steps on batches of other shapes equal eager PyTorch, on real processes."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.base.errors import AutoparError, InputError
from autopar.planning.constraints import Force
from autopar.runtime.compiled import Compiled
from autopar.runtime.step import training_programs
from autopar.schedules import Schedule
from autopar.schedules import build as build_schedule
from tests.models.zoo import build, token_batch
from tests.oracles import loss_of

pytestmark = pytest.mark.usefixtures("reused_workers")

adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
STRATEGIES = {
    "data parallel": Force("data_parallel"),
    "zero3": Force("zero3"),
    "tensor parallel": Force("tensor_parallel"),
}


class Net(nn.Module):
    """Has a buffer that training changes, and statistics of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.first(x)).relu()), y)


class Tagger(nn.Module):
    """Attention over token ids; targets of -100 are ignored, so that the mean is uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.position = nn.Embedding(32, 16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        q, k, v = (p.unflatten(-1, (2, 8)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.out(x + mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def rows(seed: int, num: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 16, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 8, (num,), generator=generator)


def text(seed: int, num: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32, (num, length), generator=generator)
    labels = torch.randint(0, 32, (num, length), generator=generator)
    return ids, labels.masked_fill(torch.rand(num, length, generator=generator) < 0.3, -100)


def compile_two(model: nn.Module, batch: Any, strategy: str, **options: Any) -> Compiled:
    return autopar.compile(
        model, 2, example_inputs=batch, constraints=STRATEGIES[strategy], optimizer=adamw,
        profile_limit_s=0, check_gradients=False, **options,
    )  # fmt: skip


def assert_trains_as_eager(
    compiled: Compiled, model: nn.Module, batches: list[tuple[Tensor, ...]], **options: Any
) -> None:
    """Losses, weights, buffers and the optimizer's state are those of one process."""
    reference = copy.deepcopy(model)
    optimizer = adamw(reference.parameters())
    for batch in batches:
        optimizer.zero_grad()
        expected = loss_of(reference(*batch))
        expected.backward()
        if "max_grad_norm" in options:
            nn.utils.clip_grad_norm_(reference.parameters(), options["max_grad_norm"])
        optimizer.step()
        torch.testing.assert_close(compiled.train_step(*batch), expected.detach())
    for key, tensor in compiled.full_state_dict().items():
        torch.testing.assert_close(tensor, reference.state_dict()[key])
    states = compiled.optimizer_state_dict()["state"]
    for name, parameter in reference.named_parameters():
        held = states[name]["exp_avg"]
        whole = held.full_tensor() if isinstance(held, DTensor) else held
        torch.testing.assert_close(whole, optimizer.state[parameter]["exp_avg"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("last", [1, 3])
def test_epochs_with_a_smaller_last_batch(strategy: str, last: int) -> None:
    torch.manual_seed(0)
    model = Tagger().double()
    loader = DataLoader(TensorDataset(*text(0, 16 + last, 8)), batch_size=8)
    batches = [tuple(batch) for _ in range(2) for batch in loader]
    with compile_two(model, batches[0], strategy) as compiled:
        assert_trains_as_eager(compiled, model, batches)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_microbatches": 2},
        {"max_grad_norm": 0.1},
        {"update": "early"},
        {"nonfinite": "ignore"},
        {"recompute": "full"},
    ],
    ids=["plain", "micro-batches", "clipping", "early", "ignore", "recompute"],
)
def test_lengths_in_buckets(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Tagger().double()
    shapes = [(8, 8), (8, 12), (8, 5), (8, 12), (3, 12), (8, 8), (6, 5)]
    batches = [text(seed, *shape) for seed, shape in enumerate(shapes)]
    with compile_two(model, batches[0], "zero3", **options) as compiled:
        assert_trains_as_eager(compiled, model, batches, **options)


def test_a_prime_number_of_rows_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Numbered().double()
    batches = [text(0, 32, 4), text(1, 13, 4), text(2, 23, 4)]
    with autopar.compile(
        model, 1, example_inputs=batches[0], optimizer=adamw, num_microbatches=4,
        profile_limit_s=0, check_gradients=False,
    ) as compiled:  # fmt: skip
        assert_trains_as_eager(compiled, model, batches)
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "no fewer than 23 micro-batches, where the example has 4" in warned[0]


def test_statistics_of_a_smaller_batch() -> None:
    torch.manual_seed(0)
    model = Net().double()
    batches = [rows(seed, num) for seed, num in enumerate([8, 8, 3, 8, 5, 8])]
    with compile_two(model, batches[0], "data parallel") as compiled:
        assert_trains_as_eager(compiled, model, batches)
        trained = copy.deepcopy(model)
        compiled.copy_to(trained)
        short = rows(9, 3)
        torch.testing.assert_close(compiled.eval()(*short), trained.eval()(*short).detach())


def test_local_statistics_of_other_shapes_are_refused() -> None:
    """A device's part of another batch might be another one."""
    torch.manual_seed(0)
    model = Net().double()
    with compile_two(model, rows(0, 8), "data parallel", batch_norm="local") as compiled:
        with pytest.raises(
            autopar.PlanError, match=r"each device's part.*batch_norm='global'"
        ) as e:
            compiled.train_step(*rows(1, 6))
        assert "drop_last=True" in "".join(e.value.__notes__)
        assert compiled.train_step(*rows(2, 8)).isfinite()


def test_a_language_model_of_the_zoo() -> None:
    torch.manual_seed(0)
    model = build("gpt2")[0]
    batch = token_batch(0)
    short = {k: v[:3, :5] for k, v in token_batch(1).items()}
    reference = copy.deepcopy(model)
    optimizer = adamw(reference.parameters())
    with compile_two(model, batch, "tensor parallel") as compiled:
        for each in (batch, short, batch):
            optimizer.zero_grad()
            expected = loss_of(reference(**each))
            expected.backward()
            optimizer.step()
            loss = compiled.train_step(**each)
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-4)


def test_programs_are_kept_and_the_oldest_makes_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(training_programs, "MAX_PROGRAMS", 2)
    model = Net().double()
    sizes = [8, 3, 5, 3, 6, 3, 5, 8]  # 6 takes the place of 5, then 5 that of 6
    batches = [rows(seed, num) for seed, num in enumerate(sizes)]
    caplog.set_level(logging.INFO, logger="autopar")
    with compile_two(model, batches[0], "data parallel") as compiled:
        assert_trains_as_eager(compiled, model, batches)
    told = [r.getMessage() for r in caplog.records if "other shapes" in r.getMessage()]
    assert [f"({num}, 16)" in line for num, line in zip([3, 5, 6, 5], told)] == [True] * 4
    assert len(told) == 4
    warned = [r for r in caplog.records if r.levelno == logging.WARNING and "shapes" in r.msg]
    assert len(warned) == 1


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Net().double()
    x, y = rows(1, 3)
    with compile_two(model, rows(0, 8), "data parallel") as compiled:
        before = compiled.full_state_dict()
        with pytest.raises(autopar.NonFiniteError, match="first"):
            compiled.train_step(x * float("nan"), y)
        after = compiled.full_state_dict()
        assert all(torch.equal(after[key], value) for key, value in before.items())
        assert_trains_as_eager(compiled, model, [(x, y), rows(0, 8), rows(2, 5)])


def test_batches_that_cannot_work_are_refused() -> None:
    torch.manual_seed(0)
    model = Net().double()
    x, y = rows(0, 8)
    with compile_two(model, (x, y), "data parallel") as compiled:
        with pytest.raises(AutoparError) as caught:
            compiled.train_step(x[:3], y[:4])
        assert "drop_last=True" in "".join(caught.value.__notes__)
        with pytest.raises(InputError, match=r"dtype torch.float32; .*\.to\(torch.float64\)"):
            compiled.train_step(x.float(), y)
        with pytest.raises(InputError, match="shape"):
            compiled.train_step(x[0], y)
        with pytest.raises(InputError, match="shape"):
            compiled.train_step(x[:0], y[:0])
        assert_trains_as_eager(compiled, model, [(x, y), (x[:3], y[:3])])


class Numbered(nn.Module):
    """Rows have weights and learned positions by their number: constants along the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, 16), nn.Embedding(8, 16)
        self.blocks = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 32))
        self.register_buffer("numbers", torch.arange(8)[None])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        places = self.numbers[:, : ids.shape[1]].expand(ids.shape[0], -1)
        weights = 1 + torch.arange(ids.shape[0], dtype=self.tokens.weight.dtype)
        out = self.blocks(self.tokens(ids) + self.positions(places)).flatten(0, 1)
        losses = F.cross_entropy(out, labels.flatten(), reduction="none", ignore_index=-100)
        return (losses.unflatten(0, labels.shape).mean(1) * weights).sum() / 100


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"update": "early"}, {"constraints": Force("data_parallel")},
        {"schedule": "1f1b", "num_stages": 2},
        {"schedule": build_schedule("chimera", num_stages=2, num_microbatches=4)},
    ],
    ids=["planned", "early", "data parallel", "1f1b", "chimera"],
)  # fmt: skip
def test_other_numbers_of_microbatches(options: dict[str, Any]) -> None:
    """Constants along the batch are cut into the micro-batches of the program that runs."""
    torch.manual_seed(0)
    model = Numbered().double()
    shapes = [(16, 8), (6, 8), (8, 5), (16, 8), (12, 8), (7, 8), (10, 4), (16, 8), (6, 8)]
    batches = [text(seed, *shape) for seed, shape in enumerate(shapes)]
    with autopar.compile(
        model, 2, example_inputs=batches[0], optimizer=adamw, num_microbatches=4, profile_limit_s=0,
        check_gradients=False, **options,
    ) as compiled:  # fmt: skip
        assert_trains_as_eager(compiled, model, batches)
        trained = copy.deepcopy(model)
        compiled.copy_to(trained)
        for batch in batches[:3]:  # evaluation in between changes nothing for the next step
            torch.testing.assert_close(compiled.eval()(*batch), trained.eval()(*batch).detach())
        compiled.train()
        torch.testing.assert_close(compiled.train_step(*batches[0]), trained(*batches[0]).detach())


class Stack(nn.Module):
    """Residual blocks, to be cut into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            for _ in range(6)
        )
        self.out = nn.Linear(16, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.out(x).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=-100)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("schedule", "num_stages", "options"),
    [
        ("1f1b", 2, {}), ("zb_h1", 2, {"recompute": "full"}), ("gpipe", 2, {"update": "early"}),
        ("chimera", 2, {}), ("interleaved", 4, {}), ("zb_v", 4, {"max_grad_norm": 0.1}),
        ("multi_stream", 4, {}),
    ],
)  # fmt: skip
def test_pipelines(schedule: str, num_stages: int, options: dict[str, Any]) -> None:
    """Sequences of other lengths under the plan's schedule, other batches under one like it."""
    torch.manual_seed(0)
    model = Stack().double()
    num = 1 if schedule == "multi_stream" else 4
    made: str | Schedule = schedule
    if schedule == "chimera":  # its plain form, which exists for other numbers of micro-batches
        made = build_schedule(schedule, num_stages=num_stages, num_microbatches=num)
    shapes = [(8, 8), (8, 5), (4, 8), (6, 8), (8, 8), (12, 3), (8, 5), (2, 8)]
    shapes += [(3, 8)] if schedule == "interleaved" else [(3, 8), (5, 8)]
    batches = [text(seed, *shape) for seed, shape in enumerate(shapes)]
    with autopar.compile(
        model, 1 if schedule == "multi_stream" else 2, example_inputs=batches[0], optimizer=adamw,
        schedule=made, num_stages=num_stages, num_microbatches=num, profile_limit_s=0,
        check_gradients=False, **options,
    ) as compiled:  # fmt: skip
        assert_trains_as_eager(compiled, model, batches, **options)


def test_a_batch_for_which_a_schedule_does_not_exist_is_refused() -> None:
    torch.manual_seed(0)
    model, batch = Stack().double(), text(0, 8, 8)
    with autopar.compile(
        model, 2, example_inputs=batch, optimizer=adamw, schedule="dualpipe", num_stages=2,
        num_microbatches=4, profile_limit_s=0, check_gradients=False,
    ) as compiled:  # fmt: skip
        with pytest.raises(autopar.PlanError, match=r"batch of 3 .* 4 micro-batches") as caught:
            compiled.train_step(*text(1, 3, 8))
        assert "drop_last=True" in "".join(caught.value.__notes__)
        assert_trains_as_eager(compiled, model, [batch, text(2, 4, 8)])


class Longest(nn.Module):
    """Scales by the length of the longest batch so far, which it keeps as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.longest, self.calls = 6, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.longest = max(self.longest, x.shape[1])
        return (self.layer(x) * (6 / self.longest)).square().mean()


def test_a_batch_that_changes_an_attribute_for_later_ones_is_refused() -> None:
    """One that every call changes alike is checked, or warned about, when the model is compiled."""
    with autopar.compile(
        Longest(), 2, torch.randn(4, 6, 4), optimizer=adamw, profile_limit_s=0.0
    ) as made:
        before = made.state_dict()
        with pytest.raises(autopar.InputError, match=r"attribute 'longest' .* 8, .* 6: later"):
            made.train_step(torch.randn(4, 8, 4))
        assert all(torch.equal(x, before[name]) for name, x in made.state_dict().items())
        made.train_step(torch.randn(4, 5, 4))
