"""Opening and writing models and adapters; each format in one place.

Importing this imports neither torch nor the Hub's library: they come in when a file needs them.
"""

from isthmus.checkpoints.adapted import AdaptedCheckpoint
from isthmus.checkpoints.adapter import Adapter, open_adapter
from isthmus.checkpoints.atomic import atomic_write_bytes, atomic_write_text
from isthmus.checkpoints.base import Checkpoint, Source, SourceFile, TensorInfo
from isthmus.checkpoints.dtypes import Dtype
from isthmus.checkpoints.layout import Shard, ShardLayout
from isthmus.checkpoints.names import align_names
from isthmus.checkpoints.references import find_adapter, open_checkpoint
from isthmus.checkpoints.replaced import ReplacedTensors
from isthmus.checkpoints.sidecars import (
    MODEL_CONFIG,
    check_sidecars,
    config_text,
    copy_sidecars,
)
from isthmus.checkpoints.sizes import parse_size
from isthmus.checkpoints.writer import ShardWriter

__all__ = [
    "MODEL_CONFIG",
    "AdaptedCheckpoint",
    "Adapter",
    "Checkpoint",
    "Dtype",
    "ReplacedTensors",
    "Shard",
    "ShardLayout",
    "ShardWriter",
    "Source",
    "SourceFile",
    "TensorInfo",
    "align_names",
    "atomic_write_bytes",
    "atomic_write_text",
    "check_sidecars",
    "config_text",
    "copy_sidecars",
    "find_adapter",
    "open_adapter",
    "open_checkpoint",
    "parse_size",
]
