"""Reads a pickle as data: imports and calls in it are recorded, and none is executed.

In: the bytes. Out: numbers, text, lists, tuples and mappings, with a `Call` where the pickle would
construct an object. The reader decides what a `Call` of a name means; a name that is not allowed is
refused before anything else is read.
"""

from __future__ import annotations

import collections
import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Name:
    """A name that the pickle would import."""

    path: str


@dataclass(slots=True, eq=False)
class Call:
    """A call that the pickle would make, with its arguments, and the state it would set."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, slots=True)
class Persistent:
    """A persistent id, which the pickle leaves to its reader to resolve."""

    key: Any


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_TEXTS = "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"
_LITERALS = frozenset(["BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", *_TEXTS])
_PUTS = frozenset(["BINPUT", "LONG_BINPUT"])
_GETS = frozenset(["BINGET", "LONG_BINGET"])
_NOTHING = frozenset(["PROTO", "FRAME"])
_NUM_IN_TUPLE = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read(data: bytes, allowed: Collection[str]) -> Any:
    """Read a pickle; ValueError for anything but plain data and calls of ``allowed`` names."""
    machine = _Machine(allowed)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                (value,) = machine.stack
                return value
            machine.run(opcode.name, argument)
    except (IndexError, KeyError, TypeError, UnicodeError, AttributeError) as error:
        raise ValueError(f"no pickle: {type(error).__name__} {error}"[:200]) from error
    raise ValueError("no pickle: it does not end")


class _Machine:
    def __init__(self, allowed: Collection[str]) -> None:
        self.allowed = allowed
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, op: str, argument: Any) -> None:
        stack = self.stack
        if op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _EMPTY:
            stack.append(_EMPTY[op]())
        elif op in _LITERALS:
            stack.append(argument)
        elif op == "MARK":
            stack.append(_MARK)
        elif op == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif op in _PUTS:
            self.memo[argument] = stack[-1]
        elif op in _GETS:
            stack.append(self.memo[argument])
        elif op in _NUM_IN_TUPLE:
            num = _NUM_IN_TUPLE[op]
            if len(stack) < num:
                raise ValueError("no pickle: a tuple of nothing")
            stack[-num:] = [tuple(stack[-num:])]
        elif op == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif op not in _NOTHING:
            self._change(op, argument)

    def _change(self, op: str, argument: Any) -> None:
        stack = self.stack
        if op == "GLOBAL":
            stack.append(self._name(*argument.split(" ", 1)))
        elif op == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(self._name(module, attribute))
        elif op in ("REDUCE", "NEWOBJ"):
            args, name = stack.pop(), stack.pop()
            if not isinstance(name, Name) or not isinstance(args, tuple):
                raise ValueError("it calls what is no name")
            stack.append(Call(name.path, args))
        elif op == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], Call):
                raise ValueError("it sets the state of what is no object")
            stack[-1].state = state
        elif op == "BINPERSID":
            stack.append(Persistent(stack.pop()))
        elif op in ("APPEND", "APPENDS"):
            items = [stack.pop()] if op == "APPEND" else self._since_mark()
            if not isinstance(stack[-1], list):
                raise ValueError("it appends to what is no list")
            stack[-1].extend(items)
        elif op in ("SETITEM", "SETITEMS"):
            items = self._since_mark() if op == "SETITEMS" else [stack.pop(-2), stack.pop()]
            self._set(items)
        else:
            raise ValueError(f"it holds {op}, which plain data needs not")

    def _name(self, module: Any, attribute: Any) -> Name:
        path = f"{module}.{attribute}"
        if path not in self.allowed:
            raise ValueError(f"it would import {path[:100]!r}")
        return Name(path)

    def _set(self, items: list[Any]) -> None:
        held = self.stack[-1]
        if isinstance(held, Call) and held.name == "collections.OrderedDict" and not held.args:
            held.state = held.state or {}
            held = held.state
        if not isinstance(held, dict):
            raise ValueError("it sets items of what is no mapping")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Keys are compared and hashed, which some nested ones make endless.
            if not isinstance(key, str | int | float | Call | None):
                raise ValueError("a key is no plain one")
            held[key] = value

    def _since_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("no pickle: a mark is missing")
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items


DATA_NAMES = frozenset({"collections.OrderedDict", "collections.Counter", "torch.Size"})
_MAX_DEPTH = 64
_MAX_NODES = 1_000_000


def plain(value: Any) -> Any:
    """Plain data without a `Call`, but for those of `DATA_NAMES`; ValueError for others."""
    left = [_MAX_NODES]

    def of(value: Any, depth: int) -> Any:
        left[0] -= 1
        if depth > _MAX_DEPTH or left[0] < 0:
            raise ValueError("it is nested too deep, or too large")
        if isinstance(value, list):
            return [of(v, depth + 1) for v in value]
        if isinstance(value, tuple):
            return tuple(of(v, depth + 1) for v in value)
        if isinstance(value, dict):
            return {of(k, depth + 1): of(v, depth + 1) for k, v in value.items()}
        if isinstance(value, Call) and value.name == "collections.OrderedDict":
            return collections.OrderedDict(of(value.state or {}, depth + 1))
        if isinstance(value, Call) and value.name == "collections.Counter":
            (counts,) = value.args
            return collections.Counter(of(counts, depth + 1))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError("it holds what is no plain data")

    return of(value, 0)
