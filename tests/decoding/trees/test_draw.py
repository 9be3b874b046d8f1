"""Drawings, character by character."""

import pytest

from specjax.decoding.trees import chain, draw


def lines(*texts: str) -> str:
    return "\n".join(texts)


def test_children_stand_below_their_parent():
    parents = (-1, -1, 0, 2, 0, 1)
    labels = ["The", "A", " cat", " sat", " dog", " bird"]
    assert draw(parents, labels, accepted=(0, 2), anchor="<s>") == lines(
        "<s>",
        "├─ The ✓",
        "│  ├─ ␣cat ✓",
        "│  │  └─ ␣sat",
        "│  └─ ␣dog",
        "└─ A",
        "   └─ ␣bird",
    )


def test_nodes_are_numbered_without_labels():
    assert draw([-1, 0, -1]) == lines("anchor", "├─ 0", "│  └─ 1", "└─ 2")
    assert draw([]) == "anchor"


def test_accepted_nodes_are_green_in_color():
    green, plain = "\x1b[32m", "\x1b[0m"
    drawn = draw([-1, 0, 0], ["a", "b", "c"], accepted={0, 2}, color=True)
    assert drawn == lines(
        "anchor",
        f"└─ {green}a ✓{plain}",
        "   ├─ b",
        f"   └─ {green}c ✓{plain}",
    )


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("", ""),
        (" ", "␣"),
        ("\n\t", r"\n\t"),
        ("\x1b[2J", r"\x1b[2J"),  # a token must not clear the screen
        ("\\n", r"\\n"),
        ("it's", "it's"),
        ("日本é", "日本é"),
        ("\udc80", r"\udc80"),
        ("12345678", "12345678"),
        ("123456789", "1234567…"),
        ("\n" * 10**6, r"\n\n\n\…"),
    ],
)
def test_labels_are_printable_and_cut(label: str, shown: str):
    assert draw([-1], [label], max_label=8) == lines("anchor", f"└─ {shown}")
    assert draw([], anchor=label, max_label=8) == shown


def test_a_long_chain_and_a_wide_star_are_drawn():
    deep = draw(chain(2000).parents).split("\n")
    assert len(deep) == 2001 and deep[-1] == "   " * 1999 + "└─ 1999"
    wide = draw((-1,) * 64, ["x" * 1000] * 64).split("\n")
    assert len(wide) == 65 and wide[1] == "├─ " + "x" * 23 + "…"


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="1 labels for 2 nodes"):
        draw([-1, 0], ["a"])
    with pytest.raises(ValueError, match=r"do not exist: \[-1, 2\]"):
        draw([-1, 0], accepted=(0, 2, -1))
    with pytest.raises(ValueError, match="node 1 has parent 1"):
        draw([-1, 1])
