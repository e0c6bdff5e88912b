"""Untrusted plans: valid ones with a change, and the outcome of loading and running each.

`make_cases` has whole plans of several kinds for one small model. `mutated` changes one in a drawn
way: its values, keys and lists, words of its placements and choices, actions of its schedule, or
its bytes. `outcome_of` loads the result as a user would and, where it is accepted, runs it: all
ranks in lockstep and the devices of a pipeline in threads, beside eager PyTorch.

    python -m tests.plan_fuzz FIRST COUNT     # seeds FIRST.. in one process; prints the tally
"""

from __future__ import annotations

import copy
import functools
import json
import random
import re
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError, PlanError
from autopar.cost_models import Cluster
from autopar.cost_models.update import adamw
from autopar.frontend.capture import Captured, capture
from autopar.lowering.pipeline import with_pipeline
from autopar.lowering.stages import stage_of_blocks
from autopar.lowering.training import lower_training
from autopar.lowering.types import RankProgram, TensorMeta
from autopar.planning.movement import movement_of
from autopar.plans.binding import strategy_of
from autopar.plans.document import Plan
from autopar.runtime.machine.protocols import Received
from autopar.runtime.state.shards import gather, microbatch_of, scatter
from autopar.runtime.step.executor import Executor, StepResult
from autopar.testing.lockstep import LockstepMachine

Shards = list[Tensor]
WAIT_S = 30.0
TOLERANCE = 1e-9
BATCH, SEQUENCE, WIDTH, VOCABULARY = 8, 4, 8, 10


# --- one model, eager and under plans of several kinds ------------------------------------------
class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    """Three layers between an embedding and a head, whose ten classes do not divide by four."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(scores, labels.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The model, its results in eager PyTorch, and valid plans by kind."""

    captured: Captured
    batch: dict[str, Tensor]
    state: dict[str, Tensor]
    loss: float
    gradients: dict[str, Tensor]
    plans: dict[str, Plan]


OFFLOADED = 44_000
"""A memory that one device's plan fits by offloading, in bytes."""
DATA = [autopar.Force("data_parallel")]
BOTH = [autopar.Force("zero3", axis="x"), autopar.Force("tensor_parallel", axis="y")]
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "data parallel": (4, {"mesh": {"x": 2, "y": 2}, "constraints": DATA}),
    "two axes": (4, {"mesh": {"x": 2, "y": 2}, "constraints": BOTH}),
    "padded": (4, {"mesh": {"x": 4}, "constraints": [autopar.Force("tensor_parallel")]}),
    "micro-batches": (2, {"mesh": {"x": 2}, "num_microbatches": 4, "constraints": DATA}),
    "pipeline": (
        4,
        {"mesh": {"x": 2}, "num_stages": 2, "num_microbatches": 4, "constraints": DATA},
    ),
    "offloaded": (
        1,
        {
            "offload": True,
            "recompute": "none",
            "num_microbatches": 1,
            "constraints": [autopar.MemoryBudget(OFFLOADED)],
        },
    ),
    "interleaved": (
        2,
        {"num_stages": 4, "schedule": "interleaved", "num_microbatches": 2, "recompute": "full"},
    ),
    "chimera": (2, {"num_stages": 2, "schedule": "chimera", "num_microbatches": 2}),
    "reverse-first-k": (
        2,
        {
            "mesh": {"x": 2},
            "num_stages": 4,
            "schedule": "reverse_first_k",
            "constraints": [autopar.Force("zero3")],
        },
    ),
}


