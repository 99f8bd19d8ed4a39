"""From stored tensors to layers of experts: one form for every layout and naming.

What is stored decides. An expert module is NVFP4 or MXFP4 where every projection has FP4 weights with a
scale per group: compressed where the two streams are stored, native where the plain scale is. Anything
else (BF16, FP8, MXFP8 ...) is left to its own recipe. The recipe only has to agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from . import names
from .codec import MXFP4, NVFP4, CodecSpec
from .errors import FormatError, RecipeError
from .files import TensorInfo
from .recipes import CSF_ENCODING, MXFP4_ALGOS, NVFP4_ALGOS, ModuleRecipe, Recipe, related

_PACKED_DTYPES = ("U8", "I8")
_SCALE_DTYPES = {NVFP4: ("F8_E4M3", "U8"), MXFP4: ("F8_E8M0", "U8")}


@dataclass(slots=True)
class StoredMatrix:
    """Where the parts of one projection lie: names of tensors, None where there is none.

    expert: the index along the first dimension, or None where the tensors are this expert's own.
    first_row, rows: the projection's rows in the tensors (gate and up may share one); inputs: logical
    input channels. half: 0 for gate and 1 for up of a shared tensor, else None.
    """

    name: str
    rows: int = 0
    inputs: int = 0
    first_row: int = 0
    expert: int | None = None
    half: int | None = None
    weight: str | None = None
    scale: str | None = None
    fixed: str | None = None
    exceptions: str | None = None
    global_scale: str | None = None
    input_scale: str | None = None
    divisors: bool = False


@dataclass(slots=True)
class StoredLayer:
    """One module of experts in FP4. matrices: by expert id and projection (gate, up, down)."""

    name: str
    spec: CodecSpec
    compressed: bool
    experts: int
    projections: tuple[str, ...]
    hidden: int
    width: int
    recipe: ModuleRecipe
    matrices: dict[tuple[int, str], StoredMatrix]
    extra: tuple[str, ...]


@dataclass(slots=True)
class _Parts:
    """Tensors of one (module, expert, stored projection) by part."""

    by_part: dict[str, str] = field(default_factory=dict)
    spec: CodecSpec | None = None
    divisors: set[bool] = field(default_factory=set)


@dataclass(slots=True)
class _Module:
    groups: dict[tuple[int | None, str], _Parts] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)


def build(
    tensors: Mapping[str, TensorInfo], recipe: Recipe
) -> tuple[tuple[StoredLayer, ...], dict[str, str]]:
    """The FP4 expert layers in natural order, and the other expert modules with what they store.

    Raises FormatError, naming the tensor, for parts that are missing, doubled or of the wrong shape or
    dtype, and RecipeError where the recipe promises what is not stored.
    """
    modules = _collect(tensors)
    layers, other = [], {}
    for name in sorted(modules, key=_natural):
        module = modules[name]
        if _is_fp4(module, tensors):
            layers.append(_layer(name, module, tensors, recipe))
        else:
            other[name] = _describe(module, tensors)
    _check_promises(layers, recipe)
    return tuple(layers), other


def _collect(tensors: Mapping[str, TensorInfo]) -> dict[str, _Module]:
    modules: dict[str, _Module] = {}
    for tensor in tensors:
        parsed = names.parse(tensor)
        if parsed is None:
            if names.is_stream(tensor):
                raise FormatError(f"{tensor}: a compressed scale that belongs to no expert projection")
            continue
        module = modules.setdefault(parsed.module, _Module())
        if parsed.part == names.OTHER:
            if parsed.codec is not None:
                raise FormatError(f"{tensor}: a compressed scale that belongs to no weight_scale or scale")
            module.extra.append(tensor)
            continue
        parts = module.groups.setdefault((parsed.expert, parsed.projection), _Parts())
        if parsed.part in parts.by_part:
            first = parts.by_part[parsed.part]
            raise FormatError(
                f"{tensor}: also stored as {first}, expected one {parsed.part} of the projection"
            )
        parts.by_part[parsed.part] = tensor
        if parsed.codec is not None:
            if parts.spec not in (None, parsed.codec):
                raise FormatError(f"{tensor}: streams of two codecs, expected one")
            parts.spec = parsed.codec
        if parsed.part in (names.GLOBAL_SCALE, names.INPUT_SCALE):
            parts.divisors.add(parsed.divisor)
    return modules


def _is_fp4(module: _Module, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether any projection has streams, or packed weights with a scale for every group."""
    for parts in module.groups.values():
        if parts.spec is not None:
            return True
        weight, scale = parts.by_part.get(names.WEIGHT), parts.by_part.get(names.SCALE)
        if weight and scale and _plain_spec(tensors[weight], tensors[scale]):
            return True
    return False


