"""Collects the expert tensors of one layer, in any order and from any shard, and checks that all came."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .kernels import reference
from .kernels.activation import Activation
from .loaders import codec
from .loaders.codec import Plane
from .loaders.errors import FormatError
from .partition import Extent

PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
REQUIRED = ("weight", "scale", "global_scale")
GROUP = 16

Key = tuple[int, str]  # local expert, "w1" | "w3" | "w2"
Scales = Plane | torch.Tensor  # of one projection: compressed, or the bytes uint8 [rows, cols]


@dataclass(frozen=True)
class LayerShape:
    """A rank's part of a layer: `experts` of them, of `hidden` channels and `width` before the cut."""

    name: str
    experts: int
    hidden: int
    width: int
    extent: Extent
    gated: bool

    @property
    def halves(self) -> int:
        return 2 if self.gated else 1

    @property
    def shards(self) -> tuple[str, ...]:
        return ("w1", "w3", "w2") if self.gated else ("w1", "w2")

    def matrix(self, shard: str) -> tuple[int, int]:
        """Rows and columns (of weights) of a whole projection."""
        return (self.hidden, self.width) if shard == "w2" else (self.width, self.hidden)

    def cut(self, shard: str, per: int) -> tuple[slice, slice]:
        """The rank's rows, and its columns where a column stands for `per` weights."""
        mine = slice(self.extent.start, self.extent.stop)
        if shard == "w2":
            return slice(0, self.hidden), slice(mine.start // per, mine.stop // per)
        return mine, slice(0, self.hidden // per)

    def local_plane(self, shard: str) -> tuple[int, int]:
        """Rows and columns of the padded plane that the rank keeps."""
        if shard == "w2":
            return self.hidden, self.extent.size // GROUP
        return self.extent.size, self.hidden // GROUP


class Intake:
    """Receives a layer's tensors; `finish` yields the layer. One per layer, for its whole life."""

    def __init__(
        self,
        layer: torch.nn.Module,
        shape: LayerShape,
        local_expert: Callable[[int], int],
        global_scale_divides: bool,
        exception_room: float = 0.0,
        whole: bool = False,
    ) -> None:
        """exception_room: share of the scales, 0 to 1, that later weights may have as exceptions, if that
        is more than the first ones have (and a quarter). whole: scales come plain and are kept as they
        are, for an execution that compresses them itself; else they are kept as CSF streams."""
        # A strong reference would keep a dropped model alive through vLLM's record of its parameters.
        self._layer = weakref.ref(layer)
        self.shape = shape
        self._local_expert = local_expert
        self._global_scale_divides = global_scale_divides
        self._exception_room = exception_room
        self.whole = whole
        self._room: dict[str, tuple[int, int]] = {}
        self._forget()

    def _forget(self) -> None:
        self._arrived: set[tuple[int, str, str]] = set()
        self._streams: dict[Key, dict[str, torch.Tensor]] = {}
        self._held: dict[Key, Callable[[], Scales | None]] = {}
        self._exceptions: dict[Key, torch.Tensor] = {}

    @property
    def empty(self) -> bool:
        return not self._arrived

    def staged_shapes(self) -> Iterator[tuple[str, int, int]]:
        """(parameter, planes, bytes of a plane) of where scales wait on the device until all have come."""
        for name, shard, halves in (("csf_scales13", "w1", self.shape.halves), ("csf_scales2", "w2", 1)):
            rows, cols = self.shape.local_plane(shard)
            yield name, self.shape.experts * halves, rows * (cols if self.whole else 1 + cols // 2)

    def receiver(self, part: str) -> Callable[..., bool | None]:
        """A weight loader, with the signature that vLLM's models call, for one part of a projection."""
        handle = getattr(self, "_on_" + part.replace(" ", "_"))

        def weight_loader(
            param: torch.Tensor,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            local = self._local_expert(expert_id)
            if local == -1:
                return False if return_success else None
            if shard_id not in self.shape.shards:
                expected = ", ".join(self.shape.shards)
                raise FormatError(f"{weight_name}: projection is {shard_id!r}, expected one of {expected}")
            name = f"{self.shape.name}.{expert_id}.{PROJECTIONS[shard_id]}.{part}"
            handle(param, loaded_weight, name, (local, shard_id))
            return True if return_success else None

        return weight_loader

    def _arrive(self, key: Key, part: str, name: str) -> None:
        if (*key, part) in self._arrived:
            raise FormatError(f"{name}: came twice, expected once")
        self._arrived.add((*key, part))

    def _on_weight(self, param: torch.Tensor, loaded: torch.Tensor, name: str, key: Key) -> None:
        local, shard = key
        target = param.data[local]
        if shard != "w2":
            size = self.shape.extent.size
            target = target.narrow(0, size if shard == "w3" else 0, size)
        if param.is_meta:
            target.copy_(target)  # a reload counts elements first; the tensor comes again
            return
        self._arrive(key, "weight", name)
        rows, cols = self.shape.matrix(shard)
        _check(name, loaded, (rows, cols // 2), 1)
        block = loaded[self.shape.cut(shard, per=2)]
        filled = target[: block.shape[0], : block.shape[1]]
        if filled.shape != target.shape:
            target.zero_()
        if filled.numel():
            _copy_bytes(filled, block.view(torch.uint8))

    def _on_global_scale(self, param: torch.Tensor, loaded: torch.Tensor, name: str, key: Key) -> None:
        local, shard = key
        target = param.data[local]
        if shard != "w2":
            target = target[1 if shard == "w3" else 0]
        if param.is_meta:
            target.copy_(target)
            return
        self._arrive(key, "global_scale", name)
        if loaded.numel() != 1:
            raise FormatError(f"{name}: has {loaded.numel()} elements, expected 1")
        value = loaded.reshape(()).float()
        if self._global_scale_divides:
            value = 1 / value
        if not torch.isfinite(value):
            raise FormatError(f"{name}: is {loaded.item()}, expected a finite multiplier")
        target.copy_(value)

    def _on_input_scale(self, param: torch.Tensor, loaded: torch.Tensor, name: str, key: Key) -> None:
        """Activations are not quantised (W4A16): accepted, and not looked at."""

    def _on_scale(self, param: torch.Tensor, loaded: torch.Tensor, name: str, key: Key) -> None:
        self._arrive(key, "scale", name)
        rows, cols = self.shape.matrix(key[1])
        _check(name, loaded, (rows, cols // GROUP), 1)
        self._offer(key, lambda: self._scales_of(loaded, name, key[1]))

    def _on_unexpected_plain_scale(
        self, param: torch.Tensor, loaded: torch.Tensor, name: str, key: Key
    ) -> None:
        raise FormatError(f"{name}: is a plain weight_scale, expected the two CSF streams alone")

    def _on_fixed(self, param: torch.Tensor, loaded: torch.Tensor, name: str, key: Key) -> None:
        self._on_stream("fixed", loaded, name, key)

    def _on_exceptions(self, param: torch.Tensor, loaded: torch.Tensor, name: str, key: Key) -> None:
        self._on_stream("exceptions", loaded, name, key)

    def _on_stream(self, part: str, loaded: torch.Tensor, name: str, key: Key) -> None:
        self._arrive(key, part, name)
        streams = self._streams.setdefault(key, {})
        streams[part] = loaded
        if len(streams) == 2:
            del self._streams[key]
            self._arrived.add((*key, "scale"))
            scale = f"{name.rpartition('.')[0]}.weight_scale"
            self._offer(key, lambda: self._plane_of_streams(streams, scale, key[1]))

    def _offer(self, key: Key, scales: Callable[[], Scales | None]) -> None:
        """Place scales now, or, while a reload keeps the staging away, when it ends."""
        name = "csf_scales2" if key[1] == "w2" else "csf_scales13"
        if self._staged(name).is_meta:
            self._held[key] = scales
        else:
            self._place(key, scales())

    def _staged(self, name: str) -> torch.Tensor:
        return getattr(self._layer(), name).data

    def _place(self, key: Key, scales: Scales | None) -> None:
        """Keep a rank's part of a plane; None where the rank owns no channel of the expert."""
        local, shard = key
        if shard == "w2":
            target = self._staged("csf_scales2")[local]
        else:
            target = self._staged("csf_scales13")[local * self.shape.halves + (shard == "w3")]
        rows, cols = self.shape.local_plane(shard)
        if scales is None:
            target.zero_()
        elif isinstance(scales, Plane):
            plane = codec.pad_plane(scales, rows, cols)
            _copy_bytes(target, plane.fixed)
            self._exceptions[key] = plane.exceptions.view(torch.int32)
        else:
            _place_whole(target.view(rows, cols), scales)

    def _scales_of(self, loaded: torch.Tensor, name: str, shard: str) -> Scales | None:
        """The rank's part of a plain scale."""
        if not self.shape.extent.count:
            return None
        rows, cols = self.shape.cut(shard, per=GROUP)
        if self.whole:
            return loaded[rows, cols].contiguous().view(torch.uint8)
        plane_of = getattr(getattr(loaded, "source", None), "plane", None)
        if plane_of is not None:
            return plane_of((rows.start, rows.stop), (cols.start, cols.stop))
        return codec.encode(loaded[rows, cols].contiguous().cpu(), name=name)

    def _plane_of_streams(self, streams: dict[str, torch.Tensor], name: str, shard: str) -> Plane | None:
        rows, cols = self.shape.matrix(shard)
        fixed, exceptions = streams["fixed"].cpu(), streams["exceptions"].cpu()
        whole = codec.plane_from_streams(fixed, exceptions, rows, cols // GROUP, name=name)
        if not self.shape.extent.count:
            return None
        mine, part = self.shape.cut(shard, per=GROUP)
        return codec.slice_plane(whole, rows=(mine.start, mine.stop), cols=(part.start, part.stop))

    def invent(self, shard: str, exceptions: torch.Tensor) -> None:
        """Declare a projection of every expert arrived, for weights that are made up in place."""
        for local in range(self.shape.experts):
            self._exceptions[local, shard] = exceptions
            self._arrived |= {(local, shard, part) for part in REQUIRED}

    def finish(
        self,
        w13: torch.Tensor,
        w2: torch.Tensor,
        alphas: tuple[torch.Tensor, torch.Tensor],
        activation: Activation,
    ) -> reference.ExpertLayer:
        """The layer of the tensors that came. Raises FormatError naming what did not."""
        self._check_complete()
        for key, scales in self._held.items():
            self._place(key, scales())
        layer = reference.ExpertLayer(
            w13, w2, self._planes("13"), self._planes("2"), *alphas, activation=activation
        )
        self._forget()
        return layer

    def _check_complete(self) -> None:
        for (local, shard), streams in self._streams.items():
            (found,) = streams
            raise FormatError(f"{self._where(local, shard)}: has the {found} stream alone, expected both")
        for local, shard in itertools.product(range(self.shape.experts), self.shape.shards):
            for part in REQUIRED:
                if (local, shard, part) not in self._arrived:
                    raise FormatError(f"{self._where(local, shard)}.{part}: did not come, expected once")

    def _where(self, local: int, shard: str) -> str:
        return f"{self.shape.name} (local expert {local}).{PROJECTIONS[shard]}"

    def _planes(self, half: str) -> reference.ScalePlanes:
        shards = ("w2",) if half == "2" else self.shape.shards[:-1]
        staged = self._staged(f"csf_scales{half}")
        rows, cols = self.shape.local_plane(shards[0])
        if self.whole:
            return reference.ScalePlanes.of_bytes(staged, rows, cols)
        none = torch.empty(0, dtype=torch.int32, device="cpu")
        keys = itertools.product(range(self.shape.experts), shards)
        words = [self._exceptions.get(key, none) for key in keys]
        counts = torch.tensor([len(w) for w in words], device="cpu")
        capacity, longest = self._room_for(half, counts, rows * cols)
        entries = torch.zeros(capacity, dtype=torch.int32, device=staged.device)
        entries[: int(counts.sum())] = torch.cat(words).to(staged.device)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(staged.device)
        return reference.ScalePlanes(staged, offsets, entries, rows, cols, longest)

    def _room_for(self, half: str, counts: torch.Tensor, plane: int) -> tuple[int, int]:
        """Capacity of the exceptions of all planes, and of the longest one.

        Both have some room, because a reload brings other exceptions into tensors whose addresses
        captured graphs know.
        """
        count, longest = int(counts.sum()), int(counts.max())
        share, planes = self._exception_room, len(counts)
        room = self._room.setdefault(
            half,
            (
                max(count + count // 4 + 64, round(share * plane * planes)),
                min(plane, max(2 * longest + 64, round(share * plane))),
            ),
        )
        for found, limit, what in (
            (count, room[0], "exceptions"),
            (longest, room[1], "exceptions in a plane"),
        ):
            if found > limit:
                raise FormatError(
                    f"{self.shape.name}: new weights have {found} {what}, expected at most {limit}; "
                    "start the server anew, or with more csf_exception_room in --additional-config"
                )
        return room


def _place_whole(target: torch.Tensor, scales: torch.Tensor) -> None:
    """Rows of zeros below; columns at the right repeat the last one, which costs no exceptions."""
    rows, cols = scales.shape
    if scales.shape != target.shape:
        target.zero_()
    _copy_bytes(target[:rows, :cols], scales)
    target[:rows, cols:] = target[:rows, cols - 1 : cols]


def _copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.device.type == "cpu":
        # On this thread: torch's pool waits for its slowest thread, tens of times longer on busy cores.
        np.copyto(target.numpy(), source.cpu().numpy())
    else:
        target.copy_(source.contiguous())


def _check(name: str, loaded: torch.Tensor, shape: tuple[int, int], width: int) -> None:
    if tuple(loaded.shape) != shape or loaded.element_size() != width:
        raise FormatError(
            f"{name}: is {loaded.dtype} {list(loaded.shape)}, expected {list(shape)} of one byte each"
        )
