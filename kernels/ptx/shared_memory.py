"""Loads and stores of shared memory."""

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .core import asm, struct, word, words


@dsl_user_op
def lds128(address, *, loc=None, ip=None):
    r = asm(
        struct(T.i32(), 4),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        "ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];",
        "=r,=r,=r,=r,r",
        True,
        loc,
        ip,
    )
    return words(r, 4, loc, ip)


@dsl_user_op
def lds64(address, *, loc=None, ip=None):
    r = asm(
        struct(T.i32(), 2),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        "ld.shared.v2.b32 {$0,$1}, [$2];",
        "=r,=r,r",
        True,
        loc,
        ip,
    )
    return words(r, 2, loc, ip)


@dsl_user_op
def sts_target(address, target, weight, *, loc=None, ip=None):
    """A global address and a factor, 16 bytes of shared memory together."""
    operands = [
        Int32(address).ir_value(loc=loc, ip=ip),
        Int64(target).ir_value(loc=loc, ip=ip),
        Float32(weight).ir_value(loc=loc, ip=ip),
    ]
    asm(None, operands, "st.shared.b64 [$0], $1;\n st.shared.f32 [$0+8], $2;", "r,l,f", True, loc, ip)


@dsl_user_op
def lds_target(address, *, loc=None, ip=None):
    """What `sts_target` stored."""
    operand = Int32(address).ir_value(loc=loc, ip=ip)
    target = Int64(asm(T.i64(), [operand], "ld.shared.b64 $0, [$1];", "=l,r", True, loc, ip))
    return target, Float32(asm(T.f32(), [operand], "ld.shared.f32 $0, [$1+8];", "=f,r", True, loc, ip))


@dsl_user_op
def lds_f32x4(address, *, loc=None, ip=None):
    r = asm(
        struct(T.f32(), 4),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];",
        "=f,=f,=f,=f,r",
        True,
        loc,
        ip,
    )
    return tuple(Float32(llvm.extractvalue(T.f32(), r, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def sts_f32x4(address, a, b, c, d, *, loc=None, ip=None):
    asm(
        None,
        [
            Int32(address).ir_value(loc=loc, ip=ip),
            *(Float32(v).ir_value(loc=loc, ip=ip) for v in (a, b, c, d)),
        ],
        "st.shared.v4.f32 [$0], {$1,$2,$3,$4};",
        "r,f,f,f,f",
        True,
        loc,
        ip,
    )


def _shared_load(text: str):
    @dsl_user_op
    def load(address, *, loc=None, ip=None):
        operand = Int32(address).ir_value(loc=loc, ip=ip)
        return Uint32(asm(T.i32(), [operand], text, "=r,r", True, loc, ip))

    return load


lds32 = _shared_load("ld.shared.b32 $0, [$1];")
lds16 = _shared_load("{ .reg .b16 h; ld.shared.b16 h, [$1]; cvt.u32.u16 $0, h; }")


@dsl_user_op
def sts32(address, value, *, loc=None, ip=None):
    asm(
        None,
        [Int32(address).ir_value(loc=loc, ip=ip), word(value, loc, ip)],
        "st.shared.b32 [$0], $1;",
        "r,r",
        True,
        loc,
        ip,
    )


@dsl_user_op
def sts64(address, a, b, *, loc=None, ip=None):
    asm(
        None,
        [Int32(address).ir_value(loc=loc, ip=ip), word(a, loc, ip), word(b, loc, ip)],
        "st.shared.v2.b32 [$0], {$1,$2};",
        "r,r,r",
        True,
        loc,
        ip,
    )


@dsl_user_op
def atom_add_shared(address, value, *, loc=None, ip=None):
    """Adds to a word of shared memory and returns its old value."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), word(value, loc, ip)]
    return Uint32(asm(T.i32(), operands, "atom.shared.add.u32 $0, [$1], $2;", "=r,r,r", True, loc, ip))


@dsl_user_op
def or_shared(address, value, *, loc=None, ip=None):
    """Sets bits of a word of shared memory."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), word(value, loc, ip)]
    asm(None, operands, "red.shared.or.b32 [$0], $1;", "r,r", True, loc, ip)


def _stmatrix(count: int):
    """Stores `count` 8x8 matrices of 16-bit elements transposed.

    Word m of lane l holds row l / 4, columns 2 * (l % 4) and the next, of matrix m; lane 8 * m + i gives
    the 16-byte aligned address to which column i of matrix m goes.
    """

    @dsl_user_op
    def store(address, *matrices, loc=None, ip=None):
        operands = [Int32(address).ir_value(loc=loc, ip=ip), *(word(v, loc, ip) for v in matrices)]
        places = ",".join(f"${i + 1}" for i in range(count))
        text = f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0], {{{places}}};"
        asm(None, operands, text, ",".join(["r"] * (count + 1)), True, loc, ip)

    return store


store_transposed2 = _stmatrix(2)
store_transposed4 = _stmatrix(4)


@dsl_user_op
def patch_pairs(sv0, sv1, head, queue, end, bound, *, loc=None, ip=None):
    """Where `head < bound`: puts the low half of `head` into a half of `sv0` or `sv1` (its bit 25 says which
    word, bit 24 the low half), and loads the next head from `queue`, 0xffffffff where that has reached `end`.

    Returns the new sv0, sv1, head and queue. Without branches: they cost more than what they skip.
    """
    operands = [word(v, loc, ip) for v in (sv0, sv1, head, queue, end, bound)]
    text = (
        "{ .reg .pred hit, low, p, q, next; .reg .b32 t, selector;\n"
        "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;\n"
        "setp.lt.u32 hit, $6, $9;\n"
        "and.b32 t, $6, 0x1000000; setp.ne.u32 low, t, 0; selp.b32 selector, 0x5410, 0x3254, low;\n"
        "and.b32 t, $6, 0x2000000; setp.eq.and.u32 p, t, 0, hit; setp.ne.and.u32 q, t, 0, hit;\n"
        "@p prmt.b32 $0, $4, $6, selector; @q prmt.b32 $1, $5, $6, selector;\n"
        "setp.lt.and.u32 next, $7, $8, hit; @hit mov.b32 $2, 0xffffffff; @next ld.shared.b32 $2, [$7];\n"
        "@hit add.u32 $3, $7, 4; }"
    )
    constraints = "=&r,=&r,=&r,=&r,r,r,r,r,r,r"
    return words(asm(struct(T.i32(), 4), operands, text, constraints, True, loc, ip), 4, loc, ip)
