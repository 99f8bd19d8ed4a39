"""The packing programs without a GPU: their PTX, interpreted, writes what `layout.pack` writes; and every
target compiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from packing import EXPECTED, differences, kinds, shapes, truth
from ptx_interpreter import Memory, kernels, run
from vllm_csf.kernels import layout, packer
from vllm_csf.kernels.moe import programs
from vllm_csf.kernels.packer import RECORDS, STEPS, TILES, Packer

pytest.importorskip("cutlass")
from vllm_csf.kernels import pack_kernels
from vllm_csf.kernels.pack_step import PackConfig

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
SHARED = 16 << 10
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ptx():
    """(step, native) -> the kernels of the program."""
    made: dict = {}

    def get(step: str, native: bool) -> list:
        if (step, native) not in made:
            compiled = pack_kernels.compile_pack(PackConfig(step, native), "sm_90a", "--keep-ptx")
            made[step, native] = kernels(compiled.__ptx__)
        return made[step, native]

    return get


class Interpreted:
    """A packer whose programs are interpreted on the bytes of host tensors; new ones are poisoned."""

    def __init__(self, ptx, native: bool, monkeypatch) -> None:
        self._ptx, self._native = ptx, native
        self._tensors: dict[int, torch.Tensor] = {}
        make, place = torch.empty, packer.place

        def poisoned(*arguments, **options) -> torch.Tensor:
            made = make(*arguments, **options)
            self._know(made).fill_(0xEE)
            return made

        def placed(*arguments):
            starts, *rest = place(*arguments)
            self._know(starts)
            return starts, *rest

        monkeypatch.setattr(torch, "empty", poisoned)
        monkeypatch.setattr(packer, "place", placed)

    def _know(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            self._tensors[tensor.data_ptr()] = tensor
        return tensor.view(torch.uint8) if tensor.numel() else tensor

    def pack(self, weight: torch.Tensor, scale: torch.Tensor, shape: layout.Shape) -> layout.PreparedMatrix:
        for tensor in (weight, scale):
            self._know(tensor)
        made = Packer({step: self._program(step) for step in STEPS})
        return made.pack_groups([(slice(None), weight, scale)], shape, CPU)

    def _program(self, step: str):
        def call(sizes: torch.Tensor, *passed: int) -> None:
            *addresses, experts, rows, k_tiles, gated = passed
            memory, held = Memory(), {}
            for pointer in (*addresses, sizes.data_ptr()):
                tensor = self._tensors.get(pointer)
                data = self._bytes(tensor) if tensor is not None else np.zeros(0, np.uint8)
                held[pointer] = memory.put(data)
            mine = [held[pointer] for pointer in (*addresses, sizes.data_ptr())]
            strides = (16, 8, rows // 2) if gated else (32, 16, 8)
            sources = zip(self._ptx(step, self._native), self._arguments(step, mine), strict=True)
            for kernel, arguments in sources:
                grid, numbers = (rows // layout.TILE_ROWS, experts), (rows, k_tiles, *strides)
                run(kernel, grid, pack_kernels.THREADS, [*arguments, *numbers], memory, SHARED)
            for pointer, address in held.items():
                if (tensor := self._tensors.get(pointer)) is not None:
                    self._bytes(tensor)[:] = memory.get(address, tensor.nbytes)

        return call

    @staticmethod
    def _arguments(step: str, mine: list[int]) -> list[list[int]]:
        """Of each kernel, in the order of its own parameters."""
        if step == RECORDS:
            scale, bases, slices, starts, records, dense, sizes = mine
            return [[scale, bases, slices, sizes, starts, records, dense]]
        weight, scale, tiles, bases, slices, sizes = mine
        return [[scale, tiles, bases, slices, sizes], [weight, tiles]]

    @staticmethod
    def _bytes(tensor: torch.Tensor) -> np.ndarray:
        return tensor.view(torch.uint8).reshape(-1).numpy()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("share", list(EXPECTED))
def test_the_programs_write_what_torch_writes(ptx, native, share, monkeypatch):
    seen = set()
    for shape in shapes(native):
        weight, scale, wanted = truth(shape, share)
        with monkeypatch.context() as patch:
            found = Interpreted(ptx, native, patch).pack(weight, scale, shape)
        assert not differences(found, wanted), shape
        seen |= kinds(wanted)
    assert seen == EXPECTED[share]


def test_weights_and_scales_of_other_sizes_are_refused():
    shape = layout.Shape(1, 32, 64, False)
    weight, scale, _ = truth(shape, 0.0)
    with pytest.raises(ValueError, match="expected"):
        Packer({}).pack_groups([(slice(None), weight[:, :16], scale)], shape, CPU)
    with pytest.raises(ValueError, match="step is 'weights'"):
        PackConfig("weights")


def test_sizes_become_places():
    """Two experts of two row blocks with two slices each: words of sparse slices, slots of dense ones."""
    sizes = torch.tensor([4, 0, 3 << 16, 6, 16 << 16, 2, 0, 16 << 16], dtype=torch.int32)
    sparse, dense = 7 << 24, -(1 << 31)
    slices = torch.zeros(2, 2, 2, 2, dtype=torch.int32)
    slices[..., 1] = torch.where(sizes >= 1 << 16, dense, sparse).view(2, 2, 2)
    starts, words, slots = packer.place(sizes, slices)
    assert starts.tolist() == [[0, 0], [10, 3]]
    assert (words, slots) == (12, 35)
    assert slices[..., 1].view(2, 4).tolist() == [
        [sparse, sparse + 4, dense, sparse + 4],
        [dense, sparse, sparse + 2, dense + 16],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_compiles(arch):
    for native in (False, True):
        wanted = programs.preparation(arch, native)
        assert [program.config.step for program in wanted] == [TILES, RECORDS]
        for program in wanted:
            assert callable(program.compile())
