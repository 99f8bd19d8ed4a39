"""Expert projections as they lie on disk, read when and as far as they are asked for.

A `ProjectionSource` is one projection of one expert; an `ExpertLayer` is a module of them. Sizes are
logical: a projection is a matrix [R, K] of R output and K input channels, gate and up [I, H], down
[H, I]. All forms of storage look the same from here: per-expert or fused tensors, compressed or plain
scales, multipliers or divisors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from . import codec
from .codec import SLAB_ROWS, CodecSpec, Plane
from .errors import CheckpointError, FormatError
from .files import TensorReader
from .inventory import StoredLayer, StoredMatrix
from .names import DOWN, GATE, UP, scale_of_stream
from .recipes import ModuleRecipe

Extent = tuple[int, int]


class ProjectionSource:
    """One projection of one expert. Nothing is read before a method asks for it.

    layer: the module's name. expert, projection: id, and gate, up or down. shape: (R, K).
    compressed: whether the two streams are stored, else the plain scale is.
    """

    def __init__(self, layer: StoredLayer, expert: int, projection: str, reader: TensorReader) -> None:
        self._matrix: StoredMatrix = layer.matrices[expert, projection]
        self._reader = reader
        self.layer = layer.name
        self.expert = expert
        self.projection = projection
        self.spec: CodecSpec = layer.spec
        self.compressed = layer.compressed

    def __repr__(self) -> str:
        return f"ProjectionSource({self.layer}, expert {self.expert}, {self.projection})"

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input channels (R, K)."""
        return self._matrix.rows, self._matrix.inputs

    @property
    def weight_name(self) -> str:
        """The tensor that holds the weights."""
        return self._matrix.name

    @property
    def scale_name(self) -> str:
        """The tensor that holds the scale, or that the two streams stand for."""
        stored = self._matrix.scale
        return stored if stored is not None else scale_of_stream(str(self._matrix.fixed))

    # ---- numbers ---------------------------------------------------------------------------------

    def weight(
        self,
        rows: Extent | None = None,
        cols: Extent | None = None,
        pad_to: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """FP4 pairs uint8 [r, k / 2] of rows [r0, r1) and input channels [k0, k1); low nibble is even.

        pad_to: (rows, input channels) of the result; what is added is 0. Raises FormatError, naming the
        tensor, for an extent outside the matrix or an odd number of channels.
        """
        r0, r1, k0, k1 = self._extents(rows, cols, 2, self.weight_name)
        found = self._block(self.weight_name, (r0, r1), (k0 // 2, k1 // 2))
        found = found.view(torch.uint8)
        if pad_to is None or pad_to == (r1 - r0, k1 - k0):
            return found
        height, width = pad_to[0], pad_to[1] // 2
        if height < found.shape[0] or width < found.shape[1] or pad_to[1] % 2:
            raise FormatError(
                f"{self.weight_name}: [{r1 - r0}, {k1 - k0}] channels padded to {list(pad_to)}, "
                "expected no smaller and even size"
            )
        return _padded(found, height, width)

    def scale(self, rows: Extent | None = None, cols: Extent | None = None) -> torch.Tensor:
        """Scale bytes uint8 [r, k / group size] of rows [r0, r1) and input channels [k0, k1)."""
        if self.compressed:
            return codec.decode(self._stored_plane(rows, cols))
        r0, r1, k0, k1 = self._extents(rows, cols, self.spec.group_size, self.scale_name)
        group = self.spec.group_size
        return self._block(self.scale_name, (r0, r1), (k0 // group, k1 // group)).view(torch.uint8)

    def plane(
        self,
        rows: Extent | None = None,
        cols: Extent | None = None,
        pad_to: tuple[int, int] | None = None,
    ) -> Plane:
        """Compressed scales [r, k / group size] of rows [r0, r1) and input channels [k0, k1).

        A plain scale is compressed here. pad_to: (rows, input channels) of the result; what is added
        decodes to a finite value. Raises FormatError, naming the tensor, for streams that break a rule
        of the format and for extents that cut a slab (16 rows) or a code byte.
        """
        if self.compressed:
            return _padded_plane(self._stored_plane(rows, cols), pad_to, self.scale_name)
        scale = self.scale(rows, cols)
        return encode_padded(scale[None], self.spec, pad_to, self.scale_name)[0]

    def channels(self, start: int, stop: int, size: int | None = None) -> tuple[torch.Tensor, Plane]:
        """A tensor-parallel rank's part: channels [start, stop) of the expert's width I, in `size`.

        These are rows of gate and up, columns of down. Returns weight and plane as `weight` and `plane`
        do. start == stop gives a part that is all padding, and reads nothing.
        """
        rows, cols, pad_to = self.part(start, stop, size)
        if start == stop:
            return self._nothing(pad_to)
        return self.weight(rows, cols, pad_to), self.plane(rows, cols, pad_to)

    def part(self, start: int, stop: int, size: int | None = None) -> tuple[Extent, Extent, tuple[int, int]]:
        """rows, cols and pad_to of the channels [start, stop) of the expert's width, in `size`."""
        rows, inputs = self.shape
        size = stop - start if size is None else size
        if self.projection == DOWN:
            return (0, rows), (start, stop), (rows, size)
        return (start, stop), (0, inputs), (size, inputs)

    @property
    def global_scale(self) -> torch.Tensor:
        """The global scale as a multiplier: float32, 0-dim; 1 where MXFP4 stores none.

        Raises FormatError where it is not finite.
        """
        value = self._scalar(self._matrix.global_scale)
        if value is None:
            return torch.ones((), dtype=torch.float32)
        if not bool(torch.isfinite(value)):
            what = "the inverse of a divisor" if self._matrix.divisors else "a multiplier"
            raise FormatError(
                f"{self._matrix.global_scale}: {float(value)} as {what}, expected a finite number"
            )
        return value

    @property
    def has_input_scale(self) -> bool:
        """Whether a scale of the activations is stored."""
        return self._matrix.input_scale is not None

    @property
    def input_scale(self) -> torch.Tensor | None:
        """The activations' scale as a multiplier: float32, 0-dim; None where none is stored."""
        return self._scalar(self._matrix.input_scale)

    # ---- storage ---------------------------------------------------------------------------------

    def _extents(
        self, rows: Extent | None, cols: Extent | None, step: int, name: str
    ) -> tuple[int, int, int, int]:
        r0, r1 = rows or (0, self.shape[0])
        k0, k1 = cols or (0, self.shape[1])
        if not (0 <= r0 < r1 <= self.shape[0] and 0 <= k0 < k1 <= self.shape[1]):
            raise FormatError(
                f"{name}: rows [{r0}, {r1}) and input channels [{k0}, {k1}), "
                f"expected a part of {self.shape[0]} x {self.shape[1]}"
            )
        if k0 % step or k1 % step:
            raise FormatError(f"{name}: input channels [{k0}, {k1}), expected multiples of {step}")
        return r0, r1, k0, k1

    def _block(self, name: str, rows: Extent, cols: Extent) -> torch.Tensor:
        first = self._matrix.first_row
        found = self._reader.read(name, (first + rows[0], first + rows[1]), cols, self._matrix.expert)
        return found.reshape(rows[1] - rows[0], cols[1] - cols[0])

    def _stored_plane(self, rows: Extent | None, cols: Extent | None) -> Plane:
        """Reads the slabs of the rows (columns lie scattered in them) and all exceptions."""
        matrix, spec = self._matrix, self.spec
        r0, r1, k0, k1 = self._extents(rows, cols, spec.group_size, self.scale_name)
        s0, s1 = matrix.first_row + r0, matrix.first_row + r1
        if s0 % SLAB_ROWS or s1 % SLAB_ROWS:
            raise FormatError(f"{self.scale_name}: rows [{s0}, {s1}), expected multiples of {SLAB_ROWS}")
        stored_rows, stored_cols = self._stored_shape()
        unit = spec.slab_bytes(stored_cols) if len(self._reader.info(str(matrix.fixed)).shape) == 1 else 1
        slabs = (s0 // SLAB_ROWS * unit, s1 // SLAB_ROWS * unit)
        plane = codec.plane_from_streams(
            self._reader.read(str(matrix.fixed), slabs),
            self._reader.read(str(matrix.exceptions)),
            stored_rows,
            stored_cols,
            spec,
            self.scale_name,
            part=(s0, s1),
        )
        if (k0, k1) == (0, self.shape[1]):
            return plane
        return codec.slice_plane(
            plane, cols=(k0 // spec.group_size, k1 // spec.group_size), name=self.scale_name
        )

    def _stored_shape(self) -> tuple[int, int]:
        """Rows and columns of the plane in the file: gate and up may share one."""
        rows = self._reader.info(self.weight_name).shape[-2]
        return rows, self._matrix.inputs // self.spec.group_size

    def _nothing(self, size: tuple[int, int]) -> tuple[torch.Tensor, Plane]:
        rows, cols = size[0], size[1] // self.spec.group_size
        self.spec.check_shape(rows, cols, self.scale_name)
        weight = torch.zeros(rows, size[1] // 2, dtype=torch.uint8)
        fixed = torch.zeros(self.spec.fixed_bytes(rows, cols), dtype=torch.uint8)
        return weight, Plane(self.spec, rows, cols, fixed, torch.empty(0, dtype=torch.uint32))

    def _scalar(self, name: str | None) -> torch.Tensor | None:
        if name is None:
            return None
        matrix = self._matrix
        value = self._reader.read(name).to(torch.float32)
        found = _entry(value, matrix.expert, matrix.half, self._experts_in(name))
        return found.reciprocal() if matrix.divisors else found

    def _experts_in(self, name: str) -> int:
        weights = self._reader.info(self.weight_name).shape
        return weights[0] if self._matrix.expert is not None else 1


class ExpertLayer:
    """A module of experts in FP4: E experts of hidden size H and width I.

    projections: (gate, up, down), or (up, down) without a gate. extra: expert tensors of other kinds,
    such as biases; a reader that cannot use them must refuse the layer.
    """

    def __init__(self, stored: StoredLayer, reader: TensorReader) -> None:
        self._stored = stored
        self._reader = reader
        self.name = stored.name
        self.experts = stored.experts
        self.projections = stored.projections
        self.spec: CodecSpec = stored.spec
        self.compressed = stored.compressed
        self.hidden = stored.hidden
        self.width = stored.width
        self.recipe: ModuleRecipe = stored.recipe
        self.extra = stored.extra

    def __repr__(self) -> str:
        kind = "compressed" if self.compressed else "plain"
        return f"ExpertLayer({self.name}, {self.experts} experts {self.hidden} x {self.width}, {kind})"

    def source(self, expert: int, projection: str) -> ProjectionSource:
        """One projection. Raises CheckpointError where the layer has no such expert or projection."""
        if (expert, projection) not in self._stored.matrices:
            raise CheckpointError(
                f"{self.name}: no {projection} of expert {expert}, expected {list(self.projections)} "
                f"of 0 to {self.experts - 1}"
            )
        return ProjectionSource(self._stored, expert, projection, self._reader)

    def sources(self, experts: Sequence[int] | None = None) -> Iterator[ProjectionSource]:
        """The projections of some experts (an expert-parallel rank's), or of all; expert by expert."""
        for expert in range(self.experts) if experts is None else experts:
            for projection in self.projections:
                yield self.source(expert, projection)

    def planes(
        self,
        projection: str,
        experts: Sequence[int] | None = None,
        start: int = 0,
        stop: int | None = None,
        size: int | None = None,
    ) -> list[Plane]:
        """Planes of one projection of many experts, in their order; channels as in `ProjectionSource`.

        Plain scales are compressed in one go, which is much faster than one at a time.
        """
        wanted = range(self.experts) if experts is None else experts
        sources = [self.source(expert, projection) for expert in wanted]
        if not sources:
            return []
        stop = self.width if stop is None else stop
        rows, cols, pad_to = sources[0].part(start, stop, size)
        if self.compressed or start == stop:
            return [
                source.plane(rows, cols, pad_to) if start < stop else source.channels(start, stop, size)[1]
                for source in sources
            ]
        scales = np.stack([source.scale(rows, cols).numpy() for source in sources])
        return encode_padded(torch.from_numpy(scales), self.spec, pad_to, f"{self.name}: {projection} scales")

    def unequal_global_scales(self) -> list[str]:
        """One line for every expert whose gate and up have other bits in their global scales."""
        if GATE not in self.projections:
            return []
        lines = []
        for expert in range(self.experts):
            gate, up = (self.source(expert, p).global_scale for p in (GATE, UP))
            if gate.view(torch.int32) != up.view(torch.int32):
                lines.append(
                    f"{self.name}.{expert}: global scale of gate {float(gate)!r}, of up {float(up)!r}"
                )
        return lines


# ---- padding -------------------------------------------------------------------------------------


def encode_padded(
    scales: torch.Tensor, spec: CodecSpec, pad_to: tuple[int, int] | None, name: str
) -> list[Plane]:
    """Compress scale bytes uint8 [E, r, c] to planes of pad_to = (rows, input channels), or unpadded.

    Padding is added after the search for bases, so that it costs no exceptions.
    """
    rows, cols = scales.shape[1:]
    if pad_to is None:
        return codec.encode_batch(scales, spec, name)
    # The codec wants whole slabs and code bytes: fill up to these with neighbours, which cost nothing.
    step = 2 if spec.code_bits == 4 else 1
    more_rows, more_cols = -rows % SLAB_ROWS, -cols % step
    if more_cols:
        scales = torch.cat([scales, _finite(scales[:, :, -1:], spec)], dim=2)
    if more_rows:
        scales = torch.cat([scales, scales.new_zeros(len(scales), more_rows, cols + more_cols)], dim=1)
    planes = codec.encode_batch(scales, spec, name)
    return [_padded_plane(plane, pad_to, name) for plane in planes]


def _finite(scales: torch.Tensor, spec: CodecSpec) -> torch.Tensor:
    nan = (scales & 0x7F) == 0x7F if spec.code_bits == 4 else scales == 0xFF
    return torch.where(nan, 0, scales).to(torch.uint8)


def _padded_plane(plane: Plane, pad_to: tuple[int, int] | None, name: str) -> Plane:
    if pad_to is None:
        return plane
    group = plane.spec.group_size
    if pad_to[1] % group:
        raise FormatError(f"{name}: padded to {pad_to[1]} input channels, expected a multiple of {group}")
    size = (pad_to[0], pad_to[1] // group)
    if size == (plane.rows, plane.cols):
        return plane
    return codec.pad_plane(plane, *size, name)


def _padded(block: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    out = np.zeros((rows, cols), np.uint8)
    out[: block.shape[0], : block.shape[1]] = block.numpy()
    return torch.from_numpy(out)


def _entry(value: torch.Tensor, expert: int | None, half: int | None, experts: int) -> torch.Tensor:
    """One number of [1], [experts], [halves] or [experts, halves]: 0-dim."""
    flat = value.reshape(-1)
    halves = 1 if half is None else 2
    if flat.numel() == experts * halves:
        return flat[(expert or 0) * halves + (half or 0)].clone()
    if flat.numel() == experts:
        return flat[expert or 0].clone()
    if flat.numel() == halves:
        return flat[half or 0].clone()
    return flat[0].clone()
