"""Further models in plain torch: a transformer of ``torch.nn``, PointNet and DLRM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TransformerLanguageModel(nn.Module):
    """``nn.TransformerEncoder`` with a causal mask and learnt positions."""

    def __init__(self, vocabulary: int, width: int = 16, length: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.1)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=2 * width, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = self.embedding(input_ids) + self.positions
        logits = self.head(self.encoder(hidden, mask=mask, is_causal=True))
        return F.cross_entropy(logits.transpose(1, 2), labels)


class Alignment(nn.Module):
    """PointNet's T-Net: a matrix predicted from the points, near the identity."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.size = size
        self.points = nn.Sequential(
            nn.Conv1d(size, width, 1), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, 2 * width, 1), nn.BatchNorm1d(2 * width), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.Linear(2 * width, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, size * size),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        pooled = torch.max(self.points(x), 2)[0]
        matrix = self.head(pooled).view(-1, self.size, self.size)
        return matrix + torch.eye(self.size, dtype=x.dtype, device=x.device)


class PointNet(nn.Module):
    """Qi et al. 2016: classification of a set of points, with its orthogonality penalty."""

    def __init__(self, width: int = 8, num_classes: int = 8) -> None:
        super().__init__()
        self.align_points, self.align_features = Alignment(3, width), Alignment(width, width)
        self.conv1, self.conv2 = nn.Conv1d(3, width, 1), nn.Conv1d(width, 4 * width, 1)
        self.norm1, self.norm2 = nn.BatchNorm1d(width), nn.BatchNorm1d(4 * width)
        self.head = nn.Sequential(
            nn.Linear(4 * width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(),
            nn.Linear(2 * width, num_classes),
        )  # fmt: skip

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        x = torch.bmm(points.transpose(1, 2), self.align_points(points)).transpose(1, 2)
        x = F.relu(self.norm1(self.conv1(x)))
        matrix = self.align_features(x)
        x = torch.bmm(x.transpose(1, 2), matrix).transpose(1, 2)
        x = self.norm2(self.conv2(x)).max(dim=2)[0]
        loss = F.nll_loss(F.log_softmax(self.head(x), dim=1), labels)
        identity = torch.eye(matrix.shape[1], dtype=x.dtype, device=x.device)
        apart = torch.bmm(matrix, matrix.transpose(1, 2)) - identity
        return loss + 0.001 * torch.mean(torch.norm(apart, dim=(1, 2)))


class DLRM(nn.Module):
    """Naumov et al. 2019: embedding bags for the sparse features, interactions by dot products."""

    def __init__(self, num_tables: int = 4, rows: int = 32, width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum") for _ in range(num_tables)
        )
        self.bottom = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        vectors = num_tables + 1
        self.top = nn.Sequential(
            nn.Linear(width + vectors * (vectors - 1) // 2, 16), nn.ReLU(), nn.Linear(16, 1)
        )

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        rows = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([bottom, *rows], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        upper = torch.triu_indices(dots.shape[1], dots.shape[2], offset=1)
        pairs = dots[:, upper[0], upper[1]]
        logits = self.top(torch.cat([bottom, pairs], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicked)
