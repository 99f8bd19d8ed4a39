"""The csf loader: what it hands to a model, and how little of a file a rank reads for it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from expert_layers import EXPERTS, MODULE, SHARDS, Checkpoint, Layer, run, wanted
from safetensors.torch import save_file

pytest.importorskip("vllm")

from vllm.config.load import LoadConfig
from vllm_csf.loaders import codec
from vllm_csf.loaders.errors import CheckpointError

from vllm_csf import loading
from vllm_csf.lazy import LazyTensor
from vllm_csf.parameters import COMPRESSED_TENSORS, MODELOPT

OTHER = {"model.norm.weight": torch.ones(64), "model.layers.3.mlp.gate.weight": torch.randn(4, 64)}
W_NAMES = {"w1": "w1", "w3": "w3", "w2": "w2"}


def write(folder: Path, checkpoint: Checkpoint, dialect=MODELOPT, streams=True, names=SHARDS) -> str:
    tensors = dict(OTHER)
    for _, suffix, tensor, shard, expert in checkpoint.tensors(dialect, streams):
        tensors[f"{MODULE}.{expert}.{names[shard]}.{suffix}"] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return str(folder)


def write_fused(folder: Path, checkpoint: Checkpoint) -> str:
    """[E, 2I, H / 2], gate over up."""

    def fused(part: str) -> dict[str, torch.Tensor]:
        def of(shard: str) -> torch.Tensor:
            return torch.stack([getattr(checkpoint.projections[e, shard], part) for e in range(EXPERTS)])

        return {"gate_up_proj": torch.cat([of("w1"), of("w3")], dim=1), "down_proj": of("w2")}

    tensors = dict(OTHER)
    for name, tensor in fused("weight").items():
        tensors[f"{MODULE}.{name}"] = tensor.contiguous()
    for name, tensor in fused("scale").items():
        tensors[f"{MODULE}.{name}_weight_scale"] = tensor.view(torch.float8_e4m3fn).contiguous()
    for expert in range(EXPERTS):
        checkpoint.projections[expert, "w3"].global_scale = checkpoint.projections[expert, "w1"].global_scale
    scales = {s: [checkpoint.projections[e, s].global_scale for e in range(EXPERTS)] for s in ("w1", "w2")}
    tensors[f"{MODULE}.gate_up_proj_weight_scale_2"] = torch.tensor(scales["w1"])
    tensors[f"{MODULE}.down_proj_weight_scale_2"] = torch.tensor(scales["w2"])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return str(folder)


def weights(model: str, quantization: str | None = "csf_nvfp4") -> Any:
    loader = loading.CsfModelLoader(LoadConfig(load_format="csf"))
    config = SimpleNamespace(model=model, revision=None, quantization=quantization)
    return loader.get_all_weights(config, torch.nn.Module())


def deliver(model: str, layer: Layer) -> dict[str, torch.Tensor]:
    """As a model's load_weights does; returns the other tensors."""
    shard_of = {name: shard for names in (SHARDS, W_NAMES) for shard, name in names.items()}
    other = {}
    for name, tensor in weights(model):
        if not name.startswith(MODULE + "."):
            other[name] = tensor
            continue
        expert, projection, suffix = name.removeprefix(MODULE + ".").split(".", 2)
        shard = shard_of[projection]
        # vLLM's RoutedExperts passes every tensor through here.
        (tensor,) = tensor.unsqueeze(0).unbind()
        layer.receive("w2" if shard == "w2" else "w13", suffix, tensor, shard, int(expert))
    return other


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("dialect", [MODELOPT, COMPRESSED_TENSORS])
@pytest.mark.parametrize("names", [SHARDS, W_NAMES])
def test_names_and_dialects_of_checkpoints(tmp_path: Path, streams: bool, dialect, names) -> None:
    checkpoint, layer = Checkpoint(), Layer(streams=False)
    other = deliver(write(tmp_path, checkpoint, dialect, streams, names), layer)
    assert {name: tensor.tolist() for name, tensor in other.items()} == {
        n: t.tolist() for n, t in OTHER.items()
    }
    np.testing.assert_allclose(run(layer.finish()).numpy(), wanted(checkpoint), rtol=1e-4, atol=1e-5)


def test_fused_tensors(tmp_path: Path) -> None:
    checkpoint, layer = Checkpoint(), Layer(streams=False)
    deliver(write_fused(tmp_path, checkpoint), layer)
    np.testing.assert_allclose(run(layer.finish()).numpy(), wanted(checkpoint), rtol=1e-4, atol=1e-5)


