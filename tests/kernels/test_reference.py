"""The torch reference against the FP64 oracle, on the CPU and (marked gpu) on CUDA."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from vllm_csf.kernels import oracle, reference
from vllm_csf.kernels.activation import Activation

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def encode_anyhow(scale: np.ndarray, base: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Streams of a plane for ANY choice of bases: what a reader has to accept. Element by element."""
    rows, cols = scale.shape
    fixed, words = [], []
    for first in range(0, rows, 16):
        fixed.extend(base[first : first + 16].tolist())
        for row in range(first, first + 16):
            codes = []
            for col in range(cols):
                code = int(scale[row, col]) - int(base[row])
                if not 0 <= code < 16:
                    words.append(int(scale[row, col]) << 24 | (row * cols + col))
                    code = (row + col) % 16  # ignored by a reader
                codes.append(code)
            fixed.extend(lo | hi << 4 for lo, hi in zip(codes[0::2], codes[1::2], strict=True))
    return np.array(fixed, dtype=np.uint8), np.array(words, dtype=np.uint32)


def planes(scales: list[np.ndarray], rng: np.random.Generator, device: str) -> reference.ScalePlanes:
    rows, cols = scales[0].shape
    streams = [encode_anyhow(s, np.clip(s.min(1).astype(int) - rng.integers(0, 3), 0, 240)) for s in scales]
    counts = [len(words) for _, words in streams]
    entries = np.concatenate([words for _, words in streams] + [np.zeros(1, np.uint32)])
    return reference.ScalePlanes(
        fixed=torch.from_numpy(np.stack([fixed for fixed, _ in streams])).to(device),
        offsets=torch.tensor([0, *itertools.accumulate(counts)], device=device),
        entries=torch.from_numpy(entries.view(np.int32)).to(device),
        rows=rows,
        cols=cols,
        longest=max(counts),
    )


@dataclass
class Case:
    layer: reference.ExpertLayer
    gate: list[np.ndarray]
    up: list[np.ndarray]
    down: list[np.ndarray]

    def oracle(self, x, weights, ids, **kwargs):
        numbers = (t.detach().float().cpu().numpy() for t in (x, weights))
        return oracle.expert_layer(*numbers, ids.cpu().numpy(), self.gate, self.up, self.down, **kwargs)


def make_scale(rng: np.random.Generator, rows: int, cols: int, dispersed: float) -> np.ndarray:
    scale = rng.integers(44, 60, (rows, cols))
    wild = rng.random((rows, cols)) < dispersed
    scale[wild] = rng.choice([0, 1, 7, 8, 30, 90, 100, 0x80, 0x81, 0xA0], wild.sum())
    return scale.astype(np.uint8)


