"""The bytes that a plan counts are those of all tensors that its processes hold."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Force
from tests.runtime.processes import counted_bytes

WIDTH = 64


class Branches(nn.Module):
    """Parallel convolutions whose results are concatenated, then one with a stride."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first = self._block(3, width, 3)
        self.left = self._block(width, width, 1)
        self.right = nn.Sequential(self._block(width, 24, 1), self._block(24, 2 * width, 3))
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), self._block(width, width, 1))
        self.strided = self._block(4 * width, width, 3, stride=2)
        self.head = nn.Linear(width, 8)

    @staticmethod
    def _block(num_in: int, num_out: int, size: int, stride: int = 1) -> nn.Module:
        convolution = nn.Conv2d(num_in, num_out, size, stride, size // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(num_out), nn.ReLU())

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.first(images)
        x = torch.cat([self.left(x), self.right(x), self.pooled(x)], dim=1)
        return nn.functional.cross_entropy(self.head(self.strided(x).mean((2, 3))), labels)


class Small(nn.Module):
    """Convolutions of few channels, by channel and transposed, which oneDNN copies each its way."""

    def __init__(self, num_dims: int, channels: int, num_transposed: int = 0) -> None:
        super().__init__()
        plain, norm, transposed = (
            (nn.Conv1d, nn.BatchNorm1d, nn.ConvTranspose1d),
            (nn.Conv2d, nn.BatchNorm2d, nn.ConvTranspose2d),
            (nn.Conv3d, nn.BatchNorm3d, nn.ConvTranspose3d),
        )[num_dims - 1]
        self.layers = nn.Sequential(
            plain(3, channels, 3, padding=1),
            nn.GELU(),
            plain(channels, channels, 5, stride=2, padding=2, groups=channels, bias=False),
            norm(channels),
            nn.ReLU6(),
            plain(channels, 2 * channels, 1),
            nn.ReLU(),
            *(transposed(2 * channels, 2 * channels, 2, 2) for _ in range(num_transposed)),
            plain(2 * channels, 10, 3, stride=2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Attending(nn.Module):
    """Self-attention whose queries, keys and values are views of one tensor."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.outer(mixed.transpose(1, 2).flatten(2))


class OneLayer(nn.Module):
    """A layer, whose output may be the first of several, between two others."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(WIDTH, WIDTH), layer
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.before(x))
        return self.after(y[0] if isinstance(y, tuple) else y).square().mean()


class OneBlock(nn.Module):
    """A layer of small weights and large activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.inner(x))


class MeanSquare(nn.Module):
    """A loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Multiplied(nn.Module):
    """A bilinear layer."""

    def __init__(self, width: int, small: int) -> None:
        super().__init__()
        self.narrow, self.product = nn.Linear(width, small), nn.Bilinear(width, small, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.narrow(x))


class Deep(nn.Module):
    """Layers large enough to be gathered and scattered alone, and small ones that are bucketed."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.narrow = nn.ModuleList(nn.Linear(width, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return sum(layer(x).square().mean() for layer in self.narrow)  # type: ignore[return-value]


class Tower(nn.Module):
    """Blocks whose weights are larger than their activations."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.square().mean()


class Recurrent(nn.Module):
    """Two bidirectional LSTM layers, each with a workspace for its derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(96, 64, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].square().mean()


class Tables(nn.Module):
    """Embeddings whose few rows give a dense gradient each, of which a device stores a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20_000, 64, mode="sum") for _ in range(4))

    def forward(self, rows: Tensor) -> Tensor:
        found = [table(rows[:, i]) for i, table in enumerate(self.tables)]
        return torch.stack(found).square().mean()


