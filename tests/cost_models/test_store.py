"""The profile store survives damaged and foreign files, concurrent writers, and killed
processes."""

import contextlib
import multiprocessing
import os
import re
import resource
import signal
import sqlite3
import tempfile
import threading
import time
import warnings
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_samples import samples

from autopar.cost_models import Cluster, CostError, OpCall, ProfileStore, StoreWarning, TensorSpec
from autopar.cost_models.call_text import call_from_text, call_to_text
from autopar.cost_models.store import SCHEMA_VERSION, CollectiveTime, OpTime, _checksum

DEVICE = Cluster.preset("cpu").device
FORK = multiprocessing.get_context("fork")


def _call(rows=4):
    return OpCall("aten.relu.default", (TensorSpec((rows, 8)),))


def _times(forward_s=1e-3):
    return OpTime(
        forward_s=forward_s, input_grad_s=2e-3, weight_grad_s=0.0, spread=0.1, num_samples=5
    )


def _collective(size_bytes):
    return CollectiveTime(size_bytes=size_bytes, time_s=1e-3, spread=0.1, num_samples=3)


@pytest.mark.parametrize("case", samples(), ids=lambda case: str(case[0]))
def test_every_call_reads_back_from_its_text(case):
    call = OpCall.of(*case)
    text = call_to_text(call)
    assert call_from_text(text) == call
    assert call_to_text(call_from_text(text)) == text


@given(st.text())
def test_text_that_is_no_call_is_refused(text):
    with pytest.raises(CostError):
        call_from_text(text)


@pytest.mark.parametrize(
    "text", ["[]", '["a",[],[[1]]]', '["a",[{"torch":"load"}],[]]', '["a",[{"eval":"1"}],[]]']
)
def test_text_never_reaches_anything_but_constants(text):
    with pytest.raises(CostError):
        call_from_text(text)


def test_times_outlive_the_process_that_measured_them(tmp_path):
    path = tmp_path / "deep" / "store.sqlite3"
    with ProfileStore(path, DEVICE) as store:
        assert store.get(_call()) is None
        store.put(_call(), _times())
    with ProfileStore(path, DEVICE) as store:
        assert store.get(_call()) == _times()
        assert list(store.of_op("aten.relu.default")) == [(_call(), _times())]
        assert store.get(_call(rows=5)) is None


def test_why_a_call_has_no_time_belongs_to_one_device(tmp_path):
    path = tmp_path / "store.sqlite3"
    with ProfileStore(path, DEVICE) as store:
        assert store.failure(_call()) is None
        store.put_failure(_call(), "no kernel")
    with ProfileStore(path, DEVICE) as store:
        assert store.failure(_call()) == "no kernel"
        assert store.get(_call()) is None
    with ProfileStore(path, msgspec.structs.replace(DEVICE, name="another")) as other:
        assert other.failure(_call()) is None


def test_times_belong_to_one_device_torch_and_number_of_threads(tmp_path, monkeypatch):
    path = tmp_path / "store.sqlite3"
    with ProfileStore(path, DEVICE) as store:
        store.put(_call(), _times())
    for change in ({"name": "another"}, {"num_threads": 7}):
        with ProfileStore(path, msgspec.structs.replace(DEVICE, **change)) as other:
            assert other.get(_call()) is None
    monkeypatch.setattr(torch, "__version__", "9.9")
    with ProfileStore(path, DEVICE) as other:
        assert other.get(_call()) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-3, 0.0])
def test_numbers_that_cannot_be_times_are_not_stored(value):
    with pytest.raises(CostError, match="cannot be the times"):
        ProfileStore(None, DEVICE).put(_call(), _times(value))


