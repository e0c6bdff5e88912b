"""Arguments of the command line: their texts, checked and read.

In: the text of an argument. Out: its value. Each reader raises InputError for a text that is none,
which is a wrong command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.base.documents import shown
from autopar.base.errors import InputError
from autopar.cost_models import Cluster


def argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """``read`` for argparse: what it refuses is a wrong command line."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def factory_name(text: str) -> str:
    """The text, if it has the form ``MODULE:FACTORY``; raises InputError."""
    name, _, attribute = text.partition(":")
    if not (name and attribute):
        raise InputError(
            f"{shown(text)} is not a factory; write MODULE:FACTORY, such as models:llama"
        )
    return text


def output_file(text: str) -> str:
    """The text, if it can be the name of a file: its folder exists; raises InputError."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else f"is in {shown(str(path.parent))}, not a folder"
        raise InputError(f"{shown(text)} {why}; write the name of a file in a folder that exists")
    return text


def cluster_name(text: str) -> str:
    """The text, if `cluster_of` can read the size in it; raises InputError."""
    name, colon, size = text.partition(":")
    nodes, _, devices = size.partition("x")
    is_size = all(number.isdecimal() and int(number) for number in (nodes, devices))
    if colon and not text.endswith(".json") and not is_size:
        raise InputError(
            f"the cluster's size is {shown(size)}; write nodes x devices a node: {name}:8x8"
        )
    return text


def cluster_of(text: str) -> Cluster:
    """``h100-sxm:8x8``, ``h100-sxm`` (one node of 8), a JSON file, or ``detect``.

    Raises ClusterError, or InputError where the size cannot be read.
    """
    if text == "detect":
        return Cluster.detect()
    if text.endswith(".json"):
        return Cluster.from_json(Path(text))
    name, colon, size = cluster_name(text).partition(":")
    if not colon:
        return Cluster.preset(name)
    nodes, _, devices = size.partition("x")
    return Cluster.preset(name, nodes=int(nodes), devices_per_node=int(devices))


def mesh_of(text: str) -> dict[str, int | None]:
    """``dp=8,tp`` as axis sizes, None where the size is searched; raises InputError."""
    found: dict[str, int | None] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not name.isidentifier() or name in found or (equals and not size.isdecimal()):
            raise InputError(
                f"--mesh has {shown(part)}; write each axis once with its size: --mesh dp=8,tp=8"
            )
        found[name] = int(size) if equals else None
    return found


def recompute_of(text: str | None) -> str | int | float | None:
    """``4096`` as bytes, ``0.5`` as a fraction, ``none``, ``full`` and ``8GiB`` as text."""
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    try:
        return float(text)
    except ValueError:
        return text


def count_of(text: str) -> int:
    """A whole number, at least 1; raises InputError."""
    if not (text.isdecimal() and int(text)):
        raise InputError(
            f"{shown(text)} is not a number of steps; write a whole number, at least 1"
        )
    return int(text)


def devices_of(text: str) -> int | str:
    """A number of devices, at least 1, or the name of a device; raises InputError."""
    if text.isdecimal() and int(text):
        return int(text)
    import torch

    try:
        return str(torch.device(text))
    except RuntimeError as error:
        why = "is neither a number of devices nor a device"
        raise InputError(f"{shown(text)} {why}; write --devices 2 or cuda:0") from error
