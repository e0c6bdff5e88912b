"""The hardware a plan is made for: one kind of device, and the links that join them.

Comes in: a preset's name, the machine at hand, or a user's JSON. Goes out: a frozen, hashable
``Cluster`` that every cost model reads and that a plan stores. It describes hardware only, so a
plan for machines that are not there is priced like one for machines that are.
"""

from pathlib import Path

import msgspec
from msgspec import structs

from autopar.base.documents import DocumentError, convert, load, shown, text_of
from autopar.base.errors import ClusterError
from autopar.cost_models.described import whole_numbers
from autopar.cost_models.detect import detect_cluster
from autopar.cost_models.hardware import Hardware
from autopar.cost_models.presets import preset_cluster


class Cluster(Hardware, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``num_devices`` equal devices joined by ``levels`` of links, innermost first.

    Rank r lives in node ``r // devices_per_node``. ``memory_reserve_bytes`` is what the framework
    itself holds on each device (contexts, communicators, library workspaces) and no plan may use.
    ``collective_launch_s`` is the fixed cost of starting any collective.
    ``overlap_slowdown`` is the factor by which compute slows while a collective runs beside it.
    """

    @classmethod
    def preset(cls, name: str, *, nodes: int = 1, devices_per_node: int = 8) -> "Cluster":
        """A cluster of ``nodes`` usual nodes of a known device; ClusterError for unknown names."""
        return cls._of(preset_cluster(name, nodes=nodes, devices_per_node=devices_per_node))

    @classmethod
    def detect(cls, num_devices: int | None = None) -> "Cluster":
        """The machine at hand: its CUDA devices, or local CPU workers where there are none.

        ``num_devices`` left out means every CUDA device, or one worker for each usable core.
        What no preset knows is measured for about two seconds once, and kept. ClusterError where
        more CUDA devices are asked for than there are.
        """
        return cls._of(detect_cluster(num_devices))

    @classmethod
    def _of(cls, hardware: Hardware) -> "Cluster":
        return cls(**structs.asdict(hardware))

    def to_json(self, path: str | Path | None = None) -> str:
        """Readable JSON, also written to ``path`` where one is given."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> "Cluster":
        """A cluster from JSON text or from a file of it.

        A string that starts with ``{`` or has a line break is text, anything else a path. A byte
        order mark is passed over, and sizes may be written as ``80e9``. ClusterError names the
        first field that is unknown, missing or of the wrong kind.
        """
        if not isinstance(source, (str, Path)):
            raise ClusterError(
                f"a cluster description is JSON text or the path of its file, not {shown(source)} "
                f"of type {type(source).__name__}. Write Cluster.from_json(json.dumps(description))"
                " for a dict, Cluster.from_json(data.decode()) for bytes."
            )
        try:
            return convert(whole_numbers(load(text_of(source)), cls, "$"), cls)
        except (DocumentError, ClusterError) as error:
            raise ClusterError(
                f"this is not a cluster description: {str(error).rstrip('.')}. "
                "Cluster.preset('h100-sxm').to_json('cluster.json') writes one with every field."
            ) from error