@pytest.mark.parametrize("damage", ["header", "middle", "truncated", "text"])
def test_a_damaged_file_is_set_aside_and_rebuilt(tmp_path, damage):
    path = tmp_path / "store.sqlite3"
    with ProfileStore(path, DEVICE) as store:
        for rows in range(1, 400):
            store.put(_call(rows), _times())
    content = bytearray(path.read_bytes())
    match damage:
        case "header":
            content[:64] = b"\xff" * 64
        case "middle":
            content[4096:] = b"\x5a" * (len(content) - 4096)
        case "truncated":
            content = content[: len(content) // 2 + 100]
        case "text":
            content = bytearray(b"these are not the bytes of a database, " * 200)
    path.write_bytes(content)
    with pytest.warns(StoreWarning, match="damaged"):
        store = ProfileStore(path, DEVICE)
    with store:
        assert store.get(_call()) is None
        store.put(_call(), _times())
    with ProfileStore(path, DEVICE) as store:
        assert store.get(_call()) == _times()
    (aside,) = tmp_path.glob("*.aside-*")
    assert aside.read_bytes() == bytes(content)


def test_a_strangers_database_is_left_alone(tmp_path):
    path = tmp_path / "store.sqlite3"
    with sqlite3.connect(path) as stranger:
        stranger.execute("CREATE TABLE op_times (precious TEXT)")
        stranger.execute("INSERT INTO op_times VALUES ('data')")
    stranger.close()
    before = path.read_bytes()
    with pytest.warns(StoreWarning, match="another program"):
        store = ProfileStore(path, DEVICE)
    with store:
        store.put(_call(), _times())
        assert store.get(_call()) == _times()
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, SCHEMA_VERSION - 1])
def test_other_layouts_are_never_misread(tmp_path, version):
    path = _file_of_two_calls(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version={version}")
    connection.close()
    before = path.read_bytes()
    with pytest.warns(StoreWarning, match=f"its layout is {version}, not {SCHEMA_VERSION}"):
        store = ProfileStore(path, DEVICE)
    with store:
        assert store.get(_call()) is None
    (aside,) = tmp_path.glob("*.aside-*")
    assert aside.read_bytes() == before


def _file_of_two_calls(folder):
    path = folder / "store.sqlite3"
    with ProfileStore(path, DEVICE) as store:
        store.put(_call(), _times())
        store.put(_call(2), _times())
    return path


def _rewritten(path, column, value, key):
    """The file with another value in one row, and a matching checksum."""
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE entries SET {column}=CAST(? AS TEXT) WHERE key=?", (value, key))
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        for row in connection.execute("SELECT owner, kind, name, key, value FROM entries"):
            connection.execute(
                "UPDATE entries SET checksum=? WHERE key=CAST(? AS TEXT)", (_checksum(row), row[3])
            )
    connection.close()


@pytest.mark.parametrize(
    "value",
    [
        '{"forward_s":"soon","input_grad_s":0,"weight_grad_s":0,"spread":0,"num_samples":3}',
        '{"forward_s":-1.0,"input_grad_s":0,"weight_grad_s":0,"spread":0,"num_samples":3}',
        '{"forward_s":1.0}',
        "[" * 20_000,
        "",
    ],
    ids=["a word", "below zero", "too few", "too deep", "nothing"],
)
def test_numbers_that_no_store_has_written_are_left_out(tmp_path, value):
    path = _file_of_two_calls(tmp_path)
    _rewritten(path, "value", value, call_to_text(_call(2)))
    with ProfileStore(path, DEVICE) as store:
        with pytest.warns(StoreWarning, match="implausible"):
            assert store.get(_call(2)) is None
        assert list(store.everything()) == [(_call(), _times())]


@pytest.mark.parametrize(
    "text",
    [
        '["aten.relu.default",[{"tensor":[["a"],"float32",null,0,0]}],[]]',
        '["aten.relu.default",[{"tensor":[[-4,8],"float32",null,0,0]}],[]]',
        "[" * 20_000,
        b"\xff\xfe",
    ],
    ids=["a word for a size", "a negative size", "too deep", "not UTF-8"],
)
def test_a_row_that_is_no_call_does_not_hide_the_others(tmp_path, text):
    path = _file_of_two_calls(tmp_path)
    _rewritten(path, "key", text, call_to_text(_call(2)))
    with ProfileStore(path, DEVICE) as store, pytest.warns(StoreWarning, match="is ignored"):
        assert list(store.everything()) == [(_call(), _times())]


def _damaged(path, column):
    """The file with one bit of one value in each row flipped."""
    with sqlite3.connect(path) as connection:
        for (value,) in connection.execute(f"SELECT DISTINCT {column} FROM entries").fetchall():
            if isinstance(value, int):
                other = value ^ 1
            else:
                place = max(value.find(digit) for digit in "12345678")
                other = value[:place] + chr(ord(value[place]) ^ 1) + value[place + 1 :]
            connection.execute(f"UPDATE entries SET {column}=? WHERE {column}=?", (other, value))
    connection.close()


@pytest.mark.parametrize("column", ["value", "checksum", "key"])
def test_a_bit_that_turned_in_a_row_costs_its_time_and_is_said_once(tmp_path, column):
    path = _file_of_two_calls(tmp_path)
    _damaged(path, column)
    calls = [_call(rows) for rows in (2, 4)]
    with ProfileStore(path, DEVICE) as store:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert list(store.everything()) == []
            assert [store.get(call) for call in calls] == [None, None]
        (warning,) = said
        assert "damaged" in str(warning.message)
        store.put(calls[0], _times(7e-3))
        assert store.get(calls[0]) == _times(7e-3)
    with ProfileStore(path, DEVICE) as store, pytest.warns(StoreWarning, match="damaged"):
        assert list(store.everything()) == [(calls[0], _times(7e-3))]


@pytest.mark.parametrize("column", ["value", "key", "checksum"])
def test_a_bit_that_turned_in_a_collectives_row_costs_its_time(tmp_path, column):
    path = tmp_path / "store.sqlite3"
    with ProfileStore(path, DEVICE) as store:
        store.put_collective("all_reduce", "[8]", "gloo", _collective(8))
        assert store.collectives("gloo") == {("all_reduce", "[8]"): (_collective(8),)}
    _damaged(path, column)
    with ProfileStore(path, DEVICE) as store, pytest.warns(StoreWarning, match="damaged"):
        assert store.collectives("gloo") == {}


def test_a_damaged_reason_is_none(tmp_path):
    path = tmp_path / "store.sqlite3"
    with ProfileStore(path, DEVICE) as store:
        store.put_failure(_call(), "8 kernels are missing")
    _damaged(path, "value")
    with ProfileStore(path, DEVICE) as store, pytest.warns(StoreWarning, match="damaged"):
        assert store.failure(_call()) is None


def test_whole_seconds_are_read_back(tmp_path):
    path = tmp_path / "store.sqlite3"
    times = OpTime(forward_s=1, input_grad_s=0, weight_grad_s=0, spread=0, num_samples=1)
    with ProfileStore(path, DEVICE) as store:
        store.put(_call(), times)
        assert store.get(_call()) == times


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_left_alone(tmp_path, kind):
    path = tmp_path / "store.sqlite3"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path = Path("/dev/null")
        case "folder":
            path.mkdir()
    with pytest.warns(StoreWarning, match="not a regular file; times are kept in memory"):
        store = ProfileStore(path, DEVICE)
    with store:
        store.put(_call(), _times())
        assert store.get(_call()) == _times()
    assert not path.is_file()


def _hold(path, statement, held):
    connection = sqlite3.connect(path, isolation_level=None)
    if statement == "BEGIN EXCLUSIVE":  # in a write-ahead log others would still read
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    connection.execute(statement)
    connection.execute("INSERT INTO entries VALUES ('', '', '', '', '', 0)")
    held.set()
    signal.pause()


@contextlib.contextmanager
def _held(path, statement):
    """While another process, which is yielded, holds the write lock."""
    held = FORK.Event()
    holder = FORK.Process(target=_hold, args=(path, statement, held))
    holder.start()
    assert held.wait(60)
    try:
        yield holder
    finally:
        holder.kill()
        holder.join(60)


@pytest.mark.timeout(50)
@pytest.mark.parametrize("statement", ["BEGIN EXCLUSIVE", "BEGIN IMMEDIATE"])
def test_a_file_that_is_locked_for_ever_is_done_without_and_said_once(tmp_path, statement):
    path = _file_of_two_calls(tmp_path)
    with _held(path, statement), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with ProfileStore(path, DEVICE) as store:
            old = {_call(2): _times()} if statement == "BEGIN IMMEDIATE" else {}
            assert store.get(_call(2)) == old.get(_call(2))
            store.put(_call(), _times(5e-3))  # only this one may wait
            want = {_call(): _times(5e-3), **old}
            for found in (store.everything(), store.of_op("aten.relu.default")):
                assert dict(pairs := list(found)) == want
                assert len(pairs) == len(want)
            for rows in range(5, 25):
                store.put(_call(rows), _times(rows))
            assert store.get(_call(24)) == _times(24)
    (warning,) = said
    assert warning.category is StoreWarning
    assert re.search(
        f"{path}: .*memory: database is locked. Stop the process", str(warning.message)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ProfileStore(path, DEVICE) as store:
            assert dict(store.everything()) == {_call(): _times(), _call(2): _times()}


@pytest.mark.parametrize("statement", ["BEGIN EXCLUSIVE", "BEGIN IMMEDIATE"])
def test_the_lock_of_a_process_that_died_holds_nobody_up(tmp_path, statement):
    path = _file_of_two_calls(tmp_path)
    with _held(path, statement) as holder:
        holder.kill()
        holder.join(60)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with ProfileStore(path, DEVICE) as store:
                store.put(_call(3), _times())
                assert len(list(store.everything())) == 3


def _fill_the_disk(path, results):
    """Every write beyond 64 KiB of a file fails, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    with warnings.catch_warnings(record=True) as said, ProfileStore(path, DEVICE) as store:
        warnings.simplefilter("always")
        for rows in range(1, 1001):
            store.put(_call(rows), _times(rows))
        found = {call.tensors()[0].shape[0]: times for call, times in store.everything()}
        assert found == {rows: _times(rows) for rows in range(1, 1001)}
        results.put([str(w.message) for w in said if w.category is StoreWarning])


def test_on_a_full_disk_times_are_kept_in_memory_and_what_was_written_stays(tmp_path):
    path = _file_of_two_calls(tmp_path)
    results = FORK.Queue()
    writer = FORK.Process(target=_fill_the_disk, args=(path, results))
    writer.start()
    (said,) = results.get(timeout=60)
    writer.join(60)
    assert "cannot be written, so new times are kept in memory" in said
    assert "free disk space" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ProfileStore(path, DEVICE) as store:
            found = {call.tensors()[0].shape[0]: times for call, times in store.everything()}
    assert 0 < len(found) < 1000
    assert all(times in (_times(rows), _times()) for rows, times in found.items())


def test_times_of_products_in_tensor_float32_are_others(tmp_path):
    path = tmp_path / "store.sqlite3"
    a100 = Cluster.preset("a100-80").device
    allowed = msgspec.structs.replace(a100, allow_tensor_float32=True)
    with ProfileStore(path, allowed) as store:
        store.put(_call(), _times())
    with ProfileStore(path, a100) as store:
        assert store.get(_call()) is None
    with ProfileStore(path, allowed) as store:
        assert store.get(_call()) == _times()


def test_threads_share_a_store(tmp_path):
    with ProfileStore(tmp_path / "store.sqlite3", DEVICE) as store:
        store.put(_call(), _times())
        found = []
        thread = threading.Thread(target=lambda: found.append(store.get(_call())))
        thread.start()
        thread.join()
        assert found == [_times()]


def _read_as_nobody(path, results):
    if os.getuid() == 0:
        os.setuid(65534)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        store = ProfileStore(path, DEVICE)
        old = store.get(_call())
        store.put(_call(9), _times())
        new = store.get(_call(9))
        store.put_failure(_call(8), "no kernel")
        assert store.failure(_call(8)) == "no kernel"
        store.put_collective("all_reduce", "[]", "gloo", _collective(8))
        store.put_collective("all_reduce", "[]", "nccl", _collective(4))
        collectives = store.collectives("gloo")
    messages = [str(w.message) for w in said if w.category is StoreWarning]
    results.put((old, new, collectives, messages))


@pytest.fixture
def open_folder():
    """A folder that other users may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not all(parent.stat().st_mode & 0o001 for parent in folder.parents):
            pytest.skip(f"another user may not enter {folder.parent}")
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


def test_a_file_that_cannot_be_written_is_read(open_folder):
    path = open_folder / "store.sqlite3"
    with ProfileStore(path, DEVICE) as store:
        store.put(_call(), _times())
        store.put_collective("all_reduce", "[]", "gloo", _collective(16))
    path.chmod(0o444)
    open_folder.chmod(0o555)
    results = FORK.Queue()
    reader = FORK.Process(target=_read_as_nobody, args=(path, results))
    reader.start()
    old, new, collectives, said = results.get(timeout=60)
    reader.join(60)
    assert old == _times()
    assert new == _times()
    assert collectives == {("all_reduce", "[]"): (_collective(8), _collective(16))}
    assert any("cannot be written" in message for message in said)


@pytest.mark.parametrize("closed", ["folder", "file"])
def test_what_may_not_be_opened_is_said_and_times_are_kept_in_memory(open_folder, closed):
    folder = open_folder / "own"
    with ProfileStore(folder / "store.sqlite3", DEVICE) as store:
        store.put(_call(), _times())
    (folder if closed == "folder" else folder / "store.sqlite3").chmod(0)
    results = FORK.Queue()
    reader = FORK.Process(target=_read_as_nobody, args=(folder / "store.sqlite3", results))
    reader.start()
    old, new, _, said = results.get(timeout=60)
    reader.join(60)
    folder.chmod(0o755)
    assert old is None
    assert new == _times()
    assert any("cannot be opened, so times are kept in memory" in message for message in said)


def _write_many(path, start, count, go):
    warnings.simplefilter("error", StoreWarning)
    go.wait(30)
    with ProfileStore(path, DEVICE) as store:
        for rows in range(start, start + count):
            store.put(_call(rows), _times(rows * 1e-6))


@pytest.mark.parametrize("attempt", range(5))
def test_many_processes_begin_and_fill_one_file(tmp_path, attempt):
    path = tmp_path / f"store-{attempt}.sqlite3"
    go = FORK.Event()
    writers = [FORK.Process(target=_write_many, args=(path, 1 + 50 * i, 100, go)) for i in range(4)]
    for writer in writers:
        writer.start()
    go.set()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    with ProfileStore(path, DEVICE) as store:
        found = {call.tensors()[0].shape[0]: t for call, t in store.of_op("aten.relu.default")}
    assert found == {rows: _times(rows * 1e-6) for rows in range(1, 251)}


def _write_for_ever(path, progress):
    with ProfileStore(path, DEVICE) as store:
        for rows in range(1, 10**9):
            store.put(_call(rows), _times(rows * 1e-6))
            progress.value = rows


@pytest.mark.parametrize("delay_s", [0.02, 0.05, 0.11])
def test_a_writer_killed_at_any_moment_loses_at_most_the_time_in_flight(tmp_path, delay_s):
    path = tmp_path / "store.sqlite3"
    progress = FORK.Value("q", 0, lock=False)  # a killed writer would keep a lock
    writer = FORK.Process(target=_write_for_ever, args=(path, progress))
    writer.start()
    deadline = time.monotonic() + 30
    while progress.value == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay_s)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(30)
    with ProfileStore(path, DEVICE) as store:
        found = sorted(c.tensors()[0].shape[0] for c, _ in store.of_op("aten.relu.default"))
    assert progress.value > 0
    assert found[: progress.value] == list(range(1, progress.value + 1))
    assert len(found) <= progress.value + 1


def test_a_forked_child_uses_its_own_connection(tmp_path):
    path = tmp_path / "store.sqlite3"
    store = ProfileStore(path, DEVICE)
    store.put(_call(1), _times())
    child = FORK.Process(target=lambda: store.put(_call(2), _times()))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert store.get(_call(1)) == store.get(_call(2)) == _times()
    store.close()
