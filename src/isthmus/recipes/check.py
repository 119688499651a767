"""From plain data to a checked recipe: every key, every number, every count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isthmus.checkpoints.dtypes import RECIPE_DTYPES
from isthmus.methods.method import BaseUse, Method
from isthmus.methods.parameters import Scope
from isthmus.methods.registry import METHODS
from isthmus.recipes.align import Align, read_align
from isthmus.recipes.calibration import Calibration, read_calibration
from isthmus.recipes.counts import example, merged_entries, wrong_count
from isthmus.recipes.document import Document, KeyPath, show
from isthmus.recipes.finish import Finish, read_finish
from isthmus.recipes.guesses import may_be_adapters
from isthmus.recipes.method_names import LATER_METHODS, space_and_method
from isthmus.recipes.problems import Problems, nearest
from isthmus.recipes.references import read_reference
from isthmus.recipes.schema import ModelEntry, Recipe
from isthmus.recipes.settings import Setting, read_setting

LATER_KEYS = {
    "slices": "List whole models under `models:`. To vary a parameter with depth, give it a list "
    "of numbers.",
    "modules": "List the models under `models:`. Tensors are matched by name in every part of a "
    "model, and filters tell the parts from each other.",
    "tokenizer": "Remove it: the output takes the tokenizer of base_model, or else of the first "
    "model.",
    "tokenizer_source": "Remove it: the output takes the tokenizer of base_model, or else of the "
    "first model.",
    "chat_template": "Remove it: the output keeps the template of base_model, or else of the first "
    "model.",
}
"""What mergekit's recipes may hold and ours may not yet, and what to do instead."""

_TOP_KEYS = tuple(Recipe.model_fields)
_PLAIN_KEYS = ("name", "seed", "tensors", "rank", "output")
_ENTRY_KEYS = tuple(ModelEntry.model_fields)


def check_recipe(document: Document, root: Path | None) -> Recipe:
    """Check a document and build its recipe.

    Args:
        document: The recipe as plain data.
        root: The folder of the file that it came from.

    Raises:
        RecipeError: if anything is wrong; lists every problem found.
    """
    return _Check(document).recipe(root)


