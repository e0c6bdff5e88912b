"""The cluster that a plan is made for: devices, and the links between them.

In: a preset's name, the local machine, or a user's JSON. Out: a frozen, hashable ``Cluster`` that
every cost model reads and that a plan stores. It only describes hardware, so a plan for absent
machines is priced like one for present ones.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from autopar.base.documents import DocumentError, convert, load, shown, text_of
from autopar.base.errors import ClusterError
from autopar.cost_models.described import whole_numbers
from autopar.cost_models.hardware import Hardware, Level
from autopar.cost_models.islands import check_islands, joined_hardware
from autopar.cost_models.presets import preset_cluster


class Cluster(Hardware, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``num_devices`` equal devices joined by ``levels`` of links, innermost first.

    Rank r is in node ``r // devices_per_node``. ``memory_reserve_bytes`` is the memory of each
    device that the framework itself holds (contexts, communicators, library workspaces), which no
    plan may use. ``collective_launch_s`` is the fixed cost of a collective. ``overlap_slowdown`` is
    the factor by which computation is slower while a collective overlaps with it.

    ``islands`` are the parts that are not alike, in the order of their ranks, see `joined`. All
    other fields then describe what spans several of them.
    """

    islands: tuple["Cluster", ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_islands(self.islands, self.num_devices)

    @classmethod
    def joined(
        cls,
        islands: Sequence["Cluster"],
        *,
        bandwidth_bytes_per_s: float,
        latency_s: float,
        efficiency: float = 1.0,
    ) -> "Cluster":
        """Clusters joined by a link: other kinds of device, other sites, or both.

        An island sends at most ``bandwidth_bytes_per_s`` to others, of which collectives reach the
        fraction ``efficiency``. The ranks of the first island come first; so do the first stages of
        a pipeline, which hold the most activations. What is inside an island is priced on it, what
        spans several at the slowest device, the slowest links and the least memory of all.
        Raises ClusterError for fewer than two islands, and for devices that cannot run one program.
        """
        given = tuple(islands) if isinstance(islands, Sequence) else (islands,)
        for island in given:
            if not isinstance(island, Cluster) or island.islands:
                raise ClusterError(
                    f"the islands must be clusters of one kind of device, not {shown(island)}. "
                    "For example, write Cluster.joined([Cluster.preset('a100-80'), "
                    "Cluster.preset('v100')], bandwidth_bytes_per_s=25e9, latency_s=1e-5)."
                )
        link = Level(
            name="between islands", size=1, latency_s=latency_s,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s, efficiency=efficiency,
        )  # fmt: skip
        whole = structs.asdict(joined_hardware(given, link))
        return cls(**whole, islands=given if len(set(given)) > 1 else ())

    def island_at(self, rank: int, num_devices: int) -> "tuple[int, Cluster] | None":
        """The first rank and the island that the devices from ``rank`` on are in; None if they are
        in several, or the cluster has none."""
        first = 0
        for island in self.islands:
            if first <= rank < first + island.num_devices:
                inside = rank + num_devices <= first + island.num_devices
                return (first, island) if inside else None
            first += island.num_devices
        return None

    @property
    def devices_text(self) -> str:
        """Numbers and names of the devices: "8 x NVIDIA A100-SXM4-80GB + 8 x NVIDIA V100"."""
        parts = self.islands or (self,)
        return " + ".join(f"{each.num_devices} x {each.device.name}" for each in parts)

    def __repr__(self) -> str:
        links = ", ".join(f"{level.name} of {level.size}" for level in self.levels)
        return f"<Cluster {self.devices_text}" + f"; {links}" * bool(links) + ">"

    @classmethod
    def preset(
        cls,
        name: str,
        *,
        nodes: int = 1,
        devices_per_node: int = 8,
        network_efficiency: float | None = None,
    ) -> "Cluster":
        """A cluster of ``nodes`` typical nodes of a known device.

        ``network_efficiency`` is the fraction of the bandwidth between nodes that large collectives
        reach, which no specification says (default: the preset's). Measure it with an all-reduce.
        Raises ClusterError for an unknown name (listing the known ones), a count below one, or a
        value that is no fraction.
        """
        return cls._of(
            preset_cluster(
                name,
                nodes=nodes,
                devices_per_node=devices_per_node,
                network_efficiency=network_efficiency,
            )
        )

    @classmethod
    def detect(cls, num_devices: int | None = None) -> "Cluster":
        """The local machine: its CUDA devices, or local CPU workers if there are none.

        ``num_devices`` defaults to all CUDA devices, or one worker per usable core. Devices without
        a preset are measured once, for about two seconds, and the result is kept. Raises
        ClusterError if there are fewer CUDA devices than asked for.
        """
        from autopar.cost_models.detect import detect_cluster  # imports torch

        return cls._of(detect_cluster(num_devices))

    @classmethod
    def _of(cls, hardware: Hardware) -> "Cluster":
        return cls(**structs.asdict(hardware))

    def to_json(self, path: str | Path | None = None) -> str:
        """The cluster as readable JSON, also written to ``path`` if given."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> "Cluster":
        """A cluster from JSON text or a JSON file.

        A string that starts with ``{`` or has a line break is text, anything else a path. A byte
        order mark is skipped, and sizes may be written as ``80e9``. Raises ClusterError naming the
        first field that is unknown, missing or of the wrong type.
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
