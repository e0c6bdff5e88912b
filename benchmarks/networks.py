"""Networks of realistic sizes on the meta device: the families that the tests train, and PaSE's.

``NETWORKS`` maps a name to a function that returns a module (which returns its loss) and a global
batch; no memory is allocated. PaSE's four networks have the sizes of the authors' own graphs and
the batches of the paper (128 images, 64 sentences); the others have those of their papers or first
releases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
Network = Callable[[], tuple[nn.Module, Batch]]


def ids(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def tokens(batch: int, length: int) -> Batch:
    return {"input_ids": ids(batch, length), "labels": ids(batch, length)}


def images(batch: int, size: int = 224) -> Batch:
    labels = torch.zeros(batch, dtype=torch.long)
    return {"pixel_values": torch.zeros(batch, 3, size, size), "labels": labels}


class Classifier(nn.Module):
    """A sequence of layers, followed by the cross-entropy of their output."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(pixel_values), labels)


def alexnet() -> tuple[nn.Module, Batch]:
    """AlexNet as in PaSE's graph: one tower, 227 x 227 images, 1,024 classes."""
    relu = nn.ReLU
    return Classifier(
        nn.Conv2d(3, 96, 11, stride=4), relu(), nn.MaxPool2d(3, 2),
        nn.Conv2d(96, 256, 5, padding=2), relu(), nn.MaxPool2d(3, 2),
        nn.Conv2d(256, 384, 3, padding=1), relu(),
        nn.Conv2d(384, 384, 3, padding=1), relu(),
        nn.Conv2d(384, 256, 3, padding=1), relu(), nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(256 * 6 * 6, 4096), relu(), nn.Linear(4096, 4096), relu(), nn.Linear(4096, 1024),
    ), images(128, 227)  # fmt: skip


class ConvNorm(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: Any, **options: Any) -> None:
        convolution = nn.Conv2d(inputs, outputs, kernel, bias=False, **options)
        super().__init__(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class Branches(nn.Module):
    """Parallel branches, concatenated over channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _across(inputs: int, outputs: int, size: int) -> nn.Module:
    return ConvNorm(inputs, outputs, (1, size), padding=(0, size // 2))


def _down(inputs: int, outputs: int, size: int) -> nn.Module:
    return ConvNorm(inputs, outputs, (size, 1), padding=(size // 2, 0))


def _pooled(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNorm(inputs, outputs, 1))


def _inception_a(n: int, pooled: int) -> nn.Module:
    return Branches(
        ConvNorm(n, 64, 1),
        nn.Sequential(ConvNorm(n, 48, 1), ConvNorm(48, 64, 5, padding=2)),
        nn.Sequential(
            ConvNorm(n, 64, 1), ConvNorm(64, 96, 3, padding=1), ConvNorm(96, 96, 3, padding=1)
        ),
        _pooled(n, pooled),
    )


def _inception_b(n: int) -> nn.Module:
    return Branches(
        ConvNorm(n, 384, 3, stride=2),
        nn.Sequential(
            ConvNorm(n, 64, 1), ConvNorm(64, 96, 3, padding=1), ConvNorm(96, 96, 3, stride=2)
        ),
        nn.MaxPool2d(3, 2),
    )


def _inception_c(n: int, c: int) -> nn.Module:
    return Branches(
        ConvNorm(n, 192, 1),
        nn.Sequential(ConvNorm(n, c, 1), _across(c, c, 7), _down(c, 192, 7)),
        nn.Sequential(
            ConvNorm(n, c, 1), _down(c, c, 7), _across(c, c, 7), _down(c, c, 7), _across(c, 192, 7)
        ),
        _pooled(n, 192),
    )


def _inception_d(n: int) -> nn.Module:
    return Branches(
        nn.Sequential(ConvNorm(n, 192, 1), ConvNorm(192, 320, 3, stride=2)),
        nn.Sequential(
            ConvNorm(n, 192, 1), _across(192, 192, 7), _down(192, 192, 7),
            ConvNorm(192, 192, 3, stride=2),
        ),
        nn.MaxPool2d(3, 2),
    )  # fmt: skip


def _inception_e(n: int) -> nn.Module:
    def fork() -> nn.Module:
        return Branches(_across(384, 384, 3), _down(384, 384, 3))

    return Branches(
        ConvNorm(n, 320, 1),
        nn.Sequential(ConvNorm(n, 384, 1), fork()),
        nn.Sequential(ConvNorm(n, 448, 1), ConvNorm(448, 384, 3, padding=1), fork()),
        _pooled(n, 192),
    )


def inception_v3() -> tuple[nn.Module, Batch]:
    """Inception v3 as in PaSE's graph: no auxiliary head, 299 x 299 images."""
    return Classifier(
        ConvNorm(3, 32, 3, stride=2), ConvNorm(32, 32, 3), ConvNorm(32, 64, 3, padding=1),
        nn.MaxPool2d(3, 2), ConvNorm(64, 80, 1), ConvNorm(80, 192, 3), nn.MaxPool2d(3, 2),
        _inception_a(192, 32), _inception_a(256, 64), _inception_a(288, 64), _inception_b(288),
        _inception_c(768, 128), _inception_c(768, 160), _inception_c(768, 160),
        _inception_c(768, 192), _inception_d(768), _inception_e(1280), _inception_e(2048),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000),
    ), images(128, 299)  # fmt: skip


