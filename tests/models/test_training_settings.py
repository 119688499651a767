"""Training settings out of other people's files."""

from __future__ import annotations

import json
import pickle

import pytest
import yaml

from isthmus.errors import TrainingError
from isthmus.models.training_settings import BatchParts, TrainingSettings, read_training_settings


def arguments(folder, **changes):
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder / "out"),
        learning_rate=2e-5,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        weight_decay=0.01,
        use_cpu=True,
        report_to=[],
        **changes,
    )


@pytest.fixture
def state():
    return {
        "global_step": 300,
        "max_steps": 400,
        "train_batch_size": 16,
        "log_history": [
            {"learning_rate": 1e-5, "loss": 2.0, "step": 100},
            {"learning_rate": 5e-5, "loss": 1.0, "step": 200},
            {"eval_loss": 1.1, "step": 200},
            {"learning_rate": 2e-6, "loss": 0.9, "step": 300},
        ],
    }


def test_transformers_own_arguments(tmp_path):
    pytest.importorskip("accelerate")
    (tmp_path / "training_args.json").write_text(arguments(tmp_path).to_json_string())
    found = read_training_settings(tmp_path)
    assert (found.lr, found.batch_size, found.weight_decay) == (2e-5, 32, 0.01)
    assert found.betas == (0.9, 0.999)
    assert found.adaptive
    assert found.noise_scale() == pytest.approx(2e-5 / 32**0.5)


def test_trainer_state(tmp_path, state):
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    found = read_training_settings(tmp_path)
    assert (found.lr, found.final_lr, found.batch_size, found.steps) == (5e-5, 2e-6, 16, 300)
    assert found.optimizer is None
    counted = read_training_settings(tmp_path / "trainer_state.json", devices=2, accumulation=3)
    assert counted.batch_size == 96
    with pytest.raises(TrainingError, match="does not tell the optimizer"):
        found.noise_scale()


def test_arguments_come_before_the_state(tmp_path, state):
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "training_args.yaml").write_text(
        "learning_rate: 1e-4\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 2\n"
        "optim: sgd\noptim_args: nesterov=True, momentum=0.9\n"
    )
    found = read_training_settings(tmp_path)
    assert (found.lr, found.batch_size, found.momentum) == (1e-4, 4, 0.9)
    assert (found.final_lr, found.steps) == (2e-6, 300)
    assert "training_args.yaml and" in found.source
    assert found.noise_scale() == pytest.approx(1e-4 / (4 * 0.1))


def test_plain_names(tmp_path):
    file = tmp_path / "training.yaml"
    file.write_text(
        "lr: 0.1\nbatch_size: 128\nmomentum: 0.9\nweight_decay: 5e-4\noptimizer: SGD\nbetas: [0.8, 0.9]"
    )
    assert read_training_settings(file) == TrainingSettings(
        0.1, 128, 0.9, (0.8, 0.9), 5e-4, "SGD", source=str(file)
    )


def test_a_pickle_is_never_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("opened",))

    (tmp_path / "training_args.bin").write_bytes(pickle.dumps(Trap()))
    for path in (tmp_path, tmp_path / "training_args.bin"):
        with pytest.raises(TrainingError, match="to_json_string"):
            read_training_settings(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"learning_rate": -0.1}, "learning rate is -0.1"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast', which is no number"),
        ({"learning_rate": float("nan")}, "learning rate is nan"),
        ({"batch_size": 0}, "batch size is 0"),
        ({"batch_size": 2.5}, "batch size is 2.5"),
        ({"per_device_train_batch_size": 0}, "batch size is 0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"adam_beta1": 0.9, "adam_beta2": 1.5}, "β₂ is 1.5"),
        ({"weight_decay": -1}, "weight decay is -1"),
    ],
)
def test_settings_out_of_range(tmp_path, content, message):
    file = tmp_path / "training_args.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(TrainingError, match=message) as error:
        read_training_settings(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
@pytest.mark.parametrize("text", ["{", "[1, 2]", ""])
def test_files_that_hold_no_settings(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(TrainingError, match=name):
        read_training_settings(tmp_path / name)


def test_nothing_there(tmp_path):
    with pytest.raises(TrainingError, match="holds no training settings"):
        read_training_settings(tmp_path)
    with pytest.raises(TrainingError, match="cannot be read"):
        read_training_settings(tmp_path / "absent.json")
    with pytest.raises(TrainingError, match="devices is 0"):
        read_training_settings(tmp_path, devices=0)


def test_what_is_missing_is_named():
    for given, missing in (
        ({"batch_size": 1, "optimizer": "sgd"}, "learning rate"),
        ({"lr": 0.1, "optimizer": "sgd"}, "batch size"),
    ):
        with pytest.raises(TrainingError, match=f"does not tell the {missing}"):
            TrainingSettings(**given).noise_scale()


def test_files_of_other_launchers(tmp_path):
    path = tmp_path / "training.yaml"
    path.write_text(
        "model_name_or_path: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 2\n"
        "gradient_accumulation_steps: 8\nnum_processes: 8\noptim: adamw_torch_fused\nlearning_rate: 2e-5\n"
    )
    found = read_training_settings(path)
    assert (found.batch_size, found.model, found.adapter) == (128, "Qwen/Qwen2.5-7B", None)
    assert found.parts == BatchParts(2, 8, 8)
    path.write_text(
        "base_model: llama\nadapter: lora\nmicro_batch_size: 2\nmax_lr: 0.1\nlr: 0.01\n"
    )
    found = read_training_settings(path)
    assert (found.lr, found.adapter, found.parts) == (0.1, True, BatchParts(2))


def test_an_optimizer_with_settings_below_it(tmp_path):
    path = tmp_path / "training.yaml"
    path.write_text("optimizer:\n  name: SGD\n  lr: 0.1\n  momentum: 0.9\nbatch_size: 8\n")
    found = read_training_settings(path)
    assert (found.optimizer, found.lr, found.momentum, found.adaptive) == ("SGD", 0.1, 0.9, False)


def test_parts_are_those_of_the_batch(tmp_path, state):
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "training_args.yaml").write_text("batch_size: 7\n")
    assert read_training_settings(tmp_path).parts is None


@pytest.mark.parametrize(
    "line", ["gradient_accumulation_steps: 0", "num_processes: 1.5", "world_size: .inf"]
)
def test_impossible_parts(line, tmp_path):
    path = tmp_path / "training.yaml"
    path.write_text(f"per_device_train_batch_size: 2\n{line}\n")
    with pytest.raises(TrainingError, match="must be a whole number"):
        read_training_settings(path)


def test_sign_descent_is_no_gradient_descent():
    assert TrainingSettings(optimizer="sign_sgd").adaptive


def test_what_is_missing_is_named_as_it_is_written(tmp_path, state):
    (tmp_path / "training.yaml").write_text("lr: 0.1\noptim: sgd\n")
    with pytest.raises(TrainingError) as error:
        read_training_settings(tmp_path / "training.yaml").noise_scale()
    assert error.value.cure == "write `batch_size: ...` into it"
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(TrainingError) as error:
        read_training_settings(tmp_path / "trainer_state.json").noise_scale()
    assert "`optim: ...` into training_args.yaml beside it" in error.value.cure
