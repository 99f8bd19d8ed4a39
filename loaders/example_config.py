"""config.json and a byte-level tokenizer of the example checkpoints."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .example_sizes import Sizes

SPECIALS = ("<unk>", "<s>", "</s>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
)
SIZE_KEYS = {  # fields of `Sizes`, and what config.json calls them
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "width": "moe_intermediate_size",
    "experts": "num_experts",
    "topk": "num_experts_per_tok",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "positions": "max_position_embeddings",
}
# Of vLLM's CPU build no NVFP4 linear layer exists, so all of them stay as they are. The head of an MTP
# layer has the vLLM name `layers.N.head`.
UNQUANTIZED = ("lm_head", "*self_attn*", "*mlp.gate", "*shared_experts*", "*eh_proj", "*.head")


def write_metadata(folder: Path, family: str, layout: str, size: Sizes, modules: list[str]) -> None:
    """Writes config.json (hf_quant_config.json beside it for ModelOpt), generation config and tokenizer."""
    config = model_config(family, size, "float32" if layout == "dequantized" else "bfloat16")
    quantization = quantization_config(layout, modules)
    if quantization is not None:
        config["quantization_config"] = quantization
    _write(folder / "config.json", config)
    if layout in ("modelopt", "container"):
        legacy = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None}
        legacy["exclude_modules"] = list(UNQUANTIZED)
        _write(folder / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": legacy})
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    _write(folder / "tokenizer.json", tokenizer(size.vocabulary))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": SPECIALS[0],
            "bos_token": SPECIALS[1],
            "eos_token": SPECIALS[2],
            "model_max_length": size.positions,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def model_config(family: str, size: Sizes, dtype: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **{key: getattr(size, field) for field, key in SIZE_KEYS.items()},
        "intermediate_size": 2 * size.hidden,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "glm4-moe":
        config |= {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "n_routed_experts": size.experts,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
            "num_nextn_predict_layers": 1,
            "use_qk_norm": False,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        }
    return config


def quantization_config(layout: str, modules: list[str]) -> dict[str, Any] | None:
    """What the layout's config.json says of quantization; `modules`: the expert modules."""
    if layout == "dequantized":
        return None
    if layout == "csf":
        entry = {"quant_algo": "NVFP4", "group_size": 16, "weight_scale_encoding": "csf"}
        return {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {module: dict(entry) for module in modules},
            "ignore": [],
        }
    if layout == "compressed-tensors":
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        weights |= {"symmetric": True, "dynamic": False}
        activations = weights | {"dynamic": "local"}
        patterns = ("self_attn", r"mlp\.gate$", "shared_experts", "eh_proj", "head$")
        return {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}
            },
            "ignore": ["lm_head", *(f"re:.*{p}.*" if "$" not in p else f"re:.*{p}" for p in patterns)],
        }
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": list(UNQUANTIZED),
    }


def tokenizer(vocabulary: int) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE: special tokens, 256 bytes, then words that begin with a space.

    Of the vocabulary of a large model nearly all tokens are words, so that a random sequence of tokens is
    itself again once it was text: what benchmarks send has the lengths and the variety that they mean.
    """
    tokens = [*SPECIALS, *byte_alphabet()]
    merges = []
    for word, letter in itertools.islice(words(), max(0, vocabulary - len(tokens))):
        merges.append(f"{word} {letter}")
        tokens.append(word + letter)
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": n, "content": token} | added for n, token in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": SPECIALS[0],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: n for n, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def words() -> Iterator[tuple[str, str]]:
    """Each word as a shorter one, which comes earlier, and a last letter: a merge of BPE. Shortest first."""
    shorter = ["Ġ"]  # how byte-level BPE writes a space
    while True:
        pairs = [(word, letter) for word in shorter for letter in string.ascii_lowercase]
        yield from pairs
        shorter = [word + letter for word, letter in pairs]


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself where it prints, else from 256 on."""
    prints = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in prints else chr(next(others)) for byte in range(256)]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
