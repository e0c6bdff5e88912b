"""The price of a traced call by the roofline, from the values that its graph notes.

In: a node of a traced graph and a device. Out: its seconds, for dividing the price of an op among
the calls that it was traced to.
"""

from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from autopar.base.torch_private import flop_formula, is_overload
from autopar.cost_models.hardware import DeviceSpec


def roofline_s(node: fx.Node, device: DeviceSpec) -> float:
    """The larger of arithmetic and memory time of one traced call; 0 for views."""
    if getattr(node.target, "is_view", False) or not is_overload(node.target):
        return 0.0
    result = node.meta.get("val")
    made = [result] if isinstance(result, Tensor) else [*(result or ())]
    read = [n.meta.get("val") for n in node.all_input_nodes]
    moved = sum(x.numel() * x.element_size() for x in (*made, *read) if isinstance(x, Tensor))
    memory_s = moved / device.memory_bandwidth_bytes_per_s
    count = flop_formula(node.target)
    tensors = [x for x in made if isinstance(x, Tensor)]
    if count is None or not tensors:
        return memory_s
    args: Any = map_arg(node.args, lambda n: n.meta["val"])
    kwargs: Any = map_arg(node.kwargs, lambda n: n.meta["val"])
    flops = count(*args, **kwargs, out_val=result)
    return max(memory_s, flops / device.matrix_flops_per_s(tensors[0].dtype))
