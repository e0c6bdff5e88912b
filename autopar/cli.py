"""The ``autopar`` command: print plans and clusters."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from autopar.base.errors import AutoparError
from autopar.cost_models import Cluster
from autopar.plans.document import Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="autopar", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print a plan")
    show.add_argument("plan", help="a plan's JSON file")
    cluster = commands.add_parser("cluster", help="print a cluster's JSON")
    cluster.add_argument("name", help="a preset such as h100-sxm, or 'detect'")
    cluster.add_argument("--nodes", type=int, default=1)
    cluster.add_argument("--devices-per-node", type=int, default=8)
    chosen = parser.parse_args(arguments)
    try:
        print(_show(chosen) if chosen.command == "show" else _cluster(chosen))
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 1
    return 0


def _show(chosen: argparse.Namespace) -> str:
    return str(Plan.from_json(chosen.plan))


def _cluster(chosen: argparse.Namespace) -> str:
    if chosen.name == "detect":
        return Cluster.detect().to_json()
    made = Cluster.preset(chosen.name, nodes=chosen.nodes, devices_per_node=chosen.devices_per_node)
    return made.to_json()


if __name__ == "__main__":
    sys.exit(main())
