"""A small layer of experts, as random checkpoint tensors and as a module that receives them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from vllm_csf.kernels import oracle, reference
from vllm_csf.kernels.activation import Activation
from vllm_csf.loaders import codec

from vllm_csf.intake import Intake, LayerShape
from vllm_csf.parameters import MODELOPT, Dialect, register_parameters
from vllm_csf.partition import extent

MODULE = "model.layers.3.mlp.experts"
EXPERTS, HIDDEN, WIDTH = 4, 64, 96
SHARDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass
class Projection:
    weight: torch.Tensor
    scale: torch.Tensor
    global_scale: float


@dataclass
class Checkpoint:
    """Random projections of a layer and, for FP64, what they mean."""

    width: int = WIDTH
    seed: int = 0
    hidden: int = HIDDEN
    projections: dict[tuple[int, str], Projection] = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        for expert in range(EXPERTS):
            for shard in SHARDS:
                rows, cols = (self.hidden, self.width) if shard == "w2" else (self.width, self.hidden)
                scale = torch.randint(40, 60, (rows, cols // 16), generator=g)
                wild = torch.rand(scale.shape, generator=g) < 0.05
                scale[wild] = torch.randint(0, 120, (int(wild.sum()),), generator=g)
                self.projections[expert, shard] = Projection(
                    torch.randint(256, (rows, cols // 2), dtype=torch.uint8, generator=g),
                    scale.to(torch.uint8),
                    float(torch.rand((), generator=g)) / 50 + 0.01,
                )

    def tensors(self, dialect: Dialect, streams: bool):
        """(half, name, tensor, shard, expert) of every stored tensor."""
        for (expert, shard), p in self.projections.items():
            half = "w2" if shard == "w2" else "w13"
            value = 1 / p.global_scale if dialect.global_scale_divides else p.global_scale
            yield half, dialect.weight, p.weight, shard, expert
            yield half, dialect.global_scale, torch.tensor(value), shard, expert
            yield half, dialect.input_scale, torch.tensor(float("nan")), shard, expert
            if streams:
                plane = codec.encode(p.scale)
                yield half, "weight_scale.nvfp4_csf_fixed", plane.fixed, shard, expert
                yield half, "weight_scale.nvfp4_csf_exceptions", plane.exceptions, shard, expert
            else:
                yield half, "weight_scale", p.scale.view(torch.float8_e4m3fn), shard, expert

    def dense(self, shard: str, expert: int) -> np.ndarray:
        p = self.projections[expert, shard]
        return oracle.dequantize(p.weight.numpy(), p.scale.numpy(), p.global_scale)


class Layer(torch.nn.Module):
    def __init__(
        self,
        dialect=MODELOPT,
        streams=True,
        rank=0,
        ranks=1,
        width=WIDTH,
        mine=range(EXPERTS),
        hidden=HIDDEN,
        module=MODULE,
        room=0.0,
        whole=False,
    ) -> None:
        super().__init__()
        self.dialect = dialect
        local = {expert: i for i, expert in enumerate(mine)}
        part = extent(width, rank, ranks, "layer")
        shape = LayerShape(module, len(local), hidden, width, part, gated=True)
        divides = dialect.global_scale_divides
        self.intake = Intake(self, shape, lambda e: local.get(e, -1), divides, room, whole)
        register_parameters(self, self.intake, dialect, streams, never_complete=1 << 40)

    def receive(self, half: str, name: str, tensor: torch.Tensor, shard: str, expert: int) -> bool:
        """As vLLM's RoutedExperts.load_weights does."""
        param = getattr(self, f"{half}_{name}")
        weight_name = f"{MODULE}.{half}_{name}"
        return param.weight_loader(
            param=param,
            loaded_weight=tensor,
            weight_name=weight_name,
            shard_id=shard,
            expert_id=expert,
            return_success=True,
        )

    def finish(self) -> reference.ExpertLayer:
        names = (self.dialect.weight, self.dialect.global_scale)
        w13, alphas13 = (getattr(self, f"w13_{name}").data for name in names)
        w2, alphas2 = (getattr(self, f"w2_{name}").data for name in names)
        return self.intake.finish(w13, w2, (alphas13, alphas2), Activation())


def run(layer: reference.ExpertLayer, expert_map: torch.Tensor | None = None) -> torch.Tensor:
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9))
    ids = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [1, 3]])
    return reference.forward(layer, x, torch.full((5, 2), 0.5), ids, expert_map)


def wanted(checkpoint: Checkpoint) -> np.ndarray:
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9)).numpy()
    ids = np.array([[0, 1], [1, 2], [2, 3], [3, 0], [1, 3]])
    dense = ([checkpoint.dense(shard, e) for e in range(EXPERTS)] for shard in ("w1", "w3", "w2"))
    return oracle.expert_layer(x, np.full((5, 2), 0.5), ids, *dense)
