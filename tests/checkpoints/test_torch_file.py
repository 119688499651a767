"""Torch's own files, its nested and shared ones, and pickles that want to run code."""

import collections
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from isthmus.checkpoints import Dtype, open_checkpoint
from isthmus.checkpoints.memory import MemoryCheckpoint
from isthmus.checkpoints.torch_file import TorchFile
from isthmus.errors import CheckpointError

from .files import numbers, packaged


def save(path: Path, value: object, **options: object) -> Path:
    torch.save(value, path, **options)
    return path


# torch's old format knows no tensors of these.
YOUNG = {Dtype.F8_E4M3, Dtype.F8_E5M2, Dtype.U16, Dtype.U32, Dtype.U64}


@pytest.mark.parametrize(
    ("dtype", "zipped"),
    [(d, zipped) for d in Dtype for zipped in (True, False) if zipped or d not in YOUNG],
)
def test_every_format(tmp_path: Path, dtype: Dtype, zipped: bool) -> None:
    tensor = torch.arange(60).reshape(5, 12).to(getattr(torch, dtype.torch_name))
    state = {"x": tensor, "zero_dim": tensor[1, 1].clone(), "empty": tensor[:0].clone()}
    file = TorchFile(save(tmp_path / "m.bin", state, _use_new_zipfile_serialization=zipped))
    assert [info.dtype for info in file.tensors.values()] == [dtype] * 3
    assert [info.shape for info in file.tensors.values()] == [(5, 12), (), (0, 12)]
    stored = file.read_stored("x", 3, 50)
    expected = tensor.reshape(-1)[3:50].view(torch.uint8).numpy()
    np.testing.assert_array_equal(stored.view(np.uint8), expected)
    out = np.empty(47, np.float32)
    file.read("x", 3, out)
    np.testing.assert_array_equal(out, tensor.reshape(-1)[3:50].float().numpy())
    assert ("all of it is in memory" in "".join(file.notes)) is not zipped


@pytest.mark.parametrize(
    "keys",
    [(), ("state_dict",), ("model",), ("module",), ("model_state_dict",), ("model", "state_dict")],
)
def test_nested_state_dicts(tmp_path: Path, keys: tuple[str, ...]) -> None:
    value: object = collections.OrderedDict(x=torch.ones(2))
    for key in reversed(keys):
        value = {key: value, "epoch": 3, "loss": torch.zeros(())}
    assert list(TorchFile(save(tmp_path / "m.pt", value)).tensors) == ["x"]


def test_a_file_that_contains_itself(tmp_path: Path) -> None:
    value: dict[str, object] = {"x": torch.ones(2)}
    value["model"] = value
    assert list(TorchFile(save(tmp_path / "m.pt", value)).tensors) == ["x"]


def test_what_is_no_tensor_is_noted(tmp_path: Path) -> None:
    file = TorchFile(save(tmp_path / "m.pt", {"x": torch.ones(2), "extra_state": {"a": 1}}))
    assert file.notes == ("m.pt: left out what is no tensor: extra_state.",)


