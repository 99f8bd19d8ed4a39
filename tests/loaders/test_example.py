"""The example checkpoints: one set of weights in every layout."""

import json

import pytest
import torch
from safetensors import SafetensorError, safe_open
from vllm_csf.loaders import codec, example
from vllm_csf.loaders.checkpoint import open_checkpoint
from vllm_csf.loaders.errors import CheckpointError

COMPRESSED = ("modelopt", "compressed-tensors", "csf", "container")


@pytest.fixture(scope="module", params=example.FAMILIES)
def family(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    return {layout: example.make_example(root / layout, request.param, layout) for layout in example.LAYOUTS}


def experts(folder):
    """Weight bytes, scale bytes and global scale of every projection."""
    with open_checkpoint(folder) as checkpoint:
        return {
            (layer.name, source.expert, source.projection): (
                source.weight(),
                codec.decode(source.plane()),
                source.global_scale,
            )
            for layer in checkpoint.layers
            for source in layer.sources()
        }


def tensors(folder):
    out = {}
    for shard in sorted(folder.glob("**/*.safetensors")):
        with safe_open(shard, "pt") as f:
            out |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    return out


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(example, "save_file", full)
    with pytest.raises(CheckpointError, match=r"00001-of-00002\.safetensors: cannot be written: .*No space"):
        example.make_example(tmp_path / "a")


def test_layouts_hold_the_same_experts(family):
    first, *others = (experts(family[layout]) for layout in COMPRESSED)
    for other in others:
        assert other.keys() == first.keys()
        for key, parts in first.items():
            assert all(torch.equal(a, b) for a, b in zip(parts, other[key], strict=True)), key


def test_dequantized_is_the_product_in_float32(family):
    plain = tensors(family["dequantized"])
    fp4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for (layer, expert, projection), (packed, scale, factor) in experts(family["csf"]).items():
        values = torch.stack((fp4[(packed & 15).long()], fp4[(packed >> 4).long()]), -1).flatten(-2)
        values = values * scale.view(torch.float8_e4m3fn).float().repeat_interleave(16, -1) * factor
        assert torch.equal(plain[f"{layer}.{expert}.{projection}_proj.weight"], values)


def test_other_tensors_and_tokenizer_are_the_same(family):
    reference = {n: t for n, t in tensors(family["csf"]).items() if ".experts." not in n}
    for layout in example.LAYOUTS:
        found = {n: t for n, t in tensors(family[layout]).items() if ".experts." not in n}
        assert found.keys() == reference.keys()
        assert all(torch.equal(found[n], reference[n]) for n in found)
        folder = family[layout] / "metadata" if layout == "container" else family[layout]
        assert json.loads((folder / "tokenizer.json").read_text())["model"]["type"] == "BPE"


def test_exceptions_occur_and_gate_and_up_share_their_scale(family, tmp_path):
    with open_checkpoint(family["csf"]) as checkpoint:
        planes = [p for layer in checkpoint.layers for p in layer.planes("up")]
        assert sum(len(p.exceptions) for p in planes) > 0.01 * sum(p.native_nbytes for p in planes)
        assert not any(layer.unequal_global_scales() for layer in checkpoint.layers)
    with open_checkpoint(example.make_example(tmp_path / "e", unequal_gate_up=True)) as checkpoint:
        assert all(layer.unequal_global_scales() for layer in checkpoint.layers)


def test_mtp_layer_does_what_the_first_layer_does(tmp_path):
    folder = example.make_example(tmp_path / "a", "glm4-moe", "dequantized")
    found = tensors(folder)
    first = {n.removeprefix("model.layers.0."): t for n, t in found.items() if ".layers.0." in n}
    assert len(first) > 3 * 8
    assert all(torch.equal(found[f"model.layers.2.{n}"], t) for n, t in first.items())
    assert not torch.equal(found["model.layers.1.mlp.gate.weight"], first["mlp.gate.weight"])


def test_compressed_tensors_recipe_quantises_activations_where_their_scales_are_stored(family):
    """A recipe without input activations would make the scales strangers."""
    config = json.loads((family["compressed-tensors"] / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    assert any(name.endswith(".input_global_scale") for name in tensors(family["compressed-tensors"]))


def test_seed_decides_and_sizes_can_be_chosen(tmp_path):
    one, same, other = (
        tensors(example.make_example(tmp_path / str(n), seed=seed, experts=4))
        for n, seed in enumerate((1, 1, 2))
    )
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    assert "model.layers.0.mlp.experts.4.up_proj.weight" not in one


def test_transformers_reads_config_and_tokenizer(family):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(family["csf"])
    text = "Grüße, 世界!"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "user: hi" in tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    config = transformers.AutoConfig.from_pretrained(family["dequantized"])
    assert config.vocab_size == len(tokenizer)


def test_transformers_runs_it_and_its_greedy_output_is_stable(family):
    """transformers knows nothing of this project: it must find each tensor, and no logits near a tie."""
    transformers = pytest.importorskip("transformers")
    folder = family["dequantized"]
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    # It has no MTP layer, vLLM does: layer 2 of the GLM example.
    assert all(".layers.2." in name for name in report["unexpected_keys"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = ("The scales of this model are", "Hello, world", "Grüße", "0123456789")
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.stack([logits[0].topk(2).values for logits in out.logits])
        assert len(best) == 16, "a special token ended the output"
        assert (best[:, 0] - best[:, 1]).min() > 1e-3
        assert len(set(out.sequences[0, -16:].tolist())) > 1


def test_wrong_requests_are_refused(tmp_path):
    with pytest.raises(ValueError, match="family"):
        example.make_example(tmp_path / "a", family="other")
    with pytest.raises(ValueError, match="layers_"):
        example.make_example(tmp_path / "a", layers_=3)
    wrong = {"hidden": 120, "width": 0, "vocabulary": 258, "topk": 9, "heads": 3, "head_dim": -1, "layers": 0}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            example.make_example(tmp_path / "a", **{name: value})
    assert not (tmp_path / "a").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        example.make_example(tmp_path / "full")


def test_without_weights_it_has_the_same_configuration(tmp_path):
    with_, without = (
        example.make_example(tmp_path / str(weights), "glm4-moe", "csf", weights=weights)
        for weights in (True, False)
    )
    assert not list(without.glob("*.safetensors*"))
    for path in without.iterdir():
        assert path.read_text() == (with_ / path.name).read_text()
    with pytest.raises(ValueError, match="without weights"):
        example.make_example(tmp_path / "c", layout="container", weights=False)


def test_words_survive_being_text(tmp_path):
    """What benchmarks send is text that was made from random tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = example.make_example(tmp_path / "e", weights=False, vocabulary=2000, positions=9999)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 2000
    ids = [int(i) for i in torch.randint(259, 2000, (500,), generator=torch.Generator().manual_seed(0))]
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 9999
