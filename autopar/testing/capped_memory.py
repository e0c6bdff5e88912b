"""A device memory with a cap, on a CPU: tensors that would exceed it are refused.

It stands for the memory of an accelerator in tests of what a step needs: every storage that an
operator makes counts until it is freed, as under a device's allocator; memory that is not torch's
own (mapped, or of another library) stands for the host's and does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.base.torch_private import TorchDispatchMode, pytree


class CapExceeded(AutoparError):
    """An operator's results do not fit a capped memory."""


class CappedMemory(TorchDispatchMode):
    """While it is entered, raises CapExceeded for an operator after which more than ``cap_bytes``
    are held; None counts only. ``held`` are tensors from before that count too."""

    def __init__(self, cap_bytes: int | None, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.cap_bytes = cap_bytes
        self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in held:
            self._hold(tensor)

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type != "meta" and storage.resizable():
            self._storages[id(storage)] = weakref.ref(storage)

    @property
    def held_bytes(self) -> int:
        """Bytes of the storages that are alive."""
        found = {key: ref() for key, ref in self._storages.items()}
        self._storages = {k: r for k, r in self._storages.items() if found[k] is not None}
        return sum(storage.nbytes() for storage in found.values() if storage is not None)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, Tensor):
                self._hold(leaf)
        held = self.held_bytes
        self.peak_bytes = max(self.peak_bytes, held)
        if self.cap_bytes is not None and held > self.cap_bytes:
            raise CapExceeded(
                f"{func} takes the memory held to {held} bytes, over the cap of {self.cap_bytes}: "
                "move or recompute more, or allow more"
            )
        return results
