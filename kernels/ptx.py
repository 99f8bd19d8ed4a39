"""The PTX instructions that the kernels use, one Python function each.

Addresses of global memory are `Int64` byte addresses, addresses of shared memory `Int32` byte addresses
in the shared window. Loads are marked as having side effects so that the compiler keeps them behind the
barrier that makes their data visible; ptxas still schedules them freely where that is safe.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_ATT = llvm.AsmDialect.AD_ATT


def _asm(
    result: Any, operands: Sequence[Any], text: str, constraints: str, effects: bool, loc: Any, ip: Any
) -> Any:
    return llvm.inline_asm(
        result,
        list(operands),
        text,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=_ATT,
        loc=loc,
        ip=ip,
    )


def _u(value: Any, loc: Any, ip: Any) -> Any:
    return Uint32(value).ir_value(loc=loc, ip=ip)


def _words(result: Any, count: int, loc: Any, ip: Any) -> tuple:
    return tuple(Uint32(llvm.extractvalue(T.i32(), result, [i], loc=loc, ip=ip)) for i in range(count))


def _struct(kind: Any, count: int) -> Any:
    return llvm.StructType.get_literal([kind] * count)


# ---- global memory -------------------------------------------------------------------------------


@dsl_user_op
def ldg128(address, *, loc=None, ip=None):
    """Four words from a 16-byte aligned global address, cached in L1."""
    r = _asm(
        _struct(T.i32(), 4),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "ld.global.v4.b32 {$0,$1,$2,$3}, [$4];",
        "=r,=r,=r,=r,l",
        True,
        loc,
        ip,
    )
    return _words(r, 4, loc, ip)


@dsl_user_op
def ldg64(address, *, loc=None, ip=None):
    """Two words from an 8-byte aligned global address."""
    r = _asm(
        _struct(T.i32(), 2),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "ld.global.v2.b32 {$0,$1}, [$2];",
        "=r,=r,l",
        True,
        loc,
        ip,
    )
    return _words(r, 2, loc, ip)


def _scalar_load(text: str):
    @dsl_user_op
    def load(address, *, loc=None, ip=None):
        operand = Int64(address).ir_value(loc=loc, ip=ip)
        return Uint32(_asm(T.i32(), [operand], text, "=r,l", True, loc, ip))

    return load


ldg32 = _scalar_load("ld.global.b32 $0, [$1];")
ldg16 = _scalar_load("{ .reg .b16 h; ld.global.b16 h, [$1]; cvt.u32.u16 $0, h; }")
ldg8 = _scalar_load("{ .reg .b16 h; ld.global.u8 h, [$1]; cvt.u32.u16 $0, h; }")


@dsl_user_op
def ldg_f32(address, *, loc=None, ip=None):
    operand = Int64(address).ir_value(loc=loc, ip=ip)
    return Float32(_asm(T.f32(), [operand], "ld.global.f32 $0, [$1];", "=f,l", True, loc, ip))


@dsl_user_op
def ldg_f32x4(address, *, loc=None, ip=None):
    r = _asm(
        _struct(T.f32(), 4),
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
    r = _asm(
        _struct(T.f32(), 4),
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
    operands = [Int64(address).ir_value(loc=loc, ip=ip), _u(value, loc, ip)]
    text = "fence.acq_rel.gpu;\n st.release.gpu.global.b32 [$0], $1;"
    _asm(None, operands, text, "l,r", True, loc, ip)


@dsl_user_op
def stg32(address, value, *, loc=None, ip=None):
    _asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip), _u(value, loc, ip)],
        "st.global.b32 [$0], $1;",
        "l,r",
        True,
        loc,
        ip,
    )


@dsl_user_op
def stg16(address, value, *, loc=None, ip=None):
    """The low half of a word."""
    _asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip), _u(value, loc, ip)],
        "{ .reg .b16 l,h; mov.b32 {l,h}, $1; st.global.b16 [$0], l; }",
        "l,r",
        True,
        loc,
        ip,
    )


@dsl_user_op
def stg64(address, a, b, *, loc=None, ip=None):
    _asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip), _u(a, loc, ip), _u(b, loc, ip)],
        "st.global.v2.b32 [$0], {$1,$2};",
        "l,r,r",
        True,
        loc,
        ip,
    )


@dsl_user_op
def stg128(address, a, b, c, d, *, loc=None, ip=None):
    _asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip), *(_u(v, loc, ip) for v in (a, b, c, d))],
        "st.global.v4.b32 [$0], {$1,$2,$3,$4};",
        "l,r,r,r,r",
        True,
        loc,
        ip,
    )


@dsl_user_op
def stg_f32(address, value, *, loc=None, ip=None):
    _asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip), Float32(value).ir_value(loc=loc, ip=ip)],
        "st.global.f32 [$0], $1;",
        "l,f",
        True,
        loc,
        ip,
    )


# ---- shared memory -------------------------------------------------------------------------------


@dsl_user_op
def lds128(address, *, loc=None, ip=None):
    r = _asm(
        _struct(T.i32(), 4),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        "ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];",
        "=r,=r,=r,=r,r",
        True,
        loc,
        ip,
    )
    return _words(r, 4, loc, ip)


@dsl_user_op
def lds64(address, *, loc=None, ip=None):
    r = _asm(
        _struct(T.i32(), 2),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        "ld.shared.v2.b32 {$0,$1}, [$2];",
        "=r,=r,r",
        True,
        loc,
        ip,
    )
    return _words(r, 2, loc, ip)


@dsl_user_op
def sts_target(address, target, weight, *, loc=None, ip=None):
    """A global address and a factor, 16 bytes of shared memory together."""
    operands = [
        Int32(address).ir_value(loc=loc, ip=ip),
        Int64(target).ir_value(loc=loc, ip=ip),
        Float32(weight).ir_value(loc=loc, ip=ip),
    ]
    _asm(None, operands, "st.shared.b64 [$0], $1;\n st.shared.f32 [$0+8], $2;", "r,l,f", True, loc, ip)


@dsl_user_op
def lds_target(address, *, loc=None, ip=None):
    """What `sts_target` stored."""
    operand = Int32(address).ir_value(loc=loc, ip=ip)
    target = Int64(_asm(T.i64(), [operand], "ld.shared.b64 $0, [$1];", "=l,r", True, loc, ip))
    return target, Float32(_asm(T.f32(), [operand], "ld.shared.f32 $0, [$1+8];", "=f,r", True, loc, ip))


@dsl_user_op
def lds_f32x4(address, *, loc=None, ip=None):
    r = _asm(
        _struct(T.f32(), 4),
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
    _asm(
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
        return Uint32(_asm(T.i32(), [operand], text, "=r,r", True, loc, ip))

    return load


lds32 = _shared_load("ld.shared.b32 $0, [$1];")
lds16 = _shared_load("{ .reg .b16 h; ld.shared.b16 h, [$1]; cvt.u32.u16 $0, h; }")


@dsl_user_op
def sts32(address, value, *, loc=None, ip=None):
    _asm(
        None,
        [Int32(address).ir_value(loc=loc, ip=ip), _u(value, loc, ip)],
        "st.shared.b32 [$0], $1;",
        "r,r",
        True,
        loc,
        ip,
    )


@dsl_user_op
def sts64(address, a, b, *, loc=None, ip=None):
    _asm(
        None,
        [Int32(address).ir_value(loc=loc, ip=ip), _u(a, loc, ip), _u(b, loc, ip)],
        "st.shared.v2.b32 [$0], {$1,$2};",
        "r,r,r",
        True,
        loc,
        ip,
    )


@dsl_user_op
def atom_add_shared(address, value, *, loc=None, ip=None):
    """Adds to a word of shared memory and returns its old value."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), _u(value, loc, ip)]
    return Uint32(_asm(T.i32(), operands, "atom.shared.add.u32 $0, [$1], $2;", "=r,r,r", True, loc, ip))


