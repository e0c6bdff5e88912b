"""Models, batches and V100 clusters of the predictions for out-of-order weight gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from msgspec import structs
from torch import nn

from autopar.cost_models import Cluster, Level
from autopar.frontend.capture import capture
from autopar.ir.graph import Graph
from tests.models.vision import densenet

PUBLISHED = {
    "single_gpu": (1.03, 1.58),
    "data_parallel": (1.10, 1.27),
    "pipeline": (1.41, 1.99),
}
DENSENET_121 = (6, 12, 24, 16)
SEQUENCE = 128
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and its batch per GPU, from the authors' scripts where they give one.

    ``measured_samples_per_s``: training throughput of one V100 in float32, where one is published.
    """

    name: str
    make: Callable[[int], tuple[nn.Module, dict[str, torch.Tensor]]]
    single_batch: int
    parallel_batch: int | None = None
    measured_samples_per_s: float | None = None


def images(batch: int, side: int = 224) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.empty(batch, 3, side, side),
        "labels": torch.empty(batch, dtype=torch.long),
    }


def tokens(batch: int) -> dict[str, torch.Tensor]:
    ids = torch.empty(batch, SEQUENCE, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def resnet50(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000)), images(batch)


def mobilenet(batch: int, width: float = 1.0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(num_labels=1000, depth_multiplier=width)
    return MobileNetV2ForImageClassification(config), images(batch)


def densenet121(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """DenseNet-121: growth 32, with ImageNet's stem and head instead of the small model's."""
    model: Any = densenet(growth=32, depths=DENSENET_121)
    model.features[0] = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
    model.head = nn.Linear(model.head.in_features, 1000)
    return model, images(batch)


def densenet_k12(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return densenet(growth=12, depths=DENSENET_121), images(batch, side=32)


def bert(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig()), tokens(batch)


def bert_classifier(
    batch: int, layers: int = 12, hidden: int = 768
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
    )
    ids = torch.empty(batch, SEQUENCE, dtype=torch.long)
    labels = torch.empty(batch, dtype=torch.long)
    return BertForSequenceClassification(config), {"input_ids": ids, "labels": labels}


def bert_large_classifier(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return bert_classifier(batch, layers=24, hidden=1024)


def gpt2(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False, loss_type="ForCausalLMLoss")
    return GPT2LMHeadModel(config), tokens(batch)


def mobilenet_quarter(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return mobilenet(batch, width=0.25)


WORKLOADS = (
    Workload(
        name="ResNet-50",
        make=resnet50,
        single_batch=32,
        parallel_batch=128,
        measured_samples_per_s=356.0,  # NVIDIA DeepLearningExamples, PyTorch 21.03, V100 32 GB
    ),
    Workload(name="MobileNetV2", make=mobilenet, single_batch=32, parallel_batch=128),
    Workload(name="DenseNet-121", make=densenet121, single_batch=32, parallel_batch=64),
    Workload(name="BERT-base", make=bert, single_batch=8, parallel_batch=32),
    Workload(name="GPT-2", make=gpt2, single_batch=8, parallel_batch=32),
    Workload(name="DenseNet-121, k=12, 32 x 32", make=densenet_k12, single_batch=32),
    Workload(name="MobileNetV2, width 0.25", make=mobilenet_quarter, single_batch=32),
)


@cache
def graph_of(make: Callable[[int], Any], batch: int) -> Graph:
    with torch.device("meta"):
        model, inputs = make(batch)
    return capture(model.train(), inputs).graph


def v100(nodes: int, per_node: int) -> Cluster:
    return Cluster.preset("v100", nodes=nodes, devices_per_node=per_node)


def ethernet(nodes: int, per_node: int) -> Cluster:
    """One 10 Gb/s adapter per node, as in the authors' p3.2xlarge and p3.8xlarge instances."""
    cluster = v100(nodes, per_node)
    level = Level(
        name="10 Gb/s Ethernet",
        size=nodes,
        latency_s=25e-6,
        bandwidth_bytes_per_s=10e9 / 8,
        efficiency=0.9,
        source="Amazon EC2 P3 instances; latency and efficiency assumed",
    )
    return structs.replace(cluster, levels=(cluster.levels[0], level))


def side(kind: str, value: float) -> str:
    low, high = PUBLISHED[kind]
    if value < low:
        return f"{value:.3f} is below the published {low}-{high}"
    return f"{value:.3f} is {'above' if value > high else 'inside'} the published {low}-{high}"