def make_case(device: str, experts=5, hidden=64, width=96, activation=None, dispersed=0.02, seed=0) -> Case:
    rng = np.random.default_rng(seed)
    activation = activation or Activation()
    names = ("gate", "up", "down") if activation.gated else ("up", "down")
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    packed, scales, alphas = {}, {}, {}
    for name in names:
        R, K = shapes[name]
        packed[name] = [rng.integers(0, 256, (R, K // 2), dtype=np.uint8) for _ in range(experts)]
        scales[name] = [make_scale(rng, R, K // 16, dispersed) for _ in range(experts)]
        alphas[name] = rng.uniform(0.01, 0.03, experts).astype(np.float32)
    halves = [n for n in names if n != "down"]
    w13 = np.stack([np.concatenate([packed[n][e] for n in halves]) for e in range(experts)])
    layer = reference.ExpertLayer(
        w13=torch.from_numpy(w13).to(device),
        w2=torch.from_numpy(np.stack(packed["down"])).to(device),
        scales13=planes([scales[n][e] for e in range(experts) for n in halves], rng, device),
        scales2=planes(scales["down"], rng, device),
        alphas13=torch.from_numpy(np.stack([alphas[n] for n in halves], axis=1)).to(device),
        alphas2=torch.from_numpy(alphas["down"]).to(device),
        activation=activation,
    )
    dense = {
        n: [oracle.dequantize(packed[n][e], scales[n][e], float(alphas[n][e])) for e in range(experts)]
        for n in names
    }
    return Case(layer, dense.get("gate", dense["up"]), dense["up"], dense["down"])


def make_routing(tokens: int, k: int, experts: int, device: str, dtype=torch.int32, seed=1):
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(tokens)])
    weights = torch.rand(tokens, k, generator=g) + 0.1
    return weights.to(device), ids.to(dtype).to(device)


def make_x(tokens: int, hidden: int, device: str, dtype=torch.float32, seed=2) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_equals_oracle(device: str, fixed_shapes: bool, tokens: int) -> None:
    case = make_case(device)
    x = make_x(tokens, 64, device)
    weights, ids = make_routing(tokens, 2, 5, device)
    out = reference.forward(case.layer, x, weights, ids, fixed_shapes=fixed_shapes)
    np.testing.assert_allclose(out.cpu().numpy(), case.oracle(x, weights, ids), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_half_precision_rounds_twice_only(device: str, dtype: torch.dtype, bits: int) -> None:
    case = make_case(device)
    x = make_x(9, 64, device, dtype)
    weights, ids = make_routing(9, 2, 5, device)
    out = reference.forward(case.layer, x, weights, ids)
    want = case.oracle(x, weights, ids)
    assert out.dtype == dtype
    # The intermediate and the result are rounded to `bits` significant bits, nothing else is.
    error = np.abs(out.float().cpu().numpy() - want).max() / np.abs(want).max()
    assert error < 2 * 2.0**-bits


def combine_oai(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def combine_step(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.minimum(gate / (1 + np.exp(-gate)), 0.7) * np.clip(up, -0.7, 0.7)


def combine_situ(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return 2 * np.tanh(gate / 2) / (1 + np.exp(-gate)) * 3 * np.tanh(up / 3)


def combine_clamped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return oracle.silu_gate(np.minimum(gate, 0.8), np.clip(up, -0.8, 0.8))


def combine_gelu_tanh(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def erf(x: np.ndarray) -> np.ndarray:
    return torch.erf(torch.from_numpy(np.atleast_1d(x))).numpy()


def combine_gelu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return 0.5 * gate * (1 + erf(gate / np.sqrt(2))) * up


ACTIVATIONS = [
    (Activation("silu", limit=0.8), combine_clamped),
    (Activation("gelu"), combine_gelu),
    (Activation("gelu_tanh"), combine_gelu_tanh),
    (Activation("swiglu_oai", limit=1.5, alpha=1.702, beta=1.0), combine_oai),
    (Activation("swiglu_step", limit=0.7), combine_step),
    (Activation("situ", limit=3.0, beta=2.0), combine_situ),
    (Activation("silu", gated=False), lambda g, u: u / (1 + np.exp(-u))),
    (Activation("relu2", gated=False), lambda g, u: np.maximum(u, 0) ** 2),
    (Activation("gelu", gated=False), lambda g, u: combine_gelu(u, np.ones_like(u))),
    (Activation("gelu_tanh", gated=False), lambda g, u: combine_gelu_tanh(u, np.ones_like(u))),
]


@pytest.mark.parametrize(("activation", "combine"), ACTIVATIONS)
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_activations(activation: Activation, combine, fixed_shapes: bool) -> None:
    case = make_case("cpu", activation=activation)
    x = make_x(4, 64, "cpu")
    weights, ids = make_routing(4, 2, 5, "cpu")
    out = reference.forward(case.layer, x, weights, ids, fixed_shapes=fixed_shapes)
    want = case.oracle(x, weights, ids, combine=combine)
    np.testing.assert_allclose(out.numpy(), want, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "swigluoai"},
        {"kind": "relu2", "gated": True},
        {"kind": "situ", "gated": False},
        {"kind": "swiglu_oai"},
        {"kind": "situ", "beta": 0.0},
    ],
)
def test_unknown_activations_are_refused(arguments: dict) -> None:
    with pytest.raises(ValueError, match="activation"):
        Activation(**arguments)


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_expert_map_and_ids_of_both_widths(fixed_shapes: bool, dtype: torch.dtype) -> None:
    case = make_case("cpu")
    x = make_x(6, 64, "cpu")
    weights, ids = make_routing(6, 3, 9, "cpu", dtype)
    mapping = torch.tensor([-1, 3, -1, 0, 4, -1, 1, -1, 2], dtype=torch.int32)
    out = reference.forward(case.layer, x, weights, ids, expert_map=mapping, fixed_shapes=fixed_shapes)
    want = case.oracle(x, weights, mapping[ids.long()])
    np.testing.assert_allclose(out.numpy(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_ids_that_are_no_expert_add_nothing(fixed_shapes: bool) -> None:
    case = make_case("cpu")
    x = make_x(3, 64, "cpu")
    ids = torch.tensor([[2**32 + 3, 1], [-1, 2], [5, 2**40]])
    weights = torch.ones(3, 2)
    out = reference.forward(case.layer, x, weights, ids, fixed_shapes=fixed_shapes)
    want = case.oracle(x, weights, torch.tensor([[-1, 1], [-1, 2], [-1, -1]]))
    np.testing.assert_allclose(out.numpy(), want, rtol=2e-5, atol=2e-5)
    assert not out[2].any()


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_a_rank_whose_experts_are_not_hit(fixed_shapes: bool) -> None:
    case = make_case("cpu")
    x = make_x(2, 64, "cpu")
    weights, ids = make_routing(2, 2, 5, "cpu")
    nowhere = torch.full((5,), -1, dtype=torch.int32)
    out = reference.forward(case.layer, x, weights, ids, expert_map=nowhere, fixed_shapes=fixed_shapes)
    assert not out.any()


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_duplicate_ids_within_a_token(fixed_shapes: bool) -> None:
    case = make_case("cpu")
    for tokens in (1, 5):
        x = make_x(tokens, 64, "cpu")
        ids = torch.tensor([[3, 3, 1]]).repeat(tokens, 1)
        weights = torch.tensor([[0.5, 0.25, 1.0]]).repeat(tokens, 1)
        out = reference.forward(case.layer, x, weights, ids, fixed_shapes=fixed_shapes)
        np.testing.assert_allclose(out.numpy(), case.oracle(x, weights, ids), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_router_weight_on_input(fixed_shapes: bool) -> None:
    case = make_case("cpu")
    for tokens in (2, 7):
        x = make_x(tokens, 64, "cpu")
        weights, ids = make_routing(tokens, 1, 5, "cpu")
        out = reference.forward(
            case.layer, x, weights, ids, apply_router_weight_on_input=True, fixed_shapes=fixed_shapes
        )
        want = case.oracle(x, weights, ids, weight_on_input=True)
        np.testing.assert_allclose(out.numpy(), want, rtol=2e-5, atol=2e-5)


def test_router_weight_on_input_of_several_experts_is_refused() -> None:
    case = make_case("cpu")
    weights, ids = make_routing(2, 2, 5, "cpu")
    with pytest.raises(ValueError, match="one expert a token, found 2"):
        reference.forward(case.layer, make_x(2, 64, "cpu"), weights, ids, apply_router_weight_on_input=True)


def test_zero_tokens() -> None:
    case = make_case("cpu")
    for fixed_shapes in (False, True):
        out = reference.forward(
            case.layer,
            torch.empty(0, 64),
            torch.empty(0, 2),
            torch.empty(0, 2, dtype=torch.int32),
            fixed_shapes=fixed_shapes,
        )
        assert out.shape == (0, 64)


def test_wrong_shapes_are_refused() -> None:
    case = make_case("cpu")
    weights, ids = make_routing(2, 2, 5, "cpu")
    with pytest.raises(ValueError, match=r"expected \[tokens, 64\]"):
        reference.forward(case.layer, make_x(2, 32, "cpu"), weights, ids)
    with pytest.raises(ValueError, match=r"expected \[3, k\]"):
        reference.forward(case.layer, make_x(3, 64, "cpu"), weights, ids)


@pytest.mark.parametrize("dispersed", [0.0, 0.5, 1.0])
def test_planes_decode_to_their_source(dispersed: float) -> None:
    rng = np.random.default_rng(7)
    scales = [rng.integers(0, 256, (32, 6)).astype(np.uint8) for _ in range(2)]
    scales += [make_scale(rng, 32, 6, dispersed) for _ in range(2)]
    compressed = planes(scales, rng, "cpu")
    index = torch.tensor([3, 0, 0, 2, 1])
    out = torch.full((5, 32 * 6 + 1), 0xAA, dtype=torch.uint8)
    decoded = reference.decode_planes(compressed, index, out)
    np.testing.assert_array_equal(decoded.numpy(), np.stack([scales[i] for i in index.tolist()]))


def test_every_weight_is_exact() -> None:
    """All 16 x 256 products, NaN included, equal the FP64 oracle bit for bit."""
    scale = np.arange(256, dtype=np.uint8).reshape(256, 1)
    packed = np.tile(np.arange(8, dtype=np.uint8) * 2 | (np.arange(8, dtype=np.uint8) * 2 + 1) << 4, (256, 1))
    want = oracle.dequantize(packed, scale, 1.0)
    got = reference.dequantize(
        torch.from_numpy(packed),
        torch.from_numpy(scale),
        reference.nibble_table(torch.device("cpu")),
        torch.empty(256, 16),
    )
    np.testing.assert_array_equal(got.numpy().astype(np.float64), want)
    bf16 = got.bfloat16().float()
    assert torch.equal(bf16.nan_to_num(7.0), got.nan_to_num(7.0))


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_nan_scales_of_an_expert_reach_its_tokens_only(fixed_shapes: bool) -> None:
    case = make_case("cpu")
    fixed = case.layer.scales2.fixed
    fixed[0, :16] = 0x7F  # base 127, codes >= 0: expert 0's first rows now hold NaN
    fixed[0, 16 : 16 + 8] = 0
    case.layer.scales2.offsets[:] = 0
    x = make_x(6, 64, "cpu")
    ids = torch.tensor([[0], [1], [2], [-1], [0], [4]])
    out = reference.forward(case.layer, x, torch.ones(6, 1), ids, fixed_shapes=fixed_shapes)
    assert out.isnan().any(1).tolist() == [True, False, False, False, True, False]


def test_scratch_is_shared_and_its_size_is_announced() -> None:
    small, large = make_case("cpu", width=32), make_case("cpu", width=96)
    scratch = reference.Scratch("cpu")
    scratch.reserve(reference.scratch_bytes(5, 64, 96, True))
    before = scratch.nbytes
    for case in (small, large):
        x = make_x(3, 64, "cpu")
        weights, ids = make_routing(3, 2, 5, "cpu")
        scratch.take(scratch.nbytes).fill_(0xFF)
        out = reference.forward(case.layer, x, weights, ids, scratch=scratch)
        np.testing.assert_allclose(out.numpy(), case.oracle(x, weights, ids), rtol=2e-5, atol=2e-5)
    assert scratch.nbytes == before


def test_groups_of_experts_that_do_not_fit_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_GROUP", 2)
    case = make_case("cpu")
    for tokens in (2, 11):
        x = make_x(tokens, 64, "cpu")
        weights, ids = make_routing(tokens, 2, 5, "cpu")
        out = reference.forward(case.layer, x, weights, ids, fixed_shapes=True)
        np.testing.assert_allclose(out.numpy(), case.oracle(x, weights, ids), rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16])
def test_captured_graph_follows_new_routing(tokens: int) -> None:
    case = make_case("cuda", experts=8)
    x = make_x(tokens, 64, "cuda", torch.bfloat16)
    weights, ids = make_routing(tokens, 2, 8, "cuda")
    scratch = reference.Scratch("cuda")
    arguments = {"scratch": scratch, "fixed_shapes": True}
    reference.forward(case.layer, x, weights, ids, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = reference.forward(case.layer, x, weights, ids, **arguments)
    for seed in (3, 4):
        new_weights, new_ids = make_routing(tokens, 2, 8, "cuda", seed=seed)
        x.copy_(make_x(tokens, 64, "cuda", torch.bfloat16, seed=seed))
        weights.copy_(new_weights)
        ids.copy_(new_ids)
        graph.replay()
        eager = reference.forward(case.layer, x, weights, ids, scratch=scratch)
        torch.testing.assert_close(out, eager, rtol=2e-2, atol=2e-2)
        want = case.oracle(x, weights, ids)
        error = np.abs(out.float().cpu().numpy() - want).max() / np.abs(want).max()
        assert error < 2 * 2.0**-8
