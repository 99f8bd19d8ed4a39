"""vLLM's own quantization configurations, each with one change: NVFP4 experts are ours.

Linear layers, KV-cache scales, attention, excluded modules and experts in other formats go through
the class that stock vLLM would have used, which these are subclasses of. So is the name that code
of vLLM's models asks for (``get_name``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from . import compat
from .config import declared_encodings
from .experts import CsfMoEMethod
from .parameters import COMPRESSED_TENSORS, MODELOPT, Dialect
from .report import Ledger, ledger_of
from .stored import PLAIN, ExpertsKind, Stored, read_stored
from .tuning import FIELD, Budget, parse_budget


def _new_ledger(tuning: Budget | None) -> Ledger:
    given = compat.tuning_argument()
    budget = parse_budget(given) if given is not None else tuning
    return Ledger(compat.is_first_tensor_rank(), compat.kv_cache_token_bytes(), budget)


class _NvFp4ExpertsCompressed:
    """Mixed into a configuration of vLLM, before it."""

    csf_dialect: Dialect
    packed_modules_mapping: dict[str, list[str]]
    csf_stored: Stored | None = None
    csf_encoded: bool = False
    csf_tuning: Budget | None = None

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        # Stock ModelOpt has no float32, which nothing in the arithmetic here needs to exclude.
        return [torch.bfloat16, torch.half, torch.float32]

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        super().maybe_update_config(model_name, hf_config=hf_config, revision=revision)  # type: ignore[misc]
        self.csf_stored = read_stored(model_name, revision)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, compat.RoutedExperts):
            return self._experts_method(layer, prefix)
        linear = isinstance(layer, (compat.LinearBase, compat.ParallelLMHead))
        if linear and self.csf_stored and self._declares_nvfp4(layer, prefix):
            algorithm = self.csf_stored.linear_algorithm(prefix, self.packed_modules_mapping)
            if algorithm == PLAIN:
                return compat.UnquantizedLinearMethod()
            if algorithm is not None:
                return compat.modelopt_method(layer, prefix, algorithm)
        return super().get_quant_method(layer, prefix)  # type: ignore[misc]

    def _experts_method(self, layer: Any, prefix: str) -> Any:
        kind = self.csf_stored.experts(prefix) if self.csf_stored else None
        declared = self._declares_nvfp4(layer, prefix)
        if kind is None and declared:
            kind = ExpertsKind.CSF if self.csf_encoded else ExpertsKind.NVFP4
        if kind in (ExpertsKind.CSF, ExpertsKind.NVFP4):
            ledger = ledger_of(self, partial(_new_ledger, self.csf_tuning))
            plain = kind is ExpertsKind.NVFP4
            if compat.load_format() == "csf":  # it hands over one dialect, and planes instead of streams
                return CsfMoEMethod(layer, MODELOPT, False, plain, ledger)
            return CsfMoEMethod(layer, self._dialect(prefix), not plain, plain, ledger)
        if kind is ExpertsKind.UNQUANTIZED:
            return compat.UnquantizedFusedMoEMethod(layer.moe_config)
        if kind is ExpertsKind.OTHER and declared:
            assert self.csf_stored is not None
            return compat.modelopt_method(layer, prefix, self.csf_stored.experts_algorithm(prefix))
        return super().get_quant_method(layer, prefix)  # type: ignore[misc]

    def _dialect(self, prefix: str) -> Dialect:
        """By the names that are stored: a converted checkpoint may keep those of compressed-tensors."""
        if self.csf_stored is None or self.csf_stored.experts(prefix) is None:
            return self.csf_dialect
        return COMPRESSED_TENSORS if self.csf_stored.has_packed_names(prefix) else MODELOPT

    def _declares_nvfp4(self, layer: Any, prefix: str) -> bool:
        """Whether the checkpoint's recipe says that this layer is NVFP4."""
        raise NotImplementedError


class CsfModelOptNvFp4Config(_NvFp4ExpertsCompressed, compat.ModelOptNvFp4Config):
    csf_dialect = MODELOPT

    def _declares_nvfp4(self, layer: Any, prefix: str) -> bool:
        return not self.is_layer_excluded(prefix)


class CsfModelOptMixedConfig(_NvFp4ExpertsCompressed, compat.ModelOptMixedPrecisionConfig):
    csf_dialect = MODELOPT

    def _declares_nvfp4(self, layer: Any, prefix: str) -> bool:
        algorithm = self._resolve_quant_algo(prefix)
        return not self.is_layer_excluded(prefix) and algorithm in ("NVFP4", "W4A16_NVFP4")


class CsfCompressedTensorsConfig(_NvFp4ExpertsCompressed, compat.CompressedTensorsConfig):
    csf_dialect = COMPRESSED_TENSORS

    def _declares_nvfp4(self, layer: Any, prefix: str) -> bool:
        return compat.compressed_tensors_is_nvfp4(self, layer, prefix)


def stock_config(config: dict[str, Any]) -> Any:
    """The configuration of a checkpoint's ``quantization_config``.

    Raises ValueError for recipes that have no NVFP4 experts, and for a field `tuning` that is none.
    """
    budget = parse_budget(config.get(FIELD))
    config = {name: value for name, value in config.items() if name != FIELD}
    nested = config.get("quantization")
    inner = nested if isinstance(nested, dict) else config
    method = str(config.get("quant_method", "")).lower()
    algo = str(inner.get("quant_algo", "")).upper()
    if method == "compressed-tensors":
        kind: Any = CsfCompressedTensorsConfig
    elif algo == "MIXED_PRECISION":
        kind = CsfModelOptMixedConfig
    elif "NVFP4" in algo:
        kind = CsfModelOptNvFp4Config
    else:
        raise ValueError(
            f"quantization_config has quant_method {method!r} and quant_algo {algo!r}, expected ModelOpt's "
            "NVFP4, W4A16_NVFP4 or MIXED_PRECISION, or compressed-tensors: csf_nvfp4 serves NVFP4 experts"
        )
    made = kind.from_config(config)
    made.csf_encoded = bool(declared_encodings(config))
    made.csf_tuning = budget
    return made
