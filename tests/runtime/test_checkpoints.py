"""Foreign and damaged checkpoints run no code, and failed saves lose nothing."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from autopar.base.errors import InputError, WorkerError
from autopar.runtime.runners.local import LocalRunner
from autopar.runtime.state import checkpoint, inert_pickle
from autopar.runtime.state.checkpoint_format import Chunk, StoredTensor, is_covered
from autopar.runtime.state.checkpoint_writer import CheckpointWriter
from autopar.runtime.state.plain import from_plain, to_plain
from autopar.runtime.workers.group import WorkerGroup
from tests.effort import EXHAUSTIVE
from tests.runtime import killed_saves
from tests.runtime.conftest import Groups
from tests.runtime.processes import ProbedService, runner_of
from tests.runtime.test_state import (
    BATCHES,
    SCHEDULERS,
    adamw,
    assert_close,
    eager,
    lowered,
    make_model,
    read_by_torch,
    start,
    train,
)

ROOT = Path(__file__).parents[2]
NUM_DAMAGED = 5000 if EXHAUSTIVE else 120


def resumable(groups: Groups) -> LocalRunner:
    return start(groups, "2", adamw, lr_scheduler=SCHEDULERS["cosine"])


def everything(runner: LocalRunner) -> dict[str, Any]:
    """All state that a checkpoint restores, flat."""
    state: dict[str, Any] = dict(runner.full_state_dict())
    optimizer = runner.optimizer_state_dict()
    for name, entries in optimizer["state"].items():
        state.update((f"{name}/{key}", value) for key, value in entries.items())
    state["groups"] = optimizer["param_groups"]
    state["progress"] = runner.group.call("progress")
    return state


def differing(got: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    if got.keys() != expected.keys():
        return sorted(got.keys() ^ expected.keys())
    return [
        key
        for key, value in expected.items()
        if not (torch.equal(got[key], value) if isinstance(value, Tensor) else got[key] == value)
    ]


def folder_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


class Canary:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class TestFromTorch:
    def saved_by_torch(self, path: Path, **more: Any) -> tuple[Any, list[float]]:
        model, optimizer, losses = eager(adamw, BATCHES[:2])
        names = {id(p): n for n, p in model.named_parameters()}
        groups = [
            {**group, "params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        state = {names[id(p)]: entries for p, entries in optimizer.state.items()}
        whole = {
            "model": model.state_dict(),
            "optimizer": {"state": state, "param_groups": groups},
            **more,
        }
        dcp.save(whole, checkpoint_id=path, no_dist=True)
        return model, losses

    def test_training_goes_on_from_it(self, groups: Groups, tmp_path: Path) -> None:
        model, losses = self.saved_by_torch(tmp_path, trainer={"num_steps": 2})
        runner = start(groups, "2x2", adamw)
        runner.load(tmp_path)
        assert_close(runner.full_state_dict(), model.state_dict())
        assert runner.group.call("progress")[0][0] == 2
        losses += train(runner, BATCHES[2:])
        assert losses == pytest.approx(eager(adamw, BATCHES)[2], rel=1e-9)

    def test_one_without_a_trainer(self, groups: Groups, tmp_path: Path) -> None:
        model, _ = self.saved_by_torch(tmp_path)
        runner = start(groups, "2", adamw)
        runner.load(tmp_path)
        assert_close(runner.full_state_dict(), model.state_dict())

    def test_no_code_in_it_runs(self, groups: Groups, tmp_path: Path) -> None:
        """In the metadata, in an entry of plain data and in a tensor's own entry."""
        canary = tmp_path / "canary"
        runner = start(groups, "2", adamw)
        before = everything(runner)
        self.saved_by_torch(tmp_path / "entry", trainer={"num_steps": Canary(canary)})
        shutil.copytree(tmp_path / "entry", tmp_path / "metadata")
        (tmp_path / "metadata" / ".metadata").write_bytes(pickle.dumps(Canary(canary)))
        shutil.copytree(tmp_path / "entry", tmp_path / "tensor")
        metadata = dcp.FileSystemReader(tmp_path / "entry").read_metadata()
        storage = metadata.storage_data
        place = next(p for i, p in storage.items() if i.fqn == "model.qkv.weight")
        evil = next(p for i, p in storage.items() if i.fqn == "trainer.num_steps")
        place.offset, place.length, evil.offset = evil.offset, evil.length, place.offset
        (tmp_path / "tensor" / ".metadata").write_bytes(pickle.dumps(metadata))
        for name in ("entry", "metadata", "tensor"):
            with pytest.raises(InputError, match="nothing was loaded"):
                runner.load(tmp_path / name)
        assert not canary.exists()
        assert differing(everything(runner), before) == []
        with pytest.raises(dcp.CheckpointException):
            dcp.load({}, checkpoint_id=tmp_path / "metadata", no_dist=True)
        assert canary.exists(), "the canary would have seen code that runs"


