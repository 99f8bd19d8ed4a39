"""Every program compiles for every target without a GPU, and within its registers and shared memory."""

from __future__ import annotations

import pytest
from vllm_csf.kernels.activation import SILU, Activation

pytest.importorskip("cutlass")

from vllm_csf.kernels.moe import programs

SHARED_LIMIT = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90a": 227,
    "sm_100a": 227,
    "sm_120a": 99,
}  # KiB a CTA


def geometry(arch: str, native: bool = False, **changes) -> programs.Geometry:
    fields = {
        "experts": 128, "global_experts": 128, "hidden": 4096, "inner": 1536, "topk": 8, "activation": SILU,
        "mapped": False, "wide_ids": False, "arch": arch, "multiprocessors": 132, "native": native,
    }  # fmt: skip
    return programs.Geometry(**(fields | changes))


@pytest.mark.slow
@pytest.mark.parametrize("arch", list(SHARED_LIMIT))
@pytest.mark.parametrize("native", [False, True])
def test_programs_compile(arch, native):
    g = geometry(arch, native)
    for choice in programs.choices(g):
        program = programs.declared(g, choice)
        for gated in (True, False):
            assert program.config.gemm(gated).shared_bytes <= SHARED_LIMIT[arch] * 1024
        assert callable(program.compile())


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"mapped": True, "wide_ids": True, "global_experts": 256},
        {"activation": Activation("silu", limit=7.0)},
        {"activation": Activation("swiglu_oai", limit=7.0, alpha=1.702, beta=1.0)},
        {"activation": Activation("swiglu_step", limit=7.0)},
        {"experts": 2000, "global_experts": 2000},
    ],
)
def test_variants_compile(changes):
    g = geometry("sm_90a", **changes)
    options = programs.choices(g)
    for choice in (options[1], options[-1]):
        assert callable(programs.declared(g, choice).compile())


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("tile", [160, 192, 224])
def test_one_fragment_a_warp_compiles(tile, native):
    """Not in the table; ptxas would only warn where it cannot keep products in flight."""
    g = geometry("sm_90a", native)
    program = programs.declared(g, programs.PrefillChoice(8192, 132, tile, stages=3, per_sm=1, fragments=1))
    for gated in (True, False):
        assert program.config.gemm(gated).shared_bytes <= SHARED_LIMIT["sm_90a"] * 1024
    assert callable(program.compile())


def test_prefill_is_for_hopper_alone():
    kinds = {arch: {o.kind for o in programs.choices(geometry(arch))} for arch in SHARED_LIMIT}
    assert kinds.pop("sm_90a") == {"decode", "prefill"}
    assert set(map(frozenset, kinds.values())) == {frozenset({"decode"})}


@pytest.mark.parametrize("experts", [4, 64, 512])
@pytest.mark.parametrize("topk", [1, 2, 8, 10])
def test_every_token_count_has_a_program_that_can_take_it(experts, topk):
    options = programs.choices(geometry("sm_90a", experts=experts, global_experts=experts, topk=topk))
    assert [o.tokens for o in options] == sorted({o.tokens for o in options})
    for tokens in range(1, options[-1].tokens + 1):
        choice = programs.choice_for(options, tokens)
        assert choice.tokens >= tokens
        own_pairs = choice.own_pairs if choice.kind == "decode" else 0
        assert not own_pairs or tokens * topk <= own_pairs
