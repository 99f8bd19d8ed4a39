"""Loads and stores of global memory."""

from cutlass import Float32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .core import asm, struct, word, words


@dsl_user_op
def ldg128(address, *, loc=None, ip=None):
    """Four words from a 16-byte aligned global address, cached in L1."""
    r = asm(
        struct(T.i32(), 4),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "ld.global.v4.b32 {$0,$1,$2,$3}, [$4];",
        "=r,=r,=r,=r,l",
        True,
        loc,
        ip,
    )
    return words(r, 4, loc, ip)


@dsl_user_op
def ldg64(address, *, loc=None, ip=None):
    """Two words from an 8-byte aligned global address."""
    r = asm(
        struct(T.i32(), 2),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "ld.global.v2.b32 {$0,$1}, [$2];",
        "=r,=r,l",
        True,
        loc,
        ip,
    )
    return words(r, 2, loc, ip)


@dsl_user_op
def ldg64_once(address, *, loc=None, ip=None):
    """As `ldg64`, of what nobody writes during the launch and this SM reads once: not kept in L1."""
    r = asm(
        struct(T.i32(), 2),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "ld.global.nc.L1::no_allocate.v2.b32 {$0,$1}, [$2];",
        "=r,=r,l",
        True,
        loc,
        ip,
    )
    return words(r, 2, loc, ip)


def _scalar_load(text: str):
    @dsl_user_op
    def load(address, *, loc=None, ip=None):
        operand = Int64(address).ir_value(loc=loc, ip=ip)
        return Uint32(asm(T.i32(), [operand], text, "=r,l", True, loc, ip))

    return load


ldg32 = _scalar_load("ld.global.b32 $0, [$1];")
ldg16 = _scalar_load("{ .reg .b16 h; ld.global.b16 h, [$1]; cvt.u32.u16 $0, h; }")
ldg8 = _scalar_load("{ .reg .b16 h; ld.global.u8 h, [$1]; cvt.u32.u16 $0, h; }")


@dsl_user_op
def ldg_f32(address, *, loc=None, ip=None):
    operand = Int64(address).ir_value(loc=loc, ip=ip)
    return Float32(asm(T.f32(), [operand], "ld.global.f32 $0, [$1];", "=f,l", True, loc, ip))


@dsl_user_op
def ldg_f32x4(address, *, loc=None, ip=None):
    r = asm(
        struct(T.f32(), 4),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "ld.global.v4.f32 {$0,$1,$2,$3}, [$4];",
        "=f,=f,=f,=f,l",
        True,
        loc,
        ip,
    )
    return tuple(Float32(llvm.extractvalue(T.f32(), r, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def ldg_f32x4_uncached(address, *, loc=None, ip=None):
    """As `ldg_f32x4`, past L1: for what another SM wrote during this launch."""
    r = asm(
        struct(T.f32(), 4),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "ld.global.cg.v4.f32 {$0,$1,$2,$3}, [$4];",
        "=f,=f,=f,=f,l",
        True,
        loc,
        ip,
    )
    return tuple(Float32(llvm.extractvalue(T.f32(), r, [i], loc=loc, ip=ip)) for i in range(4))


acquire32 = _scalar_load("ld.acquire.gpu.global.b32 $0, [$1];")


@dsl_user_op
def release32(address, value, *, loc=None, ip=None):
    """Stores a word that publishes everything the warp wrote before (after a `sync_warp`)."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), word(value, loc, ip)]
    text = "fence.acq_rel.gpu;\n st.release.gpu.global.b32 [$0], $1;"
    asm(None, operands, text, "l,r", True, loc, ip)


@dsl_user_op
def stg32(address, value, *, loc=None, ip=None):
    asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip), word(value, loc, ip)],
        "st.global.b32 [$0], $1;",
        "l,r",
        True,
        loc,
        ip,
    )


@dsl_user_op
def stg16(address, value, *, loc=None, ip=None):
    """The low half of a word."""
    asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip), word(value, loc, ip)],
        "{ .reg .b16 l,h; mov.b32 {l,h}, $1; st.global.b16 [$0], l; }",
        "l,r",
        True,
        loc,
        ip,
    )


@dsl_user_op
def stg8(address, value, *, loc=None, ip=None):
    """The low byte of a word."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), word(value, loc, ip)]
    asm(None, operands, "st.global.b8 [$0], $1;", "l,r", True, loc, ip)


@dsl_user_op
def stg64(address, a, b, *, loc=None, ip=None):
    asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip), word(a, loc, ip), word(b, loc, ip)],
        "st.global.v2.b32 [$0], {$1,$2};",
        "l,r,r",
        True,
        loc,
        ip,
    )


@dsl_user_op
def stg128(address, a, b, c, d, *, loc=None, ip=None):
    asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip), *(word(v, loc, ip) for v in (a, b, c, d))],
        "st.global.v4.b32 [$0], {$1,$2,$3,$4};",
        "l,r,r,r,r",
        True,
        loc,
        ip,
    )


@dsl_user_op
def stg_f32(address, value, *, loc=None, ip=None):
    asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip), Float32(value).ir_value(loc=loc, ip=ip)],
        "st.global.f32 [$0], $1;",
        "l,f",
        True,
        loc,
        ip,
    )