class TestFormat:
    def test_other_libraries_read_the_tensors(self, groups: Groups, tmp_path: Path) -> None:
        runner = start(groups, "2x2", adamw)
        train(runner, BATCHES[:2])
        runner.save(tmp_path)
        state, optimizer = runner.full_state_dict(), runner.optimizer_state_dict()["state"]
        moments = {
            f"optimizer.state.{name}.{key}": value
            for name, entries in optimizer.items()
            for key, value in entries.items()
        }
        expected = {**{f"model.{k}": v for k, v in state.items()}, **moments}
        found: dict[str, Any] = {key: torch.zeros_like(v) for key, v in expected.items()}
        read_by_torch(found, tmp_path)
        assert differing(found, expected) == []
        whole = start(groups, "whole", None)
        whole.load_state_dict(state)
        whole.save(tmp_path)
        by_file = [load_file(file) for file in sorted(tmp_path.glob("*.safetensors"))]
        joined = {key: value for tensors in by_file for key, value in tensors.items()}
        assert differing(joined, {f"model.{k}": v for k, v in state.items()}) == []

    def test_the_seed_and_the_schedule_come_back(self, groups: Groups, tmp_path: Path) -> None:
        first = start(groups, "2", adamw, lr_scheduler=SCHEDULERS["plateau"], seed=7)
        train(first, BATCHES[:2])
        first.save(tmp_path)
        second = start(groups, "2", adamw, lr_scheduler=SCHEDULERS["plateau"], seed=8)
        second.load(tmp_path)
        assert differing(everything(second), everything(first)) == []
        assert second.group.call("progress")[0][:2] == (2, 7)

    @pytest.mark.parametrize(
        "value",
        [
            [1, 2.5, float("inf"), -float("inf"), None, True, "ü", 2**70, -(2**63)],
            {"a": (1, (2,)), "b": {3: [], "$": "tuple"}, "c": Counter({4: 2})},
            {1.5: {}, None: ()},
            0.1 + 0.2,
        ],
    )
    def test_plain_data_is_as_it_was(self, value: Any) -> None:
        back = from_plain(json.loads(json.dumps(to_plain(value, "it"))))
        assert back == value
        assert type(back) is type(value)

    def test_a_tensor_is_covered_once(self) -> None:
        def stored(*boxes: tuple[tuple[int, int], tuple[int, int]]) -> StoredTensor:
            chunks = tuple(
                Chunk(name="x", begin=0, length=0, offsets=at, sizes=sizes) for at, sizes in boxes
            )
            return StoredTensor(dtype=torch.float32, shape=(4, 3), chunks=chunks)

        assert is_covered(stored(((0, 0), (4, 3))))
        assert is_covered(stored(((0, 0), (1, 3)), ((1, 0), (3, 1)), ((1, 1), (3, 2))))
        assert not is_covered(stored(((0, 0), (2, 3))))
        assert not is_covered(stored(((0, 0), (2, 3)), ((1, 0), (2, 3))))
        assert not is_covered(stored(((0, 0), (2, 3)), ((3, 0), (2, 3))))

    def test_a_pickle_that_would_take_all_memory_takes_none(self) -> None:
        huge_memo = b"\x80\x02Nr\xff\xff\xff\x7f."
        assert inert_pickle.read(huge_memo, ()) is None
        nested = b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"}h\x00Ns."
        for bad in (
            nested,
            b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f",
            b"",
            b"(" * 1000,
            b"\x80\x02t.",
        ):
            with pytest.raises(ValueError, match=r"pickle|key|byte|exhausted|expected"):
                inert_pickle.read(bad, ())