@functools.cache
def make_case() -> Case:
    torch.manual_seed(0)
    model = Tower().double()
    batch = {
        "ids": torch.randint(0, VOCABULARY, (BATCH, SEQUENCE)),
        "labels": torch.randint(0, VOCABULARY, (BATCH, SEQUENCE)),
    }
    batch["labels"][0, 1:] = -100
    plans = {}
    for kind, (num_devices, options) in KINDS.items():
        cluster = Cluster.preset("cpu", nodes=1, devices_per_node=num_devices)
        plans[kind] = autopar.plan(model, cluster, batch, **options)
    loss = model(**batch)
    loss.backward()
    return Case(
        captured=capture(model, batch),
        batch=batch,
        state={name: p.detach().clone() for name, p in model.named_parameters()},
        loss=loss.item(),
        gradients={name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        plans=plans,
    )


# --- the devices of a pipeline in threads -------------------------------------------------------
class Wires:
    """Messages between the devices of a pipeline, by their number on each link."""

    def __init__(self) -> None:
        self._sent: dict[Any, list[Shards]] = {}
        self._news = threading.Condition()
        self.broken = False

    def put(self, key: Any, values: Sequence[Shards]) -> None:
        with self._news:
            self._sent[key] = [[x.clone() for x in value] for value in values]
            self._news.notify_all()

    def take(self, key: Any) -> list[Shards]:
        with self._news:
            if not self._news.wait_for(lambda: self.broken or key in self._sent, WAIT_S):
                raise TimeoutError(f"nothing came for {key}")
            if self.broken:
                raise TimeoutError("another device failed")
            return self._sent.pop(key)

    def cut(self) -> None:
        with self._news:
            self.broken = True
            self._news.notify_all()


class ThreadLinks:
    """`autopar.runtime.machine.protocols.Links` of one thread."""

    def __init__(self, wires: Wires, device: int) -> None:
        self.wires = wires
        self.device = device
        self.count: Counter[Any] = Counter()

    def _next(self, key: Any) -> Any:
        self.count[key] += 1
        return (*key, self.count[key])

    def send(self, device: int, values: Sequence[Shards]) -> Callable[[], None]:
        self.wires.put(self._next(("message", self.device, device)), values)
        return lambda: None

    def receive(self, device: int, metas: Sequence[TensorMeta]) -> Callable[[], Received[Shards]]:
        key = self._next(("message", device, self.device))
        return lambda: Received(self.wires.take(key), 0.0)

    def start_sum(
        self, devices: tuple[int, ...], values: Sequence[Shards]
    ) -> Callable[[], Sequence[Shards]]:
        number = self._next(("sum", devices))
        for other in devices:
            self.wires.put((*number, self.device, other), values)

        def wait() -> Sequence[Shards]:
            parts = [self.wires.take((*number, other, self.device)) for other in devices]
            return [[sum(x[1:], start=x[0]) for x in zip(*shards)] for shards in zip(*parts)]

        return wait

    def share(self, devices: tuple[int, ...], value: Shards | None, meta: TensorMeta) -> Shards:
        raise NotImplementedError("no forward program is run here")


def run_devices(program: RankProgram, case: Case) -> list[StepResult[Shards]]:
    """One step of every device of the pipeline, each in a thread; raises an error of any of
    them."""
    num_devices = program.pipeline.num_devices
    wires = Wires()
    results: dict[int, StepResult[Shards]] = {}
    errors: list[BaseException] = []

    def play(device: int) -> None:
        try:
            results[device] = _step(program, case, ThreadLinks(wires, device), device)
        except BaseException as error:
            errors.append(error)
            wires.cut()

    threads = [threading.Thread(target=play, args=(device,)) for device in range(num_devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    if errors:
        raise errors[0]
    return [results[device] for device in range(num_devices)]


def _step(program: RankProgram, case: Case, links: Any, device: int) -> StepResult[Shards]:
    mesh = program.mesh
    tensors = case.captured.signature.flatten((), case.batch)
    executor: Executor[Shards] = Executor(program, LockstepMachine(mesh), links, device)
    num = program.num_microbatches
    return executor.step(
        {p.value: scatter(case.state[p.name], p.stored, mesh) for p in program.parameters},
        {
            b.value: [dict(program.constants)[b.name].clone() for _ in range(mesh.num_devices)]
            for b in program.buffers
        },
        [
            {
                i.value: scatter(microbatch_of(t, i, num, index), i.placements, mesh)
                for i, t in zip(program.inputs, tensors)
            }
            for index in range(num)
        ],
    )


def differs_from_eager(program: RankProgram, case: Case) -> str | None:
    """The difference of one step from eager PyTorch; None if there is none."""
    results = run_devices(program, case)
    for result in results:
        for loss in result.loss:
            if abs(loss.item() - case.loss) > TOLERANCE:
                return f"loss {loss.item()} is {case.loss} in eager mode"
    for parameter in program.parameters:
        expected = case.gradients[parameter.name]
        for device in parameter.devices or range(len(results)):
            got = results[device].gradients.get(parameter.value)
            if got is None:
                return f"no gradient of {parameter.name} on device {device}"
            whole = gather(got, parameter.stored, parameter.shape, program.mesh)
            if not torch.allclose(whole, expected, rtol=TOLERANCE, atol=TOLERANCE):
                return f"gradient of {parameter.name} is off by {(whole - expected).abs().max()}"
    return None


# --- what is changed ----------------------------------------------------------------------------
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 1.5, -0.0, 1e308, 2**31, 2**63, 2**64, 10**30,
    "", "x", "-", "R", "S0", "P", "\ud800", "\x1b[31m", "\u202e", "x" * 3000, [], {}, [1],
    ["x"], {"x": 1}, [[[]]],
)  # fmt: skip
TOKENS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "01", "1_0", "0x1", "9" * 5000, "1.",
          "[" * 5000, '{"a":' * 5000, '"\\ud800"', "1e-999", "--1", "tru", "")  # fmt: skip
WORDS = ("R", "P", "V", "S0", "S1", "S2", "S9", "S0/0", "S0/2", "S1/2", "S1/4", "S0/8", "S1/3",
         "S-1", "S", "S0/", "S٣", "S0/99999999999999999999", "-", "m", "m0", "n", "n0", "k", "h",
         "d0", "d1", "d2", "d0/2", "d0/0", "n/2", "k/4", "d0/²", "+", "k/-1", "")  # fmt: skip
ACTION = re.compile(r"\d+(?:\.\d+)?[A-Z_]+\d*(?:-\d+)?(?:@\w+)?(?:~\d+)?(?:>\S+)?")
PLACED = ("inputs", "parameters", "relays")

Edit = Callable[[random.Random, Any], None]


def _spots(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = [(value, key) for key in value]
    elif isinstance(value, list):
        items = [(value, index) for index in range(len(value))]
    return [spot for item in items for spot in (item, *_spots(item[0][item[1]]))]


def _odd_value(draw: random.Random, document: Any) -> None:
    container, key = draw.choice(_spots(document))
    container[key] = copy.deepcopy(draw.choice(ODD))


def _other_number(draw: random.Random, document: Any) -> None:
    spots = [(c, k) for c, k in _spots(document) if type(c[k]) in (int, float)]
    container, key = draw.choice(spots)
    number = container[key]
    container[key] = draw.choice((number + 1, number - 1, -number, 2 * number, 0, number * 10**9))


def _other_keys(draw: random.Random, document: Any) -> None:
    spots = [(c, k) for c, k in _spots(document) if isinstance(c, dict)]
    container, key = draw.choice(spots)
    value = container.pop(key)
    match draw.randrange(3):
        case 0:
            container[draw.choice(("surprise", key + "x", key[:-1], "\x00", "__class__"))] = value
        case 1:
            container[key] = value
            container[key + " "] = copy.deepcopy(value)


def _other_list(draw: random.Random, document: Any) -> None:
    lists = [c[k] for c, k in _spots(document) if isinstance(c[k], list) and c[k]]
    chosen = draw.choice(lists)
    place = draw.randrange(len(chosen))
    match draw.randrange(5):
        case 0:
            del chosen[place]
        case 1:
            chosen.insert(place, copy.deepcopy(draw.choice(chosen)))
        case 2:
            other = draw.randrange(len(chosen))
            chosen[place], chosen[other] = chosen[other], chosen[place]
        case 3:
            del chosen[place:]
        case 4:
            chosen[place] = copy.deepcopy(draw.choice(chosen))


def _other_word(draw: random.Random, document: Any) -> None:
    """Replace a word of a placement or a choice by another, often a valid one."""
    texts = document[draw.choice((*PLACED, "parameters", "ops", "ops"))]
    if not isinstance(texts, dict) or not texts:
        return
    name = draw.choice(sorted(texts))
    words = str(texts[name]).split(" ")
    known = [w for text in texts.values() for w in str(text).split(" ")]
    place = draw.randrange(len(words))
    match draw.randrange(6):
        case 0:
            words.insert(place, draw.choice(WORDS))
        case 1:
            del words[place]
        case 2 | 3:
            words[place] = draw.choice(WORDS)
        case _:
            words[place] = draw.choice(known)
    texts[name] = " ".join(words)


def _swapped_texts(draw: random.Random, document: Any) -> None:
    texts = document[draw.choice((*PLACED, "ops"))]
    if isinstance(texts, dict) and len(texts) > 1:
        one, other = draw.sample(sorted(texts), 2)
        texts[one], texts[other] = texts[other], texts[one]


def _whole_ops(draw: random.Random, document: Any) -> None:
    """Make some ops unsplit."""
    ops = document["ops"]
    if isinstance(ops, dict) and ops:
        for name in draw.sample(sorted(ops), draw.randint(1, len(ops))):
            del ops[name]


def _other_actions(draw: random.Random, document: Any) -> None:
    schedule = document["schedule"]
    lines = schedule.get("actions") if isinstance(schedule, dict) else None
    if not lines or not isinstance(lines, list):
        return _other_number(draw, document)
    number = draw.randrange(len(lines))
    key, colon, text = str(lines[number]).partition(":")
    words = text.split(" ")
    place = draw.randrange(len(words))
    match draw.randrange(9):
        case 0:
            del words[place]
        case 1:
            words.insert(place, words[draw.randrange(len(words))])
        case 2 | 3:
            other = draw.randrange(len(words))
            words[place], words[other] = words[other], words[place]
        case 4:
            words[place] = re.sub(
                r"\d+", lambda m: str(int(m[0]) + draw.choice((-1, 1))), words[place], count=1
            )
        case 5:
            words[place] = re.sub(
                r"[A-Z_]+",
                draw.choice(("F", "B", "I", "W", "R", "G", "U", "O", "SEND_F", "RECV_B")),
                words[place],
                count=1,
            )
        case 6:
            words[place] += draw.choice(
                ("@side", "@main", "~1", "~2", ">0F0", "-9", "0", "@", "~", "é", "999999999")
            )
        case 7:
            words[place] = draw.choice(
                ("0", "1", "2", "999999999", "yes", "no", "1 0", "0 0", "|", "0 1 | 1 0")
            )
        case 8:
            key = draw.choice(
                (
                    "device 0",
                    "device 1",
                    "recomputed",
                    "offloaded",
                    "reduces",
                    "updates",
                    "name",
                    "replica_of",
                    "placement",
                    "num_microbatches",
                )
            )
    lines[number] = f"{key}{colon}{' '.join(words)}"


EDITS: tuple[tuple[Edit, int], ...] = (
    (_odd_value, 3),
    (_other_number, 3),
    (_other_keys, 2),
    (_other_list, 2),
    (_other_word, 6),
    (_swapped_texts, 2),
    (_whole_ops, 1),
    (_other_actions, 4),
)


def _rewritten(draw: random.Random, text: str) -> str:
    """Insert text that no Python value serialises to."""
    match draw.randrange(3):
        case 0:  # a token in place of a number
            numbers = list(re.finditer(r"(?<=[ :\[,])-?\d+(?:\.\d+)?(?:e-?\d+)?(?=[,\]}\s])", text))
            found = draw.choice(numbers)
            return text[: found.start()] + draw.choice(TOKENS) + text[found.end() :]
        case 1:  # a key twice
            lines = text.splitlines(keepends=True)
            keyed = [i for i, line in enumerate(lines) if re.search(r'": .*,$', line)]
            if not keyed:
                return text[:-2]
            place = draw.choice(keyed)
            return "".join((*lines[:place], lines[place], *lines[place:]))
        case _:
            place = draw.randrange(len(text))
            return text[:place] + draw.choice(TOKENS) + text[place:]


def _other_bytes(draw: random.Random, data: bytes) -> bytes:
    content = bytearray(data)
    place = draw.randrange(len(content))
    match draw.randrange(4):
        case 0:
            for _ in range(draw.randint(1, 3)):
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        case 1:
            del content[place:]
        case 2:
            del content[place : place + draw.randint(1, 40)]
        case 3:
            content[place:place] = draw.randbytes(draw.randint(1, 4))
    return bytes(content)


def mutated(plan: Plan, seed: int) -> bytes:
    """The bytes of a plan changed according to the seed; lone surrogates are escaped."""
    draw = random.Random(seed)
    way = draw.randrange(10)
    if way < 7:
        document = json.loads(plan.to_json())
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            edits, weights = zip(*EDITS)
            try:
                draw.choices(edits, weights)[0](draw, document)
            except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError):
                break  # an edit before it took away what this one changes
        return json.dumps(document, indent=draw.choice((None, 2))).encode()
    text = plan.to_json()
    return _rewritten(draw, text).encode() if way == 7 else _other_bytes(draw, text.encode())


# --- what becomes of it -------------------------------------------------------------------------
def _decisions(plan: Plan) -> tuple[Any, ...]:
    return (
        plan.mesh, plan.schedule, plan.inputs, plan.parameters, plan.released, plan.scattered,
        plan.relays, plan.ops, plan.recomputed.kept, plan.offload,
    )  # fmt: skip


def loaded(data: bytes, way: int, folder: Path) -> Plan:
    """The plan, given as bytes, as text or as a file."""
    if way == 0:
        return Plan.from_json(data)
    if way == 1:
        return Plan.from_json("{" + data.decode(errors="surrogateescape").partition("{")[2])
    path = folder / "plan.json"
    path.write_bytes(data)
    return Plan.from_json(path)


PAGE_EVERY = 17
"""Pages have figures, which take far longer than the rest. A prime, so that every kind has some."""


def outcome_of(case: Case, kind: str, seed: int, folder: Path, *, share_run: float) -> str:
    """The outcome of one changed plan; one that begins with "BAD" is a failure."""
    draw = random.Random(~seed)
    whole = case.plans[kind]
    step = "loading"
    try:
        plan = loaded(mutated(whole, seed), seed % 3, folder)
        step = "report"
        str(plan), plan.report("full"), plan.to_json()
        if seed % PAGE_EVERY == 0:
            plan._repr_html_()
        step = "strategy"
        strategy = strategy_of(plan, case.captured, whole.cluster.num_devices)
        if _decisions(plan) == _decisions(whole):
            return "accepted, same decisions"
        if draw.random() > share_run:
            return "accepted, other decisions, not run"
        step = "lowering"
        program = lower_training(
            strategy, plan.schedule.num_microbatches, recomputation=plan.recomputed
        )
        staged = plan.schedule.pipeline()
        if staged is not None:
            program = with_pipeline(program, stage_of_blocks(staged[0], strategy.graph), staged[1])
        step = "movement"
        movement_of(plan, program, adamw(plan.cluster.device))
        step = "running"
        difference = differs_from_eager(program, case)
        return "accepted, runs as eager" if difference is None else f"BAD wrong: {difference}"
    except AutoparError as error:
        place = "with" if " at $" in str(error) else "without"
        refused = isinstance(error, PlanError) and step != "running"
        return f"{'refused' if refused else 'BAD'} {step}, {type(error).__name__} {place} place"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"BAD {step}: {type(error).__name__}: {error!s:.120} ({where.filename}:{where.lineno})"
        )


def tally(first: int, count: int, *, share_run: float) -> tuple[Counter[str], dict[str, int]]:
    """Outcomes of the plans of ``count`` seeds, each with the first seed that led to it."""
    case = make_case()
    kinds = list(KINDS)
    counts: Counter[str] = Counter()
    firsts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            kind = kinds[seed % len(kinds)]
            outcome = outcome_of(case, kind, seed, Path(folder), share_run=share_run)
            counts[outcome] += 1
            firsts.setdefault(outcome, seed)
    return counts, firsts


def main() -> None:
    counts, firsts = tally(int(sys.argv[1]), int(sys.argv[2]), share_run=1.0)
    for outcome, count in counts.most_common():
        print(f"{count:7d}  {outcome}  (seed {firsts[outcome]})")


if __name__ == "__main__":
    main()
