"""`isthmus connect` as people use it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

import isthmus
from isthmus.cli.main import app
from isthmus.errors import OutputError, PathError, SymmetryError
from isthmus.models.connection import split

from ..engine.test_align import model, transformed

WORDS = [f"w{number}" for number in range(40)]


def add_tokenizer(folder):
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    add_tokenizer(model(tmp_path / "a", "gpt2"))
    transformed(tmp_path / "a", tmp_path / "copy")
    add_tokenizer(model(tmp_path / "b", "gpt2", seed=3))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 40, (40, 12), generator=generator).tolist()
    lines = [json.dumps({"text": " ".join(WORDS[i] for i in row)}) for row in rows]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def connected(a="a", b="b", out="out", **settings):
    return isthmus.connect(a, b, "texts.jsonl", out, points=5, tokens=12, **settings)


def invoke(*arguments):
    return CliRunner().invoke(app, ["connect", *map(str, arguments)])


def test_help_teaches():
    shown = invoke("--help").stdout
    assert "isthmus connect ./model-a ./model-b --data texts.jsonl -o report" in shown
    for word in ("--path", "--align", "--bends", "--steps", "--plane", "--curvature", "--resume"):
        assert word in shown


@pytest.mark.usefixtures("workplace")
def test_a_transformed_copy_is_connected():
    found = connected(b="copy")
    assert found.distance < 1e-4 < found.before
    assert found.verdict.startswith("connected: along the straight line")
    assert max(map(abs, found.walks[0].b.excess)) < 1e-4


@pytest.mark.usefixtures("workplace")
def test_a_learned_alignment_begins_at_that_by_weights():
    """It goes on to wherever the loss half-way is lower."""
    found = connected(b="copy", align="learned", learned=5)
    assert found.distance < 0.1 * found.before
    assert found.verdict.startswith("connected")


@pytest.mark.usefixtures("workplace")
def test_without_alignment_it_is_not():
    found = connected(b="copy", align="none")
    # Random networks answer too surely: between two of them the loss is lower.
    assert max(map(abs, found.walks[0].b.excess)) > 0.1


@pytest.mark.usefixtures("workplace")
def test_activations_bring_a_copy_nearer():
    found = connected(b="copy", align="activations", examples=40)
    assert found.distance < 0.9 * found.before


def test_table_and_report(workplace):
    result = invoke(
        *("a", "b", "--data", "texts.jsonl", "--path", "polychain", "--steps", 5, "--points", 5),
        *("--plane", 3, "--curvature", "-o", "out", "--tokens", 12),
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["linear", "polychain"]
    data = json.loads((workplace / "out" / "results.json").read_text())
    for path in data["paths"]:
        excess = [
            loss - ((1 - t) * path["loss"][0] + t * path["loss"][-1])
            for t, loss in zip(path["t"], path["loss"], strict=True)
        ]
        assert path["barrier (b)"] == pytest.approx(max(excess), abs=1e-12)
    assert len(data["curvature"]) == 3
    assert len(data["plane"]["loss"]) == 3
    page = (workplace / "out" / "report.html").read_text()
    assert page.count("<svg") == 3
    assert sorted(path.name for path in (workplace / "out").iterdir()) == [
        "report.html",
        "results.json",
    ]


def test_names_are_escaped(workplace):
    shutil.copytree("b", "<b>&")
    connected(b="<b>&")
    page = (workplace / "out" / "report.html").read_text()
    assert "&lt;b&gt;&amp;" in page
    assert "<b>&" not in page


@pytest.mark.usefixtures("workplace")
def test_training_a_bend_lowers_the_loss_and_goes_on_where_it_was(monkeypatch):
    whole = connected(path="polychain", steps=45, align="none", out="whole")
    losses = [walk.profile.values["loss"] for walk in whole.walks]
    assert losses[1][2] < losses[0][2]

    from isthmus.models import connection

    plain = connection.train_bends

    def stopped(*arguments, report, **keywords):
        def told(step):
            report(step)
            if step.number == 30:
                raise KeyboardInterrupt

        return plain(*arguments, report=told, **keywords)

    monkeypatch.setattr(connection, "train_bends", stopped)
    with pytest.raises(KeyboardInterrupt):
        connected(path="polychain", steps=45, align="none")
    monkeypatch.setattr(connection, "train_bends", plain)
    with pytest.raises(OutputError, match="earlier run"):
        connected(path="polychain", steps=45, align="none")
    with pytest.raises(OutputError, match="other models, data or settings"):
        connected(path="polychain", steps=46, align="none", resume=True)
    again = connected(path="polychain", steps=45, align="none", resume=True)
    assert again.walks[1].profile.values == whole.walks[1].profile.values


def test_nothing_of_others_is_touched(workplace):
    (workplace / "out").mkdir()
    (workplace / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(OutputError, match=r"thesis\.tex"):
        connected(overwrite=True)
    connected(out="second")
    with pytest.raises(OutputError, match="earlier run"):
        connected(out="second")
    connected(out="second", overwrite=True)


@pytest.mark.usefixtures("workplace")
def test_nothing_to_resume():
    with pytest.raises(OutputError, match="no interrupted run"):
        connected(resume=True)


@pytest.mark.usefixtures("workplace")
def test_no_bends():
    with pytest.raises(PathError, match="at least one bend, not 0"):
        connected(path="bezier", bends=0)


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rate": float("nan")}, "learning rate of nan"),
        ({"rate": -1.0}, "learning rate of -1"),
        ({"seed": 10**30}, "no seed 1000"),
        ({"seed": -1}, "no seed -1"),
    ],
)
def test_settings_that_mean_nothing(settings, told):
    with pytest.raises(PathError, match=told):
        connected(**settings)


def test_another_tokenizer(workplace):
    path = workplace / "b" / "tokenizer.json"
    said = json.loads(path.read_text())
    words = said["model"]["vocab"]
    words["w3"], words["w4"] = words["w4"], words["w3"]
    path.write_text(json.dumps(said))
    with pytest.raises(PathError, match=r"2 tokens have other ids.*\n.*one tokenizer"):
        connected()


@pytest.mark.usefixtures("workplace")
def test_a_plane_without_a_bend():
    with pytest.raises(PathError, match="a straight line has two"):
        connected(plane=3)


def test_other_architectures(workplace):
    model(workplace / "llama")
    with pytest.raises(SymmetryError, match="has no tensor"):
        connected(b="llama")


def test_an_encoder_has_no_loss(workplace):
    for name in ("one", "two"):
        add_tokenizer(model(workplace / name, "bert"))
    with pytest.raises(PathError, match="only causal language models"):
        connected("one", "two")


def test_a_single_example(workplace):
    (workplace / "texts.jsonl").write_text(json.dumps({"text": "w1 w2 w3"}))
    with pytest.raises(PathError, match="one example or none"):
        connected()
    assert not (workplace / "out").exists()  # so that the next run is not in its own way


def test_halves_share_no_example_and_lose_none():
    batches = [
        {"input_ids": torch.arange(6).reshape(3, 2)},
        {"input_ids": torch.arange(6, 16).reshape(5, 2)},
    ]
    parts = split(batches)
    seen = [sorted(torch.cat([b["input_ids"] for b in part]).flatten().tolist()) for part in parts]
    assert sorted(seen[0] + seen[1]) == list(range(16))
    assert abs(len(seen[0]) - len(seen[1])) <= 2