class TestNonFinite:
    def test_it_is_not_written_over_a_good_one(self, groups: Groups, tmp_path: Path) -> None:
        runner = start(groups, "2", adamw)
        runner.save(tmp_path)
        before = folder_of(tmp_path)
        state = runner.full_state_dict()
        state["qkv.weight"][20, 3] = float("nan")  # the second worker's
        state["norm.weight"].fill_(float("inf"))
        runner.load_state_dict(state)
        with pytest.raises(InputError, match=r"'qkv.weight' holds .*allow_nonfinite=True"):
            runner.save(tmp_path)
        assert folder_of(tmp_path) == before
        runner.save(tmp_path, allow_nonfinite=True)
        runner.load(tmp_path)
        loaded = runner.full_state_dict()["qkv.weight"]
        torch.testing.assert_close(loaded, state["qkv.weight"], equal_nan=True, rtol=0, atol=0)


class TestFailedSaves:
    @pytest.mark.parametrize("limit_bytes", [100, 1500])
    def test_a_full_disk_leaves_nothing(
        self, groups: Groups, tmp_path: Path, limit_bytes: int
    ) -> None:
        runner = start(groups, "2", adamw)
        train(runner, BATCHES[:1])
        runner.save(tmp_path / "old")
        before = folder_of(tmp_path / "old")
        train(runner, BATCHES[1:2])
        state = everything(runner)
        runner.group.call("limit_file_size", limit_bytes)
        try:
            for name in ("old", "new/deep"):
                with pytest.raises(InputError, match=r"cannot be written.*File too large"):
                    runner.save(tmp_path / name)
        finally:
            runner.group.call("limit_file_size", -1)
        assert folder_of(tmp_path / "old") == before
        assert not (tmp_path / "new").exists()
        assert differing(everything(runner), state) == []
        runner.save(tmp_path / "old")
        train(runner, BATCHES[2:3])
        runner.load(tmp_path / "old")
        assert differing(everything(runner), state) == []

    def test_what_a_killed_save_left_goes_with_the_next(
        self, groups: Groups, tmp_path: Path
    ) -> None:
        with WorkerGroup(2, service=Killed, threads_per_worker=1) as group:
            captured, program = lowered("2")
            runner = runner_of(group, captured, program, make_model(), optimizer=adamw)
            train(runner, BATCHES[:1])
            state = runner.full_state_dict()
            runner.save(tmp_path)
            train(runner, BATCHES[1:2])
            group.call("die_when_written")
            with pytest.raises(WorkerError, match=r"worker [01]"):
                runner.save(tmp_path)
        left = {file.name for file in tmp_path.iterdir()}
        assert any(name.endswith(".part") for name in left)
        runner = start(groups, "2x2", adamw)
        runner.load(tmp_path)
        assert_close(runner.full_state_dict(), state)
        runner.save(tmp_path)
        names = {file.name for file in tmp_path.iterdir()}
        assert not names & (left - {"autopar.json"})
        assert all(name.endswith(".safetensors") or name == "autopar.json" for name in names)

    def test_the_death_of_the_first_rank_loses_no_checkpoint(self, tmp_path: Path) -> None:
        """The folder then has the old checkpoint or the new one, whole."""
        with (tmp_path / "log").open("wb") as log:
            command = [sys.executable, "-m", killed_saves.__name__, str(tmp_path / "jobs")]
            (tmp_path / "jobs").mkdir()
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=240, check=True)
        jobs = sorted((tmp_path / "jobs").iterdir(), key=lambda job: int(job.name))
        compiled, _ = killed_saves.compiled_for(1)
        states = []
        for job in jobs:
            compiled.load(job / "saved")
            state = compiled.full_state_dict()
            states.append(
                [
                    name
                    for name in ("before", "after")
                    if differing(state, torch.load(job / name, weights_only=True)) == []
                ]
            )
            assert (job / "told").exists() == (job is not jobs[-1])
        compiled.close()
        assert states == [["before"], *(["after"] for _ in jobs[1:])]
        assert len(jobs) >= 6  # the manifest; old and new files; the guard


class Killed(ProbedService):
    """A rank whose process ends during a save."""

    def die_when_written(self) -> None:
        write = CheckpointWriter.write_data

        def dying(*args: Any) -> Any:
            write(*args).wait()
            os._exit(9)

        CheckpointWriter.write_data = dying  # type: ignore[method-assign,assignment]


# --- damaged checkpoints -------------------------------------------------------------------

Damage = Callable[[Path, random.Random], None]


def any_file(path: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(path.iterdir()))


