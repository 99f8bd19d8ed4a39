"""The kernels on a GPU: exact where exactness is promised, near the truth elsewhere, graph-safe."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vllm_csf.kernels.activation import SILU
from vllm_csf.kernels.compiled.build import Build
from vllm_csf.kernels.compiled.cache import ProgramCache
from vllm_csf.kernels.compiled.program import Program
from vllm_csf.kernels.moe import experts as moe
from vllm_csf.kernels.moe import programs

from vllm_csf.bench import layers as stacks

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN, WIDTH, TOPK = 16, 256, 192, 4
TOKENS = (1, 3, 8, 17, 40, 64, 200, 700, 3000)
WORLD = 40  # experts of all ranks, where a rank has a part of them
FORMS = (
    {},
    {"native": True},
    {"wide_ids": True},
    {"mapped": True, "global_experts": WORLD},
)
OTHER_ARCHITECTURES = ("sm_80", "sm_120a")
ONE_FRAGMENT = ((160, 3), (192, 3), (224, 3))  # work tiles and stages of prefill programs beside the table


def arch() -> str:
    return "sm_{}{}a".format(*torch.cuda.get_device_capability())


def geometry(**changes) -> programs.Geometry:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    inner = moe.pad_to_tile(WIDTH)
    known = programs.Geometry(EXPERTS, EXPERTS, HIDDEN, inner, TOPK, SILU, False, False, arch(), sms)
    return replace(known, **changes)


def one_fragment(g: programs.Geometry) -> list[programs.PrefillChoice]:
    """Prefill programs whose warps take one fragment; for Hopper alone."""
    if programs.number(g.arch) != 90:
        return []
    return [
        programs.PrefillChoice(programs.WIDE_CHUNK_TOKENS, g.multiprocessors, tile, stages, 1, fragments=1)
        for tile, stages in ONE_FRAGMENT
    ]


def here(program: Program) -> Program:
    """A program of whatever configuration, compiled for this device."""
    return replace(program, arch=arch())


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All programs of these tests at once, in as many processes as there are cores for."""
    wanted = {programs.declared(g, c) for g in (geometry(**f) for f in FORMS) for c in programs.choices(g)}
    for g in (geometry(), geometry(native=True)):
        wanted |= {programs.declared(g, c) for c in one_fragment(g)}
    for other in OTHER_ARCHITECTURES:
        g = geometry(arch=other)
        wanted |= {here(programs.declared(g, c)) for c in programs.choices(g)}
    return Build(sorted(wanted, key=lambda p: p.name), ProgramCache(), owner="the tests").finish()