class RecurrentLanguageModel(nn.Module):
    def __init__(self, vocabulary: int, units: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, units)
        self.lstm = nn.LSTM(units, units, num_layers=2, batch_first=True)
        self.head = nn.Linear(units, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(input_ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def rnnlm() -> tuple[nn.Module, Batch]:
    """The language model of PaSE's graph: 2 layers of 2,048, 100,000 words, sentences of 256."""
    return RecurrentLanguageModel(100_000, 2048), tokens(64, 256)


class Attention(nn.Module):
    """Multi-head attention with a fused query-key-value projection for self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(memory)), split(self.value(memory))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    """Self-attention, cross-attention (in a decoder), and the feed-forward network."""

    def __init__(self, width: int, heads: int, inner: int, *, decoder: bool) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention(width, heads) for _ in range(1 + decoder))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 + decoder))
        self.inner = nn.Linear(width, inner, bias=False)
        self.outer = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        for attention, norm in zip(self.attentions, self.norms):
            to = x if attention is self.attentions[0] or memory is None else memory
            x = norm(x + attention(x, to))
        return self.norms[-1](x + self.outer(F.relu(self.inner(x))))


class TranslationTransformer(nn.Module):
    """The transformer of Vaswani et al. 2017 with the sizes of PaSE's small one."""

    def __init__(self, vocabulary: int = 50_000, width: int = 512, length: int = 256) -> None:
        super().__init__()
        self.source, self.target = (nn.Embedding(vocabulary, width) for _ in range(2))
        self.register_buffer("positions", torch.zeros(length, width))
        self.encoder, self.decoder = (
            nn.ModuleList(TransformerLayer(width, 8, 4 * width, decoder=d) for _ in range(6))
            for d in (False, True)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, target_ids: Tensor, labels: Tensor) -> Tensor:
        memory = self.source(input_ids) + self.positions
        for layer in self.encoder:
            memory = layer(memory)
        x = self.target(target_ids) + self.positions
        for layer in self.decoder:
            x = layer(x, memory)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def transformer() -> tuple[nn.Module, Batch]:
    """The transformer of PaSE's graph: 6 + 6 layers of 512, 50,000 words, sentences of 256."""
    return TranslationTransformer(), {**tokens(64, 256), "target_ids": ids(64, 256)}


class Perceptron(nn.Module):
    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1024),
        )  # fmt: skip

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), labels)


def mlp() -> tuple[nn.Module, Batch]:
    labels = torch.zeros(1024, dtype=torch.long)
    return Perceptron(), {"x": torch.zeros(1024, 784), "labels": labels}


