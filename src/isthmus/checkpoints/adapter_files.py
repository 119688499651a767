"""The weights of an adapter: one file, or shards with an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from isthmus.checkpoints.index import SAFETENSORS_INDEX, check_index, inside, read_index
from isthmus.checkpoints.safetensors_file import SafetensorsFile
from isthmus.checkpoints.tensor_file import TensorFile
from isthmus.checkpoints.torch_file import TorchFile
from isthmus.errors import CheckpointError

ADAPTER_STEM = "adapter_model"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
ADAPTER_INDEX = "adapter_model.safetensors.index.json"

# PEFT writes one file. Transformers splits a large adapter, and gives its index a model's name.
_INDICES = (ADAPTER_INDEX, SAFETENSORS_INDEX)
_SHARD_STEM = f"{ADAPTER_STEM}-"


def open_adapter_weights(folder: Path) -> Mapping[str, TensorFile]:
    """Open the weights in an adapter's folder.

    Returns:
        Every tensor's stored name, and the file in which it lies.

    Raises:
        CheckpointError: if there are none, or damaged or inconsistent ones.
    """
    safetensors, torch = (inside(folder, name) for name in ADAPTER_WEIGHTS)
    if safetensors.exists():
        file: TensorFile = SafetensorsFile(safetensors)
        return dict.fromkeys(file.tensors, file)
    for name in _INDICES:
        index = inside(folder, name)
        if not index.exists():
            continue
        weight_map = read_index(index)
        # Beside an adapter, the model's own index may stand for the model.
        if all(file.startswith(_SHARD_STEM) for file in weight_map.values()):
            return _open_shards(folder, index, weight_map)
    if torch.exists():
        file = TorchFile(torch)
        return dict.fromkeys(file.tensors, file)
    raise CheckpointError(
        f"{folder} holds adapter_config.json but neither {' nor '.join(ADAPTER_WEIGHTS)}, nor an "
        f"index {ADAPTER_INDEX}",
        "Download the adapter again.",
    )


def _open_shards(
    folder: Path, index: Path, weight_map: Mapping[str, str]
) -> Mapping[str, TensorFile]:
    shards: dict[str, TensorFile] = {}
    try:
        for name in sorted(set(weight_map.values())):
            path = inside(folder, name)
            if not path.exists():
                raise CheckpointError(
                    f"{path} is missing, though {index.name} names it", "Download it again."
                )
            shards[name] = SafetensorsFile(path)
        check_index(index, weight_map, shards)
    except BaseException:
        for shard in shards.values():
            shard.close()
        raise
    return {name: shards[file] for name, file in weight_map.items()}
