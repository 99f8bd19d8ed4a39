"""Matrix instructions of a warpgroup (sm_90a)."""

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .core import asm, struct, word

# K-major rows of 128 bytes, swizzled: eight rows are 1024 bytes apart (in units of 16 bytes, bits 32 on).
_ROWS_OF_128_LOW = 1 << 16
_ROWS_OF_128_HIGH = (1 << 30) | 64
STEP = 16  # tokens by which the width of a product grows


@dataclass(frozen=True)
class _Block:
    """Where a block of assembly has its operands: accumulators of `count` registers each, written and read,
    `steps` A fragments of four words, the descriptors of each accumulator's B, predicates."""

    accumulators: int
    count: int
    steps: int

    @property
    def a(self) -> int:
        return 2 * self.accumulators * self.count

    @property
    def b(self) -> int:
        return self.a + 4 * self.steps

    @property
    def digits(self) -> int:
        return self.b + self.accumulators * self.steps

    def products(self, width: int) -> str:
        """Of all accumulators, of `width` times 16 columns together; the first ones have the odd 16."""
        text = ""
        for step in range(self.steps):
            registers = ",".join(f"${self.a + 4 * step + i}" for i in range(4))
            for index, share in enumerate(shares(width, self.accumulators)):
                if share:
                    first = index * self.count
                    acc = ",".join(f"${first + i}" for i in range(share * STEP // 2))
                    text += (
                        f"wgmma.mma_async.sync.aligned.m64n{share * STEP}k16.f32.bf16.bf16 {{{acc}}}, "
                        f"{{{registers}}}, ${self.b + index * self.steps + step}, one, 1, 1, 0;\n"
                    )
        # The group is closed in here: closed behind the branches, ptxas adds an empty one and waits for more.
        return text + "wgmma.commit_group.sync.aligned;\n"

    def choose(self, low: int, high: int, digit: int) -> str:
        """Branches to the products of one of the widths `low` + 1 to `high`, which differ in the `digit`
        lower binary digits of what is above `low`; labels are local to the block."""
        if high - low == 1:
            return self.products(high) + "bra.uni DONE;\n"
        middle = low + (1 << (digit - 1))
        if middle >= high:
            return self.choose(low, high, digit - 1)
        return (
            f"@${self.digits + digit - 1} bra.uni ABOVE{middle};\n"
            + self.choose(low, middle, digit - 1)
            + f"ABOVE{middle}:\n"
            + self.choose(middle, high, digit - 1)
        )


def shares(width: Any, accumulators: int) -> list:
    """How many of `width` times 16 columns each accumulator holds, a number or one of the device."""
    return [(width + (accumulators - 1 - i)) // accumulators for i in range(accumulators)]


@dsl_user_op
def rows_descriptor(address, *, loc=None, ip=None):
    """The low word of the descriptor of rows of 64 bf16 in shared memory, swizzled, at a multiple of 1024. It
    grows by 1 for 16 bytes."""
    return (Uint32(address & Int32(0x3FFFF)) >> Uint32(4)) | Uint32(_ROWS_OF_128_LOW)


@dsl_user_op
def descriptors(low, steps: int, *, loc=None, ip=None):
    """The whole descriptors of the first `steps` times 16 columns of such rows."""
    text = f"{{ .reg .b32 t; add.u32 t, $1, %d; mov.b64 $0, {{t, {_ROWS_OF_128_HIGH}}}; }}"
    return [
        Int64(asm(T.i64(), [word(low, loc, ip)], text % (2 * step), "=l,r", False, loc, ip))
        for step in range(steps)
    ]


@dsl_user_op
def width_digits(tokens, most: int, *, loc=None, ip=None):
    """How many times 16 columns hold `tokens`, 1 to `most`, less one, as binary digits: predicates that are
    found once, because each test of a number takes a loop of products some 35 cycles."""
    digits = max(1, (most - 1).bit_length())
    return [((Int32(tokens) - 1) & (STEP << digit)) != 0 for digit in range(digits)]


@dsl_user_op
def products_of_64(accs, a, bs, width, most: int, *, loc=None, ip=None):
    """Issues `acc + a @ b` of each accumulator and its b as one group, without waiting.

    accs: FP32 values of 64 rows and 16 * `most` columns together, see `shares`; a: four words for each 16 of
    K; bs: see `descriptors`; `width`: of all of them together, see `width_digits`. One width is chosen at run
    time, inside the block, so that all of them use the same registers.
    """
    block = _Block(len(accs), len(accs[0]), len(a) // 4)
    total = len(accs) * len(accs[0])
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for acc in accs for v in acc]
    operands += [word(v, loc, ip) for v in a]
    operands += [Int64(v).ir_value(loc=loc, ip=ip) for b in bs for v in b]
    operands += [Boolean(v).ir_value(loc=loc, ip=ip) for v in width]
    text = "{ .reg .pred one;\nsetp.eq.u32 one, 1, 1;\n"
    text += block.choose(0, most, len(width)) + "DONE: }"
    constraints = ",".join(
        ["=f"] * total
        + [str(i) for i in range(total)]
        + ["r"] * len(a)
        + ["l"] * (len(bs) * block.steps)
        + ["b"] * len(width)
    )
    result = asm(struct(T.f32(), total), operands, text, constraints, True, loc, ip)
    values = [Float32(llvm.extractvalue(T.f32(), result, [i], loc=loc, ip=ip)) for i in range(total)]
    return [values[i : i + block.count] for i in range(0, total, block.count)]
