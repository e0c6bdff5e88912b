"""The mover executes a movement plan: tensors leave the device and come back between operations.

In: a `Movement`, the announcements of operations, and the results of those that make tensors which
move. A tensor leaves by giving up the memory of its storage, so that all its views remain valid,
and has its old contents again when it is back. Its copy on the host is pinned memory on
accelerators, kept from step to step. There two streams copy, one each way; memory is allocated and
freed in the order of the computation's stream, which waits for a copy before an operation needs its
result. On CPUs copies are made at once.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.accelerators import is_accelerator, module_of
from autopar.base.torch_private import returns_views
from autopar.movement.execution import PARAMETER, Movement, OpPlace, Update
from autopar.movement.plan import START, Transfer, Way


class Mover:
    """Executes one rank's movement in every step.

    ``stored`` gives a parameter or an optimizer state by its place in `Movement`; None if it does
    not exist yet, as states before the first update.
    """

    def __init__(
        self,
        movement: Movement,
        device: torch.device,
        stored: Callable[[tuple[int, int]], Tensor | None],
    ) -> None:
        self.movement = movement
        self.updates = tuple(p.values for p in movement.places if isinstance(p, Update))
        self.num_copied_bytes = 0
        self._stored = stored
        self._copies = _copies_of(device)
        self._ops: dict[OpPlace, list[int]] = defaultdict(list)
        for op, place in enumerate(movement.places):
            if place is not None:
                self._ops[place].append(op)
        self._following = _following(movement.places)
        self._made: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for name, (op, number) in movement.made.items():
            self._made[op].append((name, number))
        self._read: dict[fx.GraphModule, list[int]] = {}
        self._hosts: dict[str, Tensor] = {}
        self._present: dict[str, weakref.ref[torch.UntypedStorage]] = {}
        self._away: dict[str, torch.UntypedStorage] = {}
        self._begin()

    def _begin(self) -> None:
        self._num_runs: dict[OpPlace, int] = defaultdict(int)
        self._num_issued = 0
        self._op: int | None = None
        self._pending: list[tuple[Transfer, Callable[[], None]]] = []

    def begin_step(self) -> None:
        """Put the tensors that start a step on the host there, and issue the first transfers."""
        self._begin()
        for name in self.movement.plan.starts_on_host:
            if name not in self._away:
                self._offload(name)()
        self._issue(START)

    def take(self, value: int, contents: Tensor) -> None:
        """Take the contents of a parameter that is on the host when a step starts. The parameter is
        a tensor like them, whose storage has no memory yet."""
        name = self.movement.parameters_on_host[value]
        storage = self._storage(name)
        assert storage is not None
        assert not storage.nbytes()
        source = _bytes_of(contents.untyped_storage())
        assert len(source) == contents.nbytes
        host = self._hosts[name] = self._copies.host_memory(len(source))
        host.copy_(source)
        self._away[name] = storage

    def before(self, place: OpPlace) -> None:
        """Announce an operation: what it needs is on the device when this returns."""
        found = self._ops.get(place)
        number = self._num_runs[place]
        if found is None or number == len(found):
            return
        self._num_runs[place] += 1
        self._op = found[number]
        self._issue(self._op - 1)
        self._finish(self._op)

    def check(self, module: fx.GraphModule, arguments: Sequence[Tensor]) -> None:
        """Raise RuntimeError if an argument that a graph reads is on the host."""
        read = self._read.get(module)
        if read is None:
            given = [node for node in module.graph.nodes if node.op == "placeholder"]
            read = self._read[module] = [i for i, node in enumerate(given) if _is_read(node)]
        self.check_present(arguments[i] for i in read)

    def check_present(self, tensors: Iterable[Tensor]) -> None:
        """Raise RuntimeError if a tensor is on the host: reading it would give garbage."""
        for tensor in tensors:
            if tensor.numel() and not tensor.untyped_storage().nbytes():
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)} is on the host in operation "
                    f"{self._op}: its movement plan is for another program"
                )

    def after(self, results: Sequence[Tensor] = ()) -> None:
        """The announced operation has been launched, with these results.

        Tensors leave at once. Loads wait until the next announcement, as the caller still holds
        what the operation read last.
        """
        op, self._op = self._op, None
        if op is None:
            return
        for name, number in self._made.get(op, ()):
            self._present[name] = weakref.ref(results[number].untyped_storage())
        self._issue(op, loads=False)
        self._finish(self._following[op] - 1)

    def begin_again(self) -> None:
        """Begin the step's second pass, behind one that updated nothing: what the plan moves
        around updates and later moves first."""
        self._issue(len(self.movement.places))
        self.end_step()
        self.begin_step()

    def end_step(self) -> None:
        """Finish what is in flight; after a step that was broken off everything comes back."""
        is_whole = self._num_issued == len(self.movement.plan.transfers)
        while self._pending:
            self._pending.pop(0)[1]()
        self._present.clear()
        if not is_whole:
            self.bring_back()

    def bring_back(self, *, states: bool = True) -> None:
        """Bring parameters back to the device, and ``states`` of the optimizer; forget tensors that
        are not persistent, which no step reads now."""
        while self._pending:
            self._pending.pop(0)[1]()
        for name in tuple(self._away):
            _, number = self.movement.stored.get(name, (0, None))
            if number == PARAMETER or (states and number is not None):
                self._load(name)()
            elif number is None:
                del self._away[name]
        self._present.clear()

    # --- transfers ----------------------------------------------------------------------------

    def _issue(self, last: int, *, loads: bool = True) -> None:
        """Issue the transfers that wait for operations up to ``last``, in order; without ``loads``
        those before the first load."""
        transfers = self.movement.plan.transfers
        while self._num_issued < len(transfers) and transfers[self._num_issued].after <= last:
            transfer = transfers[self._num_issued]
            if transfer.way is Way.FROM_HOST and not loads:
                return
            self._num_issued += 1
            if transfer.way is not Way.FROM_HOST:
                self._finish_loads(transfer.tensor)
            if transfer.way is Way.DROP:
                self._drop(transfer.tensor)
            elif transfer.way is Way.TO_HOST:
                self._pending.append((transfer, self._offload(transfer.tensor)))
            else:
                self._finish_offloads()  # their memory may be what it takes
                self._pending.append((transfer, self._load(transfer.tensor)))

    def _finish(self, op: int) -> None:
        """Finish the transfers that operations up to ``op`` wait for, and the offloads listed
        before those."""
        due = [
            index
            for index, (transfer, _) in enumerate(self._pending)
            if transfer.before is not None and transfer.before <= op
        ]
        last, rest = max(due, default=-1), []
        for index, (transfer, finish) in enumerate(self._pending):
            if index in due or (index < last and transfer.way is Way.TO_HOST):
                finish()
            else:
                rest.append((transfer, finish))
        self._pending = rest

    def _finish_loads(self, name: str) -> None:
        """Wait for a load of a tensor that no operation has needed, as an update that was left
        out: it may still be under way, and what leaves the device must have arrived there."""
        for transfer, finish in self._pending:
            if transfer.way is Way.FROM_HOST and transfer.tensor == name:
                finish()
        self._pending = [p for p in self._pending if p[0].way is Way.TO_HOST or p[0].tensor != name]

    def _finish_offloads(self) -> None:
        for transfer, finish in self._pending:
            if transfer.way is Way.TO_HOST:
                finish()
        self._pending = [p for p in self._pending if p[0].way is not Way.TO_HOST]

    def _storage(self, name: str) -> torch.UntypedStorage | None:
        """The memory of a tensor on the device; None if there is none, or none any more, or if it
        is a transport's own, such as the result of a collective on CPUs."""
        if name in self.movement.stored:
            tensor = self._stored(self.movement.stored[name])
            if tensor is None:
                return None
            if not tensor.untyped_storage().resizable():  # loaded into memory that is not torch's
                tensor.data = tensor.detach().clone()
            return tensor.untyped_storage()
        present = self._present.get(name)
        found = None if present is None else present()
        return found if found is not None and found.resizable() else None

    def _drop(self, name: str) -> None:
        storage = self._storage(name)
        if storage is not None:
            self._away[name] = storage
            storage.resize_(0)

    def _offload(self, name: str) -> Callable[[], None]:
        """Begin to copy a tensor to the host; the returned call waits, and frees its memory."""
        storage = self._storage(name)
        if storage is None:
            return _nothing
        size = storage.nbytes()
        host = self._hosts.get(name)
        if host is None or len(host) != size:
            host = self._hosts[name] = self._copies.host_memory(size)
        wait = self._copies.to_host(host, _bytes_of(storage))
        self.num_copied_bytes += size
        self._away[name] = storage

        def finish() -> None:
            wait()
            storage.resize_(0)

        return finish

    def _load(self, name: str) -> Callable[[], None]:
        """Begin to copy a tensor back into new memory; the returned call waits."""
        storage = self._away.pop(name, None)
        if storage is None:
            return _nothing
        host = self._hosts[name]
        storage.resize_(len(host))
        self.num_copied_bytes += len(host)
        return self._copies.from_host(_bytes_of(storage), host)


