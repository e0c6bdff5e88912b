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
    buffer = io.BytesIO()
    writer = _SegmentWriter()
    _Pickler(buffer, writer).dump(value)
    payload, size_bytes = buffer.getvalue(), writer.size_bytes
    if size_bytes <= _SMALL_BYTES:
        small = bytearray(size_bytes)
        writer.write(small)
        del value, writer
        yield Message(payload=payload, small=small)
        return
    segment = (spare or Spare()).taken(size_bytes)
    writer.write(segment.mapping)
    del value, writer
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

    def __init__(self, file: io.BytesIO, segment: "_SegmentWriter") -> None:
        super().__init__(file)
        torch_reducers = self.dispatch_table  # copyreg's and torch's, set by ForkingPickler
        segment.reduce_other_tensor = torch_reducers[torch.Tensor]
        segment.reduce_other_storage = torch_reducers[torch.UntypedStorage]
        self.dispatch_table = {
            **cloudpickle.Pickler.dispatch_table,
            **torch_reducers,
            torch.Tensor: segment.reduce_tensor,
            Parameter: segment.reduce_tensor,
            torch.UntypedStorage: segment.reduce_storage,
        }

    def persistent_id(self, obj: object) -> tuple[int, int] | None:
        if type(obj) is _Span:
            return (obj.offset_bytes, obj.size_bytes)
        return None


class _SegmentWriter:
    """Reduces tensors to spans of a segment, which it lays out and, at the end, writes.

    Apart from the pickler, which would otherwise be in a reference cycle with its own table of
    reducers and keep the tensors of old messages alive until the garbage collector's next round.
    """

    reduce_other_tensor: Callable[[torch.Tensor], Any]
    reduce_other_storage: Callable[[torch.UntypedStorage], Any]

    def __init__(self) -> None:
        self._spans: dict[tuple[int, int, int], _Span] = {}
        self._sources: list[tuple[_Span, torch.Tensor]] = []
        self.size_bytes = 0

    def write(self, memory: bytearray | mmap.mmap) -> None:
        """Copy the tensors met so far, not by torch, whose other threads would go on to spin for
        milliseconds on the very cores that the receivers begin to work on."""
        target = memoryview(memory)
        for span, source in self._sources:
            end_bytes = span.offset_bytes + span.size_bytes
            target[span.offset_bytes : end_bytes] = source.numpy().data

    def reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad and not tensor.is_leaf:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} is the result of a differentiable "
                "operation; only its values can be sent to another process: pass tensor.detach()"
            )
        if tensor.is_quantized:  # torch's own reduction loses the scale in silence
            raise ValueError("a quantized tensor cannot be sent; pass tensor.dequantize()")
        plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
        if not plain or tensor.is_nested:
            return self.reduce_other_tensor(tensor)
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

    def reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu":
            return self.reduce_other_storage(storage)
        span = self._span(storage, start_bytes=0, size_bytes=storage.nbytes())
        return _rebuild_storage, (span,)

    def _span(self, storage: torch.UntypedStorage, *, start_bytes: int, size_bytes: int) -> _Span:
        if not size_bytes:
            return _Span(offset_bytes=0, size_bytes=0)
        key = (storage.data_ptr(), start_bytes, size_bytes)
        if key not in self._spans:
            offset_bytes = -(-self.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            span = _Span(offset_bytes=offset_bytes, size_bytes=size_bytes)
            source = torch.empty(0, dtype=torch.uint8)
            source.set_(storage, start_bytes, (size_bytes,), (1,))
            self.size_bytes = offset_bytes + size_bytes
            self._spans[key] = span
            self._sources.append((span, source))
        return self._spans[key]


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
        sent = 0
        while not sent:  # the descriptor travels with the first byte
            self._wait(select.POLLOUT, deadline_s)
            with contextlib.suppress(BlockingIOError):
                sent = self._socket.sendmsg([header], rights)
        self._send_all(memoryview(header)[sent:], deadline_s)
        self._send_all(memoryview(message.payload), deadline_s)
        self._send_all(memoryview(message.small), deadline_s)

    def receive(self, *, deadline_s: float) -> Message:
        """The next message; whoever calls must ``unpack`` it, which closes its descriptor."""
        header = bytearray()
        segment_fd = None
        while len(header) < _HEADER.size:
            self._wait(select.POLLIN, deadline_s)
            with contextlib.suppress(BlockingIOError):
                data, ancillary, _flags, _address = self._socket.recvmsg(
                    _HEADER.size - len(header), socket.CMSG_SPACE(_FD_SIZE_BYTES), _CLOEXEC
                )
                _require_data(len(data))
                header += data
                for _level, _type, raw in ancillary:
                    segment_fd = array.array("i", raw[:_FD_SIZE_BYTES])[0]
        payload_size_bytes, small_size_bytes, segment_size_bytes, let_go = _HEADER.unpack(header)
        payload, small = bytearray(payload_size_bytes), bytearray(small_size_bytes)
        self._receive_into(memoryview(payload), deadline_s)
        self._receive_into(memoryview(small), deadline_s)
        return Message(
            payload=payload,
            small=small,
            segment_fd=segment_fd,
            segment_size_bytes=segment_size_bytes,
            let_go=let_go,
        )

    def _send_all(self, data: memoryview, deadline_s: float) -> None:
        while data:
            self._wait(select.POLLOUT, deadline_s)
            with contextlib.suppress(BlockingIOError):
                data = data[self._socket.send(data) :]

    def _receive_into(self, data: memoryview, deadline_s: float) -> None:
        while data:
            self._wait(select.POLLIN, deadline_s)
            with contextlib.suppress(BlockingIOError):
                count = self._socket.recv_into(data)
                _require_data(count)
                data = data[count:]

    def _wait(self, event: int, deadline_s: float) -> None:
        poller = select.poll()
        poller.register(self._socket, event)
        while True:
            left_s = deadline_s - time.monotonic()
            if poller.poll(max(0, math.ceil(min(left_s, 60.0) * 1000))):
                return
            if left_s <= 0:
                raise TimeoutError("the other process did not take part in time")


def _require_data(count: int) -> None:
    if not count:
        raise ConnectionResetError("the other process has closed the connection")
