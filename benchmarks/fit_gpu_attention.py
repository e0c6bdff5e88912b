"""Fits the curves of fused attention to published measurements.

Run: ``python benchmarks/fit_gpu_attention.py``. The figures are those of the papers and reports
that `PUBLISHED` cites; every row counts ``4 rows columns width`` operations a head forward and 2.5
times as many backward, half of them if it is causal. Writes ``cost_models/gpu_attention.json`` and
prints the errors: of rows that a five-fold fit did not see, and of a device left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import least_squares

from autopar.cost_models.gpu_attention import AttentionCurve, AttentionFile, Kernel
from autopar.cost_models.gpu_curves import Spread

OUT = Path(__file__).parents[1] / "cost_models" / "gpu_attention.json"
COLUMNS = (512, 1024, 2048, 4096, 8192, 16384)
NUM_FOLDS = 5
H100_TFLOPS, A100_TFLOPS, A5000_TFLOPS = 989.0, 312.0, 111.1  # dense, in half precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """TFLOP/s over `COLUMNS` tokens a sequence, 16,384 tokens and 2,048 channels in all."""

    kernel: Kernel
    peak: float
    width: int
    tflops: tuple[float, ...]
    is_causal: bool = False
    is_backward: bool = False
    columns: tuple[int, ...] = COLUMNS


def _h100(kernel: Kernel, width: int, *tflops: float, **kwargs: Any) -> Series:
    return Series(kernel=kernel, peak=H100_TFLOPS, width=width, tflops=tflops, **kwargs)


FA3 = "Shah et al., FlashAttention-3, NeurIPS 2024, figures 5 and 6: H100 80GB SXM5, float16"
FA3 += ", by a third party's transcription of the figures"
FA2 = "Dao, FlashAttention-2, ICLR 2024, section 4.1: at most 230 TFLOP/s (73%) forward and 63% "
FA2 += "of the peak backward on an A100 80GB SXM4"
A5000 = "gpu-mode/ring-attention, issue 10: FlashAttention-2 on RTX A5000"
EFFICIENT = "Dao-AILab/flash-attention, issue 416: xformers' kernel beside FlashAttention-2, causal"
PUBLISHED = (
    _h100("cudnn", 64, 335, 373, 395, 408, 412, 413),
    _h100("cudnn", 64, 225, 288, 334, 363, 379, 388, is_causal=True),
    _h100("cudnn", 128, 497, 574, 617, 609, 600, 595),
    _h100("cudnn", 128, 315, 410, 484, 518, 529, 539, is_causal=True),
    _h100("cudnn", 256, 470, 546, 580, 581, 580, 581),
    _h100("cudnn", 256, 308, 391, 450, 483, 497, 509, is_causal=True),
    _h100("cudnn", 64, 266, 348, 395, 417, 432, 433, is_backward=True),
    _h100("cudnn", 128, 305, 408, 465, 499, 518, 516, is_backward=True),
    _h100("flash", 64, 282, 306, 318, 321, 322, 324),
    _h100("flash", 64, 180, 229, 262, 284, 295, 299, is_causal=True),
    _h100("flash", 128, 309, 350, 362, 368, 370, 370),
    _h100("flash", 128, 191, 260, 298, 319, 333, 335, is_causal=True),
    _h100("flash", 256, 275, 313, 321, 323, 324, 326),
    _h100("flash", 256, 208, 251, 278, 293, 297, 298, is_causal=True),
    _h100("flash", 64, 198, 238, 264, 279, 287, 291, is_backward=True),
    _h100("flash", 128, 214, 260, 291, 310, 318, 322, is_backward=True),
)
ON_A5000 = tuple(
    Series(
        kernel="flash", peak=A5000_TFLOPS, width=64, tflops=tflops, is_backward=is_backward,
        columns=COLUMNS[:5],
    )
    for tflops, is_backward in (
        ((84.08, 81.02, 81.31, 81.69, 81.86), False),
        ((52.88, 62.54, 70.07, 74.80, 77.42), True),
    )
)  # fmt: skip
A100_BEST = {"forward": 0.73, "backward": 0.63}
# Of the memory-efficient kernel over FlashAttention-2, at 4,096 and 8,192 tokens.
EFFICIENT_OVER_FLASH = {
    "forward": (43.41 / 53.13, 32.68 / 54.96), "backward": (27.40 / 51.93, 24.44 / 54.43),
}  # fmt: skip
ON_CUDNN = "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA B200"

Row = tuple[float, int, int, bool, bool]  # part of the peak, width, columns, causal, backward
_SHAPE = ("start_up", "start_up_backward", "causal", "causal_start_up")


def rows_of(series: Sequence[Series]) -> list[Row]:
    return [
        (tflops / one.peak, one.width, columns, one.is_causal, one.is_backward)
        for one in series
        for tflops, columns in zip(one.tflops, one.columns)
    ]


def curve_of(values: Sequence[float], widths: Sequence[tuple[bool, int]]) -> AttentionCurve:
    parts: dict[bool, dict[int, float]] = {False: {}, True: {}}
    for (is_backward, width), part in zip(widths, np.exp(values[len(_SHAPE) :])):
        parts[is_backward][width] = float(part)
    shape = dict(zip(_SHAPE, map(float, np.exp(values[: len(_SHAPE)]))))
    return AttentionCurve(forward=parts[False], backward=parts[True], **shape)


def errors(curve: AttentionCurve, rows: Sequence[Row]) -> np.ndarray[Any, Any]:
    """Logarithms of predicted over published parts."""
    return np.array(
        [
            np.log(curve.part(width, columns, is_causal=causal, is_backward=backward) / part)
            for part, width, columns, causal, backward in rows
        ],
        dtype=float,
    ).reshape(-1)


def fitted(rows: Sequence[Row]) -> AttentionCurve:
    widths = sorted({(backward, width) for _, width, _, _, backward in rows})
    start = [np.log(80.0), np.log(280.0), np.log(0.93), np.log(250.0), *[np.log(0.5)] * len(widths)]
    result = least_squares(lambda x: errors(curve_of(x, widths), rows), start, loss="soft_l1",
                           f_scale=0.05)  # fmt: skip
    return curve_of(result.x, widths)


def spread_of(found: np.ndarray[Any, Any], left_out: np.ndarray[Any, Any]) -> Spread:
    sizes, others = np.abs(np.expm1(found)), np.abs(np.expm1(left_out))
    return Spread(
        median=round(float(np.median(sizes)), 4), mean=round(float(sizes.mean()), 4),
        p90=round(float(np.quantile(sizes, 0.9)), 4),
        left_out_median=round(float(np.median(others)), 4),
    )  # fmt: skip


def folded(rows: Sequence[Row]) -> np.ndarray[Any, Any]:
    order = np.random.default_rng(0).permutation(len(rows))
    parts = []
    for fold in range(NUM_FOLDS):
        unseen = [rows[i] for i in order[fold::NUM_FOLDS]]
        seen = [rows[i] for i in order if i not in order[fold::NUM_FOLDS]]
        parts.append(errors(fitted(seen), unseen))
    return np.concatenate(parts)


def scaled(curve: AttentionCurve, forward: float, backward: float) -> AttentionCurve:
    return msgspec.structs.replace(
        curve,
        forward={width: part * forward for width, part in curve.forward.items()},
        backward={width: part * backward for width, part in curve.backward.items()},
    )


def best_of(curve: AttentionCurve, *, is_backward: bool) -> float:
    """The largest part of the peak over the widths and sequences that were measured."""
    widths = curve.backward if is_backward else curve.forward
    return max(float(curve.part(w, COLUMNS[-1], is_backward=is_backward)) for w in widths)


def rounded(curve: AttentionCurve) -> AttentionCurve:
    values = msgspec.structs.asdict(curve)
    for name, value in values.items():
        parts = isinstance(value, dict)
        values[name] = (
            {w: round(part, 4) for w, part in value.items()} if parts else round(value, 4)
        )
    return AttentionCurve(**values)


def by_kernel_of_hopper() -> dict[Kernel, list[Row]]:
    kernels: tuple[Kernel, ...] = ("cudnn", "flash")
    return {k: rows_of([one for one in PUBLISHED if one.kernel == k]) for k in kernels}


def main() -> None:
    by_kernel = by_kernel_of_hopper()
    cudnn, on_hopper = fitted(by_kernel["cudnn"]), fitted(by_kernel["flash"])
    # On Ampere, whose instructions FlashAttention-2 is written in, it reaches more of the peak.
    flash = scaled(
        on_hopper,
        A100_BEST["forward"] / best_of(on_hopper, is_backward=False),
        A100_BEST["backward"] / best_of(on_hopper, is_backward=True),
    )
    a5000 = errors(flash, rows_of(ON_A5000))
    part = {name: float(np.mean(ratios)) for name, ratios in EFFICIENT_OVER_FLASH.items()}
    efficient = scaled(flash, part["forward"], part["backward"])
    ratios = [np.log(part[name] / r) for name, each in EFFICIENT_OVER_FLASH.items() for r in each]
    # Another kernel's sequences and causal losses, with the parts of this one at their best.
    crossed = errors(msgspec.structs.replace(
        on_hopper, forward=cudnn.forward, backward=cudnn.backward), by_kernel["cudnn"])  # fmt: skip
    spread: dict[Kernel, Spread] = {
        "cudnn": spread_of(folded(by_kernel["cudnn"]), crossed),
        "flash": spread_of(folded(by_kernel["flash"]), a5000),
        "efficient": spread_of(np.array(ratios), np.array(ratios)),
    }
    found = AttentionFile(
        provenance={
            "made_by": "benchmarks/fit_gpu_attention.py", "cudnn": FA3,
            "flash": f"{FA3}, for its shape; {FA2}; left out: {A5000}", "efficient": EFFICIENT,
        },
        kernels={"cudnn": rounded(cudnn), "flash": rounded(flash), "efficient": rounded(efficient)},
        on_cudnn=ON_CUDNN,
        spread=spread,
    )  # fmt: skip
    OUT.write_text(json.dumps(msgspec.to_builtins(found, str_keys=True), indent=1) + "\n")
    for kernel, each in spread.items():
        print(kernel, msgspec.structs.asdict(each))


if __name__ == "__main__":
    main()