def _plain_spec(weight: TensorInfo, scale: TensorInfo) -> CodecSpec | None:
    """The codec whose plain form these two are, by dtypes and shapes; None for other formats."""
    if weight.dtype not in _PACKED_DTYPES or len(weight.shape) < 2 or len(scale.shape) < 2:
        return None
    for spec in (NVFP4, MXFP4):
        if scale.dtype in _SCALE_DTYPES[spec] and weight.shape[-1] * 2 == scale.shape[-1] * spec.group_size:
            return spec
    return None


def _describe(module: _Module, tensors: Mapping[str, TensorInfo]) -> str:
    weights = (parts.by_part.get(names.WEIGHT) for parts in module.groups.values())
    return ", ".join(sorted({tensors[weight].dtype for weight in weights if weight})) or "no weights"


# ---- one layer -----------------------------------------------------------------------------------


def _layer(name: str, module: _Module, tensors: Mapping[str, TensorInfo], recipe: Recipe) -> StoredLayer:
    recipe.check_agreement(name)
    matrices: dict[tuple[int, str], StoredMatrix] = {}
    kinds: dict[tuple[CodecSpec, bool], str] = {}
    for (expert, projection), parts in module.groups.items():
        kind = _check_parts(f"{name}.{'' if expert is None else f'{expert}.'}{projection}", parts, tensors)
        kinds.setdefault(kind, next(iter(parts.by_part.values())))
        if len(kinds) > 1:
            raise FormatError(f"{name}: {_both(kinds)}, expected one form for all experts of a layer")
        for key, matrix in _split(expert, projection, parts, kind[0], tensors):
            if key in matrices:
                raise FormatError(
                    f"{matrix.weight}: also stored as {matrices[key].weight}, expected one of them"
                )
            matrices[key] = matrix
    spec, compressed = next(iter(kinds))
    experts, projections = _check_complete(name, matrices)
    hidden, width = _check_geometry(name, matrices, projections)
    own = recipe.of(name)
    _check_recipe(name, own, spec, compressed, recipe.where)
    for matrix in matrices.values():
        if compressed:
            spec.check_shape(matrix.rows, matrix.inputs // spec.group_size, matrix.name)
    return StoredLayer(
        name,
        spec,
        compressed,
        experts,
        projections,
        hidden,
        width,
        own,
        matrices,
        tuple(sorted(module.extra)),
    )


def _both(kinds: Mapping[tuple[CodecSpec, bool], str]) -> str:
    return " and ".join(
        f"{'compressed' if compressed else 'plain'} {_label(spec)} ({tensor})"
        for (spec, compressed), tensor in kinds.items()
    )


def _label(spec: CodecSpec) -> str:
    return "NVFP4" if spec is NVFP4 else "MXFP4"


def _check_parts(label: str, parts: _Parts, tensors: Mapping[str, TensorInfo]) -> tuple[CodecSpec, bool]:
    """The codec of a projection and whether its scale is compressed; refuses incomplete ones."""
    part = parts.by_part
    weight, scale = part.get(names.WEIGHT), part.get(names.SCALE)
    fixed, exceptions = part.get(names.SCALE_FIXED), part.get(names.SCALE_EXCEPTIONS)
    if weight is None:
        raise FormatError(f"{label}: no weight, found only {sorted(part.values())}")
    if parts.spec is not None:
        if fixed is None or exceptions is None:
            found = fixed or exceptions
            missing = parts.spec.exceptions_suffix if fixed else parts.spec.fixed_suffix
            raise FormatError(f"{found}: its partner {names.scale_of_stream(str(found))}{missing} is missing")
        if names.scale_of_stream(fixed) != names.scale_of_stream(exceptions):
            raise FormatError(f"{fixed}: {exceptions} belongs to another scale, expected one scale")
        if scale is not None:
            raise FormatError(f"{scale}: stored beside its compressed streams, expected one of the two")
        spec = parts.spec
    else:
        if scale is None:
            raise FormatError(f"{weight}: no scale is stored for it")
        found_spec = _plain_spec(tensors[weight], tensors[scale])
        if found_spec is None:
            raise FormatError(
                f"{scale}: {tensors[scale].dtype} {list(tensors[scale].shape)} beside weights "
                f"{tensors[weight].dtype} {list(tensors[weight].shape)}, expected U8 weights with an "
                "F8_E4M3 scale for 16 or an F8_E8M0 scale for 32"
            )
        spec = found_spec
    if spec is NVFP4 and names.GLOBAL_SCALE not in part:
        raise FormatError(f"{weight}: its global scale (weight_scale_2 or weight_global_scale) is missing")
    if len(parts.divisors) > 1:
        found_scales = [part[key] for key in (names.GLOBAL_SCALE, names.INPUT_SCALE)]
        raise FormatError(f"{label}: {found_scales} mix divisors and multipliers")
    for key in (names.GLOBAL_SCALE, names.INPUT_SCALE):
        if key in part and tensors[part[key]].dtype != "F32":
            raise FormatError(f"{part[key]}: dtype {tensors[part[key]].dtype}, expected F32")
    return spec, parts.spec is not None


def _split(
    expert: int | None, projection: str, parts: _Parts, spec: CodecSpec, tensors: Mapping[str, TensorInfo]
) -> Iterable[tuple[tuple[int, str], StoredMatrix]]:
    """The matrices that one group of tensors holds: one, gate and up, and that for every expert."""
    part = parts.by_part
    weight = part[names.WEIGHT]
    info = tensors[weight]
    fused = expert is None
    if 0 in info.shape:
        raise FormatError(f"{weight}: shape {list(info.shape)}, expected no empty tensor")
    if info.dtype not in _PACKED_DTYPES or len(info.shape) != (3 if fused else 2):
        wanted = "3 dimensions [experts, rows, inputs / 2]" if fused else "2 dimensions [rows, inputs / 2]"
        raise FormatError(f"{weight}: {info.dtype} {list(info.shape)}, expected U8 in {wanted}")
    if fused and parts.spec is not None:
        raise FormatError(f"{part[names.SCALE_FIXED]}: streams of all experts at once, expected one expert's")
    rows, packed = info.shape[-2:]
    _check_scale(part, tensors, rows, packed * 2, spec, info.shape[0] if fused else None)
    halves: tuple[tuple[str, int | None], ...] = ((projection, None),)
    if projection == names.GATE_UP:
        if rows % 2:
            raise FormatError(f"{weight}: {rows} rows, expected an even number: gate over up")
        halves, rows = ((names.GATE, 0), (names.UP, 1)), rows // 2
    ids = range(info.shape[0]) if fused else (expert,)
    _check_scalars(part, tensors, len(ids), len(halves))
    for index in ids:
        for role, half in halves:
            assert index is not None
            yield (
                (index, role),
                StoredMatrix(
                    name=weight,
                    rows=rows,
                    inputs=packed * 2,
                    first_row=rows * (half or 0),
                    expert=index if fused else None,
                    half=half,
                    weight=weight,
                    scale=part.get(names.SCALE),
                    fixed=part.get(names.SCALE_FIXED),
                    exceptions=part.get(names.SCALE_EXCEPTIONS),
                    global_scale=part.get(names.GLOBAL_SCALE),
                    input_scale=part.get(names.INPUT_SCALE),
                    divisors=True in parts.divisors,
                ),
            )


def _check_scale(
    part: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
    rows: int,
    inputs: int,
    spec: CodecSpec,
    experts: int | None,
) -> None:
    weight = part[names.WEIGHT]
    if inputs % spec.group_size:
        raise FormatError(f"{weight}: {inputs} input channels, expected a multiple of {spec.group_size}")
    cols = inputs // spec.group_size
    if names.SCALE in part:
        info = tensors[part[names.SCALE]]
        wanted = (rows, cols) if experts is None else (experts, rows, cols)
        if info.shape != wanted:
            raise FormatError(f"{part[names.SCALE]}: shape {list(info.shape)}, expected {list(wanted)}")
        return
    scale = names.scale_of_stream(part[names.SCALE_FIXED])
    spec.check_shape(rows, cols, scale)
    fixed, exceptions = tensors[part[names.SCALE_FIXED]], tensors[part[names.SCALE_EXCEPTIONS]]
    flat, slabs = (spec.fixed_bytes(rows, cols),), (rows // 16, spec.slab_bytes(cols))
    if fixed.dtype != "U8" or fixed.shape not in (flat, slabs):
        raise FormatError(
            f"{part[names.SCALE_FIXED]}: {fixed.dtype} {list(fixed.shape)}, expected U8 {list(flat)} or "
            f"{list(slabs)} for a plane of {rows} x {cols} scales"
        )
    if exceptions.dtype != "U32" or len(exceptions.shape) != 1 or exceptions.numel > rows * cols:
        raise FormatError(
            f"{part[names.SCALE_EXCEPTIONS]}: {exceptions.dtype} {list(exceptions.shape)}, "
            f"expected U32 with one dimension of at most {rows * cols}"
        )


def _check_scalars(
    part: Mapping[str, str], tensors: Mapping[str, TensorInfo], experts: int, halves: int
) -> None:
    allowed = sorted({1, halves, experts, experts * halves})
    for key in (names.GLOBAL_SCALE, names.INPUT_SCALE):
        if key in part and tensors[part[key]].numel not in allowed:
            found = list(tensors[part[key]].shape)
            raise FormatError(f"{part[key]}: shape {found}, expected one of {allowed} numbers")


# ---- the whole layer -----------------------------------------------------------------------------


def _check_complete(
    name: str, matrices: Mapping[tuple[int, str], StoredMatrix]
) -> tuple[int, tuple[str, ...]]:
    found = {projection for _, projection in matrices}
    projections = tuple(p for p in (names.GATE, names.UP, names.DOWN) if p in found)
    if names.UP not in found or names.DOWN not in found:
        raise FormatError(f"{name}: projections {list(projections)}, expected up and down (and gate)")
    experts = max(expert for expert, _ in matrices) + 1
    if len(matrices) != experts * len(projections):
        missing = next((e, p) for e in range(experts) for p in projections if (e, p) not in matrices)
        raise FormatError(
            f"{name}.{missing[0]}: its {missing[1]} projection is missing, expected {list(projections)} "
            f"of the experts 0 to {experts - 1}"
        )
    return experts, projections


def _check_geometry(
    name: str, matrices: Mapping[tuple[int, str], StoredMatrix], projections: tuple[str, ...]
) -> tuple[int, int]:
    width, hidden = matrices[0, names.UP].rows, matrices[0, names.UP].inputs
    for (expert, projection), matrix in matrices.items():
        wanted = (hidden, width) if projection == names.DOWN else (width, hidden)
        if (matrix.rows, matrix.inputs) != wanted:
            raise FormatError(
                f"{matrix.name}: {projection} of expert {expert} is {matrix.rows} x {matrix.inputs}, "
                f"expected {wanted[0]} x {wanted[1]}"
            )
    return hidden, width


def _check_recipe(name: str, own: ModuleRecipe, spec: CodecSpec, compressed: bool, where: str) -> None:
    if own.encoding == CSF_ENCODING and not compressed:
        raise RecipeError(
            f"{name}: weight_scale_encoding is {CSF_ENCODING!r} in {where}, but plain scales are stored"
        )
    # Only a contradiction counts: a list that forgets the layer is outvoted by its tensors.
    wanted = NVFP4_ALGOS if spec is NVFP4 else MXFP4_ALGOS
    if own.encoding == CSF_ENCODING and own.algo not in wanted:
        raise RecipeError(f"{name}: {own.algo} in {where}, but {_label(spec)} streams are stored")
    if own.encoding == CSF_ENCODING and own.group_size not in (None, spec.group_size):
        raise RecipeError(f"{name}: group_size {own.group_size} in {where}, expected {spec.group_size}")


def _check_promises(layers: Iterable[StoredLayer], recipe: Recipe) -> None:
    stored = [layer.name for layer in layers]
    for promised in recipe.csf_modules():
        if not any(related(promised, name) for name in stored):
            raise RecipeError(
                f"{promised}: weight_scale_encoding is {CSF_ENCODING!r} in {recipe.where}, "
                "but no such experts are stored"
            )


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts layers.10 after layers.9."""
    return [
        (0, int(part), "") if part.isdecimal() and len(part) < 20 else (1, 0, part)
        for part in name.split(".")
    ]
