"""What a model's compressed layers share, and the line that says at start what was saved."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .execution import Execution, Tensors
from .kernels import reference
from .kernels.compiled.build import Account
from .kernels.compiled.cache import ProgramCache
from .planning import Plan
from .startup import Served, Startup
from .tuning import Budget, MakeTimer, Tuning

logger = logging.getLogger("vllm.csf")


@dataclass
class Totals:
    layers: int = 0
    native: int = 0
    resident: int = 0
    exceptions: int = 0

    def line(self, scratch: int, execution: str, token_bytes: int = 0) -> str:
        """`token_bytes`: of the KV cache, for one token; 0: not known."""
        share = 100 * self.exceptions / max(1, self.native)
        ratio = 100 * self.resident / max(1, self.native)
        return (
            f"csf_nvfp4: {self.layers} expert layers, block scales {size(self.native)} native, "
            f"{size(self.resident)} resident ({ratio:.1f} %), {self.exceptions} exceptions ({share:.2f} %), "
            f"scratch {size(scratch)}, execution {execution}{self._bought(token_bytes)}"
        )

    def _bought(self, token_bytes: int) -> str:
        saved = self.native - self.resident
        if token_bytes <= 0 or saved < token_bytes:
            return ""
        return f"; {size(saved)} saved are {saved // token_bytes} tokens of KV cache"


def size(nbytes: int) -> str:
    """12.3 KiB, MiB or GiB."""
    value, unit = nbytes / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.2f} {unit}"


class Ledger:
    """One per quantization config, that is per model (a draft in the same checkpoint included).

    token_bytes: of the KV cache, for one token, 0 where it is not known. tuning: what it may take, if it is
    asked for.
    """

    def __init__(self, speaks: bool = True, token_bytes: int = 0, tuning: Budget | None = None) -> None:
        self._speaks = speaks
        self._token_bytes = token_bytes
        self._expected: set[str] = set()
        self._totals = Totals()
        self._scratch: dict[torch.device, reference.Scratch] = {}
        self._startup = Startup()
        self._tuning = tuning

    def scratch(self, device: torch.device) -> reference.Scratch:
        if device not in self._scratch:
            self._scratch[device] = reference.Scratch(device)
        return self._scratch[device]

    def expect(self, layer_name: str) -> None:
        self._expected.add(layer_name)

    def declare(self, plan: Plan, cache_folder: str | None, device: torch.device) -> Served:
        """A layer's programs begin to come; all layers with an equal plan get one object."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        tuning = Tuning(self._tuning, name) if self._tuning is not None else None
        return self._startup.declare(plan, ProgramCache(cache_folder), tuning)

    def try_with(self, plan: Plan, call: Callable[[], None], timer: MakeTimer | None = None) -> None:
        self._startup.try_with(plan, call, timer)

    def done(
        self,
        layer_name: str,
        layer: reference.ExpertLayer,
        execution: Execution,
        resident: Tensors,
        device: torch.device,
    ) -> None:
        """A layer is ready, in the `resident` tensors of its execution. With the last one all programs are
        made ready and what came of it is logged; a later reload says nothing."""
        scratch = self.scratch(device)
        if not self._startup.underway:  # else the plan's is not known yet, and reserved when it is tried
            scratch.reserve(execution.scratch_bytes())
        if layer_name not in self._expected:
            return
        self._expected.remove(layer_name)
        planes = (layer.scales13, layer.scales2)
        self._totals.layers += 1
        self._totals.native += sum(p.fixed.shape[0] * p.rows * p.cols for p in planes)
        self._totals.resident += execution.scale_bytes(resident)
        self._totals.exceptions += execution.exceptions(resident)
        if not self._expected:
            account = self._finish(device)
            if self._speaks:
                if account is not None:
                    logger.info("csf_nvfp4: %s", account.line())
                for line in self._startup.tuning_lines():
                    logger.info("csf_nvfp4: %s", line)
                logger.info(self._totals.line(scratch.nbytes, execution.name, self._token_bytes))
            self._totals = Totals()

    def _finish(self, device: torch.device) -> Account | None:
        account = self._startup.finish()
        began = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what a program does wrong is said here, not somewhere later
        if account is not None:
            account.seconds += time.perf_counter() - began
            for served in self._startup.served.values():
                logger.debug("csf_nvfp4: %s", served.plan)
        return account


_ledgers: weakref.WeakKeyDictionary[object, Ledger] = weakref.WeakKeyDictionary()


def ledger_of(config: object, make: Callable[[], Ledger]) -> Ledger:
    """The ledger of a quantization config, made for its first layer. Not an attribute: configs are copied and
    sent to workers."""
    if config not in _ledgers:
        _ledgers[config] = make()
    return _ledgers[config]
