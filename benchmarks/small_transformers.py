"""Every architecture of ``transformers``, small: random weights, batches with a loss, no download.

Input: a model type (``"llama"``). Output: a model of a few thousand parameters and a way to make
its batches. The procedure is the same for all:

1. The class is the first that the auto-model mappings of `TASKS` name for the model type.
2. The default config is rebuilt with every size capped by `SIZES`, the table of attribute names;
   sub-configs likewise, with small and distinct token ids, and dropout and the like (`ZEROS`) at
   zero. `OVERRIDES` holds what single model types need in addition.
3. Weights are initialized by the model, plus noise: zero weights would hide errors.
4. The batch holds what the signature of ``forward`` asks for. The first candidate (with and without
   image, longer audio) is taken on which the model runs and its loss has a gradient. A model
   without a loss of its own is trained towards a fixed pattern.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

Batch = dict[str, Any]

TASKS = (
    "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "CTC", "SEQUENCE_CLASSIFICATION",
    "TIME_SERIES_PREDICTION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION",
    "MASKED_IMAGE_MODELING", "PRETRAINING", "TOKEN_CLASSIFICATION", "TEXT_TO_SPECTROGRAM",
    "VISUAL_QUESTION_ANSWERING", "UNIVERSAL_SEGMENTATION", "OBJECT_DETECTION",
)  # fmt: skip

BATCH, SEQUENCE, VOCABULARY = 4, 8, 96
FIRST_TOKEN = 48  # smaller ids are reserved for special tokens
IMAGE, FRAMES = 64, 64
NOISE = 0.02

# Patterns of the names of sizes, and their caps; the first pattern that matches counts.
SIZES: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size|num_channels|pretraining_tp|chunk_size_feed_forward", 1 << 30),
    (r"vocab_size|max_target_positions", VOCABULARY),
    (r"num_kv_shared_layers|num_nextn_predict_layers|first_k_dense_replace", 1),
    (r"attn_layer_offset|expert_layer_offset|max_window_layers|encoder_sparse_step", 1),
    (r"(attn|expert)_layer_period|full_attention_interval|sliding_window_pattern", 2),
    (r"global_attn_every_n_layers|cross_attention_frequency|sparse_step|mtp_num_layers", 2),
    (r"experts_per_tok|num_experts_per_token|moe_k$|moe_topk|moe_top_k|index_topk", 2),
    (r"n_group$|topk_group|num_expert_group|num_shared_experts|n_shared_experts", 1),
    (r"experts$|expert_num$", 4),
    (r"depths|num_block_repeats|layer_repeats|stage_num_blocks|stage_numb_of_layers", 1),
    (r"layers$|n_layers?$|num_blocks$|depth$|num_layer$|^layers?$", 2),
    (r"(key_value|kv)_(attention_)?heads|kv_n_heads|num_query_groups|(mamba_)?n_?groups$", 2),
    (r"heads?$", 4),
    (r"head_dim$|d_head$|head_size$|d_kv$|dim_head$|dim_per_head$|kv_channels|headdim", 8),
    (r"rotary_dim$", 4),
    (r"lora_rank|o_lora_rank|dt_rank|time_step_rank|state_size|d_state|laurel_rank", 8),
    (r"intermediate|ffn_dim|ffn_hidden|d_ff$|dim_ff$|dff$|mlp_dim|feed_?forward", 64),
    (r"inner_dim|d_inner|hidden_dim$|linear_units|moe_hidden|share_expert_dim", 64),
    (r"^window_size", 4),
    (r"sliding_window|attention_window|local_attention|attention_chunk_size", 4),
    (r"position|n_ctx|max_seq_len|max_length|model_max_length|context_length", 64),
    (r"max_2d", 64),
    (r"hidden_sizes|embed_dims|conv_dim|tdnn_dim|channels$|out_features|num_filters", 16),
    (r"hidden_size|d_model|n_embd|embed_dim|embedding_(size|dim)|emb_dim|embed_size", 32),
    (r"projection_(dim|size)|proj_size|project_dim|output_dim|lru_width|d_latents", 32),
    (r"pooler_output_size|head_size|dim_bbox|d_embed|codevector_dim|projector", 32),
    (r"image_size|pretrain_image_size|crop_size|input_size|max_image_size", IMAGE),
    (r"patch_size$", 16),
    (r"num_queries|num_latents|query_tokens|num_object_queries|num_proposals", 8),
    (r"num_denoising|mm_tokens_per_image|codebook_size|num_codevectors", 16),
    (r"chunk_size|chunk_length|block_size", 8),
    (r"conv_pos_embedding", 16),
    (r"num_frames|frames_per_clip", 4),
    (r"num_mel_bins|max_source_positions|input_feat_per_channel|num_mels", 32),
    (r"^dim$|width$|hidden_channels|base_channels|latent_channels|stem_", 32),
)
# Options that add random numbers, or keep what training does not need.
ZEROS = re.compile(
    r"drop(?!_token)|mask_time_prob|mask_feature_prob|jitter|random_noise|mask_ratio$"
)
SWITCHED_OFF = ("use_cache", "apply_spec_augment", "use_timm_backbone", "use_pretrained_backbone")
SPECIAL_TOKENS = {"pad_token": 0, "bos_token": 1, "eos_token": 2, "decoder_start_token": 1}
_HEAD_DIM: dict[str, Any] = {"head_dim": 8}
_MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2}
# Additions for single model types; a dictionary under the name of a sub-config applies to it.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bit": {"num_groups": 4},
    "cohere_asr": {"decoder_start_token_id": 1},
    "colqwen2": {"vlm_config": {"text_config": _MROPE}},
    "donut-swin": {"window_size": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4, "vocab_size": VOCABULARY},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_n_groups": 2},
    "gemma3n_text": {"intermediate_size": 64, "layer_types": ["sliding_attention"] * 2},
    "glm46v": {"text_config": _MROPE},
    "glm4v": {"text_config": _MROPE},
    "glm_ocr": {"text_config": _MROPE},
    "glmga": {"text_config": _MROPE},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": _HEAD_DIM,
    "hunyuan_v1_moe": _HEAD_DIM,
    "hunyuan_vl": {"text_config": _HEAD_DIM},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "ministral": _HEAD_DIM,
    "nemotron": {**_HEAD_DIM, "num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2},
    "neomme": {"head_dim": 16},
    "paddleocr_vl": {"text_config": _MROPE},
    "qwen2_5_vl": {"text_config": _MROPE},
    "qwen2_vl": {"text_config": _MROPE},
    "reformer": {
        "axial_pos_shape": [2, 4], "axial_pos_embds_dim": [16, 16], "num_buckets": 4,
        "attn_layers": ["local", "lsh"],
    },
    "swin": {"window_size": 2},
    "swinv2": {"window_size": 2},
    "xlnet": {"d_head": 8},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4,
        "mamba_headdim": 16, "n_mamba_heads": 4, "mamba_ngroups": 2, "num_mem_blocks": 1,
        "attention_hidden_size": 64, "attention_head_dim": 16,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model type, the class that represents it, and the mapping that named it."""

    name: str
    class_name: str
    task: str


