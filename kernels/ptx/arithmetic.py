"""Arithmetic on packed words, and the matrix instructions of a warp."""

from cutlass import Float32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .core import asm, struct, word, words


@dsl_user_op
def prmt(a, b, selector, *, loc=None, ip=None):
    operands = [word(a, loc, ip), word(b, loc, ip), word(selector, loc, ip)]
    return Uint32(asm(T.i32(), operands, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", False, loc, ip))


@dsl_user_op
def and_or(a, mask, c, *, loc=None, ip=None):
    """`(a & mask) | c` in one instruction."""
    operands = [word(a, loc, ip), word(mask, loc, ip), word(c, loc, ip)]
    return Uint32(asm(T.i32(), operands, "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", False, loc, ip))


@dsl_user_op
def rotate_right(a, bits: int, *, loc=None, ip=None):
    operands = [word(a, loc, ip)]
    return Uint32(asm(T.i32(), operands, f"shf.r.wrap.b32 $0, $1, $1, {bits};", "=r,r", False, loc, ip))


@dsl_user_op
def mul_bf16x2_by_half(a, s, high: bool, fma: bool, *, loc=None, ip=None):
    """Two bf16 products of `a` with one half of `s`; `fma` for sm_80..sm_89, which have no bf16 multiply."""
    half = "h" if high else "l"
    multiply = "fma.rn.bf16x2 $0, $1, t, z;" if fma else "mul.rn.bf16x2 $0, $1, t;"
    text = (
        "{ .reg .b16 l,h; .reg .b32 t,z; mov.b32 z, 0x80008000; mov.b32 {l,h}, $2; "
        f"mov.b32 t, {{{half},{half}}}; {multiply} }}"
    )
    operands = [word(a, loc, ip), word(s, loc, ip)]
    return Uint32(asm(T.i32(), operands, text, "=r,r,r", False, loc, ip))


@dsl_user_op
def mul_bf16x2(a, b, fma: bool, *, loc=None, ip=None):
    text = (
        "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }"
        if fma
        else "mul.rn.bf16x2 $0, $1, $2;"
    )
    operands = [word(a, loc, ip), word(b, loc, ip)]
    return Uint32(asm(T.i32(), operands, text, "=r,r,r", False, loc, ip))


@dsl_user_op
def pack_bf16x2(low, high, *, loc=None, ip=None):
    """Rounds two FP32 values to nearest bf16, `low` into the low half."""
    operands = [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)]
    return Uint32(asm(T.i32(), operands, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", False, loc, ip))


def _two_floats(text: str):
    @dsl_user_op
    def op(a, b, *, loc=None, ip=None):
        operands = [Float32(a).ir_value(loc=loc, ip=ip), Float32(b).ir_value(loc=loc, ip=ip)]
        return Float32(asm(T.f32(), operands, text, "=f,f,f", False, loc, ip))

    return op


min_nan = _two_floats("min.NaN.f32 $0, $1, $2;")
max_nan = _two_floats("max.NaN.f32 $0, $1, $2;")


@dsl_user_op
def float_bits(value, *, loc=None, ip=None):
    operand = Float32(value).ir_value(loc=loc, ip=ip)
    return Uint32(asm(T.i32(), [operand], "mov.b32 $0, $1;", "=r,f", False, loc, ip))


@dsl_user_op
def bits_float(value, *, loc=None, ip=None):
    return Float32(asm(T.f32(), [word(value, loc, ip)], "mov.b32 $0, $1;", "=f,r", False, loc, ip))


@dsl_user_op
def find_first_set(value, *, loc=None, ip=None):
    """Index of the lowest set bit; `value` must not be zero."""
    text = "{ .reg .b32 t; brev.b32 t, $1; clz.b32 $0, t; }"
    return Uint32(asm(T.i32(), [word(value, loc, ip)], text, "=r,r", False, loc, ip))


@dsl_user_op
def mma_m16n8k16(acc, a, b, *, loc=None, ip=None):
    """`acc + a @ b` of one warp: A 16x16 bf16 (4 words a lane), B 16x8 bf16 (2 words), FP32 accumulators."""
    operands = [word(v, loc, ip) for v in (*a, *b)] + [Float32(v).ir_value(loc=loc, ip=ip) for v in acc]
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};"
    )
    r = asm(struct(T.f32(), 4), operands, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", False, loc, ip)
    return tuple(Float32(llvm.extractvalue(T.f32(), r, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def match_any(value, *, loc=None, ip=None):
    """The lanes of the whole warp that have this lane's value, one bit each."""
    text = "match.any.sync.b32 $0, $1, 0xffffffff;"
    return Uint32(asm(T.i32(), [word(value, loc, ip)], text, "=r,r", True, loc, ip))


@dsl_user_op
def warp_or(value, *, loc=None, ip=None):
    """The bits that any lane of the whole warp has."""
    text = "redux.sync.or.b32 $0, $1, 0xffffffff;"
    return Uint32(asm(T.i32(), [word(value, loc, ip)], text, "=r,r", True, loc, ip))


@dsl_user_op
def here(values, *, loc=None, ip=None):
    """The same words, found at this place of the program: not later, where they are used, nor again."""
    count = len(values)
    operands = [word(v, loc, ip) for v in values]
    constraints = ",".join(["=r"] * count + [str(i) for i in range(count)])
    if count == 1:
        return [Uint32(asm(T.i32(), operands, "", constraints, True, loc, ip))]
    return list(words(asm(struct(T.i32(), count), operands, "", constraints, True, loc, ip), count, loc, ip))


@dsl_user_op
def bit(index, *, loc=None, ip=None):
    """1 << index; 0 where the index is above 31."""
    text = "{ .reg .b32 one; mov.b32 one, 1; shl.b32 $0, one, $1; }"
    return Uint32(asm(T.i32(), [word(index, loc, ip)], text, "=r,r", False, loc, ip))
