"""A drawing of a tree, for notebooks, logs and the command line."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specjax.decoding.trees.static import Tree
from specjax.decoding.types import ANCHOR

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def draw(
    parents: Sequence[int],
    labels: Sequence[str] | None = None,
    accepted: Collection[int] = (),
    *,
    anchor: str = "anchor",
    max_label: int = 24,
    color: bool = False,
) -> str:
    """One line a node, children below their parent and to the right of it.

    ``parents`` and ``labels`` have an entry for each node (cut a proposal's row at its
    ``num_nodes``). Labels are token texts, or numbers if left out: what does not print
    is escaped, spaces are shown as ``␣``, and more than ``max_label`` characters are
    cut. Nodes in ``accepted`` have a check mark, and are green with ``color``.
    """
    tree = Tree(tuple(parents))
    if labels is None:
        labels = [str(node) for node in range(tree.num_nodes)]
    if len(labels) != tree.num_nodes:
        raise ValueError(f"{len(labels)} labels for {tree.num_nodes} nodes")
    if strangers := set(accepted) - set(range(tree.num_nodes)):
        raise ValueError(f"accepted nodes that do not exist: {sorted(strangers)}")
    accepted = set(accepted)
    lines = [_printable(anchor, max_label)]
    # A stack, not recursion: a chain may be longer than Python's limit.
    todo = _below(tree, ANCHOR, indent="")
    while todo:
        node, indent, branch, below = todo.pop()
        text = _printable(labels[node], max_label)
        if node in accepted:
            text = f"{GREEN}{text} ✓{PLAIN}" if color else f"{text} ✓"
        lines.append(f"{indent}{branch}{text}")
        todo += _below(tree, node, indent + below)
    return "\n".join(lines)


def _below(tree: Tree, node: int, indent: str) -> list[tuple[int, str, str, str]]:
    """A node's children, last first: node, indent, branch, what stands under it."""
    children = tree.children(node)
    drawn = [(child, indent, "├─ ", "│  ") for child in children]
    drawn[-1:] = [(child, indent, "└─ ", "   ") for child in children[-1:]]
    return drawn[::-1]


def _printable(text: str, limit: int) -> str:
    start = text[: limit + 1]  # enough to see whether it must be cut
    escaped = repr(start)[1:-1].replace(" ", "␣")
    return escaped if len(escaped) <= limit else escaped[: max(limit - 1, 0)] + "…"
