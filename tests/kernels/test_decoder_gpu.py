"""The decoder of scale planes on a GPU: exact bytes, and nothing but the routed planes."""

from __future__ import annotations

import pytest
import torch
from vllm_csf.kernels.compiled.build import Build
from vllm_csf.kernels.compiled.cache import ProgramCache
from vllm_csf.kernels.scales import planes

from vllm_csf.bench import layers

pytestmark = pytest.mark.gpu

EXPERTS = 40
SIZES = ((320, 176), (704, 320))
OTHER_THREADS = 1024
ROUTES = (0, 1, 2, 7, 63, 700, 5000)


@pytest.fixture(scope="module", params=[None, OTHER_THREADS], ids=["default", str(OTHER_THREADS)])
def programs(request):
    """Configuration -> program. With the other number of threads each size and order has one type of ids."""
    from vllm_csf.kernels.scales.decoder import THREADS, DecoderConfig, declared

    assert THREADS != OTHER_THREADS
    arch = "sm_{}{}a".format(*torch.cuda.get_device_capability())
    configs = [
        DecoderConfig(h, i, order, wide, threads=request.param or THREADS)
        for n, (h, i) in enumerate(SIZES)
        for m, order in enumerate(planes.ORDERS)
        for wide in (False, True)
        if request.param is None or wide == bool((n + m) % 2)
    ]
    wanted = {config: declared(config, arch) for config in configs}
    built = Build(list(wanted.values()), ProgramCache(), owner="the tests").finish()
    return {config: built[program] for config, program in wanted.items()}


def poisoned(config) -> list[torch.Tensor]:
    return [torch.full((EXPERTS, p.nbytes), 0xEE, dtype=torch.uint8, device="cuda") for p in config.planes]


def routes_of(config, count: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    found = torch.randint(-3, EXPERTS + 3, (count,), generator=g, device="cuda")
    if config.wide_ids and count > 2:
        found[2] = 5 + (1 << 32)
    return found if config.wide_ids else found.int()


def ctas() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.parametrize("share", [0.0, 0.003, 0.01, 0.08, 1.0])
def test_routed_planes_are_exact_and_others_untouched(programs, share):
    from vllm_csf.kernels.scales import decoder

    for config, program in programs.items():
        stack = layers.random_stack(
            EXPERTS, config.hidden, config.width, share, device="cuda", wild=share >= 0.01
        )
        stack.scale13[0, 0], stack.scale2[3], stack.scale2[1, 4, 2] = 0, 0, 0x7F
        prepared = stack.prepare(False)
        for count in ROUTES:
            routes = routes_of(config, count)
            found, truth = poisoned(config), poisoned(config)
            decoder.run(program, config, prepared.w13, prepared.w2, routes, *found, ctas())
            for matrix, plane, out in zip((prepared.w13, prepared.w2), config.planes, truth, strict=True):
                planes.expand(matrix, plane, routes, out)
            assert all(map(torch.equal, found, truth)), (config, count)
            if config.order == planes.ROWS:
                routed = [e for e in routes.unique().tolist() if 0 <= e < EXPERTS]
                for out, scales in zip(found, (stack.scale13, stack.scale2), strict=True):
                    assert torch.equal(out[routed], scales[routed].flatten(1))


def test_replayed_calls_follow_changed_routes_and_allocate_nothing(programs):
    from vllm_csf.kernels.scales import decoder

    config, program = next(iter(programs.items()))
    prepared = layers.random_stack(EXPERTS, config.hidden, config.width, 0.01, device="cuda").prepare(False)
    routes, found = routes_of(config, 20), poisoned(config)

    def call() -> None:
        decoder.run(program, config, prepared.w13, prepared.w2, routes, *found, ctas())

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in range(4):
        routes.copy_(routes_of(config, 20, seed))
        truth = poisoned(config)
        for out in found:
            out.fill_(0xEE)
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        graph.replay()
        torch.cuda.synchronize()
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
        for matrix, plane, out in zip((prepared.w13, prepared.w2), config.planes, truth, strict=True):
            planes.expand(matrix, plane, routes, out)
        assert all(map(torch.equal, found, truth))