def test_shared_tensors_are_tied_and_partly_shared_ones_are_read(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    state = {
        "a": whole,
        "b": whole,
        "parameter": torch.nn.Parameter(whole),
        "rows": whole[1:],
        "flat": whole.reshape(-1),
        "transposed": whole.T,
        "strided": whole[::2, 1:3],
        "spread": whole[:1].expand(3, 4),
        "empty": whole[:0],
        "empty too": whole[:0],
    }
    file = TorchFile(save(tmp_path / "m.pt", state))
    assert file.tied == {"b": "a", "parameter": "a"}
    for name in file.tensors:
        expected = state[name].reshape(-1).numpy()
        for start in range(expected.size + 1):
            for stop in range(start, expected.size + 1):
                np.testing.assert_array_equal(
                    file.read_stored(name, start, stop), expected[start:stop]
                )


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_named_and_not_run(tmp_path: Path, zipped: bool) -> None:
    victim = tmp_path / "ran"
    path = save(
        tmp_path / "evil.bin",
        {"x": torch.ones(2), "y": Attack(victim)},
        _use_new_zipfile_serialization=zipped,
    )
    with pytest.raises(CheckpointError, match=r"evil\.bin asks to run (posix|os)\.mkdir"):
        TorchFile(path)
    assert not victim.exists()


def test_a_bare_pickle_does_not_run_either(tmp_path: Path) -> None:
    victim = tmp_path / "ran"
    (tmp_path / "evil.bin").write_bytes(pickle.dumps(Attack(victim)))
    with pytest.raises(CheckpointError, match=r"evil\.bin"):
        TorchFile(tmp_path / "evil.bin")
    assert not victim.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.ones(2)], "holds a list, not a state dict"),
        (torch.ones(2), "holds a Tensor, not a state dict"),
        ({}, "holds no state dict: it holds nothing"),
        ({"epoch": 1, "lr": 0.1}, "holds no state dict: it holds epoch, lr"),
        ({"x": torch.ones(2).to_sparse()}, "'x' is sparse"),
        ({"x": torch.ones(2, device="meta")}, "'x' has no numbers"),
        ({"x": torch.ones(2, dtype=torch.complex64)}, "'x' has the number format torch.complex64"),
        ({1: torch.ones(2)}, "is named 1"),
    ],
)
def test_what_cannot_be_merged(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        TorchFile(save(tmp_path / "m.pt", value))


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(CheckpointError, match="'x' is quantised"):
        TorchFile(save(tmp_path / "m.pt", {"x": tensor}))


def test_damaged_files(tmp_path: Path) -> None:
    whole = save(tmp_path / "m.pt", {"x": torch.ones(1000)}).read_bytes()
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("hello.txt", "hello")
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    for name in ("cut", "text", "other"):
        with pytest.raises(CheckpointError, match=f"{name}.pt is not a file that torch can load"):
            TorchFile(tmp_path / f"{name}.pt")
    (tmp_path / "empty.pt").touch()
    with pytest.raises(CheckpointError, match="is empty"):
        TorchFile(tmp_path / "empty.pt")


def test_a_file_changed_after_opening(tmp_path: Path) -> None:
    path = save(tmp_path / "m.pt", {"x": torch.ones(100_000)})
    file = TorchFile(path)
    os.truncate(path, 1000)
    with pytest.raises(CheckpointError, match="was changed since it was opened"):
        file.read("x", 0, np.empty(100_000, np.float32))
    path.unlink()
    with pytest.raises(CheckpointError, match="is gone"):
        file.read_stored("x", 0, 1)


@pytest.mark.parametrize("version", ["0.2.0", "0.3.0", "r2scan"])
def test_chgnet_opens(version: str) -> None:
    (path,) = packaged("chgnet", "pretrained", version).glob("*.tar")
    checkpoint = open_checkpoint(str(path))
    state = torch.load(path, map_location="cpu", weights_only=True)["model"]["state_dict"]
    assert list(checkpoint.tensors) == list(state)
    assert checkpoint.config is None
    for name, tensor in state.items():
        np.testing.assert_array_equal(numbers(checkpoint, name, np.float64), tensor.numpy())


@pytest.mark.parametrize("name", ["bert_pretrained", "bert_ft", "bert_ft_10k_25s"])
def test_rxnfp_opens(name: str) -> None:
    folder = packaged("rxnfp", "models", "transformers", name)
    checkpoint = open_checkpoint(str(folder))
    state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    assert checkpoint.tensors.keys() | checkpoint.tied.keys() == state.keys()
    for key in checkpoint.tensors:
        np.testing.assert_array_equal(numbers(checkpoint, key), state[key].numpy())
    tied = {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"}
    assert checkpoint.tied == (tied if name == "bert_pretrained" else {})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("zipped", [True, False])
def test_corrupted_files_open_or_are_refused(tmp_path: Path, zipped: bool) -> None:
    state = {"a": torch.ones(4, 5), "b": torch.ones(3, dtype=torch.bfloat16), "c": {"d": 1}}
    path = save(tmp_path / "m.pt", state, _use_new_zipfile_serialization=zipped)
    good = path.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(200):
        bad = bytearray(good)
        for position in generator.integers(0, len(good), 3):
            bad[position] = generator.integers(0, 256)
        path.write_bytes(bad[: generator.integers(1, 4 * len(bad))])
        try:
            file = TorchFile(path)
        except CheckpointError:
            continue
        for name, info in file.tensors.items():
            assert file.read_stored(name, 0, info.numel).size == info.numel


def test_names_that_no_text_can_hold(tmp_path: Path) -> None:
    state: dict[str, object] = {"a\ud800": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"m\.pt: the name of tensor .*ud800.* not valid"):
        TorchFile(save(tmp_path / "m.pt", state))
    file = TorchFile(save(tmp_path / "m.pt", {"x": torch.ones(2), "a\ud800": 1}))
    "".join(file.notes).encode()
    with pytest.raises(CheckpointError) as caught:
        TorchFile(save(tmp_path / "m.pt", {"a\ud800": 1}))
    str(caught.value).encode()


def test_views_that_torch_negates_later() -> None:
    whole = torch.tensor([1 + 2j, 3 + 4j, 5 + 6j])
    state = {"plain": whole.imag, "negated": whole.conj().imag}
    assert state["negated"].is_neg()
    memory = MemoryCheckpoint("m", state)
    assert not memory.tied
    assert memory.read_stored("negated", 1, 3).tolist() == [-4, -6]
    assert memory.read_stored("plain", 1, 3).tolist() == [4, 6]


@pytest.mark.filterwarnings("ignore:.*prototype.*")
def test_tensors_without_memory_of_their_own() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    parts = [torch.ones(2), torch.ones(3)]
    for tensor, message in (
        (fake, "'x' is a FakeTensor whose numbers cannot be read"),
        (torch.nested.nested_tensor(parts), "'x' is nested"),
        (torch.nested.nested_tensor(parts, layout=torch.jagged), "'x' is nested"),
    ):
        with pytest.raises(CheckpointError, match=message):
            MemoryCheckpoint("m", {"x": tensor})


@pytest.mark.parametrize("state", [[torch.ones(2)], torch.nn.Linear(1, 1), None])
def test_what_is_no_state_dict(state: object) -> None:
    with pytest.raises(CheckpointError, match=r"Pass model\.state_dict\(\)"):
        MemoryCheckpoint("m", state)