# ---- asynchronous copies -------------------------------------------------------------------------


@dsl_user_op
def mbarrier_init(address, count, *, loc=None, ip=None):
    operands = [Int32(address).ir_value(loc=loc, ip=ip), _u(count, loc, ip)]
    _asm(None, operands, "mbarrier.init.shared::cta.b64 [$0], $1;", "r,r", True, loc, ip)


@dsl_user_op
def mbarrier_init_fence(*, loc=None, ip=None):
    """Makes initialised barriers visible to the asynchronous proxy."""
    _asm(None, [], "fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;", "", True, loc, ip)


@dsl_user_op
def mbarrier_expect(address, count, *, loc=None, ip=None):
    """Arrives and announces `count` bytes of asynchronous copies."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), _u(count, loc, ip)]
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    _asm(None, operands, text, "r,r", True, loc, ip)


@dsl_user_op
def mbarrier_wait(address, phase, *, loc=None, ip=None):
    operands = [Int32(address).ir_value(loc=loc, ip=ip), _u(phase, loc, ip)]
    text = (
        "{ .reg .pred p;\n WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n"
        " @p bra DONE;\n bra WAIT;\n DONE: }"
    )
    _asm(None, operands, text, "r,r", True, loc, ip)


@dsl_user_op
def bulk_load(destination, source, count, barrier, policy, *, loc=None, ip=None):
    """Copies `count` bytes (multiple of 16) from global to shared memory; completes on an mbarrier."""
    operands = [
        Int32(destination).ir_value(loc=loc, ip=ip),
        Int64(source).ir_value(loc=loc, ip=ip),
        _u(count, loc, ip),
        Int32(barrier).ir_value(loc=loc, ip=ip),
        Int64(policy).ir_value(loc=loc, ip=ip),
    ]
    text = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[$0], [$1], $2, [$3], $4;"
    )
    _asm(None, operands, text, "r,l,r,r,l", True, loc, ip)


@dsl_user_op
def evict_first_policy(*, loc=None, ip=None):
    """L2 policy for data that is read once: weights should not push activations out."""
    text = "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;"
    return Int64(_asm(T.i64(), [], text, "=l", False, loc, ip))


@dsl_user_op
def cp_async16(destination, source, *, loc=None, ip=None):
    operands = [Int32(destination).ir_value(loc=loc, ip=ip), Int64(source).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "cp.async.cg.shared.global [$0], [$1], 16;", "r,l", True, loc, ip)


@dsl_user_op
def cp_async_commit(*, loc=None, ip=None):
    _asm(None, [], "cp.async.commit_group;", "", True, loc, ip)


@dsl_user_op
def cp_async_wait(pending: int, *, loc=None, ip=None):
    """Waits until at most `pending` groups of this thread's copies are under way."""
    _asm(None, [], f"cp.async.wait_group {pending};", "", True, loc, ip)