def bytes_of_experts(checkpoint: Checkpoint) -> int:
    return sum(p.weight.nbytes + p.scale.nbytes for p in checkpoint.projections.values())


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found = []
    real = loading.open_checkpoint

    def open_and_note(*args: Any, **kwargs: Any) -> Any:
        found.append(real(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(loading, "open_checkpoint", open_and_note)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tensor_parallel_ranks_read_their_share(tmp_path: Path, opened: list, ranks: int) -> None:
    checkpoint = Checkpoint(width=256)
    model = write(tmp_path, checkpoint, streams=False)
    total = torch.zeros(5, 64)
    for rank in range(ranks):
        layer = Layer(streams=False, rank=rank, ranks=ranks, width=256)
        deliver(model, layer)
        total += run(layer.finish())
        share = opened[-1].bytes_read / bytes_of_experts(checkpoint)
        assert share == pytest.approx(1 / ranks, rel=0.05)
    np.testing.assert_allclose(total.numpy(), wanted(checkpoint), rtol=1e-4, atol=1e-5)


def test_expert_parallel_ranks_read_their_share(tmp_path: Path, opened: list) -> None:
    checkpoint = Checkpoint()
    model = write(tmp_path, checkpoint, streams=False)
    deliver(model, Layer(streams=False, mine=[2]))
    assert opened[-1].bytes_read / bytes_of_experts(checkpoint) == pytest.approx(1 / EXPERTS, rel=0.05)


def own_memory() -> int:
    """Bytes of anonymous memory of this process: not what is mapped from files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("streams", [True, False])
def test_host_memory_stays_below_two_layers_over_what_is_resident(tmp_path: Path, streams: bool) -> None:
    # Layers of 28 MB: what the process allocates once (15 MB were seen) must not count as a layer.
    layers, hidden, width = 5, 2048, 2048
    shapes = {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}
    modules = [f"model.layers.{i}.mlp.experts" for i in range(layers)]
    rng = np.random.default_rng(0)
    for number, module in enumerate(modules):
        tensors = {}
        for expert, (shard, (rows, cols)) in itertools.product(range(EXPERTS), shapes.items()):
            name = f"{module}.{expert}.{SHARDS[shard]}"
            scale = torch.from_numpy(rng.integers(40, 58, (rows, cols // 16), dtype=np.uint8))
            weight = torch.from_numpy(rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8))
            tensors |= {f"{name}.weight": weight, f"{name}.weight_scale_2": torch.tensor(0.1)}
            plane = codec.encode(scale)
            tensors |= (
                {f"{name}.weight_scale" + codec.NVFP4.fixed_suffix: plane.fixed}
                | {f"{name}.weight_scale" + codec.NVFP4.exceptions_suffix: plane.exceptions}
                if streams
                else {f"{name}.weight_scale": scale.view(torch.float8_e4m3fn)}
            )
        save_file(tensors, tmp_path / f"model-{number}.safetensors")
        one_layer = sum(t.nbytes for t in tensors.values())
    (tmp_path / "config.json").write_text("{}")
    del tensors
    made = {m: Layer(streams=False, width=width, hidden=hidden, module=m) for m in modules}
    for layer in made.values():
        for parameter in layer.parameters():
            parameter.data.fill_(1)  # so that what is resident in the end counts from the start
    before, peak, shard_of = own_memory(), 0, {name: shard for shard, name in SHARDS.items()}
    for name, tensor in weights(str(tmp_path)):
        module, expert, projection, suffix = name.rsplit(".", 3)
        shard = shard_of[projection]
        made[module].receive("w2" if shard == "w2" else "w13", suffix, tensor, shard, int(expert))
        peak = max(peak, own_memory() - before)
    assert peak < 2 * one_layer
    for layer in made.values():
        layer.finish()


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path, opened: list) -> None:
    for name, tensor in weights(write(tmp_path, Checkpoint())):
        assert isinstance(tensor, LazyTensor) == name.startswith(MODULE)
    assert opened[-1].bytes_read == 0


def test_lazy_scales_have_the_plain_bytes(tmp_path: Path) -> None:
    """Whoever does not know planes, stock vLLM say, finds the scales of an uncompressed checkpoint."""
    checkpoint = Checkpoint()
    for name, tensor in weights(write(tmp_path, checkpoint, streams=True)):
        if name == f"{MODULE}.1.up_proj.weight_scale":
            found = tensor.clone()
            assert found.dtype == torch.float8_e4m3fn
            assert torch.equal(found.view(torch.uint8), checkpoint.projections[1, "w3"].scale)


def test_the_format_without_the_quantization_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="quantization is 'modelopt_fp4', expected --quantization csf_nvfp4"
    ):
        next(weights(write(tmp_path, Checkpoint()), "modelopt_fp4"))


def test_other_codecs_are_refused_by_name(tmp_path: Path) -> None:
    rows, cols, tensors = 32, 64, {}
    for projection in SHARDS.values():
        plane = codec.encode(torch.full((rows, cols // 32), 127, dtype=torch.uint8), codec.MXFP4)
        name = f"{MODULE}.0.{projection}"
        tensors[f"{name}.weight"] = torch.zeros(rows, cols // 2, dtype=torch.uint8)
        tensors[f"{name}.scale.mxfp4_csf_fixed"] = plane.fixed
        tensors[f"{name}.scale.mxfp4_csf_exceptions"] = plane.exceptions
    name = f"{MODULE}.0.down_proj"
    plane = codec.encode(torch.full((cols, rows // 32), 127, dtype=torch.uint8), codec.MXFP4)
    tensors |= {f"{name}.weight": torch.zeros(cols, rows // 2, dtype=torch.uint8)}
    tensors |= {
        f"{name}.scale.mxfp4_csf_fixed": plane.fixed,
        f"{name}.scale.mxfp4_csf_exceptions": plane.exceptions,
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"{MODULE}: has codec row-base-offset1"):
        list(weights(str(tmp_path)))


def test_a_checkpoint_without_such_experts_passes_through(tmp_path: Path) -> None:
    save_file(OTHER, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert {name for name, _ in weights(str(tmp_path), None)} == set(OTHER)
