"""`isthmus methods [NAME]`."""

from __future__ import annotations

import json
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from isthmus.methods.method import Method
    from isthmus.methods.parameters import Parameter


def command(
    name: Annotated[
        str | None, typer.Argument(help="Explain this method; without it all are listed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the merge methods, or explain one: paper, parameters, defaults.

    Example: isthmus methods ties
    """
    from isthmus.methods.registry import METHODS, get_method

    chosen = list(METHODS.values()) if name is None else [get_method(name)]
    if as_json:
        typer.echo(json.dumps([_as_data(method) for method in chosen], indent=2))
    elif name is None:
        for method in chosen:
            typer.echo(f"{method.name}\n  {method.summary}\n  {method.reference}")
            typer.echo(f"  {', '.join(map(_brief, method.parameters))}")
            typer.echo(f"  adapters: {_adapters(method)}\n")
        typer.echo("isthmus methods NAME explains one.")
    else:
        _explain(chosen[0])


def _explain(method: Method) -> None:
    from isthmus.methods.method import BaseUse

    typer.echo(f"{method.name}: {method.summary}\n{method.reference}\n")
    typer.echo(fill(method.explanation, 88))
    base = (
        "required"
        if method.base is BaseUse.REQUIRED
        else "lends config and tokenizer; counts as a model only when listed"
    )
    typer.echo(f"\nbase_model: {base}\nmodels: {_models(method)}\nadapters: {_adapters(method)}")
    if method.gauge:
        typer.echo(fill(method.gauge, 88, initial_indent="  ", subsequent_indent="  "))
    typer.echo("\nparameters:")
    for parameter in method.parameters:
        typer.echo(f"  {_brief(parameter)}  [{parameter.scope.value}]\n      {parameter.summary}")


def _models(method: Method) -> str:
    """How many models a recipe lists, in words."""
    from isthmus.methods.method import BaseUse

    words = {1: "one", 2: "two", 3: "three"}
    least, most = (words.get(n or 0, str(n)) for n in (method.min_experts, method.max_experts))
    if method.max_experts is None:
        number = f"{least} or more"
    else:
        number = f"exactly {most}" if least == most else f"{least} to {most}"
    return f"{number}, besides base_model" if method.base is BaseUse.REQUIRED else number


def _adapters(method: Method) -> str:
    """Whether and in which spaces it merges adapters, in words."""
    if not method.spaces:
        return "not merged; apply them to their base first (base+adapter)"
    default, *others = method.spaces
    if method.adapters_only:
        return f"nothing else; space: {', '.join(method.spaces)}"
    return f"space: {default} (default){''.join(f', {space}' for space in others)}"


def _brief(parameter: Parameter) -> str:
    if parameter.required:
        return f"{parameter.name} (required)"
    if parameter.ignored:
        return f"{parameter.name} (no effect)"
    return f"{parameter.name} = {json.dumps(parameter.default)}"


def _as_data(method: Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "summary": method.summary,
        "reference": method.reference,
        "explanation": method.explanation,
        "base_model": method.base.value,
        "models": [method.min_experts, method.max_experts],
        "random": method.random,
        "spaces": list(method.spaces),
        "adapters_only": method.adapters_only,
        "gauge": method.gauge,
        "parameters": [
            {
                "name": parameter.name,
                "type": parameter.kind.__name__,
                "scope": parameter.scope.value,
                "summary": parameter.summary,
                "required": parameter.required,
                "default": parameter.default,
                "choices": list(parameter.choices),
            }
            for parameter in method.parameters
        ],
    }
