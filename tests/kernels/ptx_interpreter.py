"""Runs the PTX of simple kernels without a GPU, so that their arithmetic can be tested anywhere.

All threads of a grid run at once, as numpy vectors, the lowest program counter first, which brings the
threads of a warp together again after a branch. What hardware leaves undefined is an error here: an access
outside a buffer or out of line, a warp-wide instruction or a barrier that some threads do not reach. It knows
the instructions that were met so far and no others; nothing is said about speed or about races.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

LANES = 32
POISON = 0xEE
FINISHED = 1 << 40
_U = np.uint64


class Memory:
    """Global memory: buffers, each 256-byte aligned, with gaps between them that must not be touched."""

    BASE = 1 << 20

    def __init__(self, size: int = 1 << 24) -> None:
        self._bytes = np.full(size, POISON, np.uint8)
        self._mine = np.zeros(size, bool)
        self._top = 0

    def put(self, data: np.ndarray) -> int:
        """The address of a new buffer with these bytes."""
        data = data.reshape(-1).view(np.uint8)
        start, self._top = self._top, self._top + (len(data) // 256 + 2) * 256
        self._mine[start : start + len(data)] = True
        self._bytes[start : start + len(data)] = data
        return self.BASE + start

    def get(self, address: int, size: int) -> np.ndarray:
        return self._bytes[address - self.BASE :][:size].copy()

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Indices [n, size] of accesses, which have to be aligned and inside buffers."""
        assert not (addresses % _U(size)).any(), f"an access of {size} bytes is not aligned"
        found = (addresses.astype(np.int64) - self.BASE)[:, None] + np.arange(size)
        assert (found >= 0).all(), "an access is outside every buffer"
        assert self._mine[found].all(), "an access is outside every buffer"
        return found

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        return self._bytes[self.places(addresses, size)]

    def store(self, addresses: np.ndarray, data: np.ndarray) -> None:
        self._bytes[self.places(addresses, data.shape[1])] = data


@dataclass(frozen=True)
class Instruction:
    guard: str
    name: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    name: str
    parameters: tuple[str, ...]
    code: tuple[Instruction, ...]
    labels: dict[str, int]


def kernels(ptx: str) -> list[Kernel]:
    """The kernels of a module in their order."""
    text = re.sub(r"//[^\n]*", "", ptx)
    return [_kernel(part) for part in text.split(".visible .entry ")[1:]]


def _kernel(text: str) -> Kernel:
    head, _, body = text.partition("{")
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    body = body[: body.index("\n}")]
    for statement in re.sub(r"(\$L\w+):", r"\1:;", body).split(";"):
        part = statement.strip().lstrip("{}").strip()
        if part.endswith(":"):
            labels[part[:-1]] = len(code)
        elif part and not part.startswith((".reg", ".pragma")):
            guard = ""
            if part[0] == "@":
                guard, part = part[1:].split(None, 1)
            name, *rest = part.split(None, 1)
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest[0]) if rest else []
            code.append(Instruction(guard, name, tuple(operands)))
    return Kernel(head.split("(")[0], tuple(re.findall(r"(\w+_param_\d+)", head)), tuple(code), labels)


def run(
    kernel: Kernel, grid: tuple[int, int], threads: int, arguments: list[int], memory: Memory, shared: int = 0
) -> None:
    """`threads`: of a CTA, a multiple of 32; `shared`: bytes of it."""
    assert len(arguments) == len(kernel.parameters), kernel.parameters
    _Grid(kernel, grid, threads, arguments, memory, shared).run()


class _Grid:
    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int],
        threads: int,
        arguments: list[int],
        memory: Memory,
        shared: int,
    ) -> None:
        self.kernel, self.memory, self.threads = kernel, memory, threads
        self.arguments = dict(zip(kernel.parameters, arguments, strict=True))
        self.count = grid[0] * grid[1] * threads
        thread = np.arange(self.count)
        self.cta, self.warp = thread // threads, thread // LANES
        self.special = {
            "%tid.x": thread % threads,
            "%ctaid.x": self.cta % grid[0],
            "%ctaid.y": self.cta // grid[0],
            "%nctaid.x": np.full(self.count, grid[0]),
            "%nctaid.y": np.full(self.count, grid[1]),
        }
        self.registers: dict[str, np.ndarray] = {}
        self.shared = np.full((grid[0] * grid[1], shared), POISON, np.uint8)

    def run(self) -> None:
        at = np.zeros(self.count, np.int64)
        while (lowest := int(at.min())) < len(self.kernel.code):
            here = at == lowest
            found = self.kernel.code[lowest]
            does = np.ones(int(here.sum()), bool)
            if found.guard:
                does = self.registers[found.guard.lstrip("!")][here] ^ found.guard.startswith("!")
            after = np.full(len(does), lowest + 1)
            if found.name.startswith("bra"):
                after[does] = self.kernel.labels[found.operands[-1]]
            elif found.name == "ret":
                after[does] = FINISHED
            elif does.any():
                who = here.copy()
                who[here] = does
                _Step(self, who, found).do()
            at[here] = after


