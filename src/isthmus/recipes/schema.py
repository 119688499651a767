"""The recipe: what to merge, how, and into what."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from isthmus.methods.method import BaseUse, Method
from isthmus.methods.registry import get_method
from isthmus.recipes.align import Align
from isthmus.recipes.calibration import Calibration
from isthmus.recipes.finish import Finish
from isthmus.recipes.settings import Setting


class _Dumper(yaml.SafeDumper):
    """Escapes line breaks of every kind; PyYAML loses the rarer ones in other styles of text."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelEntry(_Strict):
    """One of the listed models.

    Attributes:
        model: `path[@revision][+adapter[@revision]]`.
        parameters: What holds for this model alone, by parameter.
        calibration: The examples of its task, for methods that need them.
    """

    model: str
    parameters: Mapping[str, Setting] = Field(default_factory=dict)
    calibration: Calibration | None = None


class Recipe(_Strict):
    """A merge, checked as far as it can be without opening a model. Made by `load_recipe`.

    Two recipes are equal if they ask for the same merge: the same `canonical()` form.

    Attributes:
        merge_method: A name of the methods' registry.
        models: The listed models, in order.
        base_model: The model that task vectors are measured from, or None.
        parameters: What holds for all models, by parameter.
        dtype: The number format of the output, by its name in torch; None keeps the donor's.
        out_dtype: Goes before `dtype` where both are given.
        seed: From which random methods draw.
        tensors: strict: all models have the same tensors; common: merge what all have with one
            shape and take the rest from the donor.
        space: For adapters: where the method runs, one of its `spaces`; None for its default.
        rank: For adapters: the rank of every merged update, or the smaller side of a weight that is
            smaller; None keeps the largest rank of the module.
        output: For adapters: `adapter`, or `full` for base_model with the merged adapter added.
        calibration: What holds for the calibration of every model that does not say otherwise.
        align: Whether and how models are moved along their symmetries before they are merged.
        finish: What the merged network measures of itself on data, such as statistics of BatchNorm.
        name: What people call the result.
    """

    merge_method: str
    models: tuple[ModelEntry, ...]
    base_model: str | None = None
    parameters: Mapping[str, Setting] = Field(default_factory=dict)
    dtype: str | None = None
    out_dtype: str | None = None
    seed: int = 0
    tensors: Literal["strict", "common"] = "strict"
    space: str | None = None
    rank: int | None = Field(default=None, ge=1)
    output: Literal["adapter", "full"] | None = None
    calibration: Calibration | None = None
    align: Align | None = None
    finish: Finish | None = None
    name: str | None = None

    _root: Path | None = PrivateAttr(default=None)
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def root(self) -> Path | None:
        """The folder of the file that the recipe was read from."""
        return self._root

    @property
    def notes(self) -> tuple[str, ...]:
        """What the recipe says without effect, one sentence each, for the user to read."""
        return self._notes

    @property
    def method(self) -> Method:
        """The merge method."""
        return get_method(self.merge_method)

    @property
    def output_dtype(self) -> str | None:
        """The number format of the output; None keeps that of the donor."""
        return self.out_dtype or self.dtype

    @property
    def experts(self) -> tuple[ModelEntry, ...]:
        """The models that are merged, in order; the base is not one where a method measures from it."""
        if self.method.base is BaseUse.REQUIRED:
            return tuple(entry for entry in self.models if entry.model != self.base_model)
        return self.models

    @property
    def donor(self) -> str:
        """The model that gives the config, the tokenizer and the tensors that are not merged."""
        return self.base_model or self.models[0].model

    @property
    def for_adapters(self) -> tuple[str, ...]:
        """Keys that it gives and that mean something for adapters alone."""
        return tuple(key for key in ("space", "rank", "output") if getattr(self, key) is not None)

    def calibration_of(self, entry: ModelEntry) -> Calibration:
        """What an expert is calibrated on: its own settings before those of all."""
        return (entry.calibration or Calibration()).over(self.calibration)

    @property
    def references(self) -> tuple[str, ...]:
        """Every model once, the donor first and the others in the order of the recipe."""
        named = [self.donor, *(entry.model for entry in self.models)]
        return tuple(dict.fromkeys([*named, *([self.stays] if self.stays else [])]))

    @property
    def stays(self) -> str | None:
        """The model that the others are aligned to; None where nothing is aligned."""
        return None if self.align is None else self.align.to or self.donor

    def canonical(self) -> dict[str, Any]:
        """The recipe as plain data, with the defaults of the schema written out."""
        data: dict[str, Any] = {
            "name": self.name,
            "merge_method": self.merge_method,
            "base_model": self.base_model,
            "models": [
                {"model": entry.model}
                | _named_calibration(entry.calibration)
                | _named_settings(entry.parameters)
                for entry in self.models
            ],
            **_named_settings(self.parameters),
            "dtype": self.dtype,
            "out_dtype": self.out_dtype,
            "seed": self.seed,
            "tensors": self.tensors,
            "space": self.space,
            "rank": self.rank,
            "output": self.output,
            **_named_calibration(self.calibration),
            "align": None if self.align is None else self.align.plain(),
            "finish": None if self.finish is None else self.finish.plain(),
        }
        return {key: value for key, value in data.items() if value is not None}

    def to_yaml(self) -> str:
        """YAML that loads as an equal recipe; equal recipes have the same text."""
        return str(
            yaml.dump(
                self.canonical(),
                Dumper=_Dumper,
                sort_keys=False,
                allow_unicode=True,
                default_flow_style=None,
                width=1000,
            )
        )

    def digest(self) -> str:
        """SHA-256 of the canonical form, in hexadecimal."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Recipe):
            return NotImplemented
        return self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())


def _named_calibration(calibration: Calibration | None) -> dict[str, Any]:
    """The entry `calibration`, or nothing where it says nothing."""
    plain = {} if calibration is None else calibration.plain()
    return {"calibration": plain} if plain else {}


def _named_settings(parameters: Mapping[str, Setting]) -> dict[str, Any]:
    """The entry `parameters`, sorted by name, or nothing."""
    plain = {name: parameters[name].plain() for name in sorted(parameters)}
    return {"parameters": plain} if plain else {}
