"""The script of each rank in test_elastic.py: train on however many processes there are.

The ranks of the agent named ``b``, among four, and all ranks among two wait before a step, for what
the test does to the job. Among two nothing is trained at the beginning: the others come late.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tests.runtime.torchrun_periodic import compiled_here, make_batch

NUM_STEPS = 8
LEFT_AT, JOINED_AT = 3, 6


def main(folder: Path) -> None:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with compiled_here() as compiled, (folder / "losses").open("a") as log:
        done = compiled.checkpoint_every(1, folder / "saved", keep=2)
        for step in range(done, NUM_STEPS):
            is_left = num_ranks == 4 and step == LEFT_AT and os.environ["AGENT"] == "b"
            if is_left or (num_ranks == 2 and step in (0, JOINED_AT)):
                (folder / f"waiting-{num_ranks}-{step}-{rank}").touch()
                time.sleep(600)
            loss = compiled.train_step(**make_batch(step)).item()
            if rank == 0:
                print(json.dumps([num_ranks, done, step, loss]), file=log, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
