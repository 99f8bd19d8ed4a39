"""Expert layers of models that are served, by name, and what the measurements vary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerGeometry:
    """A rank's part of an expert layer: `width` is that of an expert on the rank."""

    name: str
    experts: int
    hidden: int
    width: int
    topk: int

    @property
    def weights(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.width


NAMED = {
    geometry.name: geometry
    for geometry in (
        LayerGeometry("GLM-Flash-TP4", 288, 4096, 512, 8),
        LayerGeometry("Qwen3.8-TP2", 512, 2560, 320, 10),
        LayerGeometry("Qwen3.8-TP1", 512, 2560, 640, 10),
        LayerGeometry("Qwen3-235B-TP1", 128, 4096, 1536, 8),
        LayerGeometry("Qwen3-30B-TP1", 128, 2048, 768, 8),
        LayerGeometry("DSV3-TP8", 256, 7168, 256, 8),
    )
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ARMS = ("csf", "native", "marlin")
SERVED_ARMS = ("stock", "native", "csf")
ROUTINGS = ("uniform", "zipf", "hot")
EXCEPTIONS = 0.003
