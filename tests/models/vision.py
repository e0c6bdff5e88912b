"""Convolutional models in plain torch, small: AlexNet, VGG-16, Inception-V3, DenseNet-121, DCGAN.

The layers and their order are those of the papers; channels are a fraction of theirs and images
32 x 32, so that a training step takes milliseconds. Dropout is off.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CLASSES = 8


class Classifier(nn.Module):
    """Features, then a head; returns the loss."""

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.flatten(self.features(pixel_values), 1)), labels)


def alexnet(width: int = 8) -> nn.Module:
    """Krizhevsky et al. 2012: five convolutions, three of them pooled, and three linear layers."""
    features = nn.Sequential(
        nn.Conv2d(3, width, 5, stride=2, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(width, 3 * width, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(3 * width, 6 * width, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(6 * width, 4 * width, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(4 * width, 4 * width, 3, padding=1), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
    )  # fmt: skip
    head = nn.Sequential(
        nn.Dropout(0.0), nn.Linear(16 * width, 64), nn.ReLU(inplace=True),
        nn.Dropout(0.0), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, NUM_CLASSES),
    )  # fmt: skip
    return Classifier(features, head)


def vgg16(width: int = 4) -> nn.Module:
    """Simonyan and Zisserman 2014, configuration D."""
    layers: list[nn.Module] = []
    channels = 3
    for times in (1, 1, 0, 2, 2, 0, 4, 4, 4, 0, 8, 8, 8, 0, 8, 8, 8, 0):
        if times == 0:
            layers.append(nn.MaxPool2d(2, 2))
            continue
        layers += [nn.Conv2d(channels, times * width, 3, padding=1), nn.ReLU(inplace=True)]
        channels = times * width
    head = nn.Sequential(
        nn.Linear(channels, 64), nn.ReLU(True), nn.Dropout(0.0),
        nn.Linear(64, 64), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(64, NUM_CLASSES),
    )  # fmt: skip
    return Classifier(nn.Sequential(*layers), head)


class ConvNorm(nn.Sequential):
    """Convolution, batch norm, ReLU: Inception's unit."""

    def __init__(self, inputs: int, outputs: int, kernel: int | tuple[int, int], **options) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, bias=False, **options),
            nn.BatchNorm2d(outputs, eps=1e-3),
            nn.ReLU(inplace=True),
        )


