"""Adapters from fine-tunes: numpy's decomposition is the reference, PEFT the reader."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from threadpoolctl import threadpool_limits

import isthmus
from isthmus.checkpoints import ShardWriter, open_adapter, open_checkpoint
from isthmus.engine import extract_plan, extract_work
from isthmus.engine.extract_plan import plan_extraction
from isthmus.engine.extraction import Extraction
from isthmus.engine.verify import verify
from isthmus.errors import IsthmusError, NonFiniteError, OutputError, PlanError

from ..checkpoints.files import numbers, packaged, save
from ..checkpoints.test_adapter import (
    bert,
    gpt2,
    llama,
    resnet,
    tied_llama,
    untied_gpt2,
    vit,
)
from .models import contents, llama_state, write_model

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    base = write_model(tmp_path / "base", llama_state(0))
    return base, write_model(tmp_path / "tuned", llama_state(1, noise_of=0))


def delta(base: Path, tuned: Path, name: str) -> np.ndarray:
    one, other = (open_checkpoint(str(path)) for path in (tuned, base))
    return numbers(one, name, np.float64) - numbers(other, name, np.float64)


def test_a_whole_fine_tune_comes_back(pair: Any, tmp_path: Path) -> None:
    base, tuned = pair
    done = isthmus.extract(tuned, base, tmp_path / "out", rank=16, save="norm|embed|lm_head")
    assert done.left_out == ()
    assert done.notes == ()
    assert done.kept == pytest.approx(1, abs=1e-12)
    assert done.kept_of_everything == pytest.approx(1, abs=1e-12)
    both = open_checkpoint(f"{base}+{tmp_path / 'out'}")
    expected = open_checkpoint(str(tuned))
    assert both.tensors.keys() == expected.tensors.keys()
    for name in expected.tensors:
        np.testing.assert_allclose(
            numbers(both, name, np.float64), numbers(expected, name, np.float64), atol=1e-6
        )


def test_ranks_are_the_least_that_keep_the_energy(pair: Any, tmp_path: Path) -> None:
    base, tuned = pair
    done = isthmus.extract(tuned, base, tmp_path / "out", energy=0.9)
    for module in done.modules:
        energies = (
            np.linalg.svd(delta(base, tuned, f"{module.module}.weight"), compute_uv=False) ** 2
        )
        best = np.concatenate([[0], np.cumsum(energies) / energies.sum()])
        assert best[module.rank - 1] < 0.9 <= best[module.rank] + 1e-12
        assert module.kept == pytest.approx(best[module.rank], abs=1e-9)
        assert module.energy == pytest.approx(energies.sum())
    assert len(done.modules) == 6
    total = sum(m.energy for m in done.modules)
    assert done.kept == pytest.approx(sum(m.kept * m.energy for m in done.modules) / total)
    assert done.kept >= 0.9


def test_what_is_kept_is_what_the_files_keep(pair: Any, tmp_path: Path) -> None:
    """The reported share is that of base+adapter, read back."""
    base, tuned = pair
    done = isthmus.extract(tuned, base, tmp_path / "out", rank=3, save="input_layernorm")
    both, expected = open_checkpoint(f"{base}+{tmp_path / 'out'}"), open_checkpoint(str(tuned))
    lost = whole = 0.0
    for name in expected.tensors:
        lost += ((numbers(both, name, np.float64) - numbers(expected, name, np.float64)) ** 2).sum()
        whole += (delta(base, tuned, name) ** 2).sum()
    assert done.kept_of_everything == pytest.approx(1 - lost / whole, abs=1e-6)
    assert {change.name for change in done.left_out} == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
    }  # fmt: skip
    assert "3 changed tensors are not in the adapter" in done.notes[0]


def test_bounds_of_the_rank(pair: Any, tmp_path: Path) -> None:
    base, tuned = pair
    done = isthmus.extract(tuned, base, tmp_path / "out", energy=0.9, min_rank=9, max_rank=10)
    assert {module.rank for module in done.modules} == {9, 10}


def test_a_merged_adapter_has_its_own_rank(tmp_path: Path) -> None:
    state = {name: tensor.double() for name, tensor in llama_state(0).items()}
    base = write_model(tmp_path / "base", state)
    draw = torch.Generator().manual_seed(5)
    factors = [torch.randn(shape, generator=draw).double() for shape in ((16, 2), (2, 16))]
    state[f"{Q}.weight"] = state[f"{Q}.weight"] + 0.1 * factors[0] @ factors[1]
    tuned = write_model(tmp_path / "tuned", state)
    done = isthmus.extract(tuned, base, tmp_path / "out", rank=8)
    # Beyond rank 2 there is the rounding of the sum, which is no zero.
    assert [module.module for module in done.modules] == [Q]
    assert done.unchanged == len(state) - 1
    again = isthmus.extract(tuned, base, tmp_path / "again", energy=1 - 1e-12)
    assert again.modules[0].rank == 2


def test_the_same_bytes_twice(pair: Any, tmp_path: Path) -> None:
    base, tuned = pair
    for out in ("one", "two"):
        isthmus.extract(tuned, base, tmp_path / out, energy=0.5, save="norm")
    one, two = (contents(tmp_path / out) for out in ("one", "two"))
    assert one.pop("README.md") != two.pop("README.md")  # its title
    one, two = ({k: v for k, v in c.items() if "manifest" not in k} for c in (one, two))
    assert one == two
    assert verify(tmp_path / "one").problems == ()


def test_formats_of_the_factors(pair: Any, tmp_path: Path) -> None:
    base, tuned = pair
    isthmus.extract(tuned, base, tmp_path / "out", rank=16, dtype="bfloat16", save="norm")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert tensors[f"base_model.model.{Q}.lora_A.weight"].dtype is torch.bfloat16
    assert tensors["base_model.model.model.norm.weight"].dtype is torch.float32
    both = open_checkpoint(f"{base}+{tmp_path / 'out'}")
    expected = numbers(open_checkpoint(str(tuned)), f"{Q}.weight")
    np.testing.assert_allclose(numbers(both, f"{Q}.weight"), expected, atol=3e-3)


def mixtral() -> torch.nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, num_local_experts=3,
        )
    )  # fmt: skip


def moved(make: Any, folder: Path, scale: float = 0.02) -> tuple[torch.nn.Module, Path, Path]:
    """A base, a fine-tune of it, and where they lie."""
    torch.manual_seed(0)
    model = make()
    model.save_pretrained(folder / "base")
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter += scale * torch.randn_like(parameter)
    tuned.save_pretrained(folder / "tuned")
    return model, folder / "base", folder / "tuned"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (llama, {"save": "norm|embed_tokens|lm_head"}),
        (llama, {"modules": "proj|embed_tokens|lm_head", "save": "norm"}),
        (tied_llama, {"save": "norm|embed_tokens"}),
        (gpt2, {"save": "ln_|wte|wpe|bias"}),
        (bert, {"save": "Norm|bias|embeddings"}),
        (
            vit,
            {"modules": "projection|_proj|fc|classifier", "save": "norm|bias"},
        ),
    ],
    ids=["llama", "embeddings", "tied", "gpt2", "bert", "convolution"],
)
def test_peft_gives_the_fine_tune_back(tmp_path: Path, make: Any, options: dict[str, str]) -> None:
    from peft import PeftModel

    model, base, tuned = moved(make, tmp_path)
    done = isthmus.extract(tuned, base, tmp_path / "out", rank=1000, **options)
    wrapped = PeftModel.from_pretrained(model, tmp_path / "out").merge_and_unload()
    wrapped.save_pretrained(tmp_path / "merged")
    merged, expected = (open_checkpoint(str(path)) for path in (tmp_path / "merged", tuned))
    left_out = {change.name for change in done.left_out}
    assert len(left_out) <= 2  # ViT's bare parameters
    for name in expected.tensors:
        if name not in left_out:
            np.testing.assert_allclose(
                numbers(merged, name), numbers(expected, name), atol=2e-6, err_msg=name
            )


@pytest.mark.parametrize("make", [llama, untied_gpt2, bert, vit, resnet])
def test_weights_tell_what_transformers_knows(tmp_path: Path, make: Any) -> None:
    """Without a config.json, the kinds of modules are read off names and shapes."""
    _, base, tuned = moved(make, tmp_path)
    plans = []
    for suffix in ("", "model.safetensors"):
        models = [open_checkpoint(str(path / suffix)) for path in (tuned, base)]
        plan = plan_extraction(*models, modules=".", save=None)
        plans.append({target.tuned.name: target.kind for target in plan.targets})
    assert plans[0] == plans[1]
    assert len(plans[0]) > 5


@pytest.mark.filterwarnings("ignore")
def test_fused_experts_are_left_out_and_named(tmp_path: Path) -> None:
    from peft import PeftModel

    model, base, tuned = moved(mixtral, tmp_path)
    done = isthmus.extract(tuned, base, tmp_path / "out")
    assert {module.module.rpartition(".")[2] for module in done.modules} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip
    assert "Transformers joins these tensors with others" in done.notes[0]
    assert "experts.0.w1.weight" in done.notes[0]
    PeftModel.from_pretrained(model, tmp_path / "out")


def test_a_new_head_is_named_and_stored_when_asked(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", llama_state(0))
    state = llama_state(1, noise_of=0) | {"score.weight": torch.ones(2, 16)}
    tuned = write_model(tmp_path / "tuned", state)
    done = isthmus.extract(tuned, base, tmp_path / "out")
    assert "the base lacks score.weight" in done.notes[1]
    done = isthmus.extract(tuned, base, tmp_path / "more", save="score")
    assert [(change.name, change.change) for change in done.saved] == [("score.weight", None)]
    both = open_checkpoint(f"{base}+{tmp_path / 'more'}")
    assert (numbers(both, "score.weight") == 1).all()


def test_modules_by_expression(pair: Any, tmp_path: Path) -> None:
    base, tuned = pair
    done = isthmus.extract(tuned, base, tmp_path / "out", modules=r"layers\.[01]\.mlp")
    assert [module.module for module in done.modules] == [
        f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)
    ]
    assert f"{Q}.weight" in {change.name for change in done.left_out}
    assert open_adapter(tmp_path / "out").updates.keys() == {m.module for m in done.modules}


def refused(pair: Any, out: Path, kind: type[IsthmusError] = PlanError, **options: Any) -> str:
    base, tuned = pair
    with pytest.raises(kind) as caught:
        isthmus.extract(tuned, base, out, **options)
    assert not out.exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 4, "energy": 0.9}, "rank and energy exclude each other"),
        ({"rank": 0}, "0 is no rank"),
        ({"energy": 0.0}, "0.0 is no share of energy"),
        ({"energy": 1.5}, "1.5 is no share of energy"),
        ({"energy": float("nan")}, "nan is no share of energy"),
        ({"max_rank": 4}, "say something about --energy only"),
        ({"energy": 0.9, "min_rank": 5, "max_rank": 4}, "no rank lies between 5 and 4"),
        ({"modules": "("}, "'(' is no regular expression"),
        ({"modules": "nothing"}, "no weight for LoRA in a module that fits 'nothing'"),
        ({"save": "nothing"}, "fits 'nothing'"),
        ({"dtype": "int8"}, "int8 is no format for factors"),
    ],
)
def test_options_that_cannot_be(
    pair: Any, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    assert message in refused(pair, tmp_path / "out", **options)


def test_equal_models(pair: Any, tmp_path: Path) -> None:
    assert "no module for LoRA differs" in refused((pair[0], pair[0]), tmp_path / "out")


def test_a_broken_fine_tune(pair: Any, tmp_path: Path) -> None:
    state = llama_state(1, noise_of=0)
    state[f"{Q}.weight"][3, 4] = torch.nan
    tuned = write_model(tmp_path / "nan", state)
    message = refused((pair[0], tuned), tmp_path / "out", NonFiniteError)
    assert f"{Q}.weight holds nan at (3, 4)" in message


def test_a_tied_base(pair: Any, tmp_path: Path) -> None:
    state = llama_state(0)
    del state["lm_head.weight"]
    base = write_model(tmp_path / "tied", state, tie_word_embeddings=True)
    head = llama_state(0)["model.embed_tokens.weight"]
    write_model(base, state | {"lm_head.weight": head}, tie_word_embeddings=True)
    for options in ({"save": "lm_head"}, {"modules": "lm_head"}):
        message = refused((base, pair[1]), tmp_path / "out", **options)
        assert "lm_head.weight is stored by itself in" in message


def t5() -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "save", "ends"),
    [
        (tied_llama, "embed_tokens|norm", {"model.embed_tokens", "lm_head"}),
        (tied_llama, "lm_head|norm", {"model.embed_tokens", "lm_head"}),
        (gpt2, "wte|wpe|ln_|bias", {"transformer.wte", "lm_head"}),
        (
            t5,
            "shared|norm|relative",
            {"shared", "lm_head", "encoder.embed_tokens", "decoder.embed_tokens"},
        ),
    ],
    ids=["llama", "llama by its head", "gpt2", "t5"],
)
def test_both_ends_of_a_tie_reach_peft(tmp_path: Path, make: Any, save: str, ends: Any) -> None:
    """Files by save_pretrained have one end only; the logits tell whether the others changed."""
    from peft import PeftModel

    base, _, where = moved(make, tmp_path, scale=0.1)
    assert "lm_head.weight" not in open_checkpoint(str(where)).tensors
    done = isthmus.extract(where, tmp_path / "base", tmp_path / "out", rank=1000, save=save)
    assert done.left_out == ()
    assert ends <= {*open_adapter(tmp_path / "out").config["modules_to_save"]}
    tuned = type(base).from_pretrained(where).eval()
    tokens = torch.arange(16)[None]
    inputs = {"input_ids": tokens}
    if make is t5:
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        expected, before = tuned(**inputs).logits, base.eval()(**inputs).logits
        found = PeftModel.from_pretrained(base, tmp_path / "out").eval()(**inputs).logits
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    both = open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'out'}")
    assert both.tensors.keys() == open_checkpoint(str(where)).tensors.keys()


@pytest.mark.filterwarnings("ignore")
def test_lora_on_one_end_of_a_tie(tmp_path: Path) -> None:
    _, base, tuned = moved(tied_llama, tmp_path)
    for modules in ("embed_tokens|proj", "proj|lm_head", "."):
        message = refused((base, tuned), tmp_path / "out", modules=modules)
        assert "tuned ties lm_head.weight to model.embed_tokens.weight, and LoRA on one" in message


@pytest.mark.filterwarnings("ignore")
def test_a_head_of_its_own_for_a_base_that_stores_none(tmp_path: Path) -> None:
    _, base, _ = moved(tied_llama, tmp_path / "tied")
    _, _, tuned = moved(llama, tmp_path / "untied")
    for options in ({"save": "lm_head"}, {"save": "embed_tokens"}, {"modules": "embed_tokens"}):
        message = refused((base, tuned), tmp_path / "out", **options)
        assert "lm_head.weight is stored by itself in" in message
        assert "ties it to model.embed_tokens.weight" in message


@pytest.mark.filterwarnings("ignore")
def test_a_tied_head_that_only_transformers_could_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, base, tuned = moved(tied_llama, tmp_path)
    monkeypatch.setattr(extract_plan, "loaded_model", lambda *_: None)
    message = refused((base, tuned), tmp_path / "out", save="embed_tokens")
    assert "ties its output embedding to model.embed_tokens.weight" in message
    assert "Install transformers 5" in message
    isthmus.extract(tuned, base, tmp_path / "out", save="norm")


def test_a_module_that_peft_cannot_store_alone(pair: Any, tmp_path: Path) -> None:
    state = llama_state(1, noise_of=0) | {"model.layers.0.scale": torch.ones(3)}
    tuned = write_model(tmp_path / "scaled", state)
    message = refused((pair[0], tuned), tmp_path / "out", save="scale")
    assert "model.layers.0 cannot be stored by itself" in message


def test_folders_that_are_not_ours(pair: Any) -> None:
    base, tuned = pair
    before = contents(tuned)
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="files that Isthmus did not write"):
            isthmus.extract(tuned, base, tuned, overwrite=overwrite)
    assert contents(tuned) == before


def test_an_input_in_the_output_folder(pair: Any, tmp_path: Path) -> None:
    base, tuned = pair
    isthmus.merge(
        {"merge_method": "passthrough", "models": [{"model": str(tuned)}]}, tmp_path / "copy"
    )
    with pytest.raises(PlanError, match=r"holds the input model\.safetensors"):
        isthmus.extract(tmp_path / "copy", base, tmp_path / "copy", overwrite=True)


def test_an_earlier_output_stays_until_the_new_one_is_complete(
    pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned = pair
    out = tmp_path / "out"
    isthmus.extract(tuned, base, out, rank=2)
    before = contents(out)
    with pytest.raises(OutputError, match="--overwrite"):
        isthmus.extract(tuned, base, out, rank=3)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(extract_work, "adapter_config", stop)
        for target, overwrite in ((out, True), (tmp_path / "new", False)):
            with pytest.raises(KeyboardInterrupt):
                isthmus.extract(tuned, base, target, rank=3, overwrite=overwrite)
    assert contents(out) == before
    assert not (tmp_path / "new").exists()
    isthmus.extract(tuned, base, out, rank=3, overwrite=True)
    assert open_adapter(out).updates[Q].rank == 3
    assert verify(out).problems == ()


def test_an_interrupted_output_is_named(pair: Any, tmp_path: Path) -> None:
    base, tuned = pair
    (tmp_path / "out" / ".isthmus").mkdir(parents=True)
    with pytest.raises(OutputError, match="being written or was interrupted"):
        isthmus.extract(tuned, base, tmp_path / "out")
    isthmus.extract(tuned, base, tmp_path / "out", overwrite=True)
    assert verify(tmp_path / "out").problems == ()


@pytest.fixture(scope="module")
def reactions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, Extraction]:
    """A real fine-tune of a real BERT."""
    base, tuned = (
        packaged("rxnfp", "models", "transformers", name)
        for name in ("bert_pretrained", "bert_ft_10k_25s")
    )
    out = tmp_path_factory.mktemp("rxnfp") / "out"
    save = r"LayerNorm|bias|classifier|embeddings"
    return base, tuned, out, isthmus.extract(tuned, base, out, energy=0.9, save=save)


@pytest.mark.slow
def test_a_real_fine_tune_keeps_its_energy(reactions: Any) -> None:
    base, tuned, out, done = reactions
    names = {module.module: module for module in done.modules}
    module = names["bert.encoder.layer.3.intermediate.dense"]
    states = [
        torch.load(path / "pytorch_model.bin", weights_only=True, map_location="cpu")
        for path in (tuned, base)
    ]
    weight = "bert.encoder.layer.3.intermediate.dense.weight"
    change = (states[0][weight].double() - states[1][weight].double()).numpy()
    energies = np.linalg.svd(change, compute_uv=False) ** 2
    best = np.cumsum(energies) / energies.sum()
    assert best[module.rank - 2] < 0.9 <= best[module.rank - 1] + 1e-12
    factors = open_adapter(out)
    update = factors.updates["bert.encoder.layer.3.intermediate.dense"]
    a, b = (factors.factor(x, np.dtype(np.float64)) for x in (update.a, update.b))
    error = change - update.scaling * b @ a
    assert 1 - (error**2).sum() / energies.sum() == pytest.approx(module.kept, abs=1e-6)
    assert {"classifier.weight", "classifier.bias"} <= {change.name for change in done.saved}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_real_fine_tune_loads_in_peft(reactions: Any) -> None:
    from peft import PeftModel
    from transformers import BertForSequenceClassification

    base, tuned, out, _ = reactions
    expected = BertForSequenceClassification.from_pretrained(tuned).eval()
    labels = expected.config.num_labels
    origin = BertForSequenceClassification.from_pretrained(base, num_labels=labels)
    found = PeftModel.from_pretrained(origin, out).merge_and_unload().eval()
    batch = torch.randint(5, 500, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = (model(input_ids=batch).logits for model in (found, expected))
    assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.9


def test_threads_of_the_linear_algebra_change_no_byte(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((1088, 1088)).astype(np.float32)
    change = draw.standard_normal((1088, 1088)).astype(np.float32)
    base = save(tmp_path / "base.safetensors", {"layer.weight": weight})
    tuned = save(tmp_path / "tuned.safetensors", {"layer.weight": weight + change})
    written = []
    for threads in (1, 2):
        out = tmp_path / f"out{threads}"
        with threadpool_limits(limits=threads):
            isthmus.extract(tuned, base, out, energy=0.5)
        written.append((out / "adapter_model.safetensors").read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize("ranks", [{"rank": 4}, {"energy": 0.1, "min_rank": 4}])
def test_a_disk_that_is_too_small(
    ranks: Any, pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned = pair
    written = 0

    def count(writer: ShardWriter, *_: object, **__: object) -> None:
        nonlocal written
        written += sum(info.nbytes for info in writer.shard.tensors.values())
        reserve(writer)

    reserve = ShardWriter._reserve
    monkeypatch.setattr(ShardWriter, "_reserve", count)
    isthmus.extract(tuned, base, tmp_path / "one", rank=4, save="norm")
    needed = written
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    isthmus.extract(tuned, base, tmp_path / "two", save="norm", **ranks)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(PlanError, match=rf"the extraction writes {needed:,} bytes and"):
        isthmus.extract(tuned, base, tmp_path / "three", save="norm", **ranks)
    assert not (tmp_path / "three").exists()
