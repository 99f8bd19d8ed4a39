"""Tensors that are read when someone needs their numbers.

A loader hands the model a tensor without storage (device ``meta``) that carries the source of its
bytes. Models rename and route it like any other: what they take of it (``t[3]``, ``chunk``,
``transpose`` ...) is a view, whose offset and strides say which part of the file is meant. The
first operation that needs numbers reads exactly that part. So a rank reads its own rows and columns
whatever way the model passes them on, and code that knows nothing of it still gets right numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_map


class MatrixSource(Protocol):
    """A matrix on disk."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, rows: slice, cols: slice) -> torch.Tensor:
        """The block as a contiguous tensor of `dtype` in host memory."""


class LazyTensor(torch.Tensor):
    """A view into a MatrixSource. Read-only."""

    source: MatrixSource

    @staticmethod
    def of(source: MatrixSource) -> LazyTensor:
        return _wrap(torch.empty(source.shape, dtype=source.dtype, device="meta"), source)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)]
        lazy = [t for t in tensors if isinstance(t, LazyTensor)]
        if args and isinstance(args[0], LazyTensor) and _writes(func):
            raise TypeError(
                f"{args[0].source.name}: {func.__name__} writes to a tensor that is read from a file"
            )
        if len(lazy) == len(tensors):
            done, result = _without_numbers(func, args, kwargs, lazy)
            if done:
                return result
        args, kwargs = tree_map(lambda a: materialize(a) if isinstance(a, LazyTensor) else a, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def block(self) -> tuple[slice, slice] | None:
        """Rows and columns of the source that this view shows, in order; None for any other view."""
        with torch._C.DisableTorchFunctionSubclass():
            return _block(self.shape, self.stride(), int(self.storage_offset()), self.source.shape)


def materialize(view: LazyTensor) -> torch.Tensor:
    """The numbers of a view, in host memory."""
    source = view.source
    with torch._C.DisableTorchFunctionSubclass():
        shape, stride, offset = tuple(view.shape), view.stride(), int(view.storage_offset())
        dtype = view.dtype
    block = _block(shape, stride, offset, source.shape)
    if block is not None:
        return source.read(*block).view(dtype).reshape(shape)
    turned = _block(shape[::-1], stride[::-1], offset, source.shape)
    if turned is not None and len(shape) == 2:
        return source.read(*turned).view(dtype).t()
    whole = source.read(slice(0, source.shape[0]), slice(0, source.shape[1]))
    return whole.view(dtype).as_strided(shape, stride, offset)


def _wrap(meta: torch.Tensor, source: MatrixSource) -> LazyTensor:
    lazy = meta.as_subclass(LazyTensor)
    lazy.source = source
    return lazy


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _without_numbers(func: Any, args: tuple, kwargs: dict, lazy: list[LazyTensor]) -> tuple[bool, Any]:
    """Try func on shapes alone: (True, result) if the result is a view of a lazy tensor or no tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError, TypeError):
            return False, None
        outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        owner = {t.untyped_storage()._cdata: t for t in lazy}
        if not all(_is_view(t, owner) for t in outputs):
            return False, None

        def wrap(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return _wrap(value, owner[value.untyped_storage()._cdata].source)

        return True, tree_map(wrap, result)


def _is_view(tensor: torch.Tensor, owner: dict[int, LazyTensor]) -> bool:
    base = owner.get(tensor.untyped_storage()._cdata)
    # Offsets and strides count elements: a view of another width would mean other bytes.
    return base is not None and base.element_size() == tensor.element_size()


def _block(
    shape: Iterable[int], stride: Iterable[int], offset: int, full: tuple[int, int]
) -> tuple[slice, slice] | None:
    long = [(n, s) for n, s in zip(shape, stride, strict=True) if n != 1]
    row, col = divmod(offset, full[1])
    rows = cols = 1
    if long and long[-1][1] == 1:
        cols = long.pop()[0]
    if long and long[-1][1] == full[1]:
        rows = long.pop()[0]
    if long or row + rows > full[0] or col + cols > full[1]:
        return None
    return slice(row, row + rows), slice(col, col + cols)
