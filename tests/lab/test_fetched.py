from __future__ import annotations

import pytest

from isthmus.errors import IsthmusError
from isthmus.lab.data.sections import CLASSES, load_sections
from isthmus.lab.data.spam import load_spam

HAM = b"""Return-Path: <someone@lists.example>
List-Id: a give-away
Subject: Re: [ILUG] Sequences window
Content-Type: text/plain

I can't reproduce this error.
"""

SPAM = b"""Subject: =?broken?Q header \xa3
Content-Type: multipart/alternative; boundary="x"

--x
Content-Type: text/html

<html><style>p {}</style><p>Buy \xa3 <b>now</b></html>
--x--
"""


@pytest.mark.parametrize("load", [load_spam, load_sections])
def test_absent_data_names_the_target_that_fetches_it(tmp_path, load):
    with pytest.raises(IsthmusError, match="make data"):
        load(tmp_path)


def test_mail_is_subject_and_body_and_no_other_header(tmp_path):
    for group, message in (("easy-ham-1", HAM), ("spam-2", SPAM)):
        folder = tmp_path / "spam-assassin" / "data" / group
        folder.mkdir(parents=True)
        (folder / "00001.txt").write_bytes(message)
    corpus = load_spam(tmp_path)
    assert corpus.labels == (0, 1)
    assert corpus.texts[0] == "Sequences window I can't reproduce this error."
    assert corpus.texts[1].endswith("Buy £ now")
    assert not any("give-away" in text for text in corpus.texts)


def test_sections_that_are_not_asked_for_are_left_out(tmp_path):
    (tmp_path / "debian-sections.tsv").write_text(
        "games\tReal-time strategy game\npython\tA library\nweb\tA browser\tfast\n"
    )
    corpus = load_sections(tmp_path)
    assert corpus.texts == ("Real-time strategy game", "A browser\tfast")
    assert [CLASSES[label] for label in corpus.labels] == ["games", "web"]