def flip(path: Path, rng: random.Random) -> None:
    file = any_file(path, rng)
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def flip_head(path: Path, rng: random.Random) -> None:
    file = any_file(path, rng)
    data = bytearray(file.read_bytes())
    data[rng.randrange(min(len(data), 64))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    file = any_file(path, rng)
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data))])


def extend(path: Path, rng: random.Random) -> None:
    with any_file(path, rng).open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 100)))


def overwrite(path: Path, rng: random.Random) -> None:
    file = any_file(path, rng)
    data = bytearray(file.read_bytes())
    begin = rng.randrange(len(data))
    data[begin : begin + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, rng.randbytes(8)])
    file.write_bytes(data)


def swap(path: Path, rng: random.Random) -> None:
    first, second = rng.sample(sorted(path.iterdir()), 2)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def special(path: Path, rng: random.Random) -> None:
    file = any_file(path, rng)
    data = file.read_bytes()
    file.unlink()
    kind = rng.randrange(6)
    if kind == 0:
        os.mkfifo(file)
    elif kind == 1:
        file.mkdir()
    elif kind == 2:
        file.symlink_to(file.name)
    elif kind == 3:
        file.symlink_to("/dev/zero")
    elif kind == 4:
        with file.open("wb") as sparse:
            sparse.write(data)
            sparse.truncate(1 << 40)


def evil(path: Path, rng: random.Random) -> None:
    file = path / rng.choice([".metadata", any_file(path, rng).name])
    file.write_bytes(pickle.dumps(Canary(path.parent / "canary"), protocol=rng.randrange(6)))


INTACT: dict[str, Damage] = {
    damage.__name__: damage
    for damage in (flip, flip_head, truncate, extend, overwrite, swap, special, evil)
}
"""Whatever is loaded after these must be what was saved."""

VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**62, 2**63, 10**30, -(10**30), 0.5, "", "../../etc/passwd", "/x",
    "autopar-0000000000000000-0.safetensors", [], {}, [[]], {"$": "tuple"}, {"$": "os.system"},
    {"$": "dict", "value": [[[], 1]]}, {"$": "int", "value": "9" * 5000}, {"$": "float"},
    {"$": "tensor", "dtype": "save", "shape": [10**9], "data": ""}, "F8_E5M2", "a\0b", "\ud800",
]  # fmt: skip


def rewrite(path: Path, rng: random.Random) -> None:
    """A manifest with valid checksums in which an entry was replaced, duplicated or removed."""
    file = path / "autopar.json"
    content = json.loads(file.read_bytes())["content"]
    for _ in range(rng.randrange(1, 4)):
        held: Any = content
        while True:
            keys = list(held) if isinstance(held, dict) else range(len(held))
            key = rng.choice(list(keys))
            if isinstance(held[key], dict | list) and held[key] and rng.random() < 0.85:
                held = held[key]
                continue
            break
        act = rng.randrange(3)
        if act == 0:
            held[key] = rng.choice(VALUES)
        elif act == 1:
            del held[key]
        elif isinstance(held, list):
            held.append(held[key])
        else:
            held[f"{key}x"] = held[key]
        if not content:
            break
    raw = json.dumps(content, separators=(",", ":")).encode()
    sign(file, rng.choice([raw, raw.replace(b"0.05", b"1e999"), raw.replace(b"0.05", b"NaN")]))


def nest(path: Path, rng: random.Random) -> None:
    depth = rng.choice([100, 10_000, 300_000])
    deep = b"[" * depth + b"]" * depth
    sign(path / "autopar.json", b'{"files":[],"tensors":{},"plain":{"trainer":' + deep + b"}}")


def sign(file: Path, raw: bytes) -> None:
    digest = hashlib.sha256(raw).hexdigest().encode()
    head = b'{"autopar_checkpoint":1,"sha256":"' + digest + b'","content":'
    file.write_bytes(head + raw + b"}")


SIGNED: dict[str, Damage] = {"rewrite": rewrite, "nest": nest}
"""Other checkpoints, made by who knows the format: they are loaded whole or not at all."""


