"""What a checkpoint holds: experts, and the size of their block scales, native and compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .checkpoint import open_checkpoint
from .codec import CodecSpec
from .files import TensorInfo
from .sources import ExpertLayer

Progress = Callable[[int], None]
WORST = 5


@dataclass(frozen=True)
class PlaneSize:
    """One plane: its scale's name, bytes of both forms, exceptions."""

    name: str
    native: int
    compressed: int
    exceptions: int

    @property
    def ratio(self) -> float:
        return self.compressed / self.native


@dataclass
class LayerSummary:
    name: str
    experts: int
    hidden: int
    width: int
    projections: tuple[str, ...]
    codec: str
    compressed: bool
    unequal_global_scales: int
    native_bytes: int = 0
    compressed_bytes: int = 0
    exceptions: int = 0


@dataclass
class Summary:
    """`layout`: A, B, C or other. `other_experts`: expert modules in another format."""

    root: str
    layout: str
    tensors: int
    layers: list[LayerSummary] = field(default_factory=list)
    other_experts: dict[str, str] = field(default_factory=dict)
    worst: list[PlaneSize] = field(default_factory=list)

    @property
    def native_bytes(self) -> int:
        return sum(layer.native_bytes for layer in self.layers)

    @property
    def compressed_bytes(self) -> int:
        return sum(layer.compressed_bytes for layer in self.layers)

    @property
    def exceptions(self) -> int:
        return sum(layer.exceptions for layer in self.layers)


def summarize(root: Path | str, progress: Progress | None = None) -> Summary:
    """Reads headers where scales are compressed, and encodes them where they are not.

    `root`: a folder or a Hugging Face repository. `progress` is told of each layer. Raises CheckpointError.
    """
    with open_checkpoint(root) as checkpoint:
        found = Summary(
            str(checkpoint.root),
            checkpoint.layout,
            len(checkpoint.tensors),
            other_experts=dict(checkpoint.other_experts),
        )
        for layer in checkpoint.layers:
            row = LayerSummary(
                layer.name,
                layer.experts,
                layer.hidden,
                layer.width,
                tuple(layer.projections),
                layer.spec.name,
                layer.compressed,
                len(layer.unequal_global_scales()),
            )
            sizes = list(_stored(layer, checkpoint.tensors) if layer.compressed else _encoded(layer))
            row.native_bytes = sum(s.native for s in sizes)
            row.compressed_bytes = sum(s.compressed for s in sizes)
            row.exceptions = sum(s.exceptions for s in sizes)
            found.layers.append(row)
            found.worst = sorted([*found.worst, *sizes], key=lambda s: -s.ratio)[:WORST]
            if progress:
                progress(1)
        return found


def _stored(layer: ExpertLayer, tensors: Mapping[str, TensorInfo]) -> Iterator[PlaneSize]:
    spec: CodecSpec = layer.spec
    for source in layer.sources():
        fixed = tensors[source.scale_name + spec.fixed_suffix].nbytes
        exceptions = tensors[source.scale_name + spec.exceptions_suffix].nbytes // 4
        rows, columns = source.shape
        yield PlaneSize(
            source.scale_name, rows * columns // spec.group_size, fixed + 4 * exceptions, exceptions
        )


def _encoded(layer: ExpertLayer) -> Iterator[PlaneSize]:
    for projection in layer.projections:
        for expert, plane in enumerate(layer.planes(projection)):
            name = layer.source(expert, projection).scale_name
            yield PlaneSize(name, plane.native_nbytes, plane.nbytes, len(plane.exceptions))
