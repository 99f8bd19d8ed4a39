"""Lazy tensors: views read just what they show, and no operation ever sees wrong numbers."""

from __future__ import annotations

import pytest
import torch

from vllm_csf.lazy import LazyTensor, materialize

ROWS, COLS = 12, 10


class Matrix:
    """A source that remembers what was read of it."""

    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    shape = (ROWS, COLS)
    dtype = torch.uint8

    def __init__(self) -> None:
        self.data = torch.arange(ROWS * COLS, dtype=torch.uint8).view(ROWS, COLS)
        self.elements = 0

    def read(self, rows: slice, cols: slice) -> torch.Tensor:
        block = self.data[rows, cols].contiguous()
        self.elements += block.numel()
        return block


@pytest.fixture
def matrix() -> Matrix:
    return Matrix()


VIEWS = [
    lambda t: t,
    lambda t: t[3:7],
    lambda t: t[:, 2:6],
    lambda t: t[4:8, 6:10],
    lambda t: t[5],
    lambda t: t[:, 3],
    lambda t: t[2, 3],
    lambda t: t.unsqueeze(0),
    lambda t: t.unsqueeze(0).unbind()[0],
    lambda t: t.chunk(2, dim=0)[1],
    lambda t: t.chunk(2, dim=0)[1].unsqueeze(0).unbind()[0],
    lambda t: t.narrow(1, 4, 2).narrow(0, 1, 5),
    lambda t: t.t(),
    lambda t: t.transpose(0, 1)[3:5],
    lambda t: t[::2],
    lambda t: t[:, 1::3],
    lambda t: t.view(-1),
    lambda t: t.view(ROWS // 2, 2, COLS),
    lambda t: t.view(torch.int8),
    lambda t: t.detach().data,
    lambda t: t.contiguous(),
    lambda t: t[None, 2:4],
    lambda t: t.expand(2, ROWS, COLS),
]


@pytest.mark.parametrize("view", VIEWS)
def test_views_show_what_the_same_view_of_the_matrix_shows(matrix: Matrix, view) -> None:
    lazy = view(LazyTensor.of(matrix))
    assert isinstance(lazy, LazyTensor)
    assert matrix.elements == 0
    want = view(matrix.data)
    got = materialize(lazy)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


BLOCKS = [
    (lambda t: t[3:7], 4 * COLS),
    (lambda t: t[:, 2:6], ROWS * 4),
    (lambda t: t[4:8, 6:10], 16),
    (lambda t: t.unsqueeze(0).unbind()[0][4:6], 2 * COLS),
    (lambda t: t.t()[2:4], 2 * ROWS),
]


@pytest.mark.parametrize(("view", "elements"), BLOCKS)
def test_blocks_read_no_more_than_themselves(matrix: Matrix, view, elements: int) -> None:
    materialize(view(LazyTensor.of(matrix)))
    assert matrix.elements == elements


OPERATIONS = [
    lambda t: t.clone(),
    lambda t: t.float(),
    lambda t: t + 1,
    lambda t: torch.cat([t, t[:2]]),
    lambda t: t.reshape(COLS, ROWS).t().reshape(-1),
    lambda t: t.to(torch.int32),
    lambda t: t.sum(),
    lambda t: t.max().item(),
    lambda t: t.tolist(),
    lambda t: torch.equal(t, t.clone()),
    lambda t: t.view(torch.int16),
    lambda t: t.numpy().tolist(),
    lambda t: t.repeat_interleave(2, dim=0),
    lambda t: bool((t == 7).any()),
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_see_the_numbers(matrix: Matrix, operation) -> None:
    got, want = operation(LazyTensor.of(matrix)), operation(matrix.data)
    if isinstance(want, torch.Tensor):
        got = materialize(got) if isinstance(got, LazyTensor) else got
        assert torch.equal(got, want)
    else:
        assert got == want


def test_copies_into_real_tensors(matrix: Matrix) -> None:
    target = torch.zeros(4, COLS, dtype=torch.uint8)
    target.copy_(LazyTensor.of(matrix)[2:6])
    assert torch.equal(target, matrix.data[2:6])
    target[1:2] = LazyTensor.of(matrix)[9:10]
    assert torch.equal(target[1], matrix.data[9])


@pytest.mark.parametrize(
    "write", [lambda t: t.fill_(0), lambda t: t.copy_(torch.zeros(ROWS, COLS)), lambda t: t[0].zero_()]
)
def test_writing_is_refused_by_name(matrix: Matrix, write) -> None:
    with pytest.raises(TypeError, match=r"experts\.0\.up_proj\.weight"):
        write(LazyTensor.of(matrix))


def test_assignment_is_refused(matrix: Matrix) -> None:
    lazy = LazyTensor.of(matrix)
    with pytest.raises(TypeError, match="__setitem__"):
        lazy[0] = 1


def test_shape_and_kind_are_known_without_reading(matrix: Matrix) -> None:
    lazy = LazyTensor.of(matrix)
    assert lazy.shape == (ROWS, COLS)
    assert lazy.dim() == 2
    assert lazy.numel() == ROWS * COLS
    assert lazy.dtype == torch.uint8
    assert not lazy.is_floating_point()
    assert lazy.is_meta
    assert matrix.elements == 0


def test_block_of_a_view(matrix: Matrix) -> None:
    lazy = LazyTensor.of(matrix)
    assert lazy[2:4].unsqueeze(0).block() == (slice(2, 4), slice(0, COLS))
    assert lazy[::2].block() is None
