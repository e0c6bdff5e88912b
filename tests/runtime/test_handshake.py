"""Processes without the job's key are rejected, and delay no rank."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import autopar
from autopar.comm.transports import handshake
from autopar.runtime.faults.json_lines import JsonLines, listen

LIMIT_S = 30.0
DEEP = b"[" * 200_000 + b"\n"
NOISE = {
    "nothing": b"",
    "a request": b"GET / HTTP/1.1\r\n\r\n",
    "half a message": struct.pack("=i", 1) + bytes(20),
    "a message without the key": struct.pack("=i32s32s", 1, os.urandom(32), os.urandom(32)),
    "more than a message": os.urandom(1 << 16),
    "deep nesting": DEEP,
}


@contextlib.contextmanager
def door(
    num: int, key: bytes, limit_s: float = LIMIT_S
) -> Iterator[tuple[int, Callable[[], dict[int, socket.socket]]]]:
    """A port that accepts ranks 1 to ``num``, and the ranks that have connected in the end."""
    found: dict[int, socket.socket] = {}
    with listen(everywhere=False) as listener:

        def accept() -> None:
            found.update(handshake.accept(listener, key, range(1, num + 1), limit_s))

        thread = threading.Thread(target=accept)
        thread.start()

        def come() -> dict[int, socket.socket]:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
            return found

        try:
            yield listener.getsockname()[1], come
        finally:
            thread.join(LIMIT_S)
            for connected in found.values():
                connected.close()


def to(port: int) -> Callable[[float], socket.socket]:
    return lambda limit_s: socket.create_connection(("127.0.0.1", port), limit_s)


def held() -> set[str | threading.Thread]:
    """The open descriptors, each with its target, and the running threads."""
    found: set[str | threading.Thread] = set(threading.enumerate())
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of this listing
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Nothing is open that was not before; what earlier tests left may be freed meanwhile."""
    before = held()
    yield
    assert held() <= before


@pytest.mark.usefixtures("nothing_is_left")
def test_ranks_get_in_past_noise_that_stays_connected() -> None:
    key = handshake.new_key()
    with contextlib.ExitStack() as stack, door(2, key) as (port, come):
        for noise in NOISE.values():
            stranger = stack.enter_context(to(port)(5.0))
            with contextlib.suppress(OSError):
                stranger.sendall(noise)
        own = [
            stack.enter_context(handshake.connect(to(port), key, rank, LIMIT_S)) for rank in (2, 1)
        ]
        found = come()
        assert sorted(found) == [1, 2]
        own[0].sendall(b"two")
        assert found[2].recv(3) == b"two"


@pytest.mark.usefixtures("nothing_is_left")
def test_a_crowd_that_says_nothing_keeps_nobody_out() -> None:
    key = handshake.new_key()
    with contextlib.ExitStack() as stack, door(1, key) as (port, come):
        for _ in range(3 * handshake._MAX_CLIENTS):
            stack.enter_context(to(port)(5.0))
        started_s = time.monotonic()
        stack.enter_context(handshake.connect(to(port), key, 1, LIMIT_S))
        assert time.monotonic() - started_s < handshake._CLIENT_S
        assert list(come()) == [1]


@pytest.mark.usefixtures("nothing_is_left")
def test_a_proof_that_was_overheard_is_worth_nothing() -> None:
    key = handshake.new_key()
    overheard: list[bytes] = []

    class Tapped(socket.socket):
        def sendall(self, data: bytes, *_: int) -> None:  # type: ignore[override]
            overheard.append(bytes(data))
            super().sendall(data)

    def tapped(limit_s: float) -> socket.socket:
        made = Tapped()
        made.settimeout(limit_s)
        made.connect(("127.0.0.1", port))
        return made

    with contextlib.ExitStack() as stack, door(2, key) as (port, come):
        stack.enter_context(handshake.connect(tapped, key, 1, LIMIT_S))
        thief = stack.enter_context(to(port)(5.0))
        thief.recv(32)
        for said in (overheard[0], struct.pack("=i", 2) + overheard[0][4:]):
            again = stack.enter_context(to(port)(5.0))
            assert len(again.recv(32)) == 32
            again.sendall(said)
            again.settimeout(5.0)
            assert again.recv(1) == b""
        stack.enter_context(handshake.connect(to(port), key, 2, LIMIT_S))
        assert sorted(come()) == [1, 2]


@pytest.mark.usefixtures("nothing_is_left")
def test_who_listens_must_know_the_key_too() -> None:
    refused = pytest.raises(ConnectionResetError)
    with door(1, handshake.new_key(), 2.0) as (port, _), refused:
        handshake.connect(to(port), handshake.new_key(), 1, 1.0)


@pytest.mark.usefixtures("nothing_is_left")
def test_a_rejection_is_told_though_the_last_attempt_has_no_time() -> None:
    attempts: list[float] = []

    def slow_after_the_first(limit_s: float) -> socket.socket:
        attempts.append(limit_s)
        if len(attempts) > 1:
            time.sleep(limit_s)
            raise TimeoutError("timed out")
        return to(port)(limit_s)

    refused = pytest.raises(ConnectionResetError)
    with door(1, handshake.new_key(), 1.0) as (port, _), refused:
        handshake.connect(slow_after_the_first, handshake.new_key(), 1, 0.5)
    assert len(attempts) == 2


@pytest.mark.parametrize("noise", [DEEP, b"{\n", b'[1, "kind"]\n', b'{"kind": 3}\n', b"\xff\n"])
def test_a_rank_that_speaks_noise_has_ended(noise: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        lines = JsonLines(ours)
        sender = threading.Thread(target=theirs.sendall, args=(b'{"kind": "status"}\n' + noise,))
        sender.start()
        received = []
        while not lines.ended:
            received += lines.receive()
        lines.close()
        sender.join(LIMIT_S)
    assert received == [{"kind": "status"}]


def test_strangers_do_not_disturb_training() -> None:
    """They connect to the ports on which the workers listen: gloo's, on this host only."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(8, 8)
    target = torch.randn(8, 8)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    expected = reference_losses(model, x, target, sgd)
    compiled = autopar.compile(
        model, 2, example_inputs=(x, target), optimizer=sgd, profile_limit_s=0,
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    with compiled, contextlib.ExitStack() as stack:
        workers = [psutil.Process(pid) for pid in compiled._runner.group.pids]  # type: ignore[attr-defined]
        losses = [compiled.train_step(x, target).item()]
        before = [(w.num_fds(), w.num_threads()) for w in workers]
        ports = [
            c.laddr for w in workers for c in w.net_connections("inet") if c.status == "LISTEN"
        ]
        assert {address.ip for address in ports} <= {"127.0.0.1", "::1"}
        named = [c.laddr for w in workers for c in w.net_connections("unix") if c.laddr]
        assert not any(map(os.path.exists, named))
        for address in ports:
            for noise in NOISE.values():
                with contextlib.suppress(OSError):
                    stranger = stack.enter_context(to(address.port)(0.3))
                    stranger.sendall(noise)
        losses += [compiled.train_step(x, target).item() for _ in range(3)]
        stack.close()
        losses += [compiled.train_step(x, target).item() for _ in range(2)]
        after = [(w.num_fds(), w.num_threads()) for w in workers]
    assert losses == pytest.approx(expected, abs=1e-6)
    assert after == before


def reference_losses(
    model: nn.Module, x: torch.Tensor, target: torch.Tensor, make: Callable[..., Any]
) -> list[float]:
    plain, losses = copy.deepcopy(model), []
    optimizer = make(plain.parameters())
    for _ in range(6):
        loss = nn.functional.mse_loss(plain(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
