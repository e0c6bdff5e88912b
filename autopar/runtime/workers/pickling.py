"""Pickling for messages between local processes: tensors by their bytes, functions by value.

In: any object that can be pickled. Out: a pickle, and the CPU tensors that it refers to by spans of
one memory, to which they are copied once. ``torch.multiprocessing`` instead moves the sender's own
tensors to shared memory, keeps a descriptor open for every tensor in every process (a model with
1,000 tensors meets the usual limit of 1,024), and shares the whole storage of a slice.

What is not a plain CPU tensor is pickled with the reductions of ``torch.multiprocessing`` (CUDA
tensors by CUDA IPC, sparse tensors by their parts); storages inside still become spans.

Functions and classes that live in ``__main__`` (a script, a notebook, ``python -``) and lambdas
and closures are pickled by value, with cloudpickle: a worker never imports ``__main__``, so a
script needs no ``if __name__ == "__main__"`` guard and is never run twice.
"""

import copyreg
import io
import mmap
import multiprocessing.reduction
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
import torch.multiprocessing  # registers torch's reductions with ForkingPickler
from torch.nn import Parameter

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A range of a message's memory; stands for a storage in the pickle."""

    offset_bytes: int
    size_bytes: int


class Tensors:
    """The tensors of one message and the place of each in its memory."""

    def __init__(self) -> None:
        self.spans: dict[tuple[int, int, int], _Span] = {}
        self.sources: list[tuple[_Span, torch.Tensor]] = []
        self.size_bytes = 0

    def write(self, memory: bytearray | mmap.mmap) -> None:
        """Copy them, without torch, whose other threads would spin for milliseconds afterwards on
        the very cores that the receivers begin to work on."""
        target = memoryview(memory)
        for span, source in self.sources:
            end_bytes = span.offset_bytes + span.size_bytes
            target[span.offset_bytes : end_bytes] = source.numpy().data


class _Reducers:
    """Reduces tensors to spans of one memory, which it lays out.

    Separate from the pickler, which would otherwise be in a reference cycle with its own table.
    """

    other_tensor: Callable[[torch.Tensor], Any]
    other_storage: Callable[[torch.UntypedStorage], Any]

    def __init__(self) -> None:
        self._tensors = Tensors()

    def taken(self) -> Tensors:
        """The tensors reduced since the last call."""
        found, self._tensors = self._tensors, Tensors()
        return found

    def of_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad and not tensor.is_leaf:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} is the result of a differentiable "
                "operation; only its values can be sent to another process: pass tensor.detach()"
            )
        if tensor.is_quantized:  # torch's own reduction loses the scale in silence
            raise ValueError("a quantized tensor cannot be sent; pass tensor.dequantize()")
        plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
        if not plain or tensor.is_nested:
            return self.other_tensor(tensor)
        tensor = tensor.resolve_conj().resolve_neg()
        size, stride = tuple(tensor.shape), tensor.stride()
        last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        span = self._span(
            tensor.untyped_storage(),
            start_bytes=int(tensor.storage_offset()) * tensor.itemsize,
            size_bytes=(last + 1) * tensor.itemsize if tensor.numel() else 0,
        )
        is_parameter = type(tensor) is Parameter
        return _rebuild_tensor, (
            span,
            tensor.dtype,
            size,
            stride,
            tensor.requires_grad,
            is_parameter,
        )

    def of_storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu":
            return self.other_storage(storage)
        span = self._span(storage, start_bytes=0, size_bytes=storage.nbytes())
        return _rebuild_storage, (span,)

    def _span(self, storage: torch.UntypedStorage, *, start_bytes: int, size_bytes: int) -> _Span:
        if not size_bytes:
            return _Span(offset_bytes=0, size_bytes=0)
        found = self._tensors
        key = (storage.data_ptr(), start_bytes, size_bytes)
        if key not in found.spans:
            offset_bytes = -(-found.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            span = _Span(offset_bytes=offset_bytes, size_bytes=size_bytes)
            source = torch.empty(0, dtype=torch.uint8)
            source.set_(storage, start_bytes, (size_bytes,), (1,))
            found.size_bytes = offset_bytes + size_bytes
            found.spans[key] = span
            found.sources.append((span, source))
        return found.spans[key]


class _Pickler(multiprocessing.reduction.ForkingPickler, cloudpickle.Pickler):
    """Pickles with torch's reductions and cloudpickle's functions, and CPU storages as spans."""

    # The C pickler's own slot again: it does not see an instance attribute that is set where a
    # class (cloudpickle's) has an attribute of this name.
    dispatch_table = pickle.Pickler.dispatch_table  # type: ignore[assignment]

    def __init__(self) -> None:
        self._buffer, self._reducers = io.BytesIO(), _Reducers()
        super().__init__(self._buffer)
        known = self.dispatch_table  # copyreg's and torch's, set by ForkingPickler
        self._known = _registered()
        self._reducers.other_tensor = known[torch.Tensor]
        self._reducers.other_storage = known[torch.UntypedStorage]
        self.dispatch_table = {
            **cloudpickle.Pickler.dispatch_table,
            **known,
            torch.Tensor: self._reducers.of_tensor,
            Parameter: self._reducers.of_tensor,
            torch.UntypedStorage: self._reducers.of_storage,
        }

    @property
    def knows_all(self) -> bool:
        """Whether no reduction was registered, or replaced, since it was made."""
        return self._known == _registered()

    def pickled(self, value: object) -> tuple[bytes, Tensors]:
        """The pickle and its tensors; nothing of the value is referred to afterwards."""
        self.dump(value)
        payload = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        self.clear_memo()
        self.globals_ref.clear()
        return payload, self._reducers.taken()

    def persistent_id(self, obj: object) -> tuple[int, int] | None:
        if type(obj) is _Span:
            return (obj.offset_bytes, obj.size_bytes)
        return None


def _registered() -> dict[type, Callable[[Any], Any]]:
    """All reductions that `ForkingPickler` begins with."""
    return {**copyreg.dispatch_table, **_Pickler._extra_reducers}


_idle_picklers: list[_Pickler] = []
"""Kept for reuse: making a pickler takes longer than pickling a batch."""


def pickled(value: object) -> tuple[bytes, Tensors]:
    """Pickle a value: the pickle, and what its spans stand for.

    Raises what pickling raises; a pickler that fails is not used again.
    """
    try:
        pickler = _idle_picklers.pop()  # at once, so no two threads have the same
    except IndexError:
        pickler = _Pickler()
    if not pickler.knows_all:
        pickler = _Pickler()
    found = pickler.pickled(value)
    _idle_picklers.append(pickler)
    return found


class Unpickler(pickle.Unpickler):
    """Restores storages as views of the message's memory."""

    def __init__(self, file: io.BytesIO, memory: bytes | bytearray | mmap.mmap) -> None:
        super().__init__(file)
        self._memory = memory
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}

    def persistent_load(self, pid: tuple[int, int]) -> torch.UntypedStorage:
        offset_bytes, size_bytes = pid
        if not size_bytes:
            return torch.UntypedStorage(0)
        if pid not in self._storages:
            view = torch.frombuffer(
                self._memory, dtype=torch.uint8, count=size_bytes, offset=offset_bytes
            )
            self._storages[pid] = view.untyped_storage()
        return self._storages[pid]


def _rebuild_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage


def _rebuild_tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storage, 0, size, stride)
    if is_parameter:
        return Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)
