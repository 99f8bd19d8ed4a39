"""The packing programs on a GPU write what `layout.pack` writes on the CPU, byte for byte."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from packing import EXPECTED, differences, kinds, shapes, truth
from vllm_csf.kernels import layout
from vllm_csf.kernels.compiled.build import Build
from vllm_csf.kernels.compiled.cache import ProgramCache
from vllm_csf.kernels.moe import experts as moe
from vllm_csf.kernels.moe import programs
from vllm_csf.kernels.packer import Packer

from vllm_csf.bench import layers
from vllm_csf.cute import device_facts

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def packers() -> dict[bool, Packer]:
    """By whether scales are native."""
    arch, _ = device_facts(torch.device("cuda", torch.cuda.current_device()))
    wanted = {native: programs.preparation(arch, native) for native in (False, True)}
    built = Build([p for both in wanted.values() for p in both], ProgramCache(), owner="the tests").finish()
    return {native: Packer({p.config.step: built[p] for p in both}) for native, both in wanted.items()}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("share", list(EXPECTED))
def test_bytes_are_those_of_the_cpu(packers, share, native):
    seen = set()
    for shape in shapes(native):
        weight, scale, wanted = truth(shape, share)
        groups = [(slice(None), weight.cuda(), scale.cuda())]
        found = packers[native].pack_groups(groups, shape, torch.device("cuda"))
        assert not differences(found, wanted), shape
        seen |= kinds(wanted)
    assert seen == EXPECTED[share]


@pytest.mark.parametrize("native", [False, True])
def test_experts_in_groups_are_one_stack(packers, native):
    shape = layout.Shape(5, 64, 320, True, native)
    weight, scale, wanted = truth(shape, 0.003)
    groups = ((slice(i, i + 2), weight[i : i + 2].cuda(), scale[i : i + 2].cuda()) for i in range(0, 5, 2))
    found = packers[native].pack_groups(groups, shape, torch.device("cuda"))
    assert not differences(
        found, layout.concatenate([_part(weight, scale, shape, i) for i in range(0, 5, 2)])
    )
    for a, b in zip(layout.unpack(found), layout.unpack(wanted), strict=True):
        assert torch.equal(a.cpu(), b)


def _part(
    weight: torch.Tensor, scale: torch.Tensor, shape: layout.Shape, start: int
) -> layout.PreparedMatrix:
    part = slice(start, start + 2)
    mine = layout.Shape(len(weight[part]), shape.rows, shape.k, shape.gated, shape.native)
    return layout.pack(weight[part], scale[part], mine)


@pytest.mark.parametrize("width", [96, 128, 352])
def test_padded_widths_and_odd_addresses(packers, width):
    stack = layers.random_stack(3, 128, width, 0.01, wild=True)
    wanted = stack.prepare(False)
    on_gpu = [getattr(stack, field.name).cuda() for field in dataclasses.fields(stack)]
    buffer = torch.empty(on_gpu[1].numel() + 4, dtype=torch.uint8, device="cuda")
    on_gpu[1] = buffer[4:].view(on_gpu[1].shape).copy_(on_gpu[1])
    found = moe.prepare(*on_gpu, packer=packers[False])
    assert not differences(found.w13, wanted.w13)
    assert not differences(found.w2, wanted.w2)


def test_nothing_but_the_result_stays(packers):
    shape = layout.Shape(4, 512, 1024, True)
    weight, scale, _ = truth(shape, 0.003)
    weight, scale = weight.cuda(), scale.cuda()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = packers[False].pack_groups([(slice(None), weight, scale)], shape, torch.device("cuda"))
    torch.cuda.synchronize()
    kept = sum(t.nbytes for t in found.tensors())
    assert torch.cuda.memory_allocated() - before <= kept + 6 * 512  # blocks of the allocator
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * kept


def test_offsets_beyond_two_and_four_gib(packers):
    """Weights of 4.5 GiB: the last experts are as they are by themselves."""
    shape = layout.Shape(144, 8192, 8192, False)
    free, _ = torch.cuda.mem_get_info()
    if free < 24 << 30:
        pytest.skip(f"needs 24 GiB of device memory, {free >> 30} are free")
    g = torch.Generator(device="cuda").manual_seed(0)
    size = (shape.experts, shape.rows)
    weight = torch.randint(256, (*size, shape.k // 2), generator=g, device="cuda", dtype=torch.uint8)
    scale = torch.randint(90, 105, (*size, shape.k // 16), generator=g, device="cuda", dtype=torch.uint8)
    scale[:, ::7, ::50] = 3
    found = packers[False].pack_groups([(slice(None), weight, scale)], shape, torch.device("cuda"))
    for expert in (0, 70, 143):
        one = layout.Shape(1, shape.rows, shape.k, False)
        wanted = layout.pack(weight[expert : expert + 1].cpu(), scale[expert : expert + 1].cpu(), one)
        assert torch.equal(found.tiles[expert].cpu(), wanted.tiles[0])
        assert torch.equal(found.slices[expert].cpu(), wanted.slices[0])
        first = int(found.starts[expert, 0])
        records = found.records.view(torch.int16)[first : first + wanted.records.numel()]
        assert torch.equal(records.cpu(), wanted.records.view(torch.int16))
