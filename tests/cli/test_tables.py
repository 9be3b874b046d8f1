"""How tables name what drafts."""

import pytest

from specjax.cli.tables import short_name


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("ngram", "ngram"),
        ("draft:smollm2-135m", "draft:smollm2-135m"),
        ("eagle3:heads/one", "eagle3:heads/one"),
        ("eagle3:/a/long/path/to/the/head", "eagle3:…/head"),
        (
            "some/where/far/away/mine.py:MyDrafter",
            "some/where/far/away/mine.py:MyDrafter",
        ),
    ],
)
def test_of_a_long_path_the_end_is_shown(said, shown):
    assert short_name(said) == shown
