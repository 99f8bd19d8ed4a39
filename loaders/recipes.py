"""What a checkpoint's quantization config says about each module.

Dialects that are read, at the top of config.json, under `text_config`, nested once more as
`quantization`, or in hf_quant_config.json:

    modelopt            quant_algo (+ ignore | exclude_modules), MIXED_PRECISION with quantized_layers
    compressed-tensors  config_groups with targets, ignore; classes, names and `re:` patterns

The tensors decide what a module is; the recipe adds what they cannot say, and is refused where it
contradicts them (`inventory`). Precedence: config.json over hf_quant_config.json. Their ignore lists may
be spelled differently; a module to which they give different algorithms is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from .errors import RecipeError

CSF_ENCODING = "csf"
MIXED_PRECISION = "MIXED_PRECISION"
REGEX = "re:"
NVFP4_ALGOS = ("NVFP4", "W4A16_NVFP4")
MXFP4_ALGOS = ("MXFP4", "W4A16_MXFP4")
CONFIG_FILE = "config.json"
QUANT_CONFIG_FILE = "hf_quant_config.json"

# Models hang the same layers under different roots; patterns are written for one of them.
_ROOTS = ("", "model.", "language_model.model.", "model.language_model.", "language_model.")


@dataclass(frozen=True)
class ModuleRecipe:
    """How one module is quantised. algo: None where it is not; encoding: `csf` or None."""

    algo: str | None
    group_size: int | None = None
    encoding: str | None = None


UNQUANTIZED = ModuleRecipe(None)


@dataclass(frozen=True)
class Recipe:
    """One quantization config.

    method: `modelopt`, `compressed-tensors`, another vLLM method, or None where nothing is quantised.
    algo: of every module that has no entry of its own; None in MIXED_PRECISION and config_groups.
    layers: module name to recipe, as written. targets: pattern to recipe, in order.
    ignore: as written. where: the file and key it was read from. raw: the config itself.
    other: the recipe of a second file, for contradictions.
    """

    method: str | None
    default: ModuleRecipe = UNQUANTIZED
    layers: Mapping[str, ModuleRecipe] = field(default_factory=dict)
    targets: tuple[tuple[str, ModuleRecipe], ...] = ()
    ignore: tuple[str, ...] = ()
    where: str = CONFIG_FILE
    raw: Mapping[str, Any] = field(default_factory=dict)
    other: Recipe | None = None

    @property
    def algo(self) -> str | None:
        """The global algorithm: `MIXED_PRECISION` where layers have their own."""
        return MIXED_PRECISION if self.layers else self.default.algo

    def ignored(self, module: str) -> bool:
        """Whether the ignore list names the module or a parent of it, or (experts) all of its children."""
        names = [module]
        if module.rpartition(".")[2] == "experts":
            # Lists name the linears of an expert; a module of experts has no name there.
            names.append(f"{module}.0.down_proj")
        return any(_matches(pattern, name) for pattern in self.ignore for name in names)

    def of(self, module: str) -> ModuleRecipe:
        """The recipe of a module, by its name in the checkpoint.

        Raises RecipeError where the entries of its children disagree.
        """
        if self.layers:
            found = self._listed(module)
            if found is not None:
                return found
        if self.ignored(module):
            return UNQUANTIZED
        for pattern, recipe in self.targets:
            if _targets(pattern, module):
                return recipe
        return self.default

    def check_agreement(self, module: str) -> None:
        """Raises RecipeError where the second file gives the module another algorithm."""
        if self.other is None:
            return
        ours, theirs = self.of(module).algo, self.other.of(module).algo
        if ours is not None and theirs is not None and ours != theirs:
            raise RecipeError(f"{module}: {ours} in {self.where}, but {theirs} in {self.other.where}")

    def csf_modules(self) -> Iterator[str]:
        """Modules whose entry promises compressed scales, as written."""
        return (name for name, recipe in self.layers.items() if recipe.encoding == CSF_ENCODING)

    def _listed(self, module: str) -> ModuleRecipe | None:
        for name in _spellings(module):
            parent = name
            while parent:
                if parent in self.layers:
                    return self.layers[parent]
                parent = parent.rpartition(".")[0]
        children = {
            recipe
            for name in _spellings(module)
            for key, recipe in self.layers.items()
            if key.startswith(name + ".")
        }
        if len(children) > 1:
            found = sorted(str(child.algo) for child in children)
            raise RecipeError(f"{module}: its parts have the recipes {found} in {self.where}, expected one")
        return children.pop() if children else None


def read_recipe(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a checkpoint from its parsed config.json and hf_quant_config.json.

    Raises RecipeError for an unknown `weight_scale_encoding`, for two different configs inside
    config.json, and where a config is not made of the JSON types that its dialect uses.
    """
    found = [
        _parse(part["quantization_config"], where)
        for part, where in (
            (config, f"{CONFIG_FILE}: quantization_config"),
            (text_config(config), f"{CONFIG_FILE}: text_config.quantization_config"),
        )
        if part.get("quantization_config")
    ]
    if len(found) == 2 and not _same(*found):
        raise RecipeError(f"{found[0].where} and {found[1].where} differ, expected one or two equal ones")
    second = _parse(hf_quant_config, QUANT_CONFIG_FILE) if hf_quant_config else None
    if not found:
        return second or Recipe(None)
    first = found[0]
    if second is None:
        return first
    return Recipe(**{**_fields(first), "other": second})


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model of one that sees or hears; else {}."""
    return _mapping(config.get("text_config") or {}, f"{CONFIG_FILE}: text_config")


def _fields(recipe: Recipe) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in recipe.__dataclass_fields__}


def _same(a: Recipe, b: Recipe) -> bool:
    return (a.default, a.layers, a.targets, set(a.ignore)) == (b.default, b.layers, b.targets, set(b.ignore))


# ---- dialects ------------------------------------------------------------------------------------


def _parse(raw: Any, where: str) -> Recipe:
    config = _mapping(raw, where)
    if "quantization" in config:
        inner = _mapping(config["quantization"], f"{where}.quantization")
        config = {**{k: v for k, v in config.items() if k != "quantization"}, **inner}
    method = str(config.get("quant_method") or "").lower()
    if method == "compressed-tensors":
        return _compressed_tensors(config, where)
    if method.startswith("modelopt") or method == "csf_nvfp4" or (not method and "quant_algo" in config):
        return _modelopt(config, where)
    if not method:
        raise RecipeError(f"{where}: neither quant_method nor quant_algo, found {sorted(config)}")
    size = config.get("group_size")
    return Recipe(
        method=method,
        default=ModuleRecipe(method.upper(), size if isinstance(size, int) else None),
        ignore=_strings(config, where, "ignore", "exclude_modules", "modules_to_not_convert"),
        where=where,
        raw=config,
    )


def _modelopt(config: Mapping[str, Any], where: str) -> Recipe:
    algo = str(config.get("quant_algo") or "").upper()
    layers = {}
    for name, entry in _mapping(config.get("quantized_layers") or {}, f"{where}.quantized_layers").items():
        layers[name] = _module_recipe(_mapping(entry, f"{where}: {name}"), f"{where}: {name}")
    if algo == MIXED_PRECISION and not layers:
        raise RecipeError(f"{where}: quant_algo is {MIXED_PRECISION}, but quantized_layers is empty")
    default = UNQUANTIZED
    if algo != MIXED_PRECISION:
        default = _module_recipe(config, where)
    return Recipe(
        method="modelopt",
        default=default,
        layers=layers,
        ignore=_strings(config, where, "ignore", "exclude_modules"),
        where=where,
        raw=config,
    )


def _module_recipe(entry: Mapping[str, Any], where: str) -> ModuleRecipe:
    encoding = entry.get("weight_scale_encoding")
    if encoding not in (None, CSF_ENCODING):
        raise RecipeError(f"{where}: weight_scale_encoding is {encoding!r}, expected {CSF_ENCODING!r}")
    algo = str(entry.get("quant_algo") or "").upper() or None
    size = entry.get("group_size")
    if size is not None and not isinstance(size, int):
        raise RecipeError(f"{where}: group_size is {size!r}, expected a number")
    if encoding == CSF_ENCODING and algo not in NVFP4_ALGOS + MXFP4_ALGOS:
        raise RecipeError(
            f"{where}: weight_scale_encoding {CSF_ENCODING!r} with quant_algo {algo}, "
            f"expected one of {list(NVFP4_ALGOS + MXFP4_ALGOS)}"
        )
    return ModuleRecipe(algo, size, encoding)


def _compressed_tensors(config: Mapping[str, Any], where: str) -> Recipe:
    targets = []
    groups = _mapping(config.get("config_groups") or {}, f"{where}.config_groups")
    for name, raw in groups.items():
        group = _mapping(raw, f"{where}.config_groups.{name}")
        recipe = _group_recipe(group, f"{where}.config_groups.{name}")
        targets += [
            (target, recipe) for target in _strings(group, f"{where}.config_groups.{name}", "targets")
        ]
    # A pattern or a name is more specific than a class.
    targets.sort(key=lambda target: _is_class(target[0]))
    return Recipe(
        method="compressed-tensors",
        targets=tuple(targets),
        ignore=_strings(config, where, "ignore"),
        where=where,
        raw=config,
    )


def _group_recipe(group: Mapping[str, Any], where: str) -> ModuleRecipe:
    weights = group.get("weights")
    if not weights:
        return UNQUANTIZED
    weights = _mapping(weights, f"{where}.weights")
    bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    weight_only = group.get("input_activations") is None
    if (bits, kind, size) == (4, "float", 16):
        return ModuleRecipe("W4A16_NVFP4" if weight_only else "NVFP4", 16)
    if (bits, kind, size) == (4, "float", 32):
        return ModuleRecipe("W4A16_MXFP4" if weight_only else "MXFP4", 32)
    if (bits, kind, size) == (8, "float", 32):
        return ModuleRecipe("MXFP8", 32)
    if (bits, kind) == (8, "float"):
        return ModuleRecipe("FP8", size if isinstance(size, int) else None)
    return ModuleRecipe(f"{str(kind).upper()}{bits}", size if isinstance(size, int) else None)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RecipeError(f"{where}: {type(value).__name__}, expected an object")
    return value


def _strings(config: Mapping[str, Any], where: str, *keys: str) -> tuple[str, ...]:
    """The patterns under all of the keys: a list beside another one adds to it."""
    out: list[str] = []
    for key in keys:
        value = config.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise RecipeError(f"{where}.{key}: {value!r}, expected a list of strings")
        for item in value:
            _check_pattern(item, f"{where}.{key}")
        out += value
    return tuple(dict.fromkeys(out))


def _check_pattern(pattern: str, where: str) -> None:
    if pattern.startswith(REGEX):
        try:
            re.compile(pattern.removeprefix(REGEX))
        except re.error as error:
            raise RecipeError(f"{where}: {pattern!r} is no regular expression: {error}") from error


# ---- patterns ------------------------------------------------------------------------------------


def _spellings(module: str) -> list[str]:
    """The module's name under every root, its own spelling first."""
    bare = module
    for root in sorted(_ROOTS, key=len, reverse=True):
        if root and module.startswith(root):
            bare = module.removeprefix(root)
            break
    return list(dict.fromkeys([module, *(root + bare for root in _ROOTS)]))


def _matches(pattern: str, module: str) -> bool:
    """An ignore entry: `re:` (from the start of the name), wildcard, or the name of a module or a parent."""
    for name in _spellings(module):
        if pattern.startswith(REGEX):
            if re.match(pattern.removeprefix(REGEX), name):
                return True
        elif name == pattern or name.startswith(pattern + ".") or fnmatchcase(name, pattern):
            return True
    return False


def related(key: str, module: str) -> bool:
    """Whether an entry of quantized_layers is about the module: its name, a parent or a part of it."""
    return any(
        key == name or name.startswith(key + ".") or key.startswith(name + ".") for name in _spellings(module)
    )


def _is_class(target: str) -> bool:
    return not target.startswith(REGEX) and "." not in target


def _targets(pattern: str, module: str) -> bool:
    """A config_groups target. A class name matches every module: `Linear` is all that experts are made of."""
    if _is_class(pattern):
        return pattern == "Linear" or module.rpartition(".")[2] == pattern
    names = [module]
    if module.rpartition(".")[2] == "experts":
        names.append(f"{module}.0.down_proj")
    return any(_matches(pattern, name) for name in names)
