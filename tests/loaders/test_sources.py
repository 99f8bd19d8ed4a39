"""Rank-local reads: what they return, and how many bytes they take from disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_checkpoints import (
    PROJECTIONS,
    Layer,
    Tensors,
    compressed_tensors,
    csf_tensors,
    fused_tensors,
    modelopt_tensors,
    random_layer,
    save,
    write_folder,
)
from vllm_csf.loaders import files
from vllm_csf.loaders.checkpoint import open_checkpoint
from vllm_csf.loaders.codec import Plane, decode, stack, validate
from vllm_csf.loaders.errors import CheckpointError, FormatError
from vllm_csf.loaders.sources import ExpertLayer

LAYOUTS = [csf_tensors, modelopt_tensors, compressed_tensors, fused_tensors]


@pytest.fixture(params=LAYOUTS, ids=[make.__name__ for make in LAYOUTS])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ExpertLayer, Layer]:
    layer = random_layer(experts=3, width=192, hidden=96)
    write_folder(tmp_path, request.param(layer))
    return open_checkpoint(tmp_path).layers[0], layer


def finite(scale: torch.Tensor) -> bool:
    return not bool((scale & 127 == 127).any())


def padded_extents(width: int, ranks: int, unit: int = 32) -> list[tuple[int, int, int]]:
    """Ranks of equal size in units of 32 channels; the last ones hold less, or nothing."""
    units = -(-width // unit)
    size = -(-units // ranks) * unit
    return [(min(r * size, width), min((r + 1) * size, width), size) for r in range(ranks)]


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_that_divide_the_width(opened: tuple[ExpertLayer, Layer], ranks: int) -> None:
    found, truth = opened
    size = truth.width // ranks
    for (expert, projection), m in truth.matrices.items():
        source = found.source(expert, projection)
        for rank in range(ranks):
            start, stop = rank * size, (rank + 1) * size
            weight, plane = source.channels(start, stop)
            rows = slice(None) if projection == "down" else slice(start, stop)
            pairs, groups = slice(None), slice(None)
            if projection == "down":
                pairs, groups = slice(start // 2, stop // 2), slice(start // 16, stop // 16)
            assert torch.equal(weight, m.weight[rows, pairs])
            assert weight.is_contiguous()
            assert torch.equal(decode(plane), m.scale[rows, groups])


@pytest.mark.parametrize("ranks", [4, 5, 8])
def test_ranks_that_do_not_divide_the_width(opened: tuple[ExpertLayer, Layer], ranks: int) -> None:
    """Each half (gate, up) is padded at its own end: stacking the padded halves keeps them apart."""
    found, truth = opened
    for rank, (start, stop, size) in enumerate(padded_extents(truth.width, ranks)):
        part = {p: found.source(1, p).channels(start, stop, size) for p in PROJECTIONS}
        both = decode(stack([part["gate"][1], part["up"][1]]))
        assert both.shape == (2 * size, truth.hidden // 16)
        assert finite(both)
        count = stop - start
        for half, projection in enumerate(("gate", "up")):
            m = truth.matrices[1, projection]
            weight = part[projection][0]
            assert torch.equal(weight[:count], m.weight[start:stop])
            assert not weight[count:].any(), f"rank {rank}"
            assert torch.equal(both[half * size :][:count], m.scale[start:stop])
        weight, plane = part["down"]
        m = truth.matrices[1, "down"]
        assert weight.shape == (truth.hidden, size // 2)
        assert torch.equal(weight[:, : count // 2], m.weight[:, start // 2 : stop // 2])
        assert not weight[:, count // 2 :].any()
        assert torch.equal(decode(plane)[:, : count // 16], m.scale[:, start // 16 : stop // 16])
        assert finite(decode(plane))
        validate(plane, "down")


@pytest.mark.parametrize("make", [modelopt_tensors, fused_tensors])
@pytest.mark.parametrize("width", [16, 48, 80, 176])
def test_widths_with_an_odd_number_of_scales(
    tmp_path: Path, make: Callable[..., Tensors], width: int
) -> None:
    """No CSF plane has an odd number of columns; a plain scale may, and is filled up."""
    truth = random_layer(experts=2, width=width)
    truth.matrices[0, "down"].scale[3, -1] = 0x7F
    write_folder(tmp_path, make(truth))
    layer = open_checkpoint(tmp_path).layers[0]
    size = -(-width // 32) * 32
    for (expert, projection), m in truth.matrices.items():
        weight, plane = layer.source(expert, projection).channels(0, width, size)
        scale = decode(plane)
        assert torch.equal(scale[: m.scale.shape[0], : m.scale.shape[1]], m.scale)
        assert finite(scale[:, m.scale.shape[1] :])
        assert torch.equal(weight[: m.weight.shape[0], : m.weight.shape[1]], m.weight)
    if width % 32:
        with pytest.raises(FormatError, match=f"down_proj.*: {width // 16} columns, expected even"):
            layer.source(0, "down").plane()


def test_padding_costs_no_exceptions(tmp_path: Path) -> None:
    truth = random_layer(experts=1, width=80)
    for m in truth.matrices.values():
        m.scale.fill_(56)
    write_folder(tmp_path, modelopt_tensors(truth))
    for source in open_checkpoint(tmp_path).layers[0].sources():
        assert source.channels(0, 80, 128)[1].exceptions.numel() == 0


def test_planes_of_many_experts_at_once(opened: tuple[ExpertLayer, Layer]) -> None:
    found, truth = opened
    for projection in PROJECTIONS:
        for experts, start, stop, size in ((None, 0, None, None), ([2, 0], 32, 96, 96), ([1], 192, 192, 64)):
            planes = found.planes(projection, experts, start, stop, size)
            for expert, plane in zip(experts or range(truth.experts), planes, strict=True):
                one = found.source(expert, projection).channels(
                    start, truth.width if stop is None else stop, size
                )[1]
                assert torch.equal(decode(plane), decode(one))
                assert (plane.rows, plane.cols) == (one.rows, one.cols)
    assert found.planes("up", []) == []


def test_rows_and_columns_of_any_projection(opened: tuple[ExpertLayer, Layer]) -> None:
    found, truth = opened
    source, m = found.source(2, "up"), truth.matrices[2, "up"]
    assert torch.equal(source.weight((16, 64), (32, 64)), m.weight[16:64, 16:32])
    assert torch.equal(decode(source.plane((16, 64), (32, 64))), m.scale[16:64, 2:4])
    assert torch.equal(source.scale((16, 64), (32, 64)), m.scale[16:64, 2:4])
    assert torch.equal(source.weight((3, 5)), m.weight[3:5])


def test_extents_that_do_not_exist(opened: tuple[ExpertLayer, Layer]) -> None:
    found, _ = opened
    source = found.source(0, "up")
    for rows, cols in (((0, 208), None), ((32, 16), None), ((-16, 16), None), (None, (0, 128))):
        with pytest.raises(FormatError, match=r"up_proj.*: rows .*expected a part of 192 x 96"):
            source.weight(rows, cols)
        with pytest.raises(FormatError, match=r"expected a part of 192 x 96"):
            source.plane(rows, cols)
    with pytest.raises(FormatError, match=r"input channels \[1, 2\), expected multiples of 2"):
        source.weight(cols=(1, 2))
    with pytest.raises(FormatError, match="expected multiples of 16"):
        source.plane(cols=(8, 32))
    with pytest.raises(FormatError, match=r"expected (a positive multiple|multiples) of 16"):
        source.plane((8, 32))
    with pytest.raises(FormatError, match="expected no smaller"):
        source.weight(pad_to=(96, 96))
    with pytest.raises(FormatError, match="expected no smaller"):
        source.plane(pad_to=(96, 96))
    with pytest.raises(FormatError, match="padded to 100 input channels"):
        source.plane(pad_to=(192, 100))
    with pytest.raises(
        CheckpointError, match=r"no gate_up of expert 0, expected \['gate', 'up', 'down'\] of 0 to 2"
    ):
        found.source(0, "gate_up")
    with pytest.raises(CheckpointError, match="no up of expert 3"):
        found.source(3, "up")


def test_gate_and_up_with_other_global_scales(tmp_path: Path) -> None:
    truth = random_layer(experts=3)
    for expert in (0, 2):
        truth.matrices[expert, "up"].global_scale = truth.matrices[expert, "gate"].global_scale
    write_folder(tmp_path, csf_tensors(truth))
    lines = open_checkpoint(tmp_path).layers[0].unequal_global_scales()
    assert len(lines) == 1
    assert lines[0].startswith(
        f"{truth.name}.1: global scale of gate {float(truth.matrices[1, 'gate'].global_scale)!r}"
    )


def test_calibration_stays_float32_under_another_default(tmp_path: Path) -> None:
    truth = random_layer(experts=1)
    write_folder(tmp_path, csf_tensors(truth))
    layer = open_checkpoint(tmp_path).layers[0]
    torch.set_default_dtype(torch.bfloat16)
    try:
        scale = layer.source(0, "gate").global_scale
    finally:
        torch.set_default_dtype(torch.float32)
    assert scale.dtype == torch.float32
    assert scale == truth.matrices[0, "gate"].global_scale


def test_input_scale_may_be_missing(tmp_path: Path) -> None:
    write_folder(tmp_path, modelopt_tensors(random_layer(), input_scale=False))
    source = open_checkpoint(tmp_path).layers[0].source(0, "down")
    assert source.input_scale is None
    assert not source.has_input_scale


# ---- bytes ---------------------------------------------------------------------------------------


def expert_bytes(planes: list[Plane], weights: list[torch.Tensor]) -> int:
    return sum(p.nbytes for p in planes) + sum(w.nbytes for w in weights)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("make", LAYOUTS, ids=[make.__name__ for make in LAYOUTS])
def test_a_tensor_parallel_rank_reads_its_share(
    tmp_path: Path, make: Callable[..., Tensors], ranks: int
) -> None:
    """Exactly 1/n of the weights and plain scales. Of the streams: 1/n of gate's and up's slabs; all of
    down's, whose columns lie scattered over every slab; and the exceptions, which are few."""
    truth = random_layer(experts=4, width=256, hidden=128)
    write_folder(tmp_path, make(truth))
    checkpoint = open_checkpoint(tmp_path)
    layer = checkpoint.layers[0]
    assert checkpoint.bytes_read == 0
    size = truth.width // ranks
    for projection in PROJECTIONS:
        matrices = [truth.matrices[e, projection] for e in range(4)]
        for rank in range(ranks):
            before = checkpoint.bytes_read
            for expert in range(4):
                layer.source(expert, projection).weight(
                    *layer.source(expert, projection).part(rank * size, (rank + 1) * size)[:2]
                )
            assert checkpoint.bytes_read - before == sum(m.weight.nbytes for m in matrices) // ranks
            before = checkpoint.bytes_read
            layer.planes(projection, None, rank * size, (rank + 1) * size)
            got = checkpoint.bytes_read - before
            if not layer.compressed:
                assert got == sum(m.scale.nbytes for m in matrices) // ranks
                continue
            planes = layer.planes(projection)
            fixed = sum(p.fixed.numel() for p in planes)
            exceptions = sum(4 * p.exceptions.numel() for p in planes)
            assert got == exceptions + (fixed if projection == "down" else fixed // ranks)


@pytest.mark.parametrize("make", LAYOUTS, ids=[make.__name__ for make in LAYOUTS])
def test_an_expert_parallel_rank_reads_its_experts(tmp_path: Path, make: Callable[..., Tensors]) -> None:
    truth = random_layer(experts=8)
    write_folder(tmp_path, make(truth))

    def read(experts: range) -> int:
        checkpoint = open_checkpoint(tmp_path)
        for source in checkpoint.layers[0].sources(experts):
            source.weight()
            source.plane()
        return checkpoint.bytes_read

    parts = [read(range(r, r + 2)) for r in range(0, 8, 2)]
    assert sum(parts) == read(range(8))
    assert max(parts) < 1.2 * sum(parts) / 4


def test_nothing_is_read_for_a_part_that_is_all_padding(opened: tuple[ExpertLayer, Layer]) -> None:
    found, truth = opened
    before = found._reader.bytes_read
    weight, plane = found.source(0, "down").channels(192, 192, 32)
    assert found._reader.bytes_read == before
    assert not weight.any()
    assert not decode(plane).any()
    assert weight.shape == (truth.hidden, 16)


# ---- files ---------------------------------------------------------------------------------------


def open_shards(root: Path) -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[-1] for line in maps if line.endswith(".safetensors") and str(root) in line})


