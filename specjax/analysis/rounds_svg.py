"""Rounds as a drawing: one bar a round, in SVG."""

from __future__ import annotations

from html import escape

from specjax.analysis.simulation import Played

ACCEPTED, BONUS, ABORTED = "#2f9e44", "#f59f00", "#e03131"
CELL, GAP, LABEL, LINE, HEAD, COLUMNS = 14, 2, 44, 20, 62, 4

NAMES = ((ACCEPTED, "accepted"), (BONUS, "the target's own"), (ABORTED, "rejected"))


def rounds_svg(played: Played, title: str) -> str:
    """A whole SVG file. Bars stand in columns, read down and then to the right."""
    nodes = played.game.tree.num_nodes
    bar = LABEL + (nodes + 1) * (CELL + GAP) + 24
    columns = min(COLUMNS, len(played.paths))
    lines = -(-len(played.paths) // columns)
    width, height = max(columns * bar, 520), HEAD + lines * LINE + 40
    body = [
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="8" y="40">{escape(_figures(played))}</text>',
    ]
    for index, path in enumerate(played.paths):
        x, y = (index // lines) * bar, HEAD + (index % lines) * LINE
        body += _bar(index, path, nodes, x, y)
    body += _legend(height - 18)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" '
            'font-size="11">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *body,
            "</svg>\n",
        ]
    )


def _figures(played: Played) -> str:
    game = played.game
    return (
        f"{len(played.paths)} rounds: τ {played.tau:.2f} (law {game.tau:.2f}), "
        f"speed-up {played.speedup:.2f}× (law {game.speedup:.2f}×)"
    )


def _bar(index: int, path: tuple[int, ...], nodes: int, x: int, y: int) -> list[str]:
    """Accepted drafts, the target's token, and the rejected drafts behind it."""
    colours = [ACCEPTED] * len(path) + [BONUS] + [ABORTED] * (nodes - len(path))
    told = f"round {index + 1}: {len(path) + 1} tokens"
    cells = [
        f'<rect x="{x + LABEL + place * (CELL + GAP)}" y="{y}" width="{CELL}" '
        f'height="{CELL}" rx="2" fill="{colour}"/>'
        for place, colour in enumerate(colours)
    ]
    number = (
        f'<text x="{x + LABEL - 8}" y="{y + 11}" text-anchor="end">{index + 1}</text>'
    )
    return [f"<g><title>{told}</title>", number, *cells, "</g>"]


def _legend(y: int) -> list[str]:
    found = []
    for place, (colour, name) in enumerate(NAMES):
        x = 8 + 150 * place
        found += [
            f'<rect x="{x}" y="{y - 11}" width="{CELL}" height="{CELL}" '
            f'fill="{colour}"/>',
            f'<text x="{x + CELL + 6}" y="{y}">{escape(name)}</text>',
        ]
    return found