class _Check:
    """One pass over a document. It goes on after a problem, so that one run shows them all."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems = Problems(document)
        # A key without a value is as good as absent.
        self.data = {key: value for key, value in document.data.items() if value is not None}
        # Keys and parameters that a problem already speaks about are not reported as missing too.
        self.excused: set[str] = set()

    def recipe(self, root: Path | None) -> Recipe:
        self._top_keys()
        method = self._method()
        space = self._space(method)
        base = self._base()
        common = self._parameters(self.data.get("parameters"), ("parameters",), method)
        entries = self._models(method)
        if "base_model" in self.excused:
            pass
        elif (
            method
            and method.base is BaseUse.REQUIRED
            and "base_model" not in self.data
            and not method.adapters_only
            and not (method.spaces and may_be_adapters(entries.values(), root))
        ):
            two = method.max_experts == 1 and len(entries) == 2
            self.problems.add(
                ("merge_method",),
                f"{method.name} needs base_model",
                f"Name one of the two models as base_model: `base_model: {entries[0].model}`."
                if two
                else example("base_model: PATH"),
            )
        elif method and (base or "base_model" not in self.data):
            self._counts(method, base, entries)
            self._required(method, base, common, entries)
        calibration = self._calibration(self.data, ())
        if method:
            self._examples(method, base, calibration, entries)
        fields: dict[str, Any] = {
            "merge_method": method.name if method else "",
            "models": tuple(entries.values()),
            "base_model": base,
            "parameters": common,
            "dtype": self._dtype("dtype"),
            "out_dtype": self._dtype("out_dtype"),
            "space": space,
            "calibration": calibration,
            "align": self._align(),
            "finish": self._finish(),
            **{key: self.data[key] for key in _PLAIN_KEYS if key in self.data},
        }
        try:
            recipe = Recipe.model_validate(fields)
        except ValidationError as error:
            self._wrong_types(error)
        self.problems.raise_if_any()
        recipe._root = root
        recipe._notes = tuple(self._notes(recipe))
        return recipe

    def _top_keys(self) -> None:
        for key in self.data:
            if key in _TOP_KEYS:
                continue
            if key == "tokenizer_source" and self.data[key] == "base" and "base_model" in self.data:
                continue
            if key in LATER_KEYS:
                self.problems.add((key,), f"{key} is not in this version yet", LATER_KEYS[key])
            else:
                self._unknown_key(key, (), _TOP_KEYS)

    def _unknown_key(self, key: str, path: KeyPath, known: tuple[str, ...]) -> None:
        where = " of a model" if path else ""
        near = nearest(key, known)
        if key in _TOP_KEYS:
            hint = "; it belongs at the top level"
        elif key == "layer_range":
            hint = "; it belongs to slices, which this version does not have yet"
        elif any(key == parameter.name for m in METHODS.values() for parameter in m.parameters):
            hint = "; it is a parameter, so write it below `parameters:`" + (
                " of the model" if path else ""
            )
            self.excused.add(key)
        elif near:
            hint = f"; did you mean {near!r}?"
            if not path:
                self.excused.add(near)
        else:
            hint = f"; known are {', '.join(known)}"
        self.problems.add((*path, key), f"unknown key {key!r}{where}{hint}")

    def _method(self) -> Method | None:
        name = self.data.get("merge_method")
        if isinstance(name, str) and space_and_method(name)[1] in METHODS:
            return METHODS[space_and_method(name)[1]]
        known = f"Known methods: {', '.join(METHODS)}."
        if name is None and "merge_method" in self.excused:
            return None
        if name is None:
            self.problems.add(
                ("merge_method",), "merge_method is missing", f"Add `merge_method: ...`. {known}"
            )
        elif not isinstance(name, str):
            self.problems.add(
                ("merge_method",),
                f"merge_method must be the name of one method, not {name!r}",
                known,
            )
        elif name in LATER_METHODS:
            self.problems.add(
                ("merge_method",), f"merge method {name!r} is not in this version yet", known
            )
        else:
            near = nearest(name, METHODS)
            hint = f"; did you mean {near!r}?" if near else ""
            self.problems.add(("merge_method",), f"there is no merge method {name!r}{hint}", known)
        return None

    def _space(self, method: Method | None) -> str | None:
        """From the key `space`, or from a name such as core_ties."""
        in_name = space_and_method(str(self.data.get("merge_method")))[0] if method else None
        given = self.data.get("space", in_name)
        if method is None or given is None:
            return None
        if given not in method.spaces:
            known = ", ".join(method.spaces)
            self.problems.add(
                ("space" if "space" in self.data else "merge_method",),
                f"{method.name} does not run in the space {given!r}"
                + ("" if known else "; it does not merge adapters"),
                f"Its spaces are {known}." if known else "Remove it.",
            )
            return None
        if in_name is not None and given != in_name:
            self.problems.add(
                ("space",),
                f"merge_method says {in_name} and space says {given}",
                f"Write `merge_method: {method.name}` and one space.",
            )
            return None
        return str(given)

    def _base(self) -> str | None:
        if "base_model" not in self.data:
            return None
        return read_reference(self.data["base_model"], ("base_model",), self.problems)

    def _dtype(self, key: str) -> str | None:
        name = self.data.get(key)
        if name is None:
            return None
        if isinstance(name, str) and name in RECIPE_DTYPES:
            return RECIPE_DTYPES[name].torch_name
        near = nearest(str(name), RECIPE_DTYPES)
        hint = f"; did you mean {near!r}?" if near else ""
        known = dict.fromkeys(dtype.torch_name for dtype in RECIPE_DTYPES.values())
        self.problems.add(
            (key,), f"there is no number format {name!r}{hint}", f"Known are {', '.join(known)}."
        )
        return None

    def _models(self, method: Method | None) -> dict[int, ModelEntry]:
        """The sound entries by their place in the list."""
        raw = self.data.get("models")
        if raw is None:
            if (
                "models" not in self.excused
                and "slices" not in self.data
                and "modules" not in self.data
            ):
                self.problems.add(
                    ("models",), "models is missing", example("models:", "  - model: PATH")
                )
            return {}
        if not isinstance(raw, list) or not raw:
            self.problems.add(
                ("models",),
                "models must be a list of one model or more",
                example("models:", "  - model: PATH"),
            )
            return {}
        entries = {
            index: self._entry(item, ("models", index), method) for index, item in enumerate(raw)
        }
        return {index: entry for index, entry in entries.items() if entry}

    def _entry(self, raw: Any, path: KeyPath, method: Method | None) -> ModelEntry | None:
        if isinstance(raw, str):
            raw = {"model": raw}
        if not isinstance(raw, dict):
            self.problems.add(
                path, "an entry of models must be text or a mapping", "Write `- model: PATH`."
            )
            return None
        for key in raw:
            if key not in _ENTRY_KEYS:
                self._unknown_key(key, path, _ENTRY_KEYS)
        parameters = self._parameters(raw.get("parameters"), (*path, "parameters"), method)
        if raw.get("model") is None:
            if any(nearest(key, _ENTRY_KEYS) == "model" for key in raw if key not in _ENTRY_KEYS):
                return None  # misspelt, and reported above
            self.problems.add(path, "this entry of models names no model", "Add `model: PATH`.")
            return None
        model = read_reference(raw["model"], (*path, "model"), self.problems)
        calibration = self._calibration(raw, path)
        if not model:
            return None
        return ModelEntry(model=model, parameters=parameters, calibration=calibration)

    def _calibration(self, level: Mapping[str, Any], path: KeyPath) -> Calibration | None:
        raw = level.get("calibration")
        if raw is None:
            return None
        where = (*path, "calibration")
        found = read_calibration(raw, where, self.problems)
        if found is None:
            self.excused.add("calibration")
        return found

    def _align(self) -> Align | None:
        raw = self.data.get("align")
        found = None if raw is None else read_align(raw, ("align",), self.problems)
        if found is not None and found.to is not None:
            read_reference(found.to, ("align", "to"), self.problems)
        return found

    def _finish(self) -> Finish | None:
        raw = self.data.get("finish")
        return None if raw is None else read_finish(raw, ("finish",), self.problems)

    def _examples(
        self,
        method: Method,
        base: str | None,
        common: Calibration | None,
        entries: dict[int, ModelEntry],
    ) -> None:
        """Calibration data is there for all experts if the method looks at any, else for none."""
        if "calibration" in self.excused:
            return
        given = [("models", index) for index, entry in entries.items() if entry.calibration]
        if not method.calibrated:
            for path in [*given, *([()] if common else [])]:
                calibrated = [other.name for other in METHODS.values() if other.calibrated]
                self.problems.add(
                    (*path, "calibration"),
                    f"{method.name} does not look at data",
                    f"Remove calibration, or take {', '.join(calibrated)}.",
                )
            return
        lacking = [
            index
            for index, entry in merged_entries(method, base, entries).items()
            if (entry.calibration or Calibration()).over(common).data is None
        ]
        if lacking:
            names = ", ".join(entries[index].model for index in lacking[:4])
            self.problems.add(
                ("models", lacking[0], "calibration"),
                f"{method.name} needs calibration data of every expert; it is missing for {names}",
                "Add, below each of them, some examples of its task without labels: "
                "`calibration: examples.jsonl`.",
            )

    def _parameters(self, raw: Any, path: KeyPath, method: Method | None) -> dict[str, Setting]:
        """The sound settings of one level."""
        if raw is None or method is None:
            return {}
        if not isinstance(raw, dict):
            self.problems.add(path, "parameters must be a mapping", "Write lines `name: value`.")
            return {}
        known = {parameter.name: parameter for parameter in method.parameters}
        settings = {}
        for name, value in raw.items():
            parameter = known.get(name)
            if parameter is None:
                self._unknown_parameter(name, (*path, name), method)
            elif parameter.scope is Scope.GLOBAL and len(path) > 1:
                self.excused.add(name)
                self.problems.add(
                    (*path, name),
                    f"{name!r} of {method.name} is one value for all models and cannot stand "
                    "under one of them",
                    "Move it to `parameters:` at the top level, beside merge_method.",
                )
            else:
                setting = read_setting(value, parameter, (*path, name), self.problems)
                if setting is None:
                    self.excused.add(name)
                else:
                    settings[name] = setting
        return settings

    def _unknown_parameter(self, name: str, path: KeyPath, method: Method) -> None:
        known = [parameter.name for parameter in method.parameters]
        owners = [
            other.name
            for other in METHODS.values()
            if any(parameter.name == name for parameter in other.parameters)
        ]
        near = nearest(name, known)
        if owners:
            self.problems.add(
                path,
                f"{name!r} belongs to {', '.join(owners)}; {method.name} takes {', '.join(known)}",
            )
        elif near:
            self.excused.add(near)
            self.problems.add(
                path,
                f"unknown parameter {name!r} of method {method.name!r}; did you mean {near!r}?",
            )
        else:
            self.problems.add(
                path,
                f"unknown parameter {name!r} of method {method.name!r}; "
                f"it takes {', '.join(known)}",
            )

    def _counts(self, method: Method, base: str | None, entries: dict[int, ModelEntry]) -> None:
        raw = self.data.get("models")
        if not raw or not isinstance(raw, list) or len(entries) < len(raw):
            return
        names = [entry.model for entry in merged_entries(method, base, entries).values()]
        wrong = wrong_count(method, names)
        if wrong is not None:
            self.problems.add(("models",), *wrong)

    def _required(
        self,
        method: Method,
        base: str | None,
        common: dict[str, Setting],
        entries: dict[int, ModelEntry],
    ) -> None:
        for parameter in method.parameters:
            name = parameter.name
            if not parameter.required or name in common or name in self.excused:
                continue
            addition = example("parameters:", f"  {name}: 0.5")
            if parameter.scope is Scope.GLOBAL:
                self.problems.add(
                    ("parameters", name),
                    f"{method.name} needs the parameter {name!r}",
                    addition,
                )
                continue
            lacking = [
                ("models", index, "parameters", name)
                for index, entry in merged_entries(method, base, entries).items()
                if name not in entry.parameters
            ]
            if lacking:
                places = ", ".join(str(entries[int(path[1])].model) for path in lacking[:4])
                more = f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""
                self.problems.add(
                    lacking[0],
                    f"{method.name} needs {name!r} for every model; it is missing for "
                    f"{places}{more}",
                    addition + "\n  below each of them, or at the top level once for all.",
                )

    def _wrong_types(self, error: ValidationError) -> None:
        for detail in error.errors():
            key, given = str(detail["loc"][0]), detail["input"]
            wanted = {
                "int_type": "a whole number",
                "string_type": "text in quotes",
                "literal_error": detail.get("ctx", {}).get("expected"),
                "greater_than_equal": "1 or more",
            }[detail["type"]]
            self.problems.add((key,), f"{key} must be {wanted}, not {given!r}")

    def _notes(self, recipe: Recipe) -> Iterator[str]:
        """What the recipe says without effect."""
        listed = [entry.model for entry in recipe.models]
        if recipe.method.base is BaseUse.IGNORED:
            if (
                recipe.base_model
                and recipe.base_model not in listed
                and not (recipe.method.spaces and may_be_adapters(recipe.models, recipe.root))
            ):
                yield (
                    f"{recipe.merge_method} merges the listed models only; base_model "
                    f"{recipe.base_model} is not among them and gives config and tokenizer."
                )
            return
        for index, entry in enumerate(recipe.models):
            if entry.model != recipe.base_model:
                continue
            given = {"parameters": entry.parameters, "calibration": entry.calibration}
            for key in (key for key, value in given.items() if value):
                path: KeyPath = ("models", index, key)
                line = self.document.line(path)
                where = f"{self.document.name}:{line}" if line else self.document.name
                yield (
                    f"{where}: {key} of the base model {'have' if key == 'parameters' else 'has'} no effect "
                    f"with {recipe.merge_method} ({show(path)})."
                )