def architectures() -> list[Architecture]:
    """All model types that the mappings of `TASKS` name, in round-robin order of the mappings."""
    by_task: list[list[Architecture]] = []
    seen: set[str] = set()
    for task in TASKS:
        mapping: Mapping[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        found = []
        for name, classes in mapping.items():
            class_name = classes if isinstance(classes, str) else classes[0]
            if name not in seen:
                seen.add(name)
                found.append(Architecture(name=name, class_name=class_name, task=task))
        by_task.append(found)
    turns = itertools.zip_longest(*by_task)
    return [one for turn in turns for one in turn if one is not None]


def small_config(name: str) -> PreTrainedConfig:
    """The config of a model type, shrunk by the tables of this file."""
    return _shrunk(CONFIG_MAPPING[name](), OVERRIDES.get(name, {}), dict(SPECIAL_TOKENS))


def _shrunk(
    config: PreTrainedConfig, overrides: Mapping[str, Any], tokens: dict[str, int]
) -> PreTrainedConfig:
    known = inspect.signature(type(config).__init__).parameters
    changed: dict[str, Any] = {}
    latent_attention = hasattr(config, "kv_lora_rank")
    for key, value in vars(config).items():
        if key not in known:
            continue
        if isinstance(value, PreTrainedConfig):
            changed[key] = _shrunk(value, overrides.get(key, {}), tokens)
        else:
            if isinstance(value, list) and len(value) == getattr(config, "num_hidden_layers", 0):
                continue  # one entry per layer: built anew
            small = _small_value(key, value, tokens)
            if key == "num_key_value_heads" and latent_attention:
                small = _small_value("num_attention_heads", value, tokens)
            if small is not value:
                changed[key] = small
    plain = {k: v for k, v in overrides.items() if not isinstance(changed.get(k), PreTrainedConfig)}
    return type(config)(**{**changed, **plain})


def _small_value(key: str, value: Any, tokens: dict[str, int]) -> Any:
    if isinstance(value, bool):
        return False if key in SWITCHED_OFF else value
    if isinstance(value, float) or ZEROS.search(key):
        return type(value)(0) if ZEROS.search(key) and isinstance(value, int | float) else value
    token = re.fullmatch(r"(\w+_token)_(id|index)", key)
    if token is not None and isinstance(value, int | list | tuple):
        token_id = tokens.setdefault(token[1], len(tokens))
        return token_id if isinstance(value, int) else [token_id]
    if isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": [2, 1, 1]}
    for pattern, most in SIZES:
        if re.search(pattern, key):
            return _capped(value, most)
    return value


def _capped(value: Any, most: int) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return min(value, most)
    if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
        return type(value)(_power_of_two(min(v, most)) for v in value)
    return value


def _power_of_two(size: int) -> int:
    """The largest power of two up to ``size``, so that the sizes of stages divide each other."""
    return 1 << (size.bit_length() - 1) if size > 0 else size


def build(one: Architecture, dtype: torch.dtype) -> nn.Module:
    """The small model in train mode, identical each time."""
    torch.manual_seed(0)
    config = small_config(one.name)
    model_class = getattr(transformers, one.class_name)
    model: nn.Module = model_class(config).to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    return model


class PatternLoss:
    """A loss for models that have none: the distance of the first output to a fixed pattern."""

    def __call__(self, output: Any) -> Tensor:
        leaves = torch.utils._pytree.tree_leaves(output)
        first = next(x for x in leaves if isinstance(x, Tensor) and x.is_floating_point())
        pattern = torch.arange(first.numel(), dtype=first.dtype).cos().reshape(first.shape)
        return (first - pattern).square().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """How to train a model: a batch for each seed, and a loss where the model has none."""

    make_batch: Callable[[int], Batch]
    loss_fn: Callable[..., Tensor] | None


class NoBatchError(Exception):
    """No candidate batch suits the model; the message has the model's error for the first."""


def find_task(one: Architecture, model: nn.Module) -> Task:
    """The first candidate batch on which the model runs and has a loss with a gradient."""
    first: Exception | None = None
    for maker in candidates(one, model):
        for loss_fn in (None, PatternLoss()):
            task = Task(make_batch=maker, loss_fn=loss_fn)
            try:
                loss = loss_of(model, task, maker(0))
                if not torch.isfinite(loss):
                    raise ValueError(f"the loss is {loss.item()}")
                loss.backward()
            except Exception as error:
                first = first or error
                continue
            finally:
                model.zero_grad(set_to_none=True)
            return task
    message = str(first).strip().splitlines()[0] if str(first).strip() else ""
    raise NoBatchError(f"{type(first).__name__}: {message}") from first


def loss_of(model: nn.Module, task: Task, batch: Batch) -> Tensor:
    output = model(**batch)
    if task.loss_fn is not None:
        return task.loss_fn(output)
    loss = output[0] if isinstance(output, tuple) else output.loss
    if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
        raise ValueError("the model returns no loss")
    return loss


def candidates(one: Architecture, model: nn.Module) -> Iterator[Callable[[int], Batch]]:
    """Batch makers, those with the most fields first."""
    wanted = inspect.signature(model.forward).parameters
    makers = _Makers(one, model, frozenset(wanted))
    for fields in makers.variants():
        yield lambda seed, fields=fields: makers.batch(seed, fields)


class _Makers:
    """The fields of a batch by name, for one model."""

    def __init__(self, one: Architecture, model: nn.Module, wanted: frozenset[str]) -> None:
        self.one, self.model, self.wanted = one, model, wanted
        self.config: Any = model.config
        self.main = getattr(model, "main_input_name", "input_ids")
        self.dtype = next(model.parameters()).dtype

    def variants(self) -> Iterator[dict[str, Any]]:
        """The fields of each candidate, with options such as the length of audio."""
        if self.one.task == "TIME_SERIES_PREDICTION":
            yield from ({"past_values": n, "future_values": m} for n, m in ((64, 16), (32, 8)))
        if "pixel_values" in self.wanted and "input_ids" in self.wanted:
            for tokens in self._image_tokens():
                yield {"input_ids": tokens, "pixel_values": (), "labels": "tokens"}
                yield {"input_ids": tokens, "pixel_values": (), "return_loss": True}
                yield {"input_ids": tokens, "pixel_values": (), "bbox": True, "labels": "one"}
        if self.main in ("input_features", "input_values"):
            yield from self._audio()
        if self.main in ("pixel_values", "pixel_values_videos"):
            yield from self._images()
        if "input_ids" in self.wanted:
            yield from self._text()

    def _text(self) -> Iterator[dict[str, Any]]:
        kind = {
            "SEQUENCE_CLASSIFICATION": "one", "IMAGE_CLASSIFICATION": "one",
        }.get(self.one.task, "tokens")  # fmt: skip
        extra = {"bbox": True} if "bbox" in self.wanted else {}
        for length in (SEQUENCE, 32, 64):
            yield {"input_ids": (), "length": length, "labels": kind, **extra}
            yield {"input_ids": (), "length": length, "labels": kind, "mask": False, **extra}
            decoder = {"decoder_input_ids": True}
            if "decoder_input_ids" in self.wanted:
                yield {"input_ids": (), "length": length, "labels": kind, **decoder, **extra}

    def _audio(self) -> Iterator[dict[str, Any]]:
        kinds = ("one", "tokens") if "labels" in self.wanted else (None,)
        if self.one.task in ("CTC", "SPEECH_SEQ_2_SEQ"):
            kinds = ("tokens",)
        is_wave = self.main == "input_values" and not hasattr(self.config, "num_mel_bins")
        lengths = (4000, 16000) if is_wave else (64, 128, 1024, 3000)
        for length, kind, rank in itertools.product(lengths, kinds, (0, 1)):
            yield {self.main: (length, rank), "labels": kind}
            if "decoder_input_ids" in self.wanted:
                yield {self.main: (length, rank), "labels": kind, "decoder_input_ids": True}

    def _images(self) -> Iterator[dict[str, Any]]:
        shapes: tuple[tuple[int, ...], ...] = ((), (4,), (2,), (1,))
        kinds = ("one", "map", None) if "labels" in self.wanted else (None,)
        for shape, kind in itertools.product(shapes, kinds):
            yield {self.main: shape, "labels": kind}
        if "decoder_input_ids" in self.wanted:
            yield {"pixel_values": (), "labels": "tokens"}
            yield {"pixel_values": (), "decoder_input_ids": True}

    def _image_tokens(self) -> Iterator[tuple[int, int] | tuple[()]]:
        """The token id of an image patch, and the number of such tokens per image."""
        token = _attribute(self.config, "image_token_id", "image_token_index")
        inner = getattr(self.model, "model", self.model)
        if token is not None and hasattr(inner, "get_image_features"):
            try:
                with torch.no_grad():
                    features = inner.get_image_features(pixel_values=self.pixels((), _seeded(0)))
                features = getattr(features, "pooler_output", features)
                parts = features if isinstance(features, list | tuple) else [features]
                width = parts[0].shape[-1]
                yield (token, sum(p.numel() for p in parts) // width // BATCH)
            except Exception:  # the model needs more than pixels: it is tried without images
                return
        else:
            yield ()

    def batch(self, seed: int, fields: Mapping[str, Any]) -> Batch:
        generator = _seeded(seed)
        batch: Batch = {}
        length = fields.get("length", SEQUENCE)
        if "input_ids" in fields:
            batch["input_ids"] = self.token_ids(fields["input_ids"], length, generator)
            if "attention_mask" in self.wanted and fields.get("mask", True):
                batch["attention_mask"] = torch.ones_like(batch["input_ids"])
                if not fields["input_ids"]:
                    batch["attention_mask"][0, -2:] = 0
        for name in ("pixel_values", "pixel_values_videos"):
            if name in fields:
                batch[name] = self.pixels(fields[name], generator)
        for name in ("input_values", "input_features"):
            if name in fields:
                batch[name] = self.sound(name, *fields[name], generator)
        if "past_values" in fields:
            for name in ("past_values", "future_values"):
                batch[name] = self.normal((BATCH, fields[name]), generator)
        if fields.get("decoder_input_ids"):
            batch["decoder_input_ids"] = self.token_ids((), SEQUENCE, generator)
        if fields.get("bbox"):
            corners = torch.randint(0, 16, (*batch["input_ids"].shape, 4), generator=generator)
            batch["bbox"] = corners + torch.tensor([0, 0, 16, 16])
        if fields.get("return_loss"):
            batch["return_loss"] = True
        labels = self.labels(fields.get("labels"), batch, generator)
        if labels is not None and "labels" in self.wanted:
            batch["labels"] = labels
        return batch

    def token_ids(
        self, image: tuple[int, int] | tuple[()], length: int, generator: torch.Generator
    ) -> Tensor:
        count = image[1] if image else 0
        ids = torch.randint(FIRST_TOKEN, VOCABULARY, (BATCH, length + count), generator=generator)
        if image:
            ids[:, 1 : 1 + count] = image[0]
        return ids

    def pixels(self, between: tuple[int, ...], generator: torch.Generator) -> Tensor:
        vision = getattr(self.config, "vision_config", None) or self.config
        channels = _attribute(vision, "num_channels", "in_channels", "in_chans")
        size = _attribute(vision, "image_size", "img_size") or IMAGE
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = channels if isinstance(channels, int) else 3
        return self.normal((BATCH, *between, channels, height, width), generator)

    def normal(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=self.dtype)

    def sound(self, name: str, length: int, order: int, generator: torch.Generator) -> Tensor:
        if name == "input_values" and not hasattr(self.config, "num_mel_bins"):
            return self.normal((BATCH, length), generator)
        audio = getattr(self.config, "audio_config", None) or self.config
        bins = _attribute(
            audio, "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel",
            "input_dim", "input_size", "num_mels",
        ) or 80  # fmt: skip
        shape = (BATCH, length, bins) if order else (BATCH, bins, length)
        return self.normal(shape, generator)

    def labels(self, kind: str | None, batch: Batch, generator: torch.Generator) -> Tensor | None:
        if kind == "one":
            classes = getattr(self.config, "num_labels", 2)
            return torch.randint(0, classes, (BATCH,), generator=generator)
        if kind == "map":
            *_, height, width = batch[self.main].shape
            return torch.randint(0, 2, (BATCH, height, width), generator=generator)
        if kind != "tokens":
            return None
        ids = batch.get("input_ids")
        shape = (BATCH, SEQUENCE) if ids is None else tuple(ids.shape)
        if self.one.task == "CTC":  # no longer than the frames of the shortest audio
            classes = self.config.vocab_size
            return torch.randint(1, classes, (BATCH, SEQUENCE // 2), generator=generator)
        labels = torch.randint(FIRST_TOKEN, VOCABULARY, shape, generator=generator)
        if self.one.task == "TOKEN_CLASSIFICATION":
            labels %= 2
        labels[0, -2:] = -100
        return labels


def _attribute(config: Any, *names: str) -> Any:
    """The first of these attributes that a config, or else one of its sub-configs, has."""
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    inner = (
        _attribute(c, *names) for c in vars(config).values() if isinstance(c, PreTrainedConfig)
    )
    return next((value for value in inner if value is not None), None)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