def _bits(kind: str) -> int:
    return int(re.sub(r"\D", "", kind) or 32)


class _Step:
    """One instruction, of the threads `who`."""

    def __init__(self, grid: _Grid, who: np.ndarray, instruction: Instruction) -> None:
        self.g, self.who = grid, who
        self.operands = instruction.operands
        self.name = instruction.name
        self.parts = instruction.name.split(".")
        self.kind = self.parts[-1]
        self.size = _bits(self.kind)

    # ---- operands --------------------------------------------------------------------------------

    def value(self, operand: str | int, kind: str = "") -> np.ndarray:
        """Unsigned as uint64, signed as int64, predicates as bool."""
        text = self.operands[operand] if isinstance(operand, int) else operand
        kind = kind or self.kind
        found = self._raw(text)
        if found.dtype == bool:
            return found
        size = _bits(kind)
        found = found & _U((1 << size) - 1)
        if kind[0] != "s":
            return found
        signed = found.astype(np.int64)
        return signed if size == 64 else np.where(found >> _U(size - 1), signed - (1 << size), signed)

    def _raw(self, text: str) -> np.ndarray:
        if text in self.g.special:
            return self.g.special[text][self.who].astype(_U)
        if text in self.g.registers:
            return self.g.registers[text][self.who]
        if text.startswith("__dynamic_shmem"):
            number = 0
        else:
            number = int(text[2:], 16) if text.startswith("0f") else int(text, 0)
        return np.full(int(self.who.sum()), number & (2**64 - 1), _U)

    def result(self, found: np.ndarray, size: int = 0, operand: str = "") -> None:
        name = operand or self.operands[0]
        if found.dtype != bool:
            found = found.astype(np.int64).astype(_U) if found.dtype != _U else found
            found = found & _U((1 << (size or self.size)) - 1)
        if name not in self.g.registers:
            self.g.registers[name] = np.zeros(self.g.count, found.dtype)
        self.g.registers[name][self.who] = found

    def together(self, of: np.ndarray, size: int) -> None:
        """Whole groups of threads are here, or none of a group."""
        present = set(np.bincount(of, weights=self.who).astype(int))
        assert present <= {0, size}, f"{self.name}: {present} of {size} threads have come"

    # ---- instructions ----------------------------------------------------------------------------

    def do(self) -> None:
        special = getattr(self, f"_{self.parts[0]}", None)
        if special is not None:
            special()
        elif self.kind == "pred":
            self.result(_PREDICATES[self.parts[0]](*(self.value(i) for i in range(1, len(self.operands)))))
        else:
            values = [self.value(i) for i in range(1, len(self.operands))]
            found = _ARITHMETIC[self.parts[0]](*values)
            self.result(np.maximum(found, 0) if "relu" in self.parts else found)

    def _ld(self) -> None:
        if self.parts[1] == "param":
            number = self.g.arguments[self.operands[1].strip("[]")]
            self.result(np.full(int(self.who.sum()), number & (2**64 - 1), _U), 64)
            return
        names, addresses, width = self._access(0, 1)
        size = width * len(names)
        if self.parts[1] == "shared":
            data = self.g.shared[self.g.cta[self.who][:, None], self._inside(addresses, size)]
        else:
            data = self.g.memory.load(addresses, size)
        words = np.ascontiguousarray(data).view(f"<u{width}").astype(_U)
        for i, name in enumerate(names):
            self.result(words[:, i], operand=name)

    def _st(self) -> None:
        names, addresses, width = self._access(1, 0)
        words = [self.value(name, f"b{self.size}").astype(f"<u{width}") for name in names]
        data = np.stack(words, 1).view(np.uint8)
        if self.parts[1] == "shared":
            self.g.shared[self.g.cta[self.who][:, None], self._inside(addresses, data.shape[1])] = data
        else:
            self.g.memory.store(addresses, data)

    def _access(self, registers: int, address: int) -> tuple[list[str], np.ndarray, int]:
        names = [name.strip() for name in self.operands[registers].strip("{}").split(",")]
        base, _, offset = self.operands[address].strip("[]").partition("+")
        kind = "b32" if self.parts[1] == "shared" else "b64"
        return names, self.value(base, kind) + _U(int(offset or 0)), self.size // 8

    def _inside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        assert not (addresses % _U(size)).any(), f"{self.name}: not aligned"
        found = addresses.astype(np.int64)[:, None] + np.arange(size)
        assert (found < self.g.shared.shape[1]).all(), f"{self.name}: outside shared memory"
        return found

    def _atom(self) -> None:
        assert self.name == "atom.shared.add.u32", self.name
        places = self._inside(self.value(self.operands[1].strip("[]"), "b32"), 4)[:, 0] // 4
        words, cta = self.g.shared.view("<u4"), self.g.cta[self.who]
        before = words[cta, places].astype(_U)
        np.add.at(words, (cta, places), self.value(2).astype(np.uint32))
        self.result(before)

    def _bar(self) -> None:
        if self.parts[1] == "warp":
            self.together(self.g.warp, LANES)
        else:
            self.together(self.g.cta, self.g.threads)

    _barrier = _bar

    def _vote(self) -> None:
        assert self.name == "vote.sync.ballot.b32", self.name
        self.together(self.g.warp, LANES)
        votes = self.g.registers[self.operands[1].lstrip("!")][self.who] ^ self.operands[1].startswith("!")
        masks = (votes.reshape(-1, LANES).astype(_U) << np.arange(LANES, dtype=_U)).sum(1, dtype=_U)
        self.result(np.repeat(masks, LANES))

    def _shfl(self) -> None:
        self.together(self.g.warp, LANES)
        values = self.value(1).reshape(-1, LANES)
        other = self.value(2).reshape(-1, LANES).astype(np.int64)
        lane, mode = np.arange(LANES)[None], self.parts[2]
        source = {"idx": other, "bfly": lane ^ other, "up": lane - other, "down": lane + other}[mode]
        assert self.operands[3] == ("0" if mode == "up" else "31"), self.operands
        source = np.where((source < 0) | (source >= LANES), lane, source)
        self.result(np.take_along_axis(values, source, 1).reshape(-1))

    def _mov(self) -> None:
        if self.operands[0][0] == "{":
            for i, name in enumerate(self.operands[0].strip("{}").split(",")):
                self.result(self.value(1) >> _U(16 * i), 16, name.strip())
        else:
            self.result(self.value(1).astype(bool) if self.kind == "pred" else self.value(1))

    def _setp(self) -> None:
        self.result(_COMPARISONS[self.parts[1]](self.value(1), self.value(2)))

    def _selp(self) -> None:
        self.result(np.where(self.g.registers[self.operands[3]][self.who], self.value(1), self.value(2)))

    def _cvt(self) -> None:
        self.result(self.value(1, self.parts[-1]), max(16, _bits(self.parts[-2])))

    def _lop3(self) -> None:
        a, b, c = (self.value(i) for i in (1, 2, 3))
        found, table = np.zeros_like(a), int(self.operands[4], 0)
        for k in range(8):
            if table >> k & 1:
                found |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        self.result(found)

    def _prmt(self) -> None:
        both, selector = self.value(1) | self.value(2) << _U(32), self.value(3)
        found = np.zeros_like(both)
        for k in range(4):
            byte = selector >> _U(4 * k) & _U(15)
            assert (byte < 8).all(), "prmt: signs are not copied here"
            found |= (both >> byte * _U(8) & _U(255)) << _U(8 * k)
        self.result(found)

    def _shf(self) -> None:
        assert self.name == "shf.r.wrap.b32", self.name
        self.result((self.value(1) | self.value(2) << _U(32)) >> (self.value(3) & _U(31)))

    def _shl(self) -> None:
        by = self.value(2, "b32")
        self.result(np.where(by < self.size, self.value(1, f"b{self.size}") << np.minimum(by, _U(63)), _U(0)))

    def _shr(self) -> None:
        value, by = self.value(1), self.value(2, "b32")
        if self.kind[0] == "s":
            self.result(value >> np.minimum(by, _U(self.size - 1)).astype(np.int64))
        else:
            self.result(np.where(by < self.size, value >> np.minimum(by, _U(63)), _U(0)))

    def _mul(self) -> None:
        self.result(self.value(1) * self.value(2), self.size * (2 if self.parts[1] == "wide" else 1))

    def _mad(self) -> None:
        wide = 2 if self.parts[1] == "wide" else 1
        third = self.value(3, f"{self.kind[0]}{self.size * wide}")
        self.result(self.value(1) * self.value(2) + third, self.size * wide)


def _each(function: Callable[[int], int]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: np.array([function(int(value)) for value in values], _U)


_COMPARISONS: dict[str, Callable] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_PREDICATES: dict[str, Callable] = {"and": np.logical_and, "or": np.logical_or, "not": np.logical_not}
_ARITHMETIC: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
    "not": np.bitwise_not,
    "popc": _each(int.bit_count),
    "clz": _each(lambda value: LANES - value.bit_length()),
    "brev": _each(lambda value: int(f"{value:032b}"[::-1], 2)),
}