def _transformers(kind: str, batch: Batch, **config: Any) -> tuple[nn.Module, Batch]:
    """A class of ``transformers``, by the name of its head, with a configuration of its own."""
    import transformers

    prefix = kind.partition("For")[0].removesuffix("LMHeadModel")
    made = getattr(transformers, f"{prefix}Config")(**config)
    return getattr(transformers, kind)(made), batch


def gpt2() -> tuple[nn.Module, Batch]:
    return _transformers("GPT2LMHeadModel", tokens(64, 1024), use_cache=False)


def bert(**config: Any) -> tuple[nn.Module, Batch]:
    return _transformers("BertForMaskedLM", tokens(64, 512), **config)


def resnet50() -> tuple[nn.Module, Batch]:
    return _transformers("ResNetForImageClassification", images(128), num_labels=1000)


def llama() -> tuple[nn.Module, Batch]:
    """The shapes of Llama-3-8B with 8 of its 32 layers, in bfloat16."""
    module, batch = _transformers(
        "LlamaForCausalLM", tokens(64, 2048), num_hidden_layers=8, hidden_size=4096,
        intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, use_cache=False,
    )  # fmt: skip
    return module.bfloat16(), batch


def t5() -> tuple[nn.Module, Batch]:
    return _transformers(
        "T5ForConditionalGeneration", tokens(64, 512), use_cache=False, decoder_start_token_id=0
    )


def vit() -> tuple[nn.Module, Batch]:
    return _transformers("ViTForImageClassification", images(128), num_labels=1000)


def mobilenet_v2() -> tuple[nn.Module, Batch]:
    return _transformers("MobileNetV2ForImageClassification", images(128), num_labels=1000)


def mixtral() -> tuple[nn.Module, Batch]:
    """The shapes of Mixtral-8x7B with 2 of its 32 layers, in bfloat16."""
    module, batch = _transformers(
        "MixtralForCausalLM", tokens(64, 1024), num_hidden_layers=2, use_cache=False
    )
    return module.bfloat16(), batch


def vgg16() -> tuple[nn.Module, Batch]:
    """VGG-16 (Simonyan and Zisserman 2014, configuration D)."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if width == 0:
            layers.append(nn.MaxPool2d(2, 2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        channels = width
    head = [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096)]
    return Classifier(*layers, *head, nn.ReLU(), nn.Linear(4096, 1000)), images(128)


class DenseBlock(nn.Module):
    def __init__(self, num_layers: int, inputs: int, growth: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(inputs + i * growth), nn.ReLU(),
                nn.Conv2d(inputs + i * growth, 4 * growth, 1, bias=False),
                nn.BatchNorm2d(4 * growth), nn.ReLU(),
                nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            )
            for i in range(num_layers)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


def densenet(depths: tuple[int, ...]) -> tuple[nn.Module, Batch]:
    """DenseNet-BC with growth rate 32 (Huang et al. 2016)."""
    channels = 64
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    for index, depth in enumerate(depths):
        layers.append(DenseBlock(depth, channels))
        channels += depth * 32
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        if index + 1 < len(depths):
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2, 2)]
            channels //= 2
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return Classifier(*layers, *head), images(128)


def densenet121() -> tuple[nn.Module, Batch]:
    return densenet((6, 12, 24, 16))


def densenet201() -> tuple[nn.Module, Batch]:
    return densenet((6, 12, 48, 32))


PASE: dict[str, Network] = {
    "alexnet": alexnet,
    "inception_v3": inception_v3,
    "rnnlm": rnnlm,
    "transformer": transformer,
}
NETWORKS: dict[str, Network] = {
    **PASE,
    "mlp": mlp,
    "gpt2": gpt2,
    "bert": bert,
    "resnet50": resnet50,
    "llama": llama,
    "t5": t5,
    "vit": vit,
    "vgg16": vgg16,
    "mixtral": mixtral,
    "mobilenet_v2": mobilenet_v2,
    "densenet121": densenet121,
}


def captured(name: str) -> Any:
    """The graph of a network, captured on the meta device."""
    from autopar.frontend.capture import capture

    with torch.device("meta"):
        module, batch = {**NETWORKS, "densenet201": densenet201}[name]()
    return capture(module.train(), batch)
