"""The ports of process groups are closed to newcomers, but not NCCL's: its ranks connect later."""

from __future__ import annotations

import socket
import sys

import pytest

from autopar.comm.transports.ports import sealed


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's socket filters are Linux's")
@pytest.mark.parametrize(
    ("backends", "is_open"),
    [("gloo", False), ("cpu:gloo,cuda:gloo", False), ("cpu:gloo,cuda:nccl", True), ("nccl", True)],
)
def test_a_port_takes_newcomers_only_where_nccl_is_a_backend(backends: str, is_open: bool) -> None:
    with socket.socket() as listener, socket.socket() as newcomer:
        with sealed(backends):
            listener.bind(("127.0.0.1", 0))
            listener.listen()
        newcomer.settimeout(0.3)
        if is_open:
            newcomer.connect(listener.getsockname())
            return
        with pytest.raises(TimeoutError):
            newcomer.connect(listener.getsockname())
