"""Messages between a process and its local workers: tensors in shared memory, waits with limits.

In: any object that can be pickled, and a connected Unix socket. Out: the same object in another
process of this machine. It exists because the standard ways each lack something here:

* A pipe copies every tensor through the kernel, once for each worker. Here all CPU tensors of one
  message are copied once into one anonymous shared-memory segment, whose descriptor every worker
  gets; only a few hundred bytes go through the socket. Tensors of a few bytes (a loss) go with
  them: to make and map a segment takes 0.4 ms.
* ``torch.multiprocessing`` moves the sender's own tensors to shared memory behind its back, keeps
  a descriptor open for every tensor in every process (a model with 1,000 tensors meets the usual
  limit of 1,024), and shares the whole storage of a slice. Here a message takes one descriptor,
  slices send only the bytes they span, and the sender's tensors are left as they are.
* A receiver maps the segment *copy-on-write*. Reading costs no copy, and a worker that writes to
  its batch in place changes neither the caller's tensors nor another worker's.
* A sender may keep a segment for its next message (`Spare`), once every receiver has said that
  nothing there uses it any more. New pages cost seven times what copying into old ones does.

What is not a plain CPU tensor is pickled with the reductions of ``torch.multiprocessing`` (CUDA
tensors by CUDA IPC, sparse tensors by their parts); storages inside still go to the segment.

Functions and classes that live in ``__main__`` (a script, a notebook, ``python -``) and lambdas
and closures are pickled by value, with cloudpickle: a worker never imports ``__main__``, so a
script needs no ``if __name__ == "__main__"`` guard and is never run twice.
"""

import array
import contextlib
import copyreg
import io
import math
import mmap
import multiprocessing.reduction
import os
import pickle
import select
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
import torch.multiprocessing  # registers torch's reductions with ForkingPickler
from torch.nn import Parameter

_ALIGNMENT_BYTES = 64
_HEADER = struct.Struct("!QQQ?")  # payload, small and segment bytes; if earlier ones are let go
_SMALL_BYTES = 1 << 14  # tensors that take no more together go through the socket
_MOST_UNUSED = 4  # times the bytes of a message that the segment kept for it may have
_FD_SIZE_BYTES = array.array("i").itemsize
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # not on macOS


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A pickled object, and its tensors: small ones themselves, of others the segment's descriptor.

    With ``let_go``, a reply says that its sender uses no segment any more that it has received.
    """

    payload: bytes | bytearray
    small: bytes | bytearray = b""
    segment_fd: int | None = None
    segment_size_bytes: int = 0
    let_go: bool = False


class _Segment:
    """Anonymous shared memory, mapped; nothing of it outlives its last user."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = _reserved_memory(size_bytes)
        self.close = weakref.finalize(self, os.close, self.fd)
        self.mapping = mmap.mmap(self.fd, size_bytes)


