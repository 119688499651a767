"""The model card of an extracted adapter."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.reports.card import is_hub_id, one_line, render_card


def adapter_card(
    *,
    title: str,
    tuned: str,
    base: str,
    ranks: Iterable[int],
    kept: float,
    kept_of_everything: float,
    settings: str,
    notes: Iterable[str],
    version: str,
) -> str:
    """Write a Hub model card in Markdown.

    Args:
        title: The adapter's name.
        tuned: The fine-tune as the user wrote it.
        base: Its base.
        ranks: The rank of each module.
        kept: The share of the squared norm of the modules' change that the adapter holds.
        kept_of_everything: The same of the change of all tensors.
        settings: What was asked for, as YAML.
        notes: What the user should know.
        version: Of Isthmus.
    """
    found = sorted(ranks)
    return render_card(
        "adapter.md.jinja",
        title=title,
        tuned=one_line(tuned),
        base=one_line(base),
        hub_ids=[base] if is_hub_id(base) else [],
        modules=len(found),
        lowest=found[0],
        highest=found[-1],
        kept=f"{kept:.1%}",
        kept_of_everything=f"{kept_of_everything:.1%}",
        settings=settings.rstrip(),
        notes=[one_line(note) for note in notes],
        version=version,
    )