# ---- arithmetic ----------------------------------------------------------------------------------


@dsl_user_op
def prmt(a, b, selector, *, loc=None, ip=None):
    operands = [_u(a, loc, ip), _u(b, loc, ip), _u(selector, loc, ip)]
    return Uint32(_asm(T.i32(), operands, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", False, loc, ip))


@dsl_user_op
def and_or(a, mask, c, *, loc=None, ip=None):
    """`(a & mask) | c` in one instruction."""
    operands = [_u(a, loc, ip), _u(mask, loc, ip), _u(c, loc, ip)]
    return Uint32(_asm(T.i32(), operands, "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", False, loc, ip))


@dsl_user_op
def rotate_right(a, bits: int, *, loc=None, ip=None):
    operands = [_u(a, loc, ip)]
    return Uint32(_asm(T.i32(), operands, f"shf.r.wrap.b32 $0, $1, $1, {bits};", "=r,r", False, loc, ip))


@dsl_user_op
def mul_bf16x2_by_half(a, s, high: bool, fma: bool, *, loc=None, ip=None):
    """Two bf16 products of `a` with one half of `s`; `fma` for sm_80..sm_89, which have no bf16 multiply."""
    half = "h" if high else "l"
    multiply = "fma.rn.bf16x2 $0, $1, t, z;" if fma else "mul.rn.bf16x2 $0, $1, t;"
    text = (
        "{ .reg .b16 l,h; .reg .b32 t,z; mov.b32 z, 0x80008000; mov.b32 {l,h}, $2; "
        f"mov.b32 t, {{{half},{half}}}; {multiply} }}"
    )
    operands = [_u(a, loc, ip), _u(s, loc, ip)]
    return Uint32(_asm(T.i32(), operands, text, "=r,r,r", False, loc, ip))


@dsl_user_op
def mul_bf16x2(a, b, fma: bool, *, loc=None, ip=None):
    text = (
        "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }"
        if fma
        else "mul.rn.bf16x2 $0, $1, $2;"
    )
    operands = [_u(a, loc, ip), _u(b, loc, ip)]
    return Uint32(_asm(T.i32(), operands, text, "=r,r,r", False, loc, ip))


@dsl_user_op
def pack_bf16x2(low, high, *, loc=None, ip=None):
    """Rounds two FP32 values to nearest bf16, `low` into the low half."""
    operands = [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)]
    return Uint32(_asm(T.i32(), operands, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", False, loc, ip))


def _two_floats(text: str):
    @dsl_user_op
    def op(a, b, *, loc=None, ip=None):
        operands = [Float32(a).ir_value(loc=loc, ip=ip), Float32(b).ir_value(loc=loc, ip=ip)]
        return Float32(_asm(T.f32(), operands, text, "=f,f,f", False, loc, ip))

    return op


min_nan = _two_floats("min.NaN.f32 $0, $1, $2;")
max_nan = _two_floats("max.NaN.f32 $0, $1, $2;")


@dsl_user_op
def float_bits(value, *, loc=None, ip=None):
    operand = Float32(value).ir_value(loc=loc, ip=ip)
    return Uint32(_asm(T.i32(), [operand], "mov.b32 $0, $1;", "=r,f", False, loc, ip))


@dsl_user_op
def bits_float(value, *, loc=None, ip=None):
    return Float32(_asm(T.f32(), [_u(value, loc, ip)], "mov.b32 $0, $1;", "=f,r", False, loc, ip))


@dsl_user_op
def find_first_set(value, *, loc=None, ip=None):
    """Index of the lowest set bit; `value` must not be zero."""
    text = "{ .reg .b32 t; brev.b32 t, $1; clz.b32 $0, t; }"
    return Uint32(_asm(T.i32(), [_u(value, loc, ip)], text, "=r,r", False, loc, ip))


@dsl_user_op
def mma_m16n8k16(acc, a, b, *, loc=None, ip=None):
    """`acc + a @ b` of one warp: A 16x16 bf16 (4 words a lane), B 16x8 bf16 (2 words), FP32 accumulators."""
    operands = [_u(v, loc, ip) for v in (*a, *b)] + [Float32(v).ir_value(loc=loc, ip=ip) for v in acc]
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};"
    )
    r = _asm(_struct(T.f32(), 4), operands, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", False, loc, ip)
    return tuple(Float32(llvm.extractvalue(T.f32(), r, [i], loc=loc, ip=ip)) for i in range(4))


# ---- order among launches ------------------------------------------------------------------------


@dsl_user_op
def dependents_may_start(*, loc=None, ip=None):
    _asm(None, [], "griddepcontrol.launch_dependents;", "", True, loc, ip)


@dsl_user_op
def wait_for_predecessor(*, loc=None, ip=None):
    """Waits until the grid before this one in the stream is complete and its writes are visible."""
    _asm(None, [], "griddepcontrol.wait;", "", True, loc, ip)
