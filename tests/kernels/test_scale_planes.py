"""Expanded scale planes: their two orders, the decoder in plain torch, and what the decoder refuses."""

from __future__ import annotations

import pytest
import torch
from vllm_csf.kernels.scales import planes
from vllm_csf.kernels.scales.planes import BLOCKED, ROWS, Plane

from vllm_csf.bench import layers

EXPERTS, HIDDEN, WIDTH = 6, 320, 176  # the width is padded to 192


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (1, 1), (130, 5), (352, 20), (320, 11)])
def test_a_byte_lies_where_the_order_says(rows, columns):
    plane = torch.randint(1, 256, (2, rows, columns), dtype=torch.uint8)
    flat = planes.to_blocked(plane)
    assert flat.shape == (2, Plane(rows, columns, BLOCKED).nbytes)
    wide = -(-columns // 4)
    seen = torch.zeros(flat.shape[1], dtype=torch.bool)
    for r in range(rows):
        for c in range(columns):
            at = (r // 128 * wide + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            assert torch.equal(flat[:, at], plane[:, r, c])
            seen[at] = True
    assert not flat[:, ~seen].any()
    assert torch.equal(planes.from_blocked(flat, rows, columns), plane)


@pytest.mark.parametrize("order", [ROWS, BLOCKED])
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_routed_planes_are_the_packed_scales_and_others_stay(order, share):
    stack = layers.random_stack(EXPERTS, HIDDEN, WIDTH, share, wild=True)
    prepared = stack.prepare(False)
    routes = torch.tensor([[4, -1, 4], [EXPERTS, 1, 1 << 20]])
    shapes = planes.planes_of(HIDDEN, WIDTH, order)
    for matrix, scales, plane in zip(
        (prepared.w13, prepared.w2), (stack.scale13, stack.scale2), shapes, strict=True
    ):
        out = torch.full((EXPERTS, plane.nbytes), 0xEE, dtype=torch.uint8)
        planes.expand(matrix, plane, routes, out)
        for expert in range(EXPERTS):
            if expert in (1, 4):
                found = out[expert].view(plane.rows, plane.columns) if order == ROWS else None
                if found is None:
                    found = planes.from_blocked(out[expert], plane.rows, plane.columns)
                assert torch.equal(found, scales[expert])
            else:
                assert bool((out[expert] == 0xEE).all())


def test_sizes_that_have_no_planes_are_named():
    with pytest.raises(ValueError, match="hidden is 100"):
        planes.planes_of(100, 64, ROWS)
    with pytest.raises(ValueError, match="width is 40"):
        planes.planes_of(128, 40, ROWS)
    with pytest.raises(ValueError, match="order is 'columns'"):
        Plane(4, 4, "columns")


@pytest.fixture
def decoder():
    pytest.importorskip("cutlass")
    from vllm_csf.kernels.scales import decoder

    return decoder


def arguments(decoder, **changes):
    """Of `run`, without the program."""
    prepared = layers.random_stack(EXPERTS, HIDDEN, WIDTH, 0.01).prepare(False)
    config = decoder.DecoderConfig(HIDDEN, WIDTH)
    outs = [torch.zeros(EXPERTS, plane.nbytes, dtype=torch.uint8) for plane in config.planes]
    known = {
        "config": config, "w13": prepared.w13, "w2": prepared.w2, "routes": torch.zeros(3, dtype=torch.int32),
        "out13": outs[0], "out2": outs[1],
    }  # fmt: skip
    return known | {name: change(known[name]) for name, change in changes.items()}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("routes", lambda t: t.long()),
        ("routes", lambda t: torch.zeros(3, 2, dtype=torch.int32).T),
        ("out13", lambda t: t[:, 1:]),
        ("out2", lambda t: t.to(torch.int8)),
        ("out2", lambda t: t[:-1]),
        ("w2", lambda m: layers.random_stack(EXPERTS, HIDDEN, 64, 0.01).prepare(False).w2),
        ("w13", lambda m: layers.random_stack(EXPERTS, HIDDEN, WIDTH, 0.01).prepare(True).w13),
    ],
)
def test_arguments_that_do_not_fit_are_named(decoder, name, change):
    decoder.check(**arguments(decoder))
    with pytest.raises(ValueError, match=name):
        decoder.check(**arguments(decoder, **{name: change}))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("order", [ROWS, BLOCKED])
def test_it_compiles(decoder, arch, order):
    hopper = arch in ("sm_90a", "sm_100a", "sm_120a")
    config = decoder.DecoderConfig(2560, 320, order, pdl=hopper)
    assert callable(decoder.declared(config, arch).compile())


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("order", [ROWS, BLOCKED])
def test_it_compiles_with_another_number_of_threads(decoder, arch, order):
    config = decoder.DecoderConfig(2560, 320, order, threads=1024)
    assert config.threads != decoder.DecoderConfig(2560, 320, order).threads
    assert callable(decoder.declared(config, arch).compile())
