"""LoRA adapters: PEFT's own merge is the oracle."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from isthmus.checkpoints import Checkpoint, Dtype, adapted, open_adapter, open_checkpoint
from isthmus.errors import CheckpointError

from .files import numbers, save


def gpt2(**more: Any) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    # Square attention weights, stored inputs first.
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50, n_embd=32, n_head=2, n_layer=2, n_positions=16, bos_token_id=0,
            eos_token_id=0, **more,
        )
    )  # fmt: skip


def untied_gpt2() -> torch.nn.Module:
    return gpt2(tie_word_embeddings=False)


def llama(**more: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=2, **more,
        )
    )  # fmt: skip


def tied_llama() -> torch.nn.Module:
    return llama(tie_word_embeddings=True)


def bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
        )
    )  # fmt: skip


def resnet() -> torch.nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    # Kernels of 7x7, 3x3 and 1x1, with strides.
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=6, hidden_sizes=[8, 12], depths=[1, 2], layer_type="bottleneck")
    )


def vit() -> torch.nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
            image_size=8, patch_size=4,
        )
    )  # fmt: skip


def whisper() -> torch.nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=40, num_mel_bins=5, d_model=16, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
            decoder_ffn_dim=24, max_source_positions=8, max_target_positions=8, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    )  # fmt: skip


def train(make: Any, folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """A base, an adapter of random numbers, and the two merged by PEFT."""
    import peft

    torch.manual_seed(0)
    model = make().to(dtype)
    model.save_pretrained(folder / "base")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    wrapped.save_pretrained(folder / "adapter")
    merged = wrapped.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    return folder


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (
        llama,
        {"target_modules": ["q_proj", "up_proj", "down_proj"], "r": 3, "lora_alpha": 7},
    ),
    "all linear": (llama, {"target_modules": "all-linear"}),
    "rank-stabilised": (llama, {"target_modules": ["q_proj"], "r": 9, "use_rslora": True}),
    "patterns": (
        llama,
        {
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 5, "proj": 7},
            "alpha_pattern": {"model.layers.0.self_attn.k_proj": 3, "down_proj": 5},
            "lora_alpha": 16,
        },
    ),
    "embedding": (llama, {"target_modules": ["embed_tokens", "lm_head"], "r": 4, "lora_alpha": 3}),
    "tied embedding without a head": (bert, {"target_modules": ["word_embeddings"], "r": 4}),
    "negative alpha": (llama, {"target_modules": ["q_proj"], "lora_alpha": -3}),
    "Conv1D": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "r": 4, "lora_alpha": 7}),
    "Conv1D and embedding": (untied_gpt2, {"target_modules": ["wte", "c_proj"], "r": 3}),
    "whole modules": (
        llama,
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    ),
    "a head": (bert, {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
    "all biases": (bert, {"target_modules": ["query"], "task_type": "SEQ_CLS", "bias": "all"}),
    "2-D convolutions": (resnet, {"target_modules": ["convolution"], "r": 3, "lora_alpha": 5}),
    "1-D convolutions": (whisper, {"target_modules": ["conv1", "conv2", "q_proj"], "r": 2}),
    "renamed in memory": (vit, {"target_modules": ["q_proj", "fc1"], "r": 3}),
    "biases of LoRA": (
        bert,
        {"target_modules": ["query", "dense"], "lora_bias": True, "r": 4, "lora_alpha": 6},
    ),
    "biases of convolutions": (vit, {"target_modules": ["projection"], "lora_bias": True}),
    "biases of Conv1D": (
        gpt2,
        {"target_modules": ["c_attn", "c_proj"], "lora_bias": True, "use_rslora": True},
    ),
    "both kinds of biases": (
        bert,
        {"target_modules": ["query"], "lora_bias": True, "bias": "lora_only"},
    ),
    "LoRA's biases": (bert, {"target_modules": ["query", "dense"], "bias": "lora_only"}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "settings"), CASES.values(), ids=CASES)
def test_peft_merges_to_the_same_numbers(
    tmp_path: Path, make: Any, settings: dict[str, Any]
) -> None:
    train(make, tmp_path, **settings)
    ours = open_checkpoint(f"{tmp_path}/base+{tmp_path}/adapter")
    base = open_checkpoint(str(tmp_path / "base"))
    merged = open_checkpoint(str(tmp_path / "merged"))
    assert dict(ours.tensors) == dict(merged.tensors)
    assert ours.config == base.config
    changed = 0
    for name in merged.tensors:
        expected = numbers(merged, name)
        np.testing.assert_allclose(
            numbers(ours, name), expected, rtol=0, atol=1e-6 * abs(expected).max()
        )
        changed += not np.array_equal(expected, numbers(base, name))
    assert changed >= len(open_adapter(tmp_path / "adapter").updates)
    assert {source.path.name for source in ours.sources} == {
        "model.safetensors",
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_bfloat16_adapters_are_added_before_rounding(tmp_path: Path) -> None:
    train(llama, tmp_path, torch.bfloat16, target_modules=["q_proj"])
    ours = open_checkpoint(f"{tmp_path}/base+{tmp_path}/adapter")
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (factors[f"base_model.model.{name}.lora_{x}.weight"].astype(np.float64) for x in "AB")
    base = numbers(open_checkpoint(str(tmp_path / "base")), f"{name}.weight", np.float64)
    exact = base + b @ a
    info = ours.tensors[f"{name}.weight"]
    assert info.dtype is Dtype.BF16
    np.testing.assert_allclose(numbers(ours, info.name, np.float64), exact, rtol=0, atol=1e-14)
    np.testing.assert_allclose(numbers(ours, info.name), exact, rtol=0, atol=1e-5)
    stored = ours.read_stored(info.name, 5, 500)
    np.testing.assert_array_equal(
        stored, numbers(ours, info.name).reshape(-1)[5:500].astype(info.dtype.storage)
    )
    other = "model.norm.weight"
    assert ours.read_stored(other, 3, 9).dtype == Dtype.BF16.storage


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(llama, tmp_path_factory.mktemp("llama"), target_modules=["q_proj", "down_proj"])


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


def together(folder: Path) -> Checkpoint:
    return open_checkpoint("base+adapter", root=folder)


def edit(folder: Path, **settings: Any) -> None:
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors = dict(load_file(path))
    change(tensors)
    save(path, tensors)


@pytest.mark.parametrize("block", [1, 100, 1 << 17])
def test_a_number_does_not_depend_on_the_range_it_is_read_in(
    trained: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(adapted, "_BLOCK_ELEMENTS", block)
    checkpoint = together(trained)
    name = "model.layers.0.mlp.down_proj.weight"
    whole = numbers(checkpoint, name).reshape(-1)
    generator = np.random.default_rng(0)
    for _ in range(100):
        start, stop = sorted(generator.integers(0, whole.size + 1, 2))
        out = np.empty(stop - start, np.float32)
        checkpoint.read(name, int(start), out)
        np.testing.assert_array_equal(out, whole[start:stop])
    with pytest.raises(IndexError):
        checkpoint.read(name, whole.size - 1, np.empty(2, np.float32))


def test_the_parts_of_an_adapter(trained: Path) -> None:
    adapter = open_adapter(trained / "adapter")
    update = adapter.updates["model.layers.1.mlp.down_proj"]
    assert (update.rank, update.shape, update.scaling) == (8, (32, 48), 1.0)
    assert adapter.factor(update.a, np.dtype(np.float32)).shape == (8, 48)
    adapter.close()
    adapter.close()


def test_torch_files_and_prefixes(copy: Path) -> None:
    path = copy / "adapter" / "adapter_model.safetensors"
    expected = numbers(together(copy), "model.layers.0.self_attn.q_proj.weight")
    torch.save(
        {k: torch.from_numpy(v) for k, v in load_file(path).items()}, path.with_suffix(".bin")
    )
    path.unlink()
    base = copy / "base" / "model.safetensors"
    save(base, {name.removeprefix("model."): array for name, array in load_file(base).items()})
    bare = together(copy)
    np.testing.assert_array_equal(numbers(bare, "layers.0.self_attn.q_proj.weight"), expected)


def test_two_adapters_one_after_the_other(copy: Path) -> None:
    once = together(copy)
    twice = open_checkpoint("base+adapter+adapter", root=copy)
    base = open_checkpoint("base", root=copy)
    name = "model.layers.0.self_attn.q_proj.weight"
    zero, one, two = (numbers(model, name, np.float64) for model in (base, once, twice))
    np.testing.assert_allclose(two - one, one - zero, atol=1e-12)
    assert twice.label == "base+adapter+adapter"
    twice.close()
    twice.close()


def test_a_folder_with_a_plus_in_its_name(copy: Path) -> None:
    (copy / "base").rename(copy / "a+b")
    assert open_checkpoint("a+b", root=copy).path.name == "a+b"
    assert open_checkpoint("a+b+adapter", root=copy).label == "a+b+adapter"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "is an adapter of the kind IA3"),
        ({"peft_type": None}, r"does not say what kind of adapter it is \(peft_type\)"),
        ({"use_dora": True}, "uses DoRA"),
        ({"target_parameters": ["experts"]}, "bare parameters"),
        ({"trainable_token_indices": [1]}, "trainable tokens"),
        ({"layer_replication": [[0, 1]]}, "layer replication"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights='pissa_niter_4', which changes",
        ),
        ({"init_lora_weights": "olora"}, "changes the base model too"),
        ({"r": 4}, "have shapes .* by adapter_config.json their rank is 4"),
        ({"r": 0}, "r in adapter_config.json is 0"),
        ({"r": "8"}, "r in adapter_config.json is '8'"),
        ({"r": -8}, "r in adapter_config.json is -8"),
        ({"lora_alpha": -1e39}, r"lora_alpha in adapter_config.json is -1e\+39"),
        ({"modules_to_save": 5}, "modules_to_save in adapter_config.json is 5"),
        ({"modules_to_save": "norm"}, "modules_to_save in adapter_config.json is 'norm'"),
        ({"modules_to_save": ["norm", 5]}, "modules_to_save in adapter_config.json is"),
        ({"lora_alpha": None}, "lora_alpha in adapter_config.json is None"),
        ({"lora_alpha": 10**400}, "lora_alpha in adapter_config.json is 1000"),
        ({"lora_alpha": 1e39}, r"lora_alpha in adapter_config.json is 1e\+39"),
        ({"lora_alpha": math.inf}, "lora_alpha in adapter_config.json is inf"),
        ({"lora_alpha": math.nan}, "lora_alpha in adapter_config.json is nan"),
        (
            {"rank_pattern": {"(": 1}},
            "rank_pattern in adapter_config.json is not a map of patterns",
        ),
        ({"alpha_pattern": [1]}, "alpha_pattern in adapter_config.json is not a map of patterns"),
    ],
)
def test_adapters_that_cannot_be_applied(
    copy: Path, settings: dict[str, Any], message: str
) -> None:
    edit(copy, **settings)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_adapter(copy / "adapter", label="adapter")
    assert "adapter" in caught.value.problem


def test_an_alpha_of_zero_is_no_update(copy: Path) -> None:
    edit(copy, lora_alpha=0)
    base, both = open_checkpoint("base", root=copy), together(copy)
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(numbers(both, name), numbers(base, name))


def test_what_the_configuration_is_to_say_is_said(copy: Path) -> None:
    for settings, cure in (
        ({"r": 0}, "a positive whole number: correct r or rank_pattern there"),
        ({"r": 8, "lora_alpha": math.nan}, "correct lora_alpha or alpha_pattern there"),
    ):
        edit(copy, **settings)
        with pytest.raises(CheckpointError) as caught:
            together(copy)
        assert cure in (caught.value.cure or "")


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def make_whole(tensors: dict[str, np.ndarray]) -> None:
    for x in "AB":
        tensors[f"{Q}.lora_{x}.weight"] = tensors[f"{Q}.lora_{x}.weight"].astype(np.int32)


def lose_half(tensors: dict[str, np.ndarray]) -> None:
    del tensors[f"{Q}.lora_B.weight"]


def add_magnitude(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{Q}.lora_magnitude_vector"] = np.ones(32, np.float32)


def convolve(tensors: dict[str, np.ndarray]) -> None:
    for x in "AB":
        tensors[f"{Q}.lora_{x}.weight"] = tensors[f"{Q}.lora_{x}.weight"][..., None, None].copy()


def half_convolve(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{Q}.lora_A.weight"] = tensors[f"{Q}.lora_A.weight"][..., None, None].copy()


def group(tensors: dict[str, np.ndarray]) -> None:
    convolve(tensors)
    tensors[f"{Q}.lora_B.weight"] = tensors[f"{Q}.lora_B.weight"][:, :4].copy()


def add_bias(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{Q}.lora_B.bias"] = np.ones(32, np.float32)


def add_lone_bias(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{Q}x.lora_B.bias"] = np.ones(32, np.float32)


def widen(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{Q}.lora_B.weight"] = np.ones((31, 8), np.float32)


def invent(tensors: dict[str, np.ndarray]) -> None:
    for x in "AB":
        tensors[f"{Q}x.lora_{x}.weight"] = tensors[f"{Q}.lora_{x}.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict.clear, "the weights of adapter hold no tensor"),
        (lose_half, "holds lora_A of .*q_proj without its other half"),
        (make_whole, "factors of .*q_proj are in I32 and I32, which are no floating-point"),
        (add_magnitude, "lora_magnitude_vector', which is no part of a plain LoRA"),
        (convolve, r"by a kernel of shape \[32, 32, 1, 1\], but '.*' is \[32, 32\] in F32 in base"),
        (half_convolve, "neither matrices nor a convolution"),
        (group, "LoRA on a convolution in groups"),
        (add_bias, "but adapter_config.json does not say lora_bias"),
        (add_lone_bias, "bias of lora_B of .*q_projx without its factors"),
        (widen, r"by a matrix of shape \[31, 32\], but '.*' is \[32, 32\] in F32 in base"),
        (invent, r"changes .*q_projx, but base has no tensor '.*q_projx.weight'"),
    ],
)
def test_weights_that_do_not_fit(copy: Path, change: Any, message: str) -> None:
    rewrite(copy, change)
    with pytest.raises(CheckpointError, match=message):
        together(copy)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (
            np.ones(31, np.float32),
            r"bias of lora_B of .*q_proj is \[31\] in F32, and should be \[32\]",
        ),
        (
            np.ones(32, np.float32),
            r"changes the bias of .*q_proj, but base has no tensor '.*q_proj.bias'",
        ),
    ],
)
def test_biases_that_do_not_fit(copy: Path, bias: np.ndarray, message: str) -> None:
    edit(copy, lora_bias=True)
    rewrite(copy, lambda tensors: tensors.update({f"{Q}.lora_B.bias": bias}))
    with pytest.raises(CheckpointError, match=message):
        together(copy)


def shard(folder: Path, index: str) -> None:
    """Split the adapter's weights in two, as transformers does."""
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    files = [f"adapter_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    parts = {name: files[number % 2] for number, name in enumerate(names)}
    for file in files:
        save(path.with_name(file), {n: tensors[n] for n in names if parts[n] == file})
    path.with_name(index).write_text(json.dumps({"weight_map": parts}))
    path.unlink()


@pytest.mark.parametrize(
    "index", ["adapter_model.safetensors.index.json", "model.safetensors.index.json"]
)
def test_an_adapter_in_shards(copy: Path, index: str) -> None:
    whole = together(copy)
    expected = {name: numbers(whole, name) for name in whole.tensors}
    shard(copy, index)
    sharded = together(copy)
    for name, values in expected.items():
        np.testing.assert_array_equal(numbers(sharded, name), values)
    assert sum(s.path.name.startswith("adapter_model-") for s in sharded.sources) == 2
    sharded.close()


def test_a_missing_shard_is_named(copy: Path) -> None:
    shard(copy, "adapter_model.safetensors.index.json")
    (copy / "adapter" / "adapter_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"adapter_model-00002-of-00002\.safetensors is missing"
    ):
        together(copy)


def test_shards_of_another_adapter(copy: Path) -> None:
    shard(copy, "adapter_model.safetensors.index.json")
    save(
        copy / "adapter" / "adapter_model-00002-of-00002.safetensors",
        {"other": np.ones(2, np.float32)},
    )
    with pytest.raises(CheckpointError, match="which does not hold it"):
        together(copy)


def test_a_square_linear_layer_among_conv1d_layers(tmp_path: Path) -> None:
    """fan_in_fan_out covers a whole adapter; PEFT goes by the class of each layer."""

    def mixed() -> torch.nn.Module:
        model = gpt2()
        for block in model.transformer.h:
            block.attn.extra = torch.nn.Linear(32, 32, bias=False)
        return model

    train(mixed, tmp_path, target_modules=["extra", "c_attn"], fan_in_fan_out=True)
    ours = open_checkpoint(f"{tmp_path}/base+{tmp_path}/adapter")
    merged = open_checkpoint(str(tmp_path / "merged"))
    name = "transformer.h.0.attn.extra.weight"
    np.testing.assert_allclose(numbers(ours, name), numbers(merged, name), rtol=0, atol=1e-5)


def test_folders_that_are_no_adapters(copy: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"base is no adapter: it has no adapter_config\.json"
    ):
        open_checkpoint("base+base", root=copy)
    with pytest.raises(CheckpointError, match="there is no model at adaptor") as caught:
        open_checkpoint("base+adaptor", root=copy)
    assert caught.value.cure == "Near it: adapter."
    (copy / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither adapter_model\.safetensors nor"):
        together(copy)
    with pytest.raises(CheckpointError, match="is an adapter, not a model"):
        open_checkpoint("adapter", root=copy)


def test_a_pipe_is_no_configuration(copy: Path) -> None:
    (copy / "adapter" / "adapter_config.json").unlink()
    os.mkfifo(copy / "adapter" / "adapter_config.json")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is a folder or a device"):
        together(copy)


def test_a_new_tensor_is_noted(copy: Path) -> None:
    rewrite(
        copy, lambda t: t.update({"base_model.model.score.weight": np.ones((2, 32), np.float32)})
    )
    checkpoint = together(copy)
    assert checkpoint.tensors["score.weight"].shape == (2, 32)
    assert numbers(checkpoint, "score.weight").all()
    assert checkpoint.read_stored("score.weight", 0, 3).tolist() == [1, 1, 1]
    assert "score.weight comes from the adapter adapter" in checkpoint.notes[-1]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tied_llama, tmp_path_factory.mktemp("tied"), target_modules=["q_proj"])


HEAD, EMBEDDING = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"
ONES, TWOS = np.ones((64, 32), np.float32), np.full((64, 32), 2, np.float32)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(
    ("extra", "together_", "fits"),
    [
        ({HEAD: ONES, EMBEDDING: ONES}, False, True),
        ({HEAD: ONES, EMBEDDING: TWOS}, False, False),
        ({HEAD: ONES, EMBEDDING: ONES[:60]}, False, False),
        ({HEAD: ONES}, False, False),
        ({EMBEDDING: ONES}, False, False),
        ({EMBEDDING: ONES}, True, True),
    ],
)
def test_tied_embeddings_stay_tied_or_are_refused(
    tied: Path, tmp_path: Path, stored: bool, extra: Any, together_: bool, fits: bool
) -> None:
    shutil.copytree(tied, tmp_path / "copy")
    base = tmp_path / "copy" / "base" / "model.safetensors"
    if stored:
        tensors = load_file(base)
        save(base, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    edit(tmp_path / "copy", ensure_weight_tying=together_)
    rewrite(tmp_path / "copy", lambda tensors: tensors.update(extra))
    if fits:
        checkpoint = together(tmp_path / "copy")
        assert "lm_head.weight" not in checkpoint.tensors
        assert (numbers(checkpoint, "model.embed_tokens.weight") == 1).all()
    else:
        with pytest.raises(CheckpointError, match=r"ties lm_head\.weight to model\.embed"):
            together(tmp_path / "copy")


def factors(generator: np.random.Generator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """LoRA on the output and on the input embedding by the same update, differently factored."""
    tokens, width, turn = (generator.normal(size=shape) for shape in ((64, 8), (8, 32), (8, 8)))
    head = {"A": width, "B": tokens}
    embedding = {"A": (tokens @ turn).T.copy(), "B": np.linalg.solve(turn, width).T.copy()}
    return (
        {f"{HEAD[:-7]}.lora_{x}.weight": array for x, array in head.items()},
        {f"{EMBEDDING[:-7]}.lora_embedding_{x}": array for x, array in embedding.items()},
    )


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("head", r"changes lm_head\.weight but not model\.embed_tokens\.weight, and base ties"),
        (
            "embedding",
            r"changes model\.embed_tokens\.weight but not lm_head\.weight, and base ties",
        ),
        ("unlike", r"changes lm_head\.weight and model\.embed_tokens\.weight in different ways"),
        ("alike", None),
    ],
)
def test_updates_of_tied_embeddings(
    tied: Path, tmp_path: Path, stored: bool, chosen: str, message: str | None
) -> None:
    shutil.copytree(tied, tmp_path / "copy")
    base = tmp_path / "copy" / "base" / "model.safetensors"
    tensors = load_file(base)
    embedding = tensors["model.embed_tokens.weight"]
    if stored:
        save(base, tensors | {"lm_head.weight": embedding})
    head, tokens = factors(np.random.default_rng(0))
    if chosen == "unlike":
        tokens = factors(np.random.default_rng(1))[1]
    added = (head if chosen != "embedding" else {}) | (tokens if chosen != "head" else {})
    rewrite(tmp_path / "copy", lambda tensors: tensors.update(added))
    if message is not None:
        with pytest.raises(CheckpointError, match=message) as caught:
            together(tmp_path / "copy")
        assert "Untie them in the base first" in (caught.value.cure or "")
        return
    both = together(tmp_path / "copy")
    assert "lm_head.weight" not in both.tensors
    update = head[f"{HEAD[:-7]}.lora_B.weight"] @ head[f"{HEAD[:-7]}.lora_A.weight"]
    np.testing.assert_allclose(
        numbers(both, "model.embed_tokens.weight"), embedding + update, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
)
def test_what_peft_ties_is_as_in_peft(tmp_path: Path, settings: dict[str, Any]) -> None:
    """PEFT's model before merge_and_unload, which adds the update to shared numbers twice."""
    import peft

    train(tied_llama, tmp_path, ensure_weight_tying=True, r=4, **settings)
    both = together(tmp_path)
    ours, base = tied_llama(), tied_llama()
    for model, checkpoint in ((ours, both), (base, open_checkpoint("base", root=tmp_path))):
        state = {name: torch.from_numpy(numbers(checkpoint, name)) for name in checkpoint.tensors}
        assert not model.load_state_dict(state, strict=False).unexpected_keys
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            ours.eval()(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-3
        )


def test_ties_where_transformers_knows_nothing(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapted, "loaded_model", lambda *_: None)
    shutil.copytree(tied, tmp_path / "copy")
    rewrite(tmp_path / "copy", lambda tensors: tensors.update({EMBEDDING: ONES}))
    message = r"changes model\.embed_tokens\.weight but not its output embedding"
    with pytest.raises(CheckpointError, match=message):
        together(tmp_path / "copy")
    config = tmp_path / "copy" / "base" / "config.json"
    classifier = {"architectures": ["MyForSequenceClassification"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | classifier))
    assert (numbers(together(tmp_path / "copy"), "model.embed_tokens.weight") == 1).all()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["MyLM"]}))
    rewrite(tmp_path / "copy", lambda tensors: tensors.update({HEAD: ONES}))
    assert (numbers(together(tmp_path / "copy"), "model.embed_tokens.weight") == 1).all()