class Spare:
    """One segment for message after message of a sender.

    It is written again only if the sender has set ``free``, which it does once each receiver of
    the last message has let go of it; else there is a new one each time.
    """

    def __init__(self) -> None:
        self.free = False
        self._segment: _Segment | None = None

    def taken(self, size_bytes: int) -> _Segment:
        """The segment kept, or a new one if that is in use, too small or much too large."""
        kept = self._segment
        fits = kept is not None and size_bytes <= kept.size_bytes <= _MOST_UNUSED * size_bytes
        if not (self.free and fits):
            self.close()
            self._segment = _Segment(size_bytes)
        self.free = False
        assert self._segment is not None
        return self._segment

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
        self._segment = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Bytes of a segment; stands for a storage in the pickle."""

    offset_bytes: int
    size_bytes: int


@contextlib.contextmanager
def packed(value: object, spare: Spare | None = None) -> Iterator[Message]:
    """Pickle ``value`` once for any number of receivers; a segment is let go at the end.

    With ``spare`` large tensors are written to its segment, and stay there. The value itself is
    held no longer than it takes to pickle it. Two tensors that are the same part of one storage
    (tied parameters) stay so at the receiver. Raises what pickling raises; nothing has been sent
    then.
    """
    payload, tensors = _pickled(value)
    size_bytes = tensors.size_bytes
    if size_bytes <= _SMALL_BYTES:
        small = bytearray(size_bytes)
        tensors.write(small)
        del value, tensors
        yield Message(payload=payload, small=small)
        return
    segment = (spare or Spare()).taken(size_bytes)
    tensors.write(segment.mapping)
    del value, tensors
    try:
        yield Message(payload=payload, segment_fd=segment.fd, segment_size_bytes=size_bytes)
    finally:
        if spare is None:
            segment.close()


def unpack(message: Message) -> Any:
    """The object of a message that was received; closes its segment's descriptor.

    Raises whatever the objects' own reconstruction raises.
    """
    return unpack_watched(message)[0]


def unpack_watched(message: Message) -> tuple[Any, Callable[[], object]]:
    """As `unpack`; with it a function that is None as soon as no tensor uses the segment."""
    if message.segment_fd is None:
        return _Unpickler(io.BytesIO(message.payload), message.small).load(), lambda: None
    try:
        mapping = mmap.mmap(message.segment_fd, message.segment_size_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(message.segment_fd)
    return _Unpickler(io.BytesIO(message.payload), mapping).load(), weakref.ref(mapping)


class _Pickler(multiprocessing.reduction.ForkingPickler, cloudpickle.Pickler):
    """torch's reductions and cloudpickle's functions, with CPU storages left to a segment."""

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

    def pickled(self, value: object) -> tuple[bytes, "_Tensors"]:
        """Of the value nothing is held afterwards."""
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
"""Making one takes longer than pickling a batch: 0.1 ms where a step has emptied the caches."""


def _pickled(value: object) -> tuple[bytes, "_Tensors"]:
    """The pickle, and what its spans stand for. A pickler that fails is not used again."""
    try:
        pickler = _idle_picklers.pop()  # at once, so no two threads have the same
    except IndexError:
        pickler = _Pickler()
    if not pickler.knows_all:
        pickler = _Pickler()
    found = pickler.pickled(value)
    _idle_picklers.append(pickler)
    return found


class _Tensors:
    """The tensors of one message: where each goes in its segment."""

    def __init__(self) -> None:
        self.spans: dict[tuple[int, int, int], _Span] = {}
        self.sources: list[tuple[_Span, torch.Tensor]] = []
        self.size_bytes = 0

    def write(self, memory: bytearray | mmap.mmap) -> None:
        """Copy them, not by torch, whose other threads would go on to spin for milliseconds on the
        very cores that the receivers begin to work on."""
        target = memoryview(memory)
        for span, source in self.sources:
            end_bytes = span.offset_bytes + span.size_bytes
            target[span.offset_bytes : end_bytes] = source.numpy().data


class _Reducers:
    """Reduces tensors to spans of a segment, which it lays out.

    Apart from the pickler, which would otherwise be in a reference cycle with its own table.
    """

    other_tensor: Callable[[torch.Tensor], Any]
    other_storage: Callable[[torch.UntypedStorage], Any]

    def __init__(self) -> None:
        self._tensors = _Tensors()

    def taken(self) -> _Tensors:
        """Those met since the last time."""
        found, self._tensors = self._tensors, _Tensors()
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


class _Unpickler(pickle.Unpickler):
    """Gives the storages that a message names as spans of its memory."""

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


def _reserved_memory(size_bytes: int) -> int:
    """The descriptor of new anonymous shared memory."""
    if hasattr(os, "memfd_create"):  # Linux; not bound by the size of /dev/shm, as in containers
        segment_fd = os.memfd_create("autopar-message")
    else:
        with tempfile.TemporaryFile() as file:
            segment_fd = os.dup(file.fileno())
    try:
        # Reserved now, a lack of memory is an OSError; later it would be a SIGBUS.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(segment_fd, 0, size_bytes)
        else:
            os.ftruncate(segment_fd, size_bytes)
    except BaseException:
        os.close(segment_fd)
        raise
    return segment_fd


class Channel:
    """One end of a connected Unix socket that carries messages, each wait with a deadline.

    Deadlines are on ``time.monotonic()``'s clock; ``math.inf`` is for the side that is ended from
    outside. One thread may send while another receives. Raises ``TimeoutError`` at the deadline
    and ``ConnectionError`` once the other end is gone.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: Message, *, deadline_s: float) -> None:
        sizes = len(message.payload), len(message.small), message.segment_size_bytes
        header = _HEADER.pack(*sizes, message.let_go)
        rights: list[tuple[int, int, bytes]] = []
        if message.segment_fd is not None:
            fds = array.array("i", [message.segment_fd]).tobytes()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
        parts = [memoryview(part) for part in (header, message.payload, message.small)]
        while parts:
            try:
                sent = self._socket.sendmsg(parts, rights)
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline_s)
                continue
            rights = []  # the descriptor travels with the first byte
            parts = _left(parts, sent)

    def receive(self, *, deadline_s: float) -> Message:
        """The next message; whoever calls must ``unpack`` it, which closes its descriptor."""
        header = bytearray()
        segment_fd = None
        while len(header) < _HEADER.size:
            try:
                data, ancillary, _flags, _address = self._socket.recvmsg(
                    _HEADER.size - len(header), socket.CMSG_SPACE(_FD_SIZE_BYTES), _CLOEXEC
                )
            except BlockingIOError:
                self._wait(select.POLLIN, deadline_s)
                continue
            _require_data(len(data))
            header += data
            for _level, _type, raw in ancillary:
                segment_fd = array.array("i", raw[:_FD_SIZE_BYTES])[0]
        payload_size_bytes, small_size_bytes, segment_size_bytes, let_go = _HEADER.unpack(header)
        payload, small = bytearray(payload_size_bytes), bytearray(small_size_bytes)
        parts = [memoryview(part) for part in (payload, small) if part]
        while parts:
            try:
                count = self._socket.recvmsg_into(parts)[0]
            except BlockingIOError:
                self._wait(select.POLLIN, deadline_s)
                continue
            _require_data(count)
            parts = _left(parts, count)
        return Message(
            payload=payload,
            small=small,
            segment_fd=segment_fd,
            segment_size_bytes=segment_size_bytes,
            let_go=let_go,
        )

    def _wait(self, event: int, deadline_s: float) -> None:
        poller = select.poll()
        poller.register(self._socket, event)
        while True:
            left_s = deadline_s - time.monotonic()
            if poller.poll(max(0, math.ceil(min(left_s, 60.0) * 1000))):
                return
            if left_s <= 0:
                raise TimeoutError("the other process did not take part in time")


def _left(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the parts after their first ``count`` bytes; none is empty."""
    left = []
    for part in parts:
        if count < len(part):
            left.append(part[count:])
        count = max(0, count - len(part))
    return left


def _require_data(count: int) -> None:
    if not count:
        raise ConnectionResetError("the other process has closed the connection")
