"""The decoder where tiles and planes lie more than 4 GiB behind their tensors' starts."""

from __future__ import annotations

import pytest
import torch
from vllm_csf.kernels import layout
from vllm_csf.kernels.compiled.build import Build
from vllm_csf.kernels.compiled.cache import ProgramCache
from vllm_csf.kernels.scales import planes

from vllm_csf.bench.decoder import prepare, random_scales
from vllm_csf.cute import device_facts

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN, WIDTH = 220, 8192, 20480


@pytest.mark.parametrize("threads", [None, 1024], ids=["default", "1024"])
@pytest.mark.parametrize("order", planes.ORDERS)
def test_last_expert_is_exact(order, threads):
    from vllm_csf.kernels.scales import decoder

    shapes = planes.planes_of(HIDDEN, WIDTH, order)
    need = EXPERTS * (HIDDEN * WIDTH * 3 * 17 // 32 + sum(p.nbytes for p in shapes)) + (8 << 30)
    if torch.cuda.mem_get_info()[0] < need:
        pytest.skip(f"needs {need >> 30} GiB of free device memory")
    assert EXPERTS * shapes[0].nbytes > 1 << 32
    config = decoder.DecoderConfig(HIDDEN, WIDTH, order, threads=threads or decoder.THREADS)
    arch, sms = device_facts(torch.device("cuda", torch.cuda.current_device()))
    wanted = decoder.declared(config, arch)
    program = Build([wanted], ProgramCache()).finish()[wanted]
    scales = [random_scales(1, p.rows, p.columns, 0.003, i) for i, p in enumerate(shapes)]
    matrices = [far(prepare(s, gated=i == 0)) for i, s in enumerate(scales)]
    outs = [torch.full((EXPERTS, p.nbytes), 0xA5, dtype=torch.uint8, device="cuda") for p in shapes]
    ids = torch.tensor([EXPERTS - 1], dtype=torch.int32, device="cuda")
    decoder.run(program, config, *matrices, ids, *outs, sms)
    for out, plane in zip(outs, scales, strict=True):
        whole = planes.to_blocked(plane) if order == planes.BLOCKED else plane.flatten(1)
        assert torch.equal(out[-1], whole[0])
        assert (out[-2] == 0xA5).all()
        assert (out[0] == 0xA5).all()


def far(packed: layout.PreparedMatrix) -> layout.PreparedMatrix:
    """One expert's matrix as the last of many; the others are never read."""
    s = packed.shape
    shape = layout.Shape(EXPERTS, s.rows, s.k, s.gated)
    fields = []
    for tensor in (packed.tiles, packed.bases, packed.slices, packed.starts):
        whole = torch.zeros(EXPERTS, *tensor.shape[1:], dtype=tensor.dtype, device="cuda")
        whole[-1] = tensor[0]
        fields.append(whole)
    return layout.PreparedMatrix(shape, *fields, packed.records, packed.dense)
