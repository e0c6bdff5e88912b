"""What experts set up by hand for the models of `large.py`, as options of `autopar.plan`.

Each setup has its source and the throughput reported with it, if any. None of these throughputs was
used to fit a price. Two things differ from the originals. Our recomputation keeps what collectives
result in; theirs repeats them, so a rank of FSDP x TP has more rows at once. And kernels are those
of eager PyTorch: where NVIDIA's fused kernels keep no intermediates of norms and activation
functions, what is recomputed is left to the planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar import Forbid, Force

TITAN = "pytorch/torchtitan"
NVIDIA = "NVIDIA/dgxc-benchmarking, llama3.1/README"
MEGATRON = "Narayanan et al., SC '21, and Korthikanti et al., 2022"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """A setup: its name, the options of `autopar.plan`, where it is from, and what was reported.

    ``reported`` is in tokens per second and GPU, ``note`` how that run differs.
    """

    name: str
    options: Mapping[str, Any]
    source: str
    reported: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Megatron:
    """Megatron's parallelism: data (ZeRO-1), context, tensor with sequence, and pipeline."""

    dp: int
    tp: int
    pp: int
    cp: int = 1
    num_chunks: int = 5
    num_microbatches: int = 64
    recompute: str | None = None

    def options(self) -> dict[str, Any]:
        sizes = {"dp": self.dp, "cp": self.cp, "tp": self.tp}
        mesh = {axis: size for axis, size in sizes.items() if size > 1}
        kinds = {
            "dp": Force("zero3", axis="dp"),
            "cp": Forbid("tensor_parallel", axis="cp"),
            "tp": Force("megatron_sequence", axis="tp"),
        }
        stages = {
            "num_stages": self.pp * self.num_chunks,
            "schedule": "interleaved" if self.num_chunks > 1 else "1f1b",
        }
        return {
            "mesh": mesh,
            "constraints": [kinds[axis] for axis in mesh],
            "num_microbatches": self.num_microbatches,
            "recompute": self.recompute,
            "reshard_after_forward": False,
            **(stages if self.pp > 1 else {}),
        }


def _fsdp(num_devices: int, **options: Any) -> dict[str, Any]:
    return {
        "mesh": {"dp": num_devices},
        "constraints": [Force("zero3")],
        "reshard_after_forward": True,
        "num_microbatches": 1,
        **options,
    }


def _fsdp_tp(dp: int, tp: int, **options: Any) -> dict[str, Any]:
    return {
        "mesh": {"dp": dp, "tp": tp},
        "constraints": [Force("zero3", axis="dp"), Force("megatron_sequence", axis="tp")],
        "reshard_after_forward": True,
        **options,
    }


def _selective(num_layers: int) -> list[str]:
    """The modules that torchtitan's selective policy recomputes: every other matrix product, norms,
    activation functions."""
    modules = (
        "input_layernorm", "post_attention_layernorm", "mlp.act_fn", "self_attn.k_proj",
        "self_attn.o_proj", "mlp.up_proj",
    )  # fmt: skip
    return [f"model.layers.{i}.{name}" for i in range(num_layers) for name in modules]


LLAMA_8B_ON_8 = (
    Expert(
        name="FSDP2, selective activation checkpointing, local batch 2",
        options=_fsdp(8, recompute=_selective(32)),
        source=f"{TITAN}, llama3_8b.toml; benchmarks/llama3_h100_202412_torchtitan.md, table 1",
        reported=5762.0,
        note="6,667 with torch.compile; takes 82.4 GiB, on H100 of 96 GB and 500 W",
    ),
    Expert(
        name="FSDP2, full activation checkpointing, local batch 2",
        options=_fsdp(8, recompute="full"),
        source=f"{TITAN}, llama3_8b.toml with mode = 'full'",
    ),
    Expert(
        name="FSDP2, local batch 1, two micro-batches, selective activation checkpointing",
        options=_fsdp(8, recompute=_selective(32), num_microbatches=2),
        source=f"{TITAN}, llama3_8b.toml: batch_size = 1",
    ),
    Expert(
        name="FSDP2, local batch 2, what is recomputed chosen by autopar",
        options=_fsdp(8),
        source="as the first, with PyTorch's activation memory budget in mind",
    ),
    Expert(
        name="DP4 (ZeRO-1) x CP2, micro-batch of 1 row",
        options=_Megatron(dp=4, cp=2, tp=1, pp=1, num_microbatches=4).options(),
        source=f"{NVIDIA}_8b.md: TP1 PP1 CP2 MBS1, BF16, 128 rows",
        reported=81222 / 8,
        note="Transformer Engine's fused kernels",
    ),
)


def llama_70b(num_devices: int) -> tuple[Expert, ...]:
    """For Llama-3-70B on 64 or 256 H100, two rows for each device."""
    num_rows = 2 * num_devices
    megatron = num_devices // 32
    throughput = {64: 71235 / 64, 256: 283399 / 256}[num_devices]
    return (
        Expert(
            name="TP4 x PP4 (interleaved, 5 chunks) x CP2 x DP (ZeRO-1)",
            options=_Megatron(dp=megatron, cp=2, tp=4, pp=4).options(),
            source=f"{NVIDIA}_70b.md: TP4 PP4 CP2 VP5 MBS1, BF16",
            reported=throughput,
            note="Transformer Engine's fused kernels",
        ),
        Expert(
            name="TP8 x PP4 (interleaved, 5 chunks) x DP (ZeRO-1)",
            options=_Megatron(dp=megatron, tp=8, pp=4).options(),
            source=MEGATRON,
        ),
        Expert(
            name="TP8 x PP8 (1F1B) x DP (ZeRO-1)",
            options=_Megatron(
                dp=num_devices // 64, tp=8, pp=8, num_chunks=1, num_microbatches=128
            ).options(),
            source=MEGATRON,
        ),
        Expert(
            name="TP8 x PP4 (interleaved, 5 chunks) x DP (ZeRO-1), full recomputation",
            options=_Megatron(dp=megatron, tp=8, pp=4, recompute="full").options(),
            source=MEGATRON,
        ),
        Expert(
            name="FSDP2 x TP8, full activation checkpointing, micro-batch of 1 row",
            options=_fsdp_tp(
                num_devices // 8, 8, recompute="full", num_microbatches=8 * num_rows // num_devices
            ),
            source=f"{TITAN}, llama3_70b.toml",
            reported={256: 829.0}.get(num_devices),
            note="float8, torch.compile, 16 rows at once; 876 with asynchronous tensor parallelism",
        ),
        Expert(
            name="FSDP2, full activation checkpointing, local batch 2",
            options=_fsdp(num_devices, recompute="full"),
            source=f"{TITAN}, docs/performance.md (64 A100: 331 tokens/s a GPU, 51.7% MFU)",
        ),
    )


TENSOR_IN_NODES = Expert(
    name="mesh dp=16, tp=8, everything else searched",
    options={"mesh": {"dp": 16, "tp": 8}, "schedule": "auto"},
    source="tensor parallelism inside nodes, sixteen replicas of a pipeline",
)