class Branches(nn.Module):
    """Branches side by side, concatenated over channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _inception_a(inputs: int, w: int, pooled: int) -> nn.Module:
    return Branches(
        ConvNorm(inputs, 2 * w, 1),
        nn.Sequential(ConvNorm(inputs, 2 * w, 1), ConvNorm(2 * w, 2 * w, 5, padding=2)),
        nn.Sequential(
            ConvNorm(inputs, 2 * w, 1),
            ConvNorm(2 * w, 3 * w, 3, padding=1),
            ConvNorm(3 * w, 3 * w, 3, padding=1),
        ),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNorm(inputs, pooled, 1)),
    )


def _reduction(inputs: int, w: int) -> nn.Module:
    return Branches(
        ConvNorm(inputs, 4 * w, 3, stride=2),
        nn.Sequential(
            ConvNorm(inputs, 2 * w, 1),
            ConvNorm(2 * w, 2 * w, 3, padding=1),
            ConvNorm(2 * w, 2 * w, 3, stride=2),
        ),
        nn.MaxPool2d(3, 2),
    )


def _inception_c(inputs: int, w: int) -> nn.Module:
    def seven(channels: int, out: int, *, across: bool) -> nn.Module:
        kernel, padding = ((1, 7), (0, 3)) if across else ((7, 1), (3, 0))
        return ConvNorm(channels, out, kernel, padding=padding)

    return Branches(
        ConvNorm(inputs, 4 * w, 1),
        nn.Sequential(
            ConvNorm(inputs, 2 * w, 1),
            seven(2 * w, 2 * w, across=True),
            seven(2 * w, 4 * w, across=False),
        ),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNorm(inputs, 4 * w, 1)),
    )


def _inception_e(inputs: int, w: int) -> nn.Module:
    def fork(channels: int) -> nn.Module:
        return Branches(
            ConvNorm(channels, 2 * w, (1, 3), padding=(0, 1)),
            ConvNorm(channels, 2 * w, (3, 1), padding=(1, 0)),
        )

    return Branches(
        ConvNorm(inputs, 2 * w, 1),
        nn.Sequential(ConvNorm(inputs, 2 * w, 1), fork(2 * w)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNorm(inputs, 2 * w, 1)),
    )


def inception_v3(w: int = 4) -> nn.Module:
    """Szegedy et al. 2015: stem, modules A, reduction, module C with 1x7, forked module E."""
    features = nn.Sequential(
        ConvNorm(3, 2 * w, 3, padding=1),
        ConvNorm(2 * w, 4 * w, 3, stride=2, padding=1),
        _inception_a(4 * w, w, w),
        _inception_a(8 * w, w, 2 * w),
        _reduction(9 * w, w),
        _inception_c(15 * w, w),
        _inception_e(12 * w, w),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Dropout(0.0),
    )
    return Classifier(features, nn.Linear(8 * w, NUM_CLASSES))


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(4 * growth)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        hidden = self.conv1(F.relu(self.norm1(torch.cat(features, 1)), inplace=True))
        return self.conv2(F.relu(self.norm2(hidden), inplace=True))


class DenseBlock(nn.Module):
    def __init__(self, num_layers: int, inputs: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DenseLayer(inputs + i * growth, growth) for i in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


def densenet(growth: int = 4, depths: tuple[int, ...] = (2, 3, 4, 2)) -> nn.Module:
    """Huang et al. 2016, DenseNet-BC; DenseNet-121 has depths (6, 12, 24, 16)."""
    channels = 2 * growth
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    for i, depth in enumerate(depths):
        layers.append(DenseBlock(depth, channels, growth))
        channels += depth * growth
        if i + 1 < len(depths):
            layers += [
                nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
                nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2, 2),
            ]  # fmt: skip
            channels //= 2
    layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((1, 1))]
    return Classifier(nn.Sequential(*layers), nn.Linear(channels, NUM_CLASSES))


class DCGAN(nn.Module):
    """Radford et al. 2015: a generator of transposed convolutions and its discriminator.

    The loss is the sum of both players' losses on one batch; the discriminator sees the generated
    images twice, once detached.
    """

    def __init__(self, width: int = 4, latent: int = 8) -> None:
        super().__init__()
        w = width

        def up(inputs: int, outputs: int, *options: int) -> list[nn.Module]:
            conv = nn.ConvTranspose2d(inputs, outputs, 4, *options, bias=False)
            return [conv, nn.BatchNorm2d(outputs), nn.ReLU(True)]

        def down(inputs: int, outputs: int) -> list[nn.Module]:
            conv = nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False)
            return [conv, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, inplace=True)]

        self.generator = nn.Sequential(
            *up(latent, 4 * w, 1, 0), *up(4 * w, 2 * w, 2, 1), *up(2 * w, w, 2, 1),
            nn.ConvTranspose2d(w, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, w, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            *down(w, 2 * w), *down(2 * w, 4 * w), nn.Conv2d(4 * w, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(), nn.Flatten(0),
        )  # fmt: skip

    def forward(self, pixel_values: Tensor, noise: Tensor) -> Tensor:
        made = self.generator(noise)
        real = self.discriminator(pixel_values)
        fake, fooled = self.discriminator(made.detach()), self.discriminator(made)
        ones, zeros = torch.ones_like(real), torch.zeros_like(real)
        loss = F.binary_cross_entropy(real, ones) + F.binary_cross_entropy(fake, zeros)
        return loss + F.binary_cross_entropy(fooled, ones)
