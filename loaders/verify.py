"""Checks a checkpoint of compressed experts, plane by plane, and compares it with its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from . import conversion, names, shard_writer
from .checkpoint import INDEX, Checkpoint, is_shard_path, open_checkpoint
from .codec import decode
from .container import TENSORS
from .dialect import is_divisor, modelopt_names, reciprocal
from .errors import CheckpointError
from .files import read_header, read_object
from .restore import checked
from .sources import ExpertLayer, ProjectionSource

Progress = Callable[[int], None]
Read = Callable[[], torch.Tensor | None]


@dataclass
class Report:
    """planes: how many were decoded. compared: parts that were compared with a given source. reproduced:
    files of the source that came out with the SHA-256 recorded at conversion. findings: one line for each
    thing that is wrong.
    """

    planes: int = 0
    exceptions: int = 0
    native_bytes: int = 0
    compressed_bytes: int = 0
    compared: int = 0
    reproduced: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings

    def add(self, finding: object) -> None:
        """A finding that is not known yet."""
        if str(finding) not in self.findings:
            self.findings.append(str(finding))


def verify(
    root: Path, source: Path | None = None, progress: Progress | None = None, planes_only: bool = False
) -> Report:
    """Decodes every plane and checks every rule of the format; does not stop at the first finding.

    A converted checkpoint has to give its source's files again, by their SHA-256 (not with `planes_only`,
    which leaves all but the scales unread). With `source`, everything that both hold is compared bit for
    bit. `progress` is told of each plane.
    """
    root = Path(root)
    report = Report()
    try:
        checkpoint = open_checkpoint(root)
    except CheckpointError as error:
        report.add(error)
        _check_shards(root, report)
        return report
    with checkpoint:
        if not any(layer.compressed for layer in checkpoint.layers):
            report.findings.append(f"{root}: has no compressed experts (layout {checkpoint.layout})")
        for layer in checkpoint.layers:
            _check_layer(layer, report, progress)
        if not planes_only and conversion.folder_of(root).exists():
            _reproduce(checkpoint, report)
        if source is not None:
            _compare(checkpoint, source, report)
    return report


def _check_shards(root: Path, report: Report) -> None:
    """Of a checkpoint that cannot be opened: whatever else is wrong with its shards."""
    found = [path for folder in (root, root / TENSORS) for path in folder.glob("*.safetensors")]
    shards = {path.relative_to(root).as_posix() for path in found}
    try:
        weight_map = read_object(root / INDEX).get("weight_map")
        named = map(str, weight_map.values()) if isinstance(weight_map, dict) else ()
        shards |= set(filter(is_shard_path, named))
    except CheckpointError:
        pass  # containers have none
    for shard in sorted(shards):
        try:
            read_header(root / shard, shard)
        except CheckpointError as error:
            report.add(error)


def _reproduce(checkpoint: Checkpoint, report: Report) -> None:
    """Every file of the source, from what is stored now."""
    try:
        record = conversion.read_record(checkpoint.root)
    except CheckpointError as error:
        report.add(error)
        return
    for file in record.files:
        try:
            for _ in checked(checkpoint, record, file):
                pass
            report.reproduced += 1
        except CheckpointError as error:
            report.add(error)


def _check_layer(layer: ExpertLayer, report: Report, progress: Progress | None) -> None:
    for part in layer.sources():
        try:
            plane = part.plane()
            decode(plane)
            value = part.global_scale
            if not torch.isfinite(value):
                report.findings.append(
                    f"{part.weight_name}: global scale is {value.item()}, expected a finite one"
                )
            report.exceptions += len(plane.exceptions)
            report.native_bytes += plane.native_nbytes
            report.compressed_bytes += plane.nbytes
        except CheckpointError as error:
            report.add(error)
        report.planes += 1
        if progress:
            progress(1)


def _compare(checkpoint: Checkpoint, root: Path, report: Report) -> None:
    try:
        source = open_checkpoint(root)
    except CheckpointError as error:
        report.findings.append(f"source: {error}")
        return
    with source:
        ours = {layer.name: layer for layer in checkpoint.layers}
        theirs = {layer.name: layer for layer in source.layers}
        for name in sorted(ours.keys() ^ theirs.keys()):
            where = "the source" if name in theirs else "the checkpoint"
            report.findings.append(f"{name}: in {where} alone")
        for name in ours.keys() & theirs.keys():
            _compare_layer(ours[name], theirs[name], report)
        _compare_others(checkpoint, source, set(ours) | set(theirs), report)


def _compare_layer(ours: ExpertLayer, theirs: ExpertLayer, report: Report) -> None:
    if (ours.experts, ours.projections) != (theirs.experts, theirs.projections):
        report.findings.append(
            f"{ours.name}: {ours.experts} experts of {ours.projections}, expected {theirs.experts} of "
            f"{theirs.projections}"
        )
        return
    for a, b in zip(ours.sources(), theirs.sources(), strict=True):
        for what, values in _parts(a, b):
            try:
                mine, wanted = (value() for value in values)
            except CheckpointError as error:
                report.add(error)
                continue
            report.compared += 1
            if mine is None and wanted is None:
                continue
            if mine is None or wanted is None or not _same(mine, wanted):
                report.findings.append(
                    f"{a.weight_name}: {what} differs from the source{_where(mine, wanted)}"
                )


def _parts(a: ProjectionSource, b: ProjectionSource) -> Iterator[tuple[str, tuple[Read, Read]]]:
    yield "the weight", (a.weight, b.weight)
    yield "the block scale", (a.scale, b.scale)
    yield "the global scale", (lambda: a.global_scale, lambda: b.global_scale)
    yield "the input scale", (lambda: a.input_scale, lambda: b.input_scale)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # numpy compares on this thread: torch's pool stalls where cores are busy.
    mine, wanted = (t.reshape(-1).view(torch.uint8).numpy() for t in (a, b))
    return np.array_equal(mine, wanted)


def _where(a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype or a.dim() != 2:
        return ""
    row, column = (a != b).nonzero()[0].tolist()
    return f", first at row {row}, column {column}: {a[row, column]}, expected {b[row, column]}"


def _compare_others(checkpoint: Checkpoint, source: Checkpoint, layers: set[str], report: Report) -> None:
    """Everything but the experts, the source's tensors under the names that they have here."""
    try:
        renamed = modelopt_names(source.tensors)
    except CheckpointError:
        renamed = {}  # no source that could have been converted: names are compared as they are
    ours = {name: name for name in _outside(checkpoint.tensors, layers)}
    theirs = {renamed.get(name, name): name for name in _outside(source.tensors, layers)}
    for name in sorted(ours.keys() ^ theirs.keys()):
        where = "the source" if name in theirs else "the checkpoint"
        report.findings.append(f"{name}: in {where} alone")
    for name in sorted(ours.keys() & theirs.keys()):
        report.compared += 1
        if not _same_stored(checkpoint, name, source, theirs[name]):
            report.findings.append(f"{name}: differs from the source")


def _outside(tensors: Mapping[str, object], layers: set[str]) -> Iterator[str]:
    for name in tensors:
        parsed = names.parse(name)
        if parsed is None or parsed.module not in layers:
            yield name


def _same_stored(ours: Checkpoint, name: str, theirs: Checkpoint, original: str) -> bool:
    """Bytes as stored, so that dtypes do not matter that nothing here can read."""
    mine, wanted = ours.tensors[name], theirs.tensors[original]
    if name != original and is_divisor(original):
        if (mine.dtype, mine.numel) != ("F32", 1):
            return False
        return _same(ours.read(name).reshape(()), reciprocal(theirs.read(original)))
    if (mine.dtype, mine.shape) != (wanted.dtype, wanted.shape):
        return False
    chunks = zip(shard_writer.stored_bytes(mine), shard_writer.stored_bytes(wanted), strict=True)
    return all(a == b for a, b in chunks)