class _AtOnce:
    """Copies of a CPU's memory, made at once. The host's is foreign to torch's allocator."""

    def host_memory(self, size_bytes: int) -> Tensor:
        return torch.frombuffer(bytearray(size_bytes), dtype=torch.uint8)

    def to_host(self, host: Tensor, device: Tensor) -> Callable[[], None]:
        host.copy_(device)
        return _nothing

    def from_host(self, device: Tensor, host: Tensor) -> Callable[[], None]:
        device.copy_(host)
        return _nothing


class _Streams:
    """Copies on two streams of an accelerator, one each way."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = module_of(device)
        self._device = device
        self._out, self._in = self._module.Stream(device), self._module.Stream(device)

    def host_memory(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def to_host(self, host: Tensor, device: Tensor) -> Callable[[], None]:
        return self._copy(self._out, host, device)

    def from_host(self, device: Tensor, host: Tensor) -> Callable[[], None]:
        return self._copy(self._in, device, host)

    def _copy(self, stream: Any, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Copy after what the computation's stream has been given; the returned call makes that
        stream wait. An earlier copy of the tensor the other way has ended before it was used."""
        stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)
            ended = stream.record_event()

        def wait() -> None:
            self._module.current_stream(self._device).wait_event(ended)

        return wait


def _copies_of(device: torch.device) -> _AtOnce | _Streams:
    return _Streams(device) if is_accelerator(device) else _AtOnce()


def _nothing() -> None:
    pass


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _is_read(node: fx.Node) -> bool:
    """Whether the contents of a tensor are read, not only handed on or viewed."""
    users = (user for user in node.users if user.op != "output")
    return any(not returns_views(user.target) or _is_read(user) for user in users)


def _following(places: Sequence[OpPlace]) -> Mapping[int, int]:
    """For each announced operation, the next one, or the end of the step."""
    announced = [op for op, place in enumerate(places) if place is not None]
    return dict(zip(announced, [*announced[1:], len(places)]))
