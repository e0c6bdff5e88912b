"""Messages between a process and its local workers: tensors in shared memory, waits with limits.

In: any object that can be pickled, and a connected Unix socket. Out: the same object in another
process of this machine. A pipe would copy every tensor through the kernel, once for each worker.

* All CPU tensors of a message are copied once into one shared-memory segment
  (`autopar.comm.transports.segments`), whose descriptor every worker gets; only a few hundred bytes
  go through the socket. Tensors of a few bytes (a loss) go with them: making and mapping a segment
  costs more.
* A receiver maps the segment *copy-on-write*. Reading costs no copy, and a worker that writes to
  its batch in place changes neither the caller's tensors nor another worker's.
* A sender may keep a segment for its next message (`Spare`), once every receiver has reported that
  nothing there uses it any more: new pages cost several times what copying into old ones does.
"""

import contextlib
import io
import math
import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autopar.comm.transports.segments import new_segment, receive_with_fd, send_with_fd
from autopar.runtime.workers.pickling import Unpickler, pickled

_HEADER = struct.Struct("!QQQ?")  # bytes of payload, small tensors and segment; `released`
_SMALL_BYTES = 1 << 14  # tensors that take no more together go through the socket
_MAX_UNUSED = 4  # times the bytes of a message that the segment kept for it may have


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A pickled object with its tensors, which are in ``small`` or in a segment.

    In a reply, ``released`` says that its sender uses none of the segments it has received.
    """

    payload: bytes | bytearray
    small: bytes | bytearray = b""
    segment_fd: int | None = None
    segment_size_bytes: int = 0
    released: bool = False


class _Segment:
    """A mapped segment."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = new_segment(size_bytes, reserved=True)
        self.close = weakref.finalize(self, os.close, self.fd)
        self.mapping = mmap.mmap(self.fd, size_bytes)


class Spare:
    """A segment that a sender keeps from one message to the next.

    It is written again only if the sender has set ``free``, once each receiver of the last message
    has released it; otherwise there is a new segment each time.
    """

    def __init__(self) -> None:
        self.free = False
        self._segment: _Segment | None = None

    def taken(self, size_bytes: int) -> _Segment:
        """The segment kept, or a new one if that is in use, too small or much too large."""
        kept = self._segment
        fits = kept is not None and size_bytes <= kept.size_bytes <= _MAX_UNUSED * size_bytes
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


@contextlib.contextmanager
def packed(value: object, spare: Spare | None = None) -> Iterator[Message]:
    """Pickle ``value`` once for any number of receivers; its segment is closed at the end.

    With ``spare`` large tensors are written to the spare segment, and stay there. The value is kept
    alive no longer than it takes to pickle it. Two tensors that are the same part of one storage
    (tied parameters) stay so at the receiver. Raises what pickling raises, before anything is sent.
    """
    payload, tensors = pickled(value)
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
        return Unpickler(io.BytesIO(message.payload), message.small).load(), lambda: None
    try:
        mapping = mmap.mmap(message.segment_fd, message.segment_size_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(message.segment_fd)
    return Unpickler(io.BytesIO(message.payload), mapping).load(), weakref.ref(mapping)


class Channel:
    """One end of a connected Unix socket that carries messages, each wait with a deadline.

    Deadlines are on ``time.monotonic()``'s clock; ``math.inf`` is for the side that is ended from
    outside. One thread may send while another receives. Raises ``TimeoutError`` at the deadline
    and ``ConnectionError`` once the other end is gone.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._pollers = {event: select.poll() for event in (select.POLLIN, select.POLLOUT)}
        for event, poller in self._pollers.items():
            poller.register(connected, event)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: Message, *, deadline_s: float) -> None:
        sizes = len(message.payload), len(message.small), message.segment_size_bytes
        header = _HEADER.pack(*sizes, message.released)
        fd = message.segment_fd
        parts = [memoryview(part) for part in (header, message.payload, message.small)]
        while parts:
            try:
                sent = send_with_fd(self._socket, parts, fd)
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline_s)
                continue
            fd = None  # the descriptor travels with the first byte
            parts = _left(parts, sent)

    def receive(self, *, deadline_s: float) -> Message:
        """The next message; whoever calls must ``unpack`` it, which closes its descriptor."""
        header = bytearray()
        segment_fd = None
        while len(header) < _HEADER.size:
            try:
                data, fd = receive_with_fd(self._socket, _HEADER.size - len(header))
            except BlockingIOError:
                self._wait(select.POLLIN, deadline_s)
                continue
            _require_data(len(data))
            header += data
            segment_fd = fd if segment_fd is None else segment_fd
        payload_size_bytes, small_size_bytes, segment_size_bytes, released = _HEADER.unpack(header)
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
            released=released,
        )

    def _wait(self, event: int, deadline_s: float) -> None:
        poller = self._pollers[event]
        while True:
            left_s = deadline_s - time.monotonic()
            if poller.poll(max(0, math.ceil(min(left_s, 60.0) * 1000))):
                return
            if left_s <= 0:
                raise TimeoutError("the other process did not take part in time")


def _left(parts: list[memoryview], count: int) -> list[memoryview]:
    """The rest of the parts after their first ``count`` bytes; none is empty."""
    left = []
    for part in parts:
        if count < len(part):
            left.append(part[count:])
        count = max(0, count - len(part))
    return left


def _require_data(count: int) -> None:
    if not count:
        raise ConnectionResetError("the other process has closed the connection")
