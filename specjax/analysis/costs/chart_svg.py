"""The curve of a calibration as a drawing: T(W) / T(1) by the rows of a window."""

from __future__ import annotations

from html import escape

import numpy as np

from specjax.analysis.costs.calibrated import Calibrated, Curve
from specjax.analysis.law.sizes import Number

COLOURS = ("#1f6fb4", "#d1670a", "#3a8a4d", "#8b3fb0")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 620, 360, 56, 44, 20, 48


def curve_svg(found: Calibrated) -> str:
    """A whole SVG file: a line a batch and context, the middle half of turns shaded."""
    widest = max(curve.widths[-1] for curve in found.curves)
    highest = max(1.2, *(_band(curve, 0.75).max() for curve in found.curves))
    scale = _Scale(widest, highest * 1.05)
    title = f"{found.model}, {found.dtype}, {found.device}"
    body = [f'<text x="8" y="20" font-size="13">{escape(title)}</text>', *scale.axes()]
    for index, curve in enumerate(found.curves):
        body += _line(curve, scale, COLOURS[index % len(COLOURS)], index)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
            'font-size="11">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            *body,
            "</svg>\n",
        ]
    )


class _Scale:
    """From rows and ratios to places on the paper."""

    def __init__(self, widest: int, highest: Number) -> None:
        self._widest, self._highest = widest, highest

    def x(self, rows: Number) -> float:
        """From the left."""
        share = (rows - 1) / max(1, self._widest - 1)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, ratio: Number) -> float:
        """From the top."""
        share = ratio / self._highest
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def axes(self) -> list[str]:
        """Ticks, grid and names."""
        found = []
        for rows in range(1, self._widest + 1):
            found.append(
                f'<text x="{self.x(rows)}" y="{HEIGHT - BOTTOM + 16}" '
                f'text-anchor="middle">{rows}</text>'
            )
        step = next(s for s in (0.25, 0.5, 1, 2, 5, 10, 50) if self._highest / s <= 12)
        for ratio in np.arange(0, self._highest, step):
            y = self.y(ratio)
            found.append(
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" '
                f'stroke="{"#555" if ratio == 1 else "#ddd"}"/>'
            )
            found.append(
                f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{ratio:g}</text>'
            )
        found.append(
            f'<text x="{LEFT}" y="{HEIGHT - 12}">W, rows of a window; upwards: a round '
            "without drafting, in plain steps</text>"
        )
        return found


def _band(curve: Curve, share: float) -> np.ndarray:
    return np.array([np.quantile(curve.ratios(rows), share) for rows in curve.widths])


def _line(curve: Curve, scale: _Scale, colour: str, index: int) -> list[str]:
    def points(rows: list[int], ratios: np.ndarray) -> str:
        pairs = zip(rows, ratios, strict=True)
        return " ".join(f"{scale.x(w)},{scale.y(r)}" for w, r in pairs)

    rows = curve.widths
    low, middle, high = (_band(curve, share) for share in (0.25, 0.5, 0.75))
    outline = f"{points(rows, high)} {points(rows[::-1], low[::-1])}"
    dots = [
        f'<circle cx="{scale.x(w)}" cy="{scale.y(r)}" r="3" fill="{colour}">'
        f"<title>W = {w}: {r:.3f}</title></circle>"
        for w, r in zip(rows, middle, strict=True)
    ]
    return [
        f'<polygon points="{outline}" fill="{colour}" fill-opacity="0.18"/>',
        f'<polyline points="{points(rows, middle)}" fill="none" stroke="{colour}" '
        'stroke-width="1.5"/>',
        *dots,
        f'<text x="{LEFT + 10 + 190 * index}" y="{TOP - 6}" fill="{colour}">'
        f"batch {curve.batch}, context {curve.context}</text>",
    ]
