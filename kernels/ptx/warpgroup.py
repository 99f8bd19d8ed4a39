"""Matrix instructions of a warpgroup (sm_90a)."""

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .core import asm, struct, word

# K-major rows of 128 bytes, swizzled: eight rows are 1024 bytes apart (in units of 16 bytes, bits 32 on).
_ROWS_OF_128_LOW = 1 << 16
_ROWS_OF_128_HIGH = (1 << 30) | 64
STEP = 16  # tokens by which the width of a product grows
TRIED_FIRST = 3  # widths that are tried one after the other


def _products(width: int, steps: int, a: int) -> str:
    acc = ",".join(f"${i}" for i in range(width * STEP // 2))
    text = ""
    for step in range(steps):
        registers = ",".join(f"${a + 4 * step + i}" for i in range(4))
        text += (
            f"wgmma.mma_async.sync.aligned.m64n{width * STEP}k16.f32.bf16.bf16 "
            f"{{{acc}}}, {{{registers}}}, ${a + 4 * steps + step}, one, 1, 1, 0;\n"
        )
    # The group is closed in here: closed behind the branches, ptxas adds an empty one and waits for more.
    return text + "wgmma.commit_group.sync.aligned;\n"


def _choose(low: int, high: int, steps: int, a: int) -> str:
    """Branches to the products whose width is the selector's; labels are local to the block."""
    if low == high:
        return _products(low, steps, a) + "bra.uni DONE;\n"
    middle = (low + high + 1) // 2
    return (
        f"setp.ge.s32 p, ${a + 5 * steps}, {middle};\n@p bra.uni FROM{middle}_{high};\n"
        + _choose(low, middle - 1, steps, a)
        + f"FROM{middle}_{high}:\n"
        + _choose(middle, high, steps, a)
    )


def _choose_widest_first(most: int, steps: int, a: int) -> str:
    """As `_choose`; the widest, where time counts most, are reached with the fewest tests."""
    if most == 1:
        return _products(most, steps, a)
    text, width = "", most
    while width > max(most - TRIED_FIRST, 1):
        text += f"setp.lt.s32 p, ${a + 5 * steps}, {width};\n@p bra.uni LESS{width};\n"
        text += _products(width, steps, a) + f"bra.uni DONE;\nLESS{width}:\n"
        width -= 1
    return text + _choose(1, width, steps, a) + "DONE:\n"


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
def products_of_64(acc, a, b, width, most: int, *, loc=None, ip=None):
    """Issues `acc + a @ b` as one group, without waiting.

    acc: `most` * 8 FP32 values of 64 rows and `most` * 16 columns; a: four words for each 16 of K; b: see
    `descriptors`; `width`: how many times 16 columns to compute, 1 to `most`. One width is
    chosen at run time, inside the block, so that all of them use the same registers.
    """
    count, steps = most * STEP // 2, len(a) // 4
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in acc]
    operands += [word(v, loc, ip) for v in a]
    operands += [Int64(v).ir_value(loc=loc, ip=ip) for v in b]
    operands += [Int32(width).ir_value(loc=loc, ip=ip)]
    first = 2 * count
    text = "{ .reg .pred p, one;\nsetp.eq.u32 one, 1, 1;\n"
    text += _choose_widest_first(most, steps, first) + "}"
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * (4 * steps) + ["l"] * steps + ["r"])
    result = asm(struct(T.f32(), count), operands, text, constraints, True, loc, ip)
    return [Float32(llvm.extractvalue(T.f32(), result, [i], loc=loc, ip=ip)) for i in range(count)]
