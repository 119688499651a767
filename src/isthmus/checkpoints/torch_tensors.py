"""Torch tensors by name, seen as numpy arrays in the order of their elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from isthmus.checkpoints.base import TensorInfo
from isthmus.checkpoints.dtypes import Dtype
from isthmus.checkpoints.tensor_file import check_range
from isthmus.errors import CheckpointError
from isthmus.typing import StorageArray

if TYPE_CHECKING:
    import torch

_DTYPES = {dtype.torch_name: dtype for dtype in Dtype}


class TensorTable:
    """The tensors of a state dict.

    Views of one storage that cover the same elements in the same order are one tensor: the first
    name has it, the others are tied to that name.

    Args:
        state: Tensors by name; what is no tensor is left out.
        where: What errors call it.

    Attributes:
        tensors: Name, format and shape of each.
        tied: Names that share another tensor, and that tensor's name.
        others: Keys of what is no tensor.

    Raises:
        CheckpointError: if a tensor is sparse, quantised, without numbers, in an unknown number
            format, or not named by text.
    """

    def __init__(self, state: Mapping[Any, Any], where: str) -> None:
        import torch

        self._arrays: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.tied: dict[str, str] = {}
        self.others: list[str] = []
        kept: dict[tuple[Any, ...], str] = {}
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor):
                self.others.append(printable(name))
                continue
            if not isinstance(name, str):
                raise CheckpointError(f"{where}: a tensor is named {name!r}, which is no text")
            if printable(name) != name:
                raise CheckpointError(
                    f"{where}: the name of tensor {printable(name)!r} is not valid Unicode",
                    "The file is damaged; rename the tensor in torch, or download the file again.",
                )
            info = _describe(name, tensor, where)
            try:
                identity = (
                    tensor.untyped_storage().data_ptr(),
                    tensor.storage_offset(),
                    tensor.dtype,
                    tensor.shape,
                    tensor.stride(),
                    tensor.is_neg(),
                )
            except (RuntimeError, NotImplementedError) as error:
                raise _without_memory(f"{where}: tensor {name!r}", tensor) from error
            if info.numel and identity in kept:
                self.tied[name] = kept[identity]
                continue
            kept[identity] = name
            self.tensors[name] = info
            self._arrays[name] = tensor.detach()

    def view(self, name: str, start: int, stop: int) -> StorageArray:
        """Elements `start : stop`, in the tensor's own memory where it is contiguous.

        Raises:
            IndexError: if the tensor has no such elements.
        """
        info = self.tensors[name]
        check_range(info, start, stop)
        # An imaginary part can be a view that torch negates when it is used.
        flat = _flat_range(self._arrays[name], start, stop).cpu().resolve_neg()
        return as_numpy(flat, info.dtype)

    def clear(self) -> None:
        """Let go of the tensors."""
        self._arrays = {}


def printable(key: object) -> str:
    """A key as text that any file and terminal can hold; half characters are written as escapes."""
    return str(key).encode("utf-8", "backslashreplace").decode("utf-8")


def _without_memory(here: str, tensor: torch.Tensor) -> CheckpointError:
    return CheckpointError(
        f"{here} is a {type(tensor).__name__} whose numbers cannot be read in place",
        "Make it a plain tensor first.",
    )


def _describe(name: str, tensor: torch.Tensor, where: str) -> TensorInfo:
    import torch

    here = f"{where}: tensor {name!r}"
    if tensor.is_quantized:
        raise CheckpointError(f"{here} is quantised", "Dequantise the model first.")
    if tensor.is_nested:
        raise CheckpointError(f"{here} is nested", "Save its parts under names of their own.")
    if tensor.layout != torch.strided:
        raise CheckpointError(f"{here} is sparse", "Save it with .to_dense() first.")
    if tensor.device.type == "meta":
        raise CheckpointError(f"{here} has no numbers: it was saved from the meta device")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        # Fake, distributed and the like: the tensor itself holds no numbers.
        raise _without_memory(here, tensor)
    dtype = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(
            f"{here} has the number format {tensor.dtype}, which Isthmus does not know",
            f"It reads {', '.join(_DTYPES)}. Convert the model to one of these first.",
        )
    return TensorInfo(name, dtype, tuple(tensor.shape))


def _flat_range(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements `start : stop` in reading order, copying no more than the rows they touch."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    row = tensor.numel() // tensor.shape[0]
    first = start // row
    rows = tensor[first : -(-stop // row)].reshape(-1)
    return rows[start - first * row : stop - first * row]


def as_numpy(tensor: torch.Tensor, dtype: Dtype) -> StorageArray:
    """The same memory as a numpy array; numpy lacks bfloat16 and float8, so by way of integers."""
    import torch

    if dtype is Dtype.BF16:
        tensor = tensor.view(torch.int16)
    elif dtype in (Dtype.F8_E4M3, Dtype.F8_E5M2):
        tensor = tensor.view(torch.uint8)
    array: StorageArray = tensor.numpy().view(dtype.storage)
    return array