class Layer:
    """One layer in one arm (compressed or native), with poisoned scratch and outputs."""

    def __init__(self, stack: stacks.Stack, **changes) -> None:
        self.geometry = geometry(**changes)
        self.prepared = stack.prepare(self.geometry.native)
        self.options = programs.choices(self.geometry)
        self.flags = torch.zeros(2 * 16 * self.geometry.multiprocessors, dtype=torch.int32, device="cuda")

    def workspace(self, tokens: int, choice: programs.Choice) -> moe.Workspace:
        def poisoned(size: int) -> torch.Tensor:
            return torch.full((size // 4,), float("nan"), device="cuda").view(torch.uint8)

        return programs.workspace(poisoned, self.geometry, choice, tokens)

    def __call__(self, x, ids, weights, expert_map=None, choice=None, program=None):
        choice = choice or programs.choice_for(self.options, x.shape[0])
        out = torch.full_like(x, float("nan"))
        program = program or programs.program(self.geometry, choice)
        workspace = self.workspace(x.shape[0], choice)
        moe.run(program, self.prepared, workspace, self.flags, x, ids, weights, out, expert_map, choice.ctas)
        torch.cuda.synchronize()
        assert not self.flags.any()
        return out


def tokens_of(count: int, seed: int = 1) -> torch.Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(count, HIDDEN, generator=g, device="cuda").bfloat16()


def takes(choice: programs.Choice, tokens: int) -> bool:
    """Whether a choice can serve so many tokens at all, its workspace being as large."""
    return not (choice.kind == "decode" and choice.own_pairs) or tokens * TOPK <= choice.own_pairs


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    return ((out.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("share", [0.0, 0.003, 0.01, 0.08, 1.0])
def test_arms_agree_bit_for_bit_and_are_near_the_truth(share):
    stack = stacks.random_stack(EXPERTS, HIDDEN, WIDTH, share, seed=3, device="cuda", wild=share >= 0.01)
    if share >= 0.01:
        stack.scale13[0, 0] = 0
        stack.scale13[0, 5] = torch.arange(HIDDEN // 16, device="cuda") % 9
        stack.scale2[0, 3] = 126
        stack.scale2[1, 4] = 0
    csf, native = Layer(stack), Layer(stack, native=True)
    for count in TOKENS:
        x = tokens_of(count)
        ids, weights = stacks.random_routing(count, EXPERTS, TOPK, count, "cuda")
        truth = stacks.truth(stack, x, ids, weights)
        for choice in csf.options:
            if not takes(choice, count):
                continue
            out = csf(x, ids, weights, choice=choice)
            assert torch.equal(
                out.view(torch.int16), native(x, ids, weights, choice=choice).view(torch.int16)
            )
            assert torch.equal(out.view(torch.int16), csf(x, ids, weights, choice=choice).view(torch.int16))
            assert error(out, truth) < 5e-3


@pytest.mark.parametrize("share", [0.0, 0.003, 0.02, 0.08, 1.0])
def test_all_prefill_programs_give_the_same_bits(share):
    """Two slices along K with a half stage at the end, and rows that do not fill the last CTA's tile; calls
    that leave accumulators empty, halve odd numbers of steps, and fill several work tiles an expert."""
    if programs.number(arch()) != 90:
        pytest.skip("prefill programs are for sm_90")
    hidden, width = 1344, 192
    stack = stacks.random_stack(EXPERTS, hidden, width, share, seed=5, device="cuda", wild=share >= 0.01)
    arms = [Layer(stack, hidden=hidden, native=native) for native in (False, True)]
    prefill = [c for c in arms[0].options if c.kind == "prefill"]
    for count in (1, 40, 70, 150, 310, 460, 590, 650, 760, 3000):
        generator = torch.Generator(device="cuda").manual_seed(count)
        x = torch.randn(count, hidden, generator=generator, device="cuda").bfloat16()
        ids, weights = stacks.random_routing(count, EXPERTS, TOPK, count, "cuda")
        expected = arms[0](x, ids, weights, choice=prefill[-1])
        assert error(expected, stacks.truth(stack, x, ids, weights)) < 5e-3
        for layer in arms:
            for choice in (*prefill, *one_fragment(layer.geometry)):
                out = layer(x, ids, weights, choice=choice)
                assert torch.equal(out.view(torch.int16), expected.view(torch.int16)), (count, choice)


def test_nan_scales_pass_through():
    stack = stacks.random_stack(EXPERTS, HIDDEN, WIDTH, 0.003, device="cuda")
    stack.scale2[2, 7, 1] = 0x7F
    x = tokens_of(5)
    ids, weights = stacks.random_routing(5, EXPERTS, TOPK, 0, "cuda")
    ids[0, 0], ids[1] = 2, torch.tensor([3, 4, 5, 6], device="cuda")
    for native in (False, True):
        out = Layer(stack, native=native)(x, ids, weights)
        assert out[0, 7].isnan()
        assert not out[0, :7].isnan().any()
        assert not out[1].isnan().any()


def test_ids_outside_are_ignored_also_above_32_bits():
    stack = stacks.random_stack(EXPERTS, HIDDEN, WIDTH, 0.003, device="cuda")
    x = tokens_of(9)
    ids, weights = stacks.random_routing(9, EXPERTS, TOPK, 0, "cuda")
    ids[0] = -1
    ids[1, 1], ids[2, 2] = EXPERTS, 99
    ids[3] = 3
    truth = stacks.truth(stack, x, ids, weights)
    layer = Layer(stack)
    assert error(layer(x, ids, weights), truth) < 5e-3
    wide = Layer(stack, wide_ids=True)
    far = ids.long()
    far[4, 0] = 3 + (1 << 32)
    weights[4, 0] = 0
    ids[4, 0] = -1
    out = wide(x, far, weights)
    assert error(out, stacks.truth(stack, x, ids, weights)) < 5e-3
    assert torch.equal(out[0], torch.zeros_like(out[0]))


def test_expert_map_selects_local_experts():
    stack = stacks.random_stack(EXPERTS, HIDDEN, WIDTH, 0.003, device="cuda")
    expert_map = torch.full((WORLD,), -1, dtype=torch.int32, device="cuda")
    expert_map[5:21] = torch.arange(16, dtype=torch.int32, device="cuda")
    layer = Layer(stack, mapped=True, global_experts=WORLD)
    for count in (1, 30, 60, 300):
        x = tokens_of(count)
        ids, weights = stacks.random_routing(count, WORLD, TOPK, count, "cuda")
        local = expert_map[ids.long()]
        out = layer(x, ids, weights, expert_map)
        assert error(out, stacks.truth(stack, x, local, weights)) < 5e-3


def test_all_tokens_to_one_expert_and_no_expert_hit():
    stack = stacks.random_stack(EXPERTS, HIDDEN, WIDTH, 0.003, device="cuda")
    layer = Layer(stack)
    for count in (1, 20, 100, 1000):
        x = tokens_of(count)
        ids, weights = stacks.random_routing(count, EXPERTS, TOPK, 0, "cuda")
        ids[:] = 7
        assert error(layer(x, ids, weights), stacks.truth(stack, x, ids, weights)) < 5e-3
        ids[:] = -1
        assert not layer(x, ids, weights).any()


@pytest.mark.parametrize("count", [1, 6, 40, 60, 150, 900])
def test_captured_calls_follow_changed_inputs_and_allocate_nothing(count):
    stack = stacks.random_stack(EXPERTS, HIDDEN, WIDTH, 0.01, device="cuda")
    layer = Layer(stack)
    choice = programs.choice_for(layer.options, count)
    program = programs.program(layer.geometry, choice)
    x, out = tokens_of(count), torch.empty(count, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ids, weights = stacks.random_routing(count, EXPERTS, TOPK, 0, "cuda")
    workspace = layer.workspace(count, choice)

    def call() -> None:
        moe.run(program, layer.prepared, workspace, layer.flags, x, ids, weights, out, None, choice.ctas)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in range(4):
        x.copy_(tokens_of(count, seed))
        fresh = stacks.random_routing(count, EXPERTS, TOPK, seed, "cuda")
        ids.copy_(fresh[0])
        weights.copy_(fresh[1])
        out.fill_(float("nan"))
        for tensor in workspace.tensors():
            tensor.view(torch.uint8).fill_(255)
        before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        graph.replay()
        torch.cuda.synchronize()
        assert (torch.cuda.memory_reserved(), torch.cuda.memory_allocated()) == before
        assert error(out, stacks.truth(stack, x, ids, weights)) < 5e-3


@pytest.mark.parametrize("count", [30, 400, 2000])
def test_skewed_routing_gives_the_same_bits_every_time(count):
    """Many work tiles of one expert: where a token's lies among them must not depend on a race."""
    stack = stacks.random_stack(EXPERTS, HIDDEN, WIDTH, 0.01, device="cuda")
    layer = Layer(stack)
    x = tokens_of(count)
    ids, weights = stacks.random_routing(count, EXPERTS, TOPK, 0, "cuda")
    ids[:, 0] = 7
    for choice in layer.options:
        if takes(choice, count):
            first = layer(x, ids, weights, choice=choice)
            assert error(first, stacks.truth(stack, x, ids, weights)) < 5e-3
            for _ in range(3):
                assert torch.equal(first, layer(x, ids, weights, choice=choice))


@pytest.mark.parametrize("other", OTHER_ARCHITECTURES)
def test_the_form_for_other_architectures_is_right_here(other, compiled):
    """The same source with the copies, multiplications and sizes that another architecture gets."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("bulk copies need sm_90")
    stack = stacks.random_stack(EXPERTS, HIDDEN, WIDTH, 0.01, device="cuda", wild=True)
    layer = Layer(stack, arch=other)
    for choice in layer.options:
        count = min(choice.tokens, 300)
        x = tokens_of(count)
        ids, weights = stacks.random_routing(count, EXPERTS, TOPK, count, "cuda")
        program = compiled[here(programs.declared(layer.geometry, choice))]
        out = layer(x, ids, weights, choice=choice, program=program)
        assert error(out, stacks.truth(stack, x, ids, weights)) < 5e-3
