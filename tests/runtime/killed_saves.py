"""Two ranks save over a checkpoint; the first one dies in front of a drawn change of the folder.

Arguments: a folder and the change's number, from 0, of those with which the first rank makes the
files the checkpoint; with a number beyond the last it does not die. ``before`` and ``after`` hold
the weights of the checkpoint that was there and of the one that was being written. The second rank
lives on, gets the error, and cleans up as every rank does whose save has failed.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from tests.warm import import_what_it_imports

NUM_RANKS = 2
DIED = 9


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def compiled_for(num_ranks: int) -> tuple[Any, tuple[Tensor, Tensor]]:
    """The compiled model and its batch."""
    batch = torch.linspace(-1, 1, 64).reshape(8, 8), torch.zeros(8, 8)
    compiled = autopar.compile(
        make_model(), num_ranks, example_inputs=batch, profile_limit_s=0,
        loss_fn=nn.functional.mse_loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    return compiled, batch


def main(folder: Path, number: int) -> None:
    dist.init_process_group("gloo")
    compiled, batch = compiled_for(NUM_RANKS)
    for name in ("before", "after"):
        compiled.train_step(*batch)
        state = compiled.full_state_dict()
        if dist.get_rank() == 0:
            torch.save(state, folder / name)
            if name == "after":
                die_at(number)
        try:
            compiled.save(folder / "saved")
        except AutoparError:
            (folder / "told").touch()
            raise
    compiled.close()


def die_at(number: int) -> None:
    """End this process in front of the change of a folder with this number."""
    changes = 0

    def counted(change: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            nonlocal changes
            if changes == number:
                os._exit(DIED)
            changes += 1
            change(*args, **kwargs)

        return call

    os.replace, os.unlink = counted(os.replace), counted(os.unlink)  # type: ignore[assignment]


def fork_ranks(folder: Path, number: int) -> list[int]:
    """Fork both ranks of one job; returns their exit codes."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pids = []
    for rank in range(NUM_RANKS):
        pid = os.fork()
        if pid == 0:
            os.environ.update(env | {"RANK": str(rank)})
            main(folder, number)
            sys.exit(0)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    root = Path(sys.argv[1])
    import_what_it_imports(lambda: compiled_for(1))
    for at in range(100):
        codes = fork_ranks(root / str(at), at)
        if codes[0] != DIED:
            break
