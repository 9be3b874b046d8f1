"""The page on writing a drafter: its code runs, and is as short as it says."""

import re
from pathlib import Path

import pytest

from specjax.acceptance.greedy import Greedy
from specjax.decoding.engine import Engine
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.drafters import DRAFTERS, register
from specjax.drafters.null import NullDrafter
from specjax.testing.toys import toy_llama

PAGE = Path(__file__).resolve().parents[2] / "docs/write-a-drafter.md"


@pytest.fixture(scope="module")
def page() -> list[str]:
    """Its code, block by block."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


@pytest.fixture
def unregistered():
    yield
    DRAFTERS.pop("last-place", None)


def test_the_drafter_is_short(page):
    assert len([line for line in page[0].splitlines() if line.strip()]) < 40


@pytest.mark.usefixtures("unregistered")
def test_the_drafters_draft_and_decode_exactly(page):
    names = {}
    drafter, _, registered, head = page
    for code in (
        drafter,
        registered,
        "from specjax.testing.toys import toy_llama\n",
        head,
    ):
        exec(compile(code, str(PAGE), "exec"), names)
    target = toy_llama().decoder
    # a text that repeats itself, so that there is something to find
    requests = [Request(prompt_ids=[5, 6, 7, 8] * 6, max_tokens=24) for _ in range(2)]
    plain = generate(Engine(target, NullDrafter(), Greedy()), requests)
    for made in (names["drafter"], names["head_drafter"]):
        drafted = generate(Engine(target, made, Greedy()), requests)
        assert [c.ids for c in drafted] == [c.ids for c in plain]
        assert sum(c.drafted for c in drafted) > 0
    assert names["drafter"].k == 5
    with pytest.raises(ValueError, match="last-place"):
        register("last-place", lambda options: NullDrafter())


@pytest.mark.full
@pytest.mark.usefixtures("unregistered")
def test_the_page_runs_from_top_to_bottom(page):
    names = {}
    for code in page:
        exec(compile(code, str(PAGE), "exec"), names)
    assert names["report"].ok