class Points(nn.Module):
    """Batch norms whose gradients are the largest tensors of a step."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 128)
        self.layers = nn.Sequential(
            *(
                layer
                for before, width in itertools.pairwise(widths)
                for layer in (nn.Conv1d(before, width, 1), nn.BatchNorm1d(width), nn.ReLU())
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).amax(2).square().mean()


class Masked(nn.Module):
    """Attention layers in the style of LLMs: one boolean mask for all of them."""

    def __init__(self, width: int = 64, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(num_layers))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        size = x.shape[1]
        place = torch.arange(size)
        mask = (place[:, None] >= place) & (place < lengths[:, None, None, None])
        for layer in self.layers:
            heads = layer(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
            x = x + mixed.movedim(1, 2).flatten(2)
        return x.square().mean()


def images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "images": torch.randn(32, 3, 24, 24, generator=generator),
        "labels": torch.randint(0, 8, (32,), generator=generator),
    }


def rows() -> dict[str, Tensor]:
    return {"x": torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))}


def sequences() -> dict[str, Tensor]:
    return {"x": torch.randn(16, 40, 96, generator=torch.Generator().manual_seed(0))}


def padded() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(4, 512, 64, generator=generator),
        "lengths": torch.tensor([512, 400, 300, 500]),
    }


def points() -> dict[str, Tensor]:
    return {"x": torch.randn(16, 3, 1024, generator=torch.Generator().manual_seed(0))}


def bags() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"rows": torch.randint(0, 20_000, (64, 4, 3), generator=generator)}


CASES = {
    "tables, ZeRO-3": (Tables, bags, 2, [Force("zero3")]),
    "masked, alone": (Masked, padded, 1, []),
    "masked, data parallel": (Masked, padded, 2, [Force("data_parallel")]),
    "points, alone": (Points, points, 1, []),
    "recurrent, alone": (Recurrent, sequences, 1, []),
    "branches, alone": (Branches, images, 1, []),
    "deep, alone": (Deep, rows, 1, []),
    "branches, ZeRO-3": (Branches, images, 2, [Force("zero3")]),
    "deep, data parallel": (Deep, rows, 2, [Force("data_parallel")]),
    "deep, ZeRO-3": (Deep, rows, 2, [Force("zero3")]),
    "deep, tensor parallel": (Deep, rows, 2, [Force("tensor_parallel")]),
}


AdamW = functools.partial(torch.optim.AdamW, lr=1e-3)
SGD = functools.partial(torch.optim.SGD, lr=1e-3)
OTHERS = [  # each holds as much as the parameters, or several of its own, beside its state
    functools.partial(torch.optim.AdamW, foreach=True),
    torch.optim.RMSprop,
    torch.optim.NAdam,
    functools.partial(torch.optim.Adagrad, foreach=True),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        *((case, AdamW) for case in CASES),
        *(("deep, alone", optimizer) for optimizer in (SGD, *OTHERS)),
        *(("deep, ZeRO-3", optimizer) for optimizer in OTHERS[:2]),
    ],
)
def test_counted_is_held(case: str, optimizer: Any) -> None:
    make_model, make_batch, num_processes, constraints = CASES[case]
    torch.manual_seed(0)
    compiled = autopar.compile(
        make_model(), num_processes, example_inputs=make_batch(), constraints=constraints,
        optimizer=optimizer, profile_limit_s=0.001,
    )  # fmt: skip
    with compiled:
        held = max(compiled.peak_tensor_bytes(**make_batch()))
    assert counted_bytes(compiled) == pytest.approx(held, rel=0.03)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("num_dims", "channels", "num_transposed", "rows", "size"),
    [(1, 20, 1, 32, 400), (2, 4, 0, 2, 32), (2, 12, 1, 8, 28), (2, 16, 0, 4, 24), (3, 6, 1, 4, 12)],
)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_copies_of_small_convolutions_are_counted(
    num_dims: int, channels: int, num_transposed: int, rows: int, size: int, num_microbatches: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 3, *[size] * num_dims)
    compiled = autopar.compile(
        Small(num_dims, channels, num_transposed), 1, example_inputs={"x": x}, optimizer=SGD,
        profile_limit_s=0.001, update="at_end", recompute="none", batch_norm="local",
        num_microbatches=num_microbatches,
    )  # fmt: skip
    held = max(compiled.peak_tensor_bytes(x=x))
    assert counted_bytes(compiled) == pytest.approx(held, rel=0.01)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attending(WIDTH, 4),
    "bilinear": lambda: Multiplied(WIDTH, 8),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, 512), nn.Dropout(0.2), nn.Linear(512, WIDTH)),
    "LSTM": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "GRU, whose gates are views": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layer", LAYERS)
def test_memory_within_operators_is_counted(layer: str, recompute: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 33, WIDTH)
    compiled = autopar.compile(
        OneLayer(LAYERS[layer]()), 1, example_inputs={"x": x}, optimizer=SGD, recompute=recompute,
        update="at_end", num_microbatches=1, profile_limit_s=0.001,
    )  # fmt: skip
    held = max(compiled.peak_tensor_bytes(x=x))
    assert counted_bytes(compiled) == pytest.approx(held, rel=0.005)


@pytest.mark.parametrize("case", ["deep, data parallel", "deep, ZeRO-3"])
def test_mixed_precision_is_counted(case: str) -> None:
    """Parameters twice, in both dtypes, and gradients while they are cast and summed."""
    make_model, make_batch, num_processes, constraints = CASES[case]
    torch.manual_seed(0)
    compiled = autopar.compile(
        make_model(), num_processes, example_inputs=make_batch(), constraints=constraints,
        optimizer=AdamW, profile_limit_s=0.001, precision="bf16",
    )  # fmt: skip
    with compiled:
        held = max(compiled.peak_tensor_bytes(**make_batch()))
        counted = compiled.plan.prediction.memory_bytes
    own = sum(counted.values()) - counted["inputs"]
    assert 0.99 * held <= own <= 1.01 * held


STAGED = {
    "pipeline": {"num_microbatches": 2},
    "pipeline, clipped": {"num_microbatches": 2, "max_grad_norm": 1.0},
    "conventional": {"schedule": "conventional", "constraints": [Force("data_parallel")]},
    "multi-stream": {"schedule": "multi_stream", "constraints": [Force("data_parallel")]},
    "reverse-first-k": {"schedule": "reverse_first_k", "constraints": [Force("data_parallel")]},
}


@pytest.mark.parametrize("case", STAGED)
def test_what_updates_hold_is_counted_where_they_are_made(case: str) -> None:
    """By an optimizer with temporary tensors as large as the parameters it updates together."""
    torch.manual_seed(0)
    options = {"optimizer": OTHERS[0], "profile_limit_s": 0, "num_stages": 2}
    compiled = autopar.compile(Tower(), 2, example_inputs=rows(), **options, **STAGED[case])
    with compiled:
        held = max(compiled.peak_tensor_bytes(**rows()))
        counted = compiled.plan.prediction.memory_bytes
    own = sum(counted.values()) - counted["inputs"]
    assert 0.99 * held <= own <= 1.01 * held


@pytest.mark.usefixtures("reused_workers")
def test_reductions_that_run_one_by_one_are_counted() -> None:
    """HSDP scatters a gradient within a group and sums it over the groups in one graph, in place,
    which ends before the next begins."""
    torch.manual_seed(0)
    constraints = [Force("data_parallel", axis="between"), Force("zero3", axis="within")]
    compiled = autopar.compile(
        Deep(), 4, example_inputs=rows(), constraints=constraints, optimizer=AdamW,
        mesh={"between": 2, "within": 2}, profile_limit_s=0,
    )  # fmt: skip
    held = max(compiled.peak_tensor_bytes(**rows()))
    assert counted_bytes(compiled) == pytest.approx(held, rel=1e-3)


@pytest.mark.usefixtures("reused_workers")
def test_buffers_of_small_sums_are_counted() -> None:
    """Each rank gathers the gradients of all and adds them, which is the peak of these steps."""
    torch.manual_seed(0)
    compiled = autopar.compile(
        OneLayer(nn.Identity()), 2, example_inputs={"x": torch.randn(4, 2, WIDTH)}, optimizer=SGD,
        constraints=[Force("data_parallel")], update="at_end", recompute="none", profile_limit_s=0,
    )  # fmt: skip
    held = max(compiled.peak_tensor_bytes(x=torch.randn(4, 2, WIDTH)))
    assert compiled.plan.prediction.memory_peak_at.startswith("G")
    assert counted_bytes(compiled) == pytest.approx(held, rel=0.01)


@pytest.mark.usefixtures("reused_workers")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_messages_between_stages_are_counted(schedule: str) -> None:
    """A receive is posted while the stage before computes, and its buffer exists from then on."""
    torch.manual_seed(0)
    x = torch.randn(64, 33, WIDTH)
    compiled = autopar.compile(
        nn.Sequential(*(OneBlock(WIDTH) for _ in range(4)), MeanSquare()), 2, optimizer=SGD,
        example_inputs=(x,), num_stages=2, num_microbatches=4, schedule=schedule,
        recompute="none", profile_limit_s=0.001,
    )  # fmt: skip
    held = max(compiled.peak_tensor_bytes(x))
    assert counted_bytes(compiled) == pytest.approx(held, rel=0.005)
