"""Checks a checkpoint of compressed experts, plane by plane, and compares it with its source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import conversion, names
from .checkpoint import Checkpoint, open_checkpoint
from .codec import decode
from .errors import CheckpointError
from .sources import ExpertLayer, ProjectionSource

Progress = Callable[[int], None]


@dataclass
class Report:
    """planes: how many were decoded. findings: one line for each thing that is wrong."""

    planes: int = 0
    exceptions: int = 0
    native_bytes: int = 0
    compressed_bytes: int = 0
    compared: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings


def verify(root: Path, source: Path | None = None, progress: Progress | None = None) -> Report:
    """Decodes every plane and checks every rule of the format; does not stop at the first finding.

    With `source`, everything that both hold is compared bit for bit. `progress` is told of each plane.
    """
    report = Report()
    if (conversion.folder_of(root) / conversion.INCOMPLETE).exists():
        report.findings.append(f"{root}: its conversion was interrupted; convert again to finish it")
        return report
    try:
        checkpoint = open_checkpoint(root)
    except CheckpointError as error:
        report.findings.append(str(error))
        return report
    with checkpoint:
        if not any(layer.compressed for layer in checkpoint.layers):
            report.findings.append(f"{root}: has no compressed experts (layout {checkpoint.layout})")
        for layer in checkpoint.layers:
            _check_layer(layer, report, progress)
        if source is not None:
            _compare(checkpoint, source, report)
    return report


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
            report.findings.append(str(error))
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
                report.findings.append(str(error))
                continue
            report.compared += 1
            if mine is None and wanted is None:
                continue
            if mine is None or wanted is None or not _same(mine, wanted):
                report.findings.append(
                    f"{a.weight_name}: {what} differs from the source{_where(mine, wanted)}"
                )


def _parts(a: ProjectionSource, b: ProjectionSource):
    yield "the weight", (a.weight, b.weight)
    yield "the block scale", (a.scale, b.scale)
    yield "the global scale", (lambda: a.global_scale, lambda: b.global_scale)
    yield "the input scale", (lambda: a.input_scale, lambda: b.input_scale)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _where(a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype or a.dim() != 2:
        return ""
    row, column = (a != b).nonzero()[0].tolist()
    return f", first at row {row}, column {column}: {a[row, column]}, expected {b[row, column]}"


def _compare_others(checkpoint: Checkpoint, source: Checkpoint, layers: set[str], report: Report) -> None:
    def others(which: Checkpoint) -> set[str]:
        found = set()
        for name in which.tensors:
            parsed = names.parse(name)
            if parsed is None or parsed.module not in layers:
                found.add(name)
        return found

    ours, theirs = others(checkpoint), others(source)
    for name in sorted(ours ^ theirs):
        where = "the source" if name in theirs else "the checkpoint"
        report.findings.append(f"{name}: in {where} alone")
    for name in sorted(ours & theirs):
        report.compared += 1
        if not _same(checkpoint.read(name), source.read(name)):
            report.findings.append(f"{name}: differs from the source")
