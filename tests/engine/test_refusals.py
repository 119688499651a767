"""Bad input gets an error that names file, tensor and cure, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

import isthmus
from isthmus.engine.verify import verify
from isthmus.errors import (
    CheckpointError,
    IsthmusError,
    NonFiniteError,
    OutputError,
    PlanError,
    RecipeError,
)

from .models import contents, family, llama_state, recipe, write_model


@pytest.fixture
def models(tmp_path):
    return family(tmp_path / "models")


@pytest.fixture
def ties(models):
    return recipe("ties", models[1:], models[0], parameters={"density": 0.5})


def refused(content, out, kind=IsthmusError, **options) -> str:
    """The message; the output folder must not look like a model."""
    with pytest.raises(kind) as caught:
        isthmus.merge(content, out, **options)
    assert not (out / "config.json").exists()
    return str(caught.value)


# What does not fit together


def test_a_shape_that_differs(models, tmp_path):
    state = load_file(models[2] / "model.safetensors")
    state["lm_head.weight"] = torch.zeros(41, 16)
    write_model(models[2], state)
    message = refused(recipe("ties", models[1:], models[0]), tmp_path / "out", PlanError)
    for part in ("lm_head.weight", "[41, 16]", "[40, 16]", "expert2", "base"):
        assert part in message
    assert not (tmp_path / "out").exists()


def test_a_missing_and_an_extra_tensor(models, tmp_path):
    state = load_file(models[1] / "model.safetensors")
    del state["model.norm.weight"]
    state["score.weight"] = torch.zeros(3)
    write_model(models[1], state)
    message = refused(recipe("ties", models[1:], models[0]), tmp_path / "out", PlanError)
    assert "model.norm.weight is in" in message
    assert "score.weight is in" in message
    assert "expert1" in message
    assert "tensors: common" in message


def test_models_without_anything_in_common(models, tmp_path):
    other = write_model(tmp_path / "other", {"x": torch.zeros(2)})
    content = recipe("linear", [models[0], other], tensors="common")
    assert "shares no tensor" in refused(content, tmp_path / "out", PlanError)


def test_a_base_that_is_absent(models, tmp_path):
    assert "base_model" in refused(recipe("ties", models[1:]), tmp_path / "out", RecipeError)


def test_weights_that_sum_to_zero(models, tmp_path):
    content = recipe("linear", models[1:3])
    content["models"][0]["parameters"] = {
        "weight": [{"filter": "norm", "value": -1}, {"value": 1.0}]
    }
    message = refused(content, tmp_path / "out", PlanError)
    assert "norm" in message
    assert "sum to zero" in message
    assert "normalize: false" in message


@pytest.mark.parametrize("density", [0, -0.1, 1.5, float("nan")])
def test_a_density_out_of_range(models, tmp_path, density):
    content = recipe("ties", models[1:], models[0], parameters={"density": density})
    assert "density" in refused(content, tmp_path / "out", RecipeError)


def test_a_gradient_of_zero_length(models, tmp_path):
    content = recipe("ties", models[1:], models[0], parameters={"density": []})
    assert "density" in refused(content, tmp_path / "out", RecipeError)


def test_a_vocabulary_that_differs_is_noted(models, tmp_path):
    for number, model in enumerate(models):
        (model / "vocab.txt").write_text("\n".join(["a", "b", "c"][:: -1 if number == 2 else 1]))
    outcome = isthmus.merge(recipe("ties", models[1:], models[0]), tmp_path / "out")
    noted = [note for note in outcome.notes if "tokens" in note]
    assert len(noted) == 1
    assert "2 tokens" in noted[0]
    assert "expert2" in noted[0]


def test_a_filter_that_names_no_tensor_is_noted(models, tmp_path):
    content = recipe("linear", models[1:])
    content["models"][0]["parameters"] = {
        "weight": [{"filter": "self_atn", "value": 0.5}, {"value": 1.0}]
    }
    outcome = isthmus.merge(content, tmp_path / "out")
    assert any("self_atn" in note for note in outcome.notes)


# Numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", ["linear", "ties", "dare_linear", "slerp", "passthrough"])
def test_a_number_that_is_not_finite(models, tmp_path, method, value):
    state = load_file(models[1] / "model.safetensors")
    state["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    write_model(models[1], state)
    base = models[0] if method in ("ties", "dare_linear", "slerp") else None
    experts = models[1:2] if method in ("slerp", "passthrough") else models[1:]
    parameters = {"ties": {"density": 0.5}, "dare_linear": {"density": 0.5}, "slerp": {"t": 0.5}}
    content = recipe(method, experts, base, parameters=parameters.get(method, {}))
    message = refused(content, tmp_path / "out", NonFiniteError)
    for part in ("expert1", "model.layers.1.mlp.down_proj.weight", "(3, 5)", "--allow-nonfinite"):
        assert part in message
    isthmus.merge(content, tmp_path / "out", allow_nonfinite=True, overwrite=True)
    assert verify(tmp_path / "out").problems == ()


def test_a_result_that_overflows_its_format(models, tmp_path):
    content = recipe("linear", models[1:], out_dtype="float16", parameters={"normalize": False})
    for entry in content["models"]:
        entry["parameters"] = {"weight": 1e6}
    message = refused(content, tmp_path / "out", NonFiniteError)
    assert "float16" in message
    assert "bfloat16" in message


# Files


def test_a_missing_model_and_a_missing_shard(models, tmp_path):
    content = recipe("linear", [models[1], tmp_path / "models" / "expert22"])
    assert "expert22" in refused(content, tmp_path / "out", CheckpointError)
    (models[1] / "model.safetensors").unlink()
    (models[1] / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    )
    message = refused(recipe("linear", models[1:]), tmp_path / "out", CheckpointError)
    assert "model-00001-of-00002.safetensors" in message


def test_a_truncated_input(models, tmp_path):
    file = models[1] / "model.safetensors"
    os.truncate(file, file.stat().st_size - 10)
    message = refused(recipe("linear", models[1:]), tmp_path / "out", CheckpointError)
    assert "model.safetensors" in message


def test_an_input_that_changes_during_the_merge(models, tmp_path):
    file = models[1] / "model.safetensors"
    with isthmus.plan(recipe("linear", models[1:])) as plan:
        os.truncate(file, file.stat().st_size - 4000)
        from isthmus.api import run_plan

        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            run_plan(plan, tmp_path / "out")


# The output folder


def test_a_folder_that_is_not_ours_is_never_touched(ties, tmp_path):
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        message = refused(ties, out, OutputError, **options)
        assert "thesis.tex" in message
    assert contents(out) == {"thesis.tex": b"years of work"}


def test_files_added_to_our_folder_are_never_touched(ties, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    with pytest.raises(OutputError, match=r"notes\.txt"):
        isthmus.merge(ties, out, overwrite=True)
    assert contents(out) == before


def test_an_output_of_ours_is_replaced_only_when_asked(ties, models, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out, max_shard_size=4000)
    before = contents(out)
    with pytest.raises(OutputError, match="--overwrite"):
        isthmus.merge(ties, out)
    assert contents(out) == before
    isthmus.merge(recipe("linear", models[1:]), out, overwrite=True)
    after = contents(out)
    assert "model.safetensors" in after
    assert not [name for name in after if "-of-" in name or "index" in name]
    assert verify(out).problems == ()


def test_a_failing_overwrite_leaves_the_old_output_whole(ties, models, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    before = contents(out)
    state = load_file(models[1] / "model.safetensors")
    state["model.norm.weight"][0] = float("nan")
    write_model(models[1], state)
    with pytest.raises(NonFiniteError):
        isthmus.merge(ties, out, overwrite=True)
    after = contents(out)
    assert {name: after[name] for name in before} == before


def test_a_file_in_the_way(ties, tmp_path):
    out = tmp_path / "out"
    out.write_text("a file")
    with pytest.raises(OutputError, match="is a file"):
        isthmus.merge(ties, out)
    assert out.read_text() == "a file"


def test_an_output_over_an_input(models):
    with pytest.raises(PlanError, match="input"):
        isthmus.merge(recipe("linear", models[1:]), models[1], overwrite=True)
    with pytest.raises(PlanError, match="input"):
        isthmus.merge(recipe("linear", models[1:]), models[1].parent)
    load_file(models[1] / "model.safetensors")


def test_a_read_only_place(ties, tmp_path, monkeypatch):
    """The superuser may write anywhere, so the system's answer is put in its mouth."""

    def forbidden(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", forbidden)
    message = refused(ties, tmp_path / "out", OutputError)
    assert "Permission denied" in message
    assert "out" in message


def test_a_disk_too_small_is_found_before_anything_is_written(ties, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    message = refused(ties, tmp_path / "out", PlanError)
    assert "100" in message
    monkeypatch.undo()
    isthmus.merge(ties, tmp_path / "out", resume=True)


def test_a_disk_that_fills_up_leaves_a_resumable_state(ties, tmp_path, monkeypatch):
    isthmus.merge(ties, tmp_path / "calm" / "out")
    real, calls = os.pwrite, iter(range(1_000_000))

    def full(*arguments):
        if next(calls) > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    out = tmp_path / "hit" / "out"
    monkeypatch.setattr(os, "pwrite", full)
    message = refused(ties, out, OutputError, workers=1)
    assert "full" in message
    monkeypatch.undo()
    with pytest.raises(OutputError, match="--resume"):
        isthmus.merge(ties, out)
    outcome = isthmus.merge(ties, out, resume=True)
    assert outcome.resumed > 0
    assert contents(out) == contents(tmp_path / "calm" / "out")


# Interruptions


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A merge that takes a second or so, as a recipe file."""
    root = tmp_path_factory.mktemp("large")
    draw = torch.Generator().manual_seed(0)
    shapes = {f"layers.{i}.weight": (1024, 1024) for i in range(24)}
    paths = [
        write_model(root / f"m{n}", {k: torch.randn(s, generator=draw) for k, s in shapes.items()})
        for n in range(3)
    ]
    content = recipe("dare_ties", paths[1:], paths[0], parameters={"density": 0.5})
    (root / "recipe.yaml").write_text(yaml.safe_dump(content))
    isthmus.merge(content, root / "calm" / "out")
    return root


def start(large, out, *options):
    command = [sys.executable, "-m", "isthmus", "merge", large / "recipe.yaml", out, *options]
    return subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_the_first_tensors(process, out):
    journal = out / ".isthmus" / "journal.jsonl"
    for _ in range(4000):
        if process.poll() is not None or (journal.exists() and journal.stat().st_size > 300):
            return
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_polite_stop_says_how_to_go_on(large, tmp_path, name):
    out = tmp_path / "out"
    process = start(large, out, "--workers", "2")
    wait_for_the_first_tensors(process, out)
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    assert not list(out.glob("*.safetensors"))
    with pytest.raises(OutputError, match="--resume"):
        isthmus.merge(large / "recipe.yaml", out)
    outcome = isthmus.merge(large / "recipe.yaml", out, resume=True)
    assert 0 < outcome.resumed < 24
    assert contents(out) == contents(large / "calm" / "out")


@pytest.mark.slow
def test_two_merges_into_one_folder(large, tmp_path):
    out = tmp_path / "out"
    process = start(large, out, "--workers", "1")
    wait_for_the_first_tensors(process, out)
    with pytest.raises(OutputError, match="another merge"):
        isthmus.merge(large / "recipe.yaml", out, resume=True)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert contents(out) == contents(large / "calm" / "out")


def test_resuming_with_another_recipe_or_changed_inputs_is_refused(
    ties, models, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    monkeypatch.setattr(
        os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken"))
    )
    with pytest.raises(OutputError):
        isthmus.merge(ties, out)
    monkeypatch.undo()
    with pytest.raises(OutputError, match="another recipe"):
        isthmus.merge(ties | {"seed": 9}, out, resume=True)
    file = models[1] / "model.safetensors"
    os.utime(file, ns=(1, 1))
    with pytest.raises(OutputError, match="other inputs"):
        isthmus.merge(ties, out, resume=True)
    isthmus.merge(ties, out, overwrite=True)
    assert verify(out).problems == ()


def test_a_tensor_that_rotted_since_the_interruption_is_merged_again(ties, tmp_path, monkeypatch):
    isthmus.merge(ties, tmp_path / "calm" / "out")
    out = tmp_path / "hit" / "out"
    from isthmus.engine import run as run_module

    monkeypatch.setattr(
        run_module, "_write_rest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        isthmus.merge(ties, out)
    monkeypatch.undo()
    staged = out / ".isthmus" / "files" / "model.safetensors"
    content = bytearray(staged.read_bytes())
    content[-5] ^= 255
    staged.write_bytes(content)
    journal = out / ".isthmus" / "journal.jsonl"
    journal.write_text(journal.read_text() + '{"tensor": "half a li')
    tensors = len(load_file(tmp_path / "calm" / "out" / "model.safetensors"))
    assert isthmus.merge(ties, out, resume=True).resumed == tensors - 1
    assert contents(out) == contents(tmp_path / "calm" / "out")


@pytest.mark.parametrize("after", range(8))
def test_a_crash_while_files_move_into_place_is_completed(
    ties, models, tmp_path, monkeypatch, after
):
    """Every number of moves done, from none to all but the clean-up."""
    isthmus.merge(ties, tmp_path / "calm" / "out", max_shard_size=8000)
    out = tmp_path / "hit" / "out"
    isthmus.merge(recipe("linear", models[1:]), out)
    from pathlib import Path

    real, left = Path.replace, [after]

    def dying(self, target):
        if ".isthmus" in str(self) and ".isthmus" not in str(target):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "replace", dying)
    try:
        isthmus.merge(ties, out, overwrite=True, max_shard_size=8000)
    except KeyboardInterrupt:
        monkeypatch.undo()
        with pytest.raises(OutputError, match="--resume"):
            isthmus.merge(ties, out, max_shard_size=8000)
        isthmus.merge(ties, out, resume=True, max_shard_size=8000)
    assert contents(out) == contents(tmp_path / "calm" / "out")


def test_resuming_never_replaces_another_finished_merge(ties, models, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    before = contents(out)
    for other in (recipe("linear", models[1:]), ties | {"seed": 1}):
        with pytest.raises(OutputError, match="--overwrite"):
            isthmus.merge(other, out, resume=True)
    with pytest.raises(OutputError, match="other options"):
        isthmus.merge(ties, out, resume=True, max_shard_size=4000)
    with pytest.raises(PlanError, match="exclude"):
        isthmus.merge(ties, out, resume=True, overwrite=True)
    assert contents(out) == before


def test_resuming_a_finished_merge_notices_new_inputs_and_damage(ties, models, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    (out / "config.json").unlink()
    with pytest.raises(OutputError, match=r"config\.json is missing"):
        isthmus.merge(ties, out, resume=True)
    isthmus.merge(ties, out, overwrite=True)
    write_model(models[1], load_file(models[2] / "model.safetensors"))  # of the same size
    with pytest.raises(OutputError, match="other inputs"):
        isthmus.merge(ties, out, resume=True)


def test_allowing_nonfinite_numbers_on_resume(ties, models, tmp_path):
    state = load_file(models[1] / "model.safetensors")
    state["model.norm.weight"][0] = float("nan")
    write_model(models[1], state)
    with pytest.raises(NonFiniteError):
        isthmus.merge(ties, tmp_path / "out", workers=1)
    outcome = isthmus.merge(ties, tmp_path / "out", resume=True, allow_nonfinite=True)
    assert outcome.resumed > 0


def test_remains_of_a_removed_work_folder_are_no_obstacle(ties, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    (out / ".isthmus-done").mkdir()
    (out / ".isthmus-done" / "state.json").write_text("{")
    assert verify(out).problems == ()
    isthmus.merge(ties, out, resume=True)
    isthmus.merge(ties, out, overwrite=True)
    assert not (out / ".isthmus-done").exists()


def test_a_failed_overwrite_leaves_a_merge_that_verifies(ties, models, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    state = load_file(models[1] / "model.safetensors")
    state["model.norm.weight"][0] = float("nan")
    write_model(models[1], state)
    with pytest.raises(NonFiniteError):
        isthmus.merge(ties, out, overwrite=True)
    assert verify(out).problems == ()


def test_a_full_disk_under_the_journal(ties, tmp_path, monkeypatch):
    from isthmus.engine.journal import Journal

    class Full:
        name = "journal.jsonl"

        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    real = Journal.__init__

    def broken(self, path):
        real(self, path)
        self._file.close()
        self._file = Full()

    monkeypatch.setattr(Journal, "__init__", broken)
    message = refused(ties, tmp_path / "out", OutputError)
    assert "No space left" in message
    monkeypatch.undo()
    isthmus.merge(ties, tmp_path / "out", resume=True)


@pytest.mark.parametrize("name", ["../victim.txt", "/etc/passwd", "", ".", "a\0b", "x" * 300])
def test_a_manifest_with_names_that_lead_outside_is_refused(ties, tmp_path, name):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    manifest = json.loads((out / "isthmus-manifest.json").read_text())
    manifest["files"][name] = {"size": 1, "xxh3": "0"}
    (out / "isthmus-manifest.json").write_text(json.dumps(manifest))
    victim = tmp_path / "victim.txt"
    victim.write_text("keep me")
    with pytest.raises(OutputError, match="outside"):
        verify(out)
    with pytest.raises(OutputError):
        isthmus.merge(ties, out, overwrite=True)
    assert victim.read_text() == "keep me"


def test_a_manifest_that_lists_a_tensor_too_many(ties, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    manifest = json.loads((out / "isthmus-manifest.json").read_text())
    manifest["files"]["model.safetensors"]["tensors"]["ghost"] = "0"
    (out / "isthmus-manifest.json").write_text(json.dumps(manifest))
    assert any("ghost" in problem for problem in verify(out).problems)


def test_names_that_no_file_system_takes(ties, tmp_path, monkeypatch):
    with pytest.raises(OutputError, match="too long"):
        isthmus.merge(ties, tmp_path / ("x" * 300))
    isthmus.merge(ties, tmp_path / os.fsdecode(b"out\xff"))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    from pathlib import Path

    with pytest.raises(OutputError, match="gone"):
        isthmus.merge(ties, Path("out"))


@pytest.mark.parametrize("device", ["meta", "nonsense", "cuda:99"])
def test_a_device_that_cannot_be_used(ties, tmp_path, device):
    message = refused(ties, tmp_path / "out", PlanError, device=device)
    assert device in message
    assert "--device cpu" in message


def test_without_a_place_for_compiled_code_it_is_compiled_anew(tmp_path):
    code = (
        "import numba\n"
        "real = numba.njit\n"
        "def njit(*functions, **options):\n"
        "    if options.get('cache'): raise RuntimeError('no locator available')\n"
        "    return real(*functions, **options)\n"
        "numba.njit = njit\n"
        "import numpy as np\n"
        "from isthmus.methods.kernels import count_digits\n"
        "counts = np.zeros(1 << 16, np.int64)\n"
        "count_digits(np.array([1.0], np.float32).view(np.uint32), np.uint32(2**31 - 1),"
        " np.uint32(16), np.uint32(0), counts)\n"
        "assert counts[0x3f80] == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_a_head_of_its_own_beside_a_tied_base_is_explained(tmp_path):
    tied = llama_state(0)
    del tied["lm_head.weight"]
    one = write_model(tmp_path / "tied", tied, tie_word_embeddings=True)
    two = write_model(tmp_path / "own", llama_state(1))
    message = refused(recipe("ties", [two], one), tmp_path / "out", PlanError)
    assert "lm_head.weight has numbers of its own" in message


def test_resuming_a_finished_merge_changes_nothing(ties, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    before = {name: (out / name).stat().st_mtime_ns for name in contents(out)}
    outcome = isthmus.merge(ties, out, resume=True)
    assert outcome.resumed == outcome.merged + outcome.carried
    assert {name: (out / name).stat().st_mtime_ns for name in contents(out)} == before


def test_the_model_state_is_not_needed_beyond_a_few_chunks(tmp_path):
    """What the plan calls peak memory does not grow with layers, and with models by their chunks."""

    def peak(layers, models):
        states = [llama_state(seed, layers=layers) for seed in range(models)]
        root = tmp_path / f"{layers}-{models}"
        paths = [write_model(root / str(i), state) for i, state in enumerate(states)]
        with isthmus.plan(recipe("ties", paths[1:], paths[0])) as plan:
            return plan.peak_memory(1)

    assert peak(2, 3) == peak(8, 3)
    assert peak(2, 8) < 8 / 3 * peak(2, 3)


def test_a_parameter_without_effect_is_noted(models, tmp_path):
    content = recipe("task_arithmetic", models[1:], models[0], parameters={"density": 0.5})
    outcome = isthmus.merge(content, tmp_path / "out")
    assert any("density has no effect" in note for note in outcome.notes)
    plain = isthmus.merge(recipe("task_arithmetic", models[1:], models[0]), tmp_path / "plain")
    assert not any("no effect" in note for note in plain.notes)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "plain" / "model.safetensors"
    ).read_bytes()


def test_the_base_under_another_name_is_noted(models, tmp_path):
    content = recipe("ties", models[1:3], models[0])
    content["models"][1]["model"] = f"{models[0].parent}/../models/base"
    outcome = isthmus.merge(content, tmp_path / "out")
    assert any("under another name" in note for note in outcome.notes)
    plain = isthmus.merge(recipe("ties", models[1:], models[0]), tmp_path / "plain")
    assert not any("under another name" in note for note in plain.notes)
