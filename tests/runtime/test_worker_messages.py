"""Messages arrive as sent; large tensors travel through one shared segment only."""

import copyreg
import functools
import os
import socket
import time
import weakref

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from autopar.runtime.workers.messages import Channel, Message, packed, unpack


def sent_through_socket(value: object) -> tuple[object, int, int]:
    """The value as received, its pickle's size and its segment's size, both in bytes."""
    left, right = socket.socketpair()
    sender, receiver = Channel(left), Channel(right)
    deadline_s = time.monotonic() + 10
    try:
        with packed(value) as message:
            sender.send(message, deadline_s=deadline_s)
            sizes = len(message.payload), message.segment_size_bytes
        return unpack(receiver.receive(deadline_s=deadline_s)), *sizes
    finally:
        sender.close()
        receiver.close()


def test_a_large_tensor_does_not_go_through_the_socket() -> None:
    tensor = torch.randn(1 << 22)
    received, payload_bytes, segment_bytes = sent_through_socket(tensor)
    assert torch.equal(received, tensor)
    assert payload_bytes < 1000
    assert segment_bytes == tensor.nbytes


def test_a_slice_sends_only_the_bytes_it_spans() -> None:
    data = torch.arange(1 << 20).reshape(1024, 1024)
    received, _, segment_bytes = sent_through_socket(data[3:8, 10:20])
    assert torch.equal(received, data[3:8, 10:20])
    assert received.stride() == (1024, 1)
    assert segment_bytes == (4 * 1024 + 10) * 8


def test_small_tensors_take_no_segment_and_are_the_receivers_own() -> None:
    tensor = torch.arange(100.0)
    with packed((tensor, tensor[50:])) as message:
        assert message.segment_fd is None
        whole, part = unpack(message)
    assert torch.equal(whole, tensor)
    part.zero_()
    assert whole[50:].any()
    assert tensor[50:].any()


def test_the_senders_tensor_stays_private_memory() -> None:
    tensor = torch.zeros(100)
    address = tensor.data_ptr()
    received, _, _ = sent_through_socket(tensor)
    received.add_(1)
    assert tensor.data_ptr() == address
    assert not tensor.is_shared()
    assert torch.equal(tensor, torch.zeros(100))


def test_tied_parameters_stay_tied_and_are_sent_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64))
    model[1].weight = model[0].weight
    alias = model[0].weight.detach()
    (received, alias), _, segment_bytes = sent_through_socket((model, alias))
    assert received[0].weight is received[1].weight
    assert alias.data_ptr() == received[0].weight.data_ptr()
    assert isinstance(received[0].weight, torch.nn.Parameter)
    assert received[0].weight.requires_grad
    assert segment_bytes == 64 * 64 * 4 + 64 * 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.empty(3, 0, 2, dtype=torch.int8),
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.randn(3, 5).bfloat16().t(),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(4, dtype=torch.complex64).imag,
        torch.randn(7, 1).expand(7, 9),
        torch.randn(6).to(torch.float8_e4m3fn),
    ],
    ids=lambda tensor: f"{str(tensor.dtype)[6:]}-{tuple(tensor.shape)}",
)
def test_kinds_of_dense_tensors(tensor: torch.Tensor) -> None:
    received, _, _ = sent_through_socket(tensor)
    torch.testing.assert_close(received, tensor, rtol=0, atol=0, equal_nan=True)
    assert received.stride() == tensor.stride()


def test_kinds_of_other_tensors_keep_their_kind() -> None:
    sparse = torch.eye(5).to_sparse()
    meta = torch.empty(1 << 40, device="meta")
    received, _, _ = sent_through_socket({"sparse": sparse, "meta": meta})
    assert received["sparse"].layout is torch.sparse_coo
    assert torch.equal(received["sparse"].to_dense(), torch.eye(5))
    assert received["meta"].device.type == "meta"
    assert received["meta"].shape == meta.shape


def test_a_traced_graph_computes_the_same() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    graph = torch.fx.symbolic_trace(model)
    received, _, _ = sent_through_socket(graph)
    inputs = torch.randn(3, 4)
    assert torch.equal(received(inputs), model(inputs))


def test_lambdas_closures_and_partials_are_sent_by_value() -> None:
    scale = torch.tensor(3.0)
    functions = (lambda x: x * scale, functools.partial(torch.optim.AdamW, lr=0.25))
    (times, optimizer), _, _ = sent_through_socket(functions)
    assert times(torch.tensor(2.0)) == 6.0
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert optimizer([parameter]).param_groups[0]["lr"] == 0.25


class Mark:
    pass


def test_a_reduction_that_is_replaced_counts_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        monkeypatch.setitem(copyreg.dispatch_table, Mark, lambda _, name=name: (str, (name,)))
        assert sent_through_socket(Mark())[0] == name


def test_nothing_of_a_message_is_held() -> None:
    tensor = torch.randn(1 << 16)
    held = weakref.ref(tensor)
    with packed([tensor, lambda: 1]):
        del tensor
        assert held() is None


def test_a_tensor_with_a_history_is_refused_with_the_fix() -> None:
    loss = (torch.ones(2, requires_grad=True) * 2).sum()
    with pytest.raises(ValueError, match=r"tensor\.detach\(\)"), packed(loss):
        pass


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_a_quantized_tensor_is_refused_with_the_fix() -> None:
    quantized = torch.quantize_per_tensor(torch.randn(8), 0.1, 0, torch.qint8)
    with pytest.raises(ValueError, match=r"tensor\.dequantize\(\)"), packed(quantized):
        pass


def test_without_memfd_a_temporary_file_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "posix_fallocate")
    tensor = torch.randn(10_000)
    assert torch.equal(sent_through_socket(tensor)[0], tensor)


def test_no_descriptor_is_left_open() -> None:
    sent_through_socket(torch.zeros(10))
    before = len(os.listdir("/dev/fd"))
    for _ in range(20):
        sent_through_socket((torch.zeros(10), torch.ones(10_000)))
    assert len(os.listdir("/dev/fd")) == before


def test_a_receiver_that_gets_nothing_gives_up_in_time() -> None:
    left, right = socket.socketpair()
    with left, right, pytest.raises(TimeoutError):
        Channel(right).receive(deadline_s=time.monotonic() + 0.1)


def test_a_sender_whose_receiver_does_not_read_gives_up_in_time() -> None:
    left, right = socket.socketpair()
    message = Message(payload=bytes(1 << 24))
    with left, right, pytest.raises(TimeoutError):
        Channel(left).send(message, deadline_s=time.monotonic() + 0.1)


def test_an_end_of_file_within_a_message_is_an_error() -> None:
    left, right = socket.socketpair()
    with right:
        left.sendall(b"\0" * 7)
        left.close()
        with pytest.raises(ConnectionError):
            Channel(right).receive(deadline_s=time.monotonic() + 10)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.data())
def test_any_strided_view_arrives_with_its_values_and_strides(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    if data.draw(st.booleans()):
        shape[0] *= 1000  # more than goes through the socket
    dtype = data.draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.float64]))
    base = torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape)
    view = base.permute(data.draw(st.permutations(range(len(shape)))))
    for dim, length in enumerate(view.shape):
        start = data.draw(st.integers(0, length))
        view = view.narrow(dim, start, data.draw(st.integers(0, length - start)))
    expected = view.clone()
    (received, whole), _, _ = sent_through_socket((view, base))
    assert torch.equal(received, expected)
    assert received.shape == view.shape
    assert received.stride() == view.stride()
    assert torch.equal(whole, base)
