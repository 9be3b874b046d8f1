"""The report's plots; matplotlib is imported only when they are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speed import figures as f

OURS, OTHERS = "#1f6fb4", "#9a9a9a"
COLOURS = {"float32": "#1f6fb4", "bfloat16": "#d1670a", "int8": "#3a8a4d"}


def draw(data: f.Data, stem: Path) -> dict[str, str] | None:
    """File names by section; ``None`` without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    drawings = {}
    if data.get("decode"):
        drawings |= {"A": ("plain", _plain)}
        if any(not f.is_plain(data, arm) for arm in f.arms(data)):
            drawings |= {"B": ("drafts", _drafts)}
    if data.get("passes"):
        drawings |= {"C": ("passes", _passes)}
    names = {}
    for section, (name, drawing) in drawings.items():
        path = stem.parent / f"{stem.name}-{name}.png"
        _save(drawing(data), path)
        names[section] = path.name
    return names


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    # no date or version inside: the same data give the same file
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def _plain(data: f.Data) -> Any:
    """Bars: tokens a second of plain decoding, and the floor of each weight type."""
    import matplotlib.pyplot as plt

    arms = [arm for arm in f.arms(data) if f.is_plain(data, arm)]
    arms.sort(key=lambda arm: list(COLOURS).index(f.dtype_of(arm)))
    figure, axes = plt.subplots(figsize=(7.5, 0.5 * len(arms) + 1.2))
    for place, arm in enumerate(arms):
        rate = f.rates(data, arm, "wall")
        assert rate is not None
        spread = [[rate.value - rate.low], [rate.high - rate.value]]
        colour = OURS if arm.startswith("specjax") else OTHERS
        axes.barh(place, rate.value, color=colour, xerr=spread, height=0.7)
        floor = f.floor_ms(data, f.dtype_of(arm))
        if floor:
            axes.plot([1e3 / floor] * 2, [place - 0.4, place + 0.4], "k-", lw=2)
    axes.set_yticks(range(len(arms)), arms)
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s, prefill included (black: the memory's floor)")
    axes.grid(axis="x", alpha=0.3)
    return figure


def _drafts(data: f.Data) -> Any:
    """Bars: speed-up by kind, one panel a weight type."""
    import matplotlib.pyplot as plt

    kinds = f.kinds(data)
    dtypes = list(data["bytes_read"])
    figure, panels = plt.subplots(
        len(dtypes), 1, figsize=(8, 2.6 * len(dtypes)), sharex=True, squeeze=False
    )
    for axes, dtype in zip(panels[:, 0], dtypes, strict=True):
        arms = [
            arm
            for arm in f.arms(data)
            if f.dtype_of(arm) == dtype and not f.is_plain(data, arm)
        ]
        for number, arm in enumerate(arms):
            values = [
                f.known(f.speed_up(data, arm, "wall", kind)) for kind in (*kinds, None)
            ]
            _bars(axes, values, number, len(arms), arm)
        axes.axhline(1, color="black", lw=1)
        axes.set_xticks(range(len(kinds) + 1), [*kinds, "mean"])
        axes.set_ylabel(f"{dtype}: × plain")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _bars(axes: Any, values: list[f.Figure], number: int, of: int, arm: str) -> None:
    width = 0.8 / of
    spread = [
        [value.value - value.low for value in values],
        [value.high - value.value for value in values],
    ]
    axes.bar(
        [place - 0.4 + (number + 0.5) * width for place in range(len(values))],
        [value.value for value in values],
        width,
        yerr=spread,
        label=arm,
        color=None if arm.startswith("specjax") else OTHERS,
        error_kw={"lw": 0.8},
    )


def _passes(data: f.Data) -> Any:
    """Curves: milliseconds of a pass by its rows, beside the floor; and the ratio."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    for dtype, colour in COLOURS.items():
        timed = f.Passes.of(data, dtype)
        widths = timed.widths()
        if not widths:
            continue
        times = [timed.time("pass", width) for width in widths]
        left.plot(widths, [t.value for t in times], "o-", color=colour, label=dtype)
        left.fill_between(
            widths,
            [t.low for t in times],
            [t.high for t in times],
            color=colour,
            alpha=0.2,
        )
        floor = f.floor_ms(data, dtype)
        if floor:
            left.axhline(floor, color=colour, ls=":", lw=1)
        growth = [timed.growth(width).value for width in widths]
        right.plot(widths, growth, "o-", color=colour, label=f"specjax {dtype}")
        peer = [f.peer_growth(data, dtype, width) for width in widths]
        if all(value is not None for value in peer):
            right.plot(widths, peer, "x--", color=colour, label=f"transformers {dtype}")
    left.set_ylabel("ms a pass (dotted: reading the weights)")
    left.set_ylim(bottom=0)
    right.set_ylabel("T(W) / T(plain)")
    for axes in (left, right):
        axes.set_xlabel("W, rows of the window")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure
