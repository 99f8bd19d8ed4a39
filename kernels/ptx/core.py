"""How the instructions of this package are emitted."""

from collections.abc import Sequence
from typing import Any

from cutlass import Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

_ATT = llvm.AsmDialect.AD_ATT


def asm(
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


def word(value: Any, loc: Any, ip: Any) -> Any:
    return Uint32(value).ir_value(loc=loc, ip=ip)


def words(result: Any, count: int, loc: Any, ip: Any) -> tuple:
    return tuple(Uint32(llvm.extractvalue(T.i32(), result, [i], loc=loc, ip=ip)) for i in range(count))


def struct(kind: Any, count: int) -> Any:
    return llvm.StructType.get_literal([kind] * count)
