"""The devices that a request selects, and the requests that are rejected with a fix."""

import pytest
import torch

from autopar.base.errors import DeviceError
from autopar.runtime.host.devices import MAX_CPU_WORKERS, resolve_devices

CPU = torch.device("cpu")


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with as many CUDA devices as the parameter says."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)


def with_cuda_devices(count: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("machine", [count], indirect=True)


@pytest.mark.usefixtures("machine")
@with_cuda_devices(0)
class TestOnAMachineWithoutCuda:
    def test_an_int_is_that_many_cpu_workers(self) -> None:
        assert resolve_devices(3) == [CPU] * 3

    def test_more_workers_than_cores_are_allowed_up_to_the_limit(self) -> None:
        assert len(resolve_devices(MAX_CPU_WORKERS)) == MAX_CPU_WORKERS
        for devices in (MAX_CPU_WORKERS + 1, ["cpu"] * (MAX_CPU_WORKERS + 1)):
            with pytest.raises(DeviceError, match=f"at most {MAX_CPU_WORKERS}"):
                resolve_devices(devices)

    def test_cpu_strings_and_devices(self) -> None:
        assert resolve_devices("cpu") == [CPU]
        assert resolve_devices(CPU) == [CPU]
        assert resolve_devices(["cpu", torch.device("cpu", 0)]) == [CPU, CPU]

    @pytest.mark.parametrize("devices", ["cuda", "cuda:0", ["cpu", "cuda:1"]])
    def test_a_cuda_device_does_not_exist(self, devices: str | list[str]) -> None:
        with pytest.raises(DeviceError, match=r'has 0 CUDA device\(s\); pass "cpu"'):
            resolve_devices(devices)


@pytest.mark.usefixtures("machine")
@with_cuda_devices(2)
class TestOnAMachineWithTwoCudaDevices:
    def test_an_int_is_the_first_cuda_devices(self) -> None:
        assert resolve_devices(2) == [torch.device("cuda", 0), torch.device("cuda", 1)]

    def test_more_than_exist_names_value_rule_and_fix(self) -> None:
        with pytest.raises(DeviceError, match=r"devices=3: .* has 2 .* devices=2, or .*\* 3"):
            resolve_devices(3)

    def test_a_missing_index_is_refused(self) -> None:
        with pytest.raises(DeviceError, match=r"'cuda:2' does not exist.*\"cuda:1\""):
            resolve_devices(["cuda:0", "cuda:2"])

    def test_strings_and_lists_keep_their_order(self) -> None:
        assert resolve_devices("cuda:1") == [torch.device("cuda", 1)]
        assert resolve_devices(["cuda:1", torch.device("cuda", 0)]) == [
            torch.device("cuda", 1),
            torch.device("cuda", 0),
        ]

    def test_cuda_without_an_index_is_the_current_device(self) -> None:
        assert resolve_devices("cuda") == [torch.device("cuda", 0)]

    def test_cpu_workers_can_be_asked_for(self) -> None:
        assert resolve_devices(["cpu"] * 4) == [CPU] * 4

    def test_a_device_listed_twice_is_refused(self) -> None:
        with pytest.raises(DeviceError, match="cuda:0 is listed more than once"):
            resolve_devices(["cuda", "cuda:0", "cuda:1"])

    def test_mixed_types_are_refused(self) -> None:
        with pytest.raises(DeviceError, match="same type"):
            resolve_devices(["cpu", "cuda:0"])


@pytest.mark.usefixtures("machine")
@with_cuda_devices(0)
@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (0, "at least one"),
        (-1, "at least one"),
        ([], "at least one"),
        (True, "is a bool"),
        (2.0, "is a float"),
        (None, "is a NoneType"),
        ("gpu", "is no device"),
        ([["cpu"]], "is no device"),
        ("meta", "runs on cpu and cuda"),
        ("cpu:1", r'pass \["cpu"\] \* 2'),
    ],
)
def test_anything_else_is_refused(devices: object, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        resolve_devices(devices)  # type: ignore[arg-type]
