"""The YAML that describes a merge: schema, parsing, layer gradients, filters."""

from isthmus.recipes.depth import Depths
from isthmus.recipes.load import load_recipe
from isthmus.recipes.resolve import resolve_settings
from isthmus.recipes.schema import ModelEntry, Recipe

__all__ = ["Depths", "ModelEntry", "Recipe", "load_recipe", "resolve_settings"]