def test_few_shards_are_mapped_at_a_time(tmp_path: Path) -> None:
    write_folder(tmp_path, csf_tensors(random_layer(experts=8)), shards=12)
    checkpoint = open_checkpoint(tmp_path)
    kept = [(source.weight(), source.plane()) for source in checkpoint.layers[0].sources()]
    assert 0 < open_shards(tmp_path) <= files._OPEN_SHARDS
    checkpoint.close()
    assert open_shards(tmp_path) == 0, "what was read still maps a shard"
    assert kept[0][0].shape == (64, 48)
    assert checkpoint.layers[0].source(0, "up").weight().shape == (64, 48)


def test_a_shard_is_mapped_anew_after_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = files.safe_open
    monkeypatch.setattr(files, "safe_open", lambda *a, **k: opened.append(a) or real(*a, **k))
    monkeypatch.setattr(files, "_REMAP_BYTES", 10_000)
    truth = random_layer(experts=8)
    write_folder(tmp_path, csf_tensors(truth), shards=1)
    for source in open_checkpoint(tmp_path).layers[0].sources():
        assert torch.equal(source.weight(), truth.matrices[source.expert, source.projection].weight)
    assert 5 < len(opened) < 12


def test_reads_from_several_threads(tmp_path: Path) -> None:
    truth = random_layer(experts=8)
    write_folder(tmp_path, csf_tensors(truth), shards=7)
    layer = open_checkpoint(tmp_path).layers[0]
    wrong: list[str] = []

    def work() -> None:
        for source in layer.sources():
            m = truth.matrices[source.expert, source.projection]
            if not (torch.equal(source.weight(), m.weight) and torch.equal(source.scale(), m.scale)):
                wrong.append(repr(source))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def anonymous_memory() -> int:
    """Bytes of this process that are no file's."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


@pytest.mark.parametrize("make", [csf_tensors, modelopt_tensors])
def test_host_memory_stays_below_two_layers(tmp_path: Path, make: Callable[..., Tensors]) -> None:
    """Reading layer after layer, keeping one, never holds two."""
    truth = random_layer(experts=16, width=512, hidden=2048)
    for i in range(6):
        truth.name = f"model.layers.{i}.mlp.experts"
        save(tmp_path / f"model-{i}.safetensors", make(truth))
    layer_bytes = sum(m.weight.nbytes + m.scale.nbytes for m in truth.matrices.values())
    checkpoint = open_checkpoint(tmp_path)
    start, peak = anonymous_memory(), 0
    for layer in checkpoint.layers:
        kept = []
        for projection in PROJECTIONS:
            kept.append(layer.planes(projection))
            kept.append([layer.source(e, projection).weight() for e in range(layer.experts)])
            peak = max(peak, anonymous_memory() - start)
    assert peak < 2 * layer_bytes


def test_blocks_of_any_tensor(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(24, dtype=torch.int32).view(4, 6),
        "b": torch.arange(5),
        "c": torch.tensor(3.0),
    }
    write_folder(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("a"), tensors["a"])
    assert torch.equal(checkpoint.read("a", (1, 3), (2, 5)), tensors["a"][1:3, 2:5])
    assert torch.equal(checkpoint.read("a", cols=(0, 1)), tensors["a"][:, :1])
    assert torch.equal(checkpoint.read("b", (2, 4)), tensors["b"][2:4])
    assert torch.equal(checkpoint.read("c"), tensors["c"])
    assert checkpoint.bytes_read == 96 + 24 + 16 + 16 + 4
    for name, rows, cols in (
        ("a", (0, 5), None),
        ("a", None, (6, 7)),
        ("b", (2, 2), None),
        ("b", None, (0, 2)),
    ):
        with pytest.raises(FormatError, match=f"{name}: .* asked of shape"):
            checkpoint.read(name, rows, cols)
    with pytest.raises(CheckpointError, match="d: no such tensor"):
        checkpoint.read("d")