def peak_bytes(group: WorkerGroup) -> list[int]:
    """The peak memory of each worker so far."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        status = Path(f"/proc/{process.pid}/status").read_text()
        found += [int(x.split()[1]) << 10 for x in status.splitlines() if x.startswith("VmHWM")]
    return sorted(found)


def tally_of(
    runner: LocalRunner, good: Path, saved: dict[str, Any], others: Path, num: int,
    damages: dict[str, Damage], seed: int,
) -> Counter[str]:  # fmt: skip
    """Load ``num`` damaged copies of ``good``; each is refused by name, or whole."""
    rng = random.Random(seed)
    tally: Counter[str] = Counter()
    runner.load(others)
    present = everything(runner)
    for case in range(num):
        name = rng.choice(sorted(damages))
        work = good.parent / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(good, work)
        damages[name](work, rng)
        try:
            runner.load(work)
        except InputError:
            tally[f"{name}: refused"] += 1
            assert differing(everything(runner), present) == [], (name, case)
            continue
        tally[f"{name}: loaded"] += 1
        if name in INTACT:
            assert differing(everything(runner), saved) == [], (name, case)
        groups = everything(runner)["groups"]
        assert [group.keys() for group in groups] == [g.keys() for g in saved["groups"]], case
        runner.load(others)
    assert not (good.parent / "canary").exists()
    return tally


class Meddled(ProbedService):
    """A rank whose checkpoint is written to once all checksums have been verified."""

    def meddle(self, path: str) -> None:
        verify = checkpoint._Source.verify

        def verified(*args: Any) -> None:
            verify(*args)
            dist.barrier()
            for file in Path(path).glob("*.safetensors") if dist.get_rank() == 0 else ():
                data = bytearray(file.read_bytes())
                data[-1] ^= 1
                file.write_bytes(data)
            dist.barrier()

        checkpoint._Source.verify = verified  # type: ignore[method-assign]


class TestDamaged:
    def test_an_option_that_the_optimizer_lacks_is_refused(
        self, groups: Groups, tmp_path: Path
    ) -> None:
        runner = resumable(groups)
        train(runner, BATCHES[:1])
        runner.save(tmp_path)
        file = tmp_path / "autopar.json"
        content = json.loads(file.read_bytes())["content"]
        (group,) = content["plain"]["optimizer"]["param_groups"]
        for changed, named in (
            ({**group, "momentum": 0.9}, "'momentum'"),
            ({k: v for k, v in group.items() if k != "weight_decay"}, "'weight_decay'"),
        ):
            content["plain"]["optimizer"]["param_groups"] = [changed]
            sign(file, json.dumps(content, separators=(",", ":")).encode())
            with pytest.raises(InputError, match=f"options .*{named}"):
                runner.load(tmp_path)

    def test_a_file_that_changes_after_its_verification_is_refused(self, tmp_path: Path) -> None:
        with WorkerGroup(2, service=Meddled, threads_per_worker=1) as group:
            captured, program = lowered("2")
            runner = runner_of(group, captured, program, make_model(), optimizer=adamw)
            train(runner, BATCHES[:1])
            runner.save(tmp_path)
            runner.load(tmp_path)
            group.call("meddle", str(tmp_path))
            with pytest.raises(InputError, match="was changed after its checksum was verified"):
                runner.load(tmp_path)

    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("by", ["autopar", "torch"])
    def test_it_is_refused_or_whole(self, groups: Groups, tmp_path: Path, by: str) -> None:
        runner = resumable(groups)
        train(runner, BATCHES[:1])
        runner.save(tmp_path / "others")
        train(runner, BATCHES[1:3])
        runner.save(tmp_path / "good")
        saved = everything(runner)
        damages, num = {**INTACT, **SIGNED}, NUM_DAMAGED * 3 // 4
        if by == "torch":
            shutil.rmtree(tmp_path / "good")
            optimizer = runner.optimizer_state_dict()
            steps, _, schedule = runner.group.call("progress")[0]
            dcp.save(
                {
                    "model": runner.full_state_dict(),
                    "optimizer": optimizer,
                    "trainer": {"num_steps": steps, "lr_scheduler": schedule},
                },
                checkpoint_id=tmp_path / "good",
                no_dist=True,
            )
            damages, num = INTACT, NUM_DAMAGED // 4
        before = peak_bytes(runner.group)
        tally = tally_of(runner, tmp_path / "good", saved, tmp_path / "others", num, damages, 0)
        assert sum(tally.values()) == num
        assert max(peak_bytes(runner.group)) < max(before) + (1 << 30)
        print(by, dict(sorted(tally.items())))
        runner.load(tmp_path / "good")
        assert differing(everything(runner), saved) == []
