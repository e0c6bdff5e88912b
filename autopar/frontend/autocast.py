"""``torch.autocast`` around a call, which is refused: a compiled program has fixed dtypes.

Inside the model it becomes part of the graph, as casts, and is not refused.
"""

from __future__ import annotations

import torch

from autopar.base.errors import InputError


def refuse_autocast(device_type: str, call: str) -> None:
    """Raise InputError where ``call`` is made inside ``torch.autocast`` of this device, or the CPU.

    Models are captured on the CPU, whatever device they are compiled for.
    """
    for kind in dict.fromkeys((device_type, "cpu")):
        if not torch.is_autocast_enabled(kind):
            continue
        dtype = torch.get_autocast_dtype(kind)
        name = {torch.float16: "fp16"}.get(dtype, "bf16")
        raise InputError(
            f"{call} inside torch.autocast({kind!r}, dtype={dtype}): a compiled model computes in "
            "the dtypes that it was captured with, so autocast around it would change nothing. "
            f"Leave it out, and write autopar.compile(..., precision={name!r}), or put it into the "
            f"model, around the part to compute in {dtype}:\n"
            "    def forward(self, x):\n"
            f"        with torch.autocast({kind!r}, dtype={dtype}):\n"
            "            ..."
        )
