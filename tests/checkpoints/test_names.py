"""Prefixes that one model's names carry and another's lack."""

from hypothesis import given
from hypothesis import strategies as st

from isthmus.checkpoints import align_names, open_checkpoint

from .files import packaged


def test_prefixes_added_removed_and_exchanged() -> None:
    reference = ["bert.a", "bert.b.c", "cls.x"]
    for other in (["a", "b.c", "cls.x"], ["roberta.a", "model.bert.b.c", "_orig_mod.cls.x"]):
        assert align_names(reference, other) == dict(zip(reference, other, strict=True))
        assert align_names(other, reference) == dict(zip(other, reference, strict=True))


def test_language_models_inside_others() -> None:
    reference = ["model.language_model.layers.0.w", "lm_head.weight"]
    other = ["language_model.model.layers.0.w", "language_model.lm_head.weight"]
    assert align_names(reference, other) == dict(zip(reference, other, strict=True))


def test_exact_names_win() -> None:
    assert align_names(["a", "model.a"], ["model.a"]) == {"model.a": "model.a"}
    assert align_names(["model.a"], ["a", "model.a"]) == {"model.a": "model.a"}


def test_what_is_ambiguous_is_left_out() -> None:
    assert align_names(["bert.a", "roberta.a"], ["a"]) == {}
    assert align_names(["a"], ["bert.a", "roberta.a"]) == {}
    assert align_names(["a", "b"], ["c", "model.b"]) == {"b": "model.b"}


def test_no_names_at_all() -> None:
    assert align_names([], ["a"]) == {}
    assert align_names(["a"], []) == {}


NAMES = st.lists(
    st.tuples(
        st.sampled_from(["", "model.", "bert.", "module.model.", "_orig_mod."]),
        st.sampled_from(["a", "b", "c.d", "model", "bert"]),
    ).map("".join),
    max_size=8,
    unique=True,
)


@given(reference=NAMES, other=NAMES)
def test_a_one_to_one_map_that_knows_no_order(reference: list[str], other: list[str]) -> None:
    found = align_names(reference, other)
    assert len(set(found.values())) == len(found)
    assert set(found) <= set(reference)
    assert set(found.values()) <= set(other)
    assert all(found[name] == name for name in set(reference) & set(other))
    assert found == align_names(reference[::-1], other[::-1])
    assert align_names(other, reference) == {theirs: ours for ours, theirs in found.items()}


def test_the_three_berts_of_rxnfp() -> None:
    base, plain, headed = (
        open_checkpoint(str(packaged("rxnfp", "models", "transformers", name))).tensors
        for name in ("bert_pretrained", "bert_ft", "bert_ft_10k_25s")
    )
    assert not plain.keys() & base.keys()
    found = align_names(plain, base)
    assert found == {name: f"bert.{name}" for name in plain}
    assert all(plain[ours].shape == base[theirs].shape for ours, theirs in found.items())
    assert len(align_names(headed, base)) == 199
    assert headed.keys() - align_names(headed, base).keys() == {
        "classifier.weight",
        "classifier.bias",
    }
