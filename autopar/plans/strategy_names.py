"""Names of the known strategies, as plans and reports print them."""

from __future__ import annotations

DATA, ZERO1, ZERO2, ZERO3 = "data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"
HYBRID = "data x ZeRO-3"
TENSOR, MEGATRON, MEGATRON_SEQUENCE = "tensor parallel", "Megatron", "Megatron + sequence"
ONE_WEIRD_TRICK = "one weird trick"
MARKOV_CHAIN = "FlexFlow's Markov chain"

ALONG_DATA = (DATA, ZERO1, ZERO2, ZERO3, HYBRID)
ALONG_TENSORS = (TENSOR, MEGATRON, MEGATRON_SEQUENCE)


def name_of(data: str, tensor: str = "") -> str:
    """``ZeRO-3 x Megatron``, or the one name that is not empty."""
    return " x ".join(part for part in (data, tensor) if part)


NOT_EAGER = "not eager's result"
"""How the note of a baseline begins that trains on old weights."""
