"""The report of a measurement in Markdown, from its JSON file alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speed import figures as f
from speed import plots
from speed.targets import targets

NONE = "–"
NOTES = {
    "A": """\
Every prompt is continued by all arms in turn. tok/s are medians between quartiles and
include the prefill; *decode* leaves it out. Ratios are medians over prompts of ratios
within a turn, with 95 % bootstrap intervals. The floor is the time to read the weights
once; *share* is floor over time per token (decode where known, else with prefill), so
100 % is all that the memory gives. CPU is the process's own time, all threads together.
""",
    "B": """\
Speed-up over plain decoding by the same engine in the same turn, prefill included: the
mean over a kind's prompts of each prompt's median, then the mean over kinds, with 95 %
bootstrap intervals over prompts. τ is tokens a pass of the target (transformers counts
the prefill as a pass, we do not), α accepted over drafted. *Identical* counts outputs
equal to plain decoding's; beyond float32 a near-tie may fall either way, because rows
of wide and narrow windows round differently.
""",
    "C": """\
Milliseconds on the wall, medians over repeats; each figure is the mean of {passes}
passes or rounds inside one jitted loop, over {context} committed tokens. *Pass* is the
target's pass alone, on a state that stays as it is. T(W)/T(plain) divides by the
cheapest pass (W = {plain}). *Greedy* and *sampled* (temperature 0.8) are whole rounds
with n-gram drafts; *beside* is the share of the round that is not the pass, by the wall
and by CPU time; it grows with τ, the tokens a round, since acceptance looks at the
accepted rows one by one. The floor reads the weights once.
""",
    "D": """\
Seconds from the start of `specjax generate` to the first characters. *Cold* has an
empty compilation cache, *warm* has it filled; in both the weights were read before.
""",
}


def write(data: f.Data, path: Path) -> Path:
    """The report beside the JSON file, with plots if they can be drawn."""
    drawn = plots.draw(data, path.with_suffix(""))
    report = path.with_suffix(".md")
    report.write_text(render(data, path.name, drawn))
    return report


def render(data: f.Data, source: str, drawn: dict[str, str] | None) -> str:
    """The whole text."""
    parts = [_head(data, source), _targets(data)]
    if drawn is None:
        parts.append("No plots: matplotlib is not installed (`pip install .[plots]`).")
    sections = (
        ("A", "Plain decoding", "decode", _plain),
        ("B", "n-gram drafts", "decode", _drafts),
        ("C", "A pass of W rows, and the round around it", "passes", _passes),
        ("D", "Start", "starts", _start),
    )
    for letter, title, key, body in sections:
        if not data.get(key):
            continue
        parts.append(f"## {letter}. {title}")
        parts.append(_note(data, letter))
        if drawn and letter in drawn:
            parts.append(f"![{title}]({drawn[letter]})")
        parts += body(data)
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _note(data: f.Data, letter: str) -> str:
    if letter != "C":
        return NOTES[letter]
    plain = {f.Passes.of(data, dtype).plain_width() for dtype in data["bytes_read"]}
    return NOTES[letter].format(
        passes=data["options"]["passes"],
        context=data["options"]["context"],
        plain=" or ".join(str(width) for width in sorted(plain)),
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned right."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def show(figure: f.Figure | None, digits: int = 2, unit: str = "") -> str:
    """A value with its range."""
    if figure is None:
        return NONE
    v, low, high = (f"{x:.{digits}f}" for x in (figure.value, figure.low, figure.high))
    return f"{v}{unit} ({low}–{high})"


def percent(figure: f.Figure | None) -> str:
    """A share with its range."""
    if figure is None:
        return NONE
    scaled = f.Figure(*(100 * x for x in (figure.value, figure.low, figure.high)))
    return show(scaled, 1, " %")


def _head(data: f.Data, source: str) -> str:
    m = data["machine"]
    threads = data["threads"]
    versions = data["versions"] | (data.get("peers") or {})
    lines = [
        f"# Decoding speed, {threads} thread{'s' if threads > 1 else ''}",
        "",
        f"{data['model']}, on {data['date'][:10]}. Made from `{source}`, which holds "
        "every time that was taken.",
        "",
        f"- Machine: {m['cpu']}, {m['cores']} cores"
        + (" (virtual)" if m["virtual"] else "")
        + f", {m['memory_gib']} GiB; last-level cache {m['last_level_cache']}; "
        + (", ".join(m["flags"]) or "no vector extensions known"),
        f"- Cores used: {data['cores_used']}, by every arm alike",
        f"- Versions: {', '.join(f'{k} {v}' for k, v in versions.items())}",
        f"- Commit {data['commit']}; `{data['command']}`",
        f"- {_load(data)}",
        f"- Memory reads: {_bandwidth(data)}",
    ]
    if "engine" in data:
        e, o = data["engine"], data["options"]
        widths = "; ".join(f"k = {k}: {w}" for k, w in e["widths"].items())
        lines.append(
            f"- Decoding: greedy, batch 1, {o['tokens']} tokens, no end by any id, "
            f"capacity {e['capacity']} (rounded up to 128s), prefill by "
            f"{e['prefill_width']}, {o['rounds_per_call']} rounds a call; {o['ks']} "
            f"n-gram drafts of 2-3 token matches; window widths {widths}; "
            f"{o['per_kind']} prompts a kind, {o['repeats']} turns"
        )
    return "\n".join(lines)


def _load(data: f.Data) -> str:
    usage = data.get("usage")
    if usage is None:
        return "The measurement did not come to its end: what follows is a part of it"
    before, after = (f"{usage[k][0]:.2f}" for k in ("load_before", "load_after"))
    quiet = "" if usage["others"] + usage["stolen"] < 0.03 else " — **not quiet**"
    return (
        f"Load average {before} before, {after} after; of all cores' time "
        f"{usage['ours']:.0%} was ours, {usage['others']:.0%} other programs', "
        f"{usage['stolen']:.0%} kept by the host{quiet}"
    )


def _bandwidth(data: f.Data) -> str:
    """The rates by size."""
    parts = []
    for dtype, size in data["bytes_read"].items():
        rates = [b["rate"] for b in data["bandwidth"] if b["dtype"] == dtype]
        if rates:
            rate = max(rates) / 2**30
            parts.append(f"{size / 1e6:.0f} MB ({dtype} weights) at {rate:.1f} GiB/s")
    return (
        "; ".join(parts) + "; `numpy.max` over a float32 array of that size, in one "
        "process a core, the best moment"
    )


def _targets(data: f.Data) -> str:
    rows = [
        [t.text, t.wanted, t.show(t.wall), t.show(t.cpu), t.verdict]
        for t in targets(data)
    ]
    amx = "amx_bf16" in data["machine"]["flags"]
    said = "has" if amx else "**does not have**"
    head = ["", "wanted", "wall", "CPU time", ""]
    return (
        "## Targets\n\nThey were set for CPUs with bf16 matrix units, which this one "
        f"{said}.\n\n" + table(head, rows)
    )


def _plain(data: f.Data) -> list[str]:
    best = f.best_float32(data)
    head = ["arm", "tok/s", "tok/s decode", "tok/s CPU"]
    head += ["× transformers, wall", "CPU", f"× {best}", "floor ms", "share"]
    rows = []
    for arm in f.arms(data):
        if not f.is_plain(data, arm):
            continue
        dtype = f.dtype_of(arm)
        hf = f"hf-{dtype}"
        wall, decode = (f.rates(data, arm, c) for c in ("wall", "decode"))
        floor = f.floor_ms(data, dtype)
        share = floor and f"{floor * f.known(decode or wall).value / 1e3:.0%}"
        rows.append(
            [
                arm,
                show(wall, 1),
                show(decode, 1),
                show(f.rates(data, arm, "cpu"), 1),
                show(f.ratio(data, arm, hf, "wall")),
                show(f.ratio(data, arm, hf, "cpu")),
                show(f.ratio(data, arm, best, "wall")),
                f"{floor:.1f}" if floor else NONE,
                share or NONE,
            ]
        )
    return [table(head, rows)]


def _drafts(data: f.Data) -> list[str]:
    kinds = f.kinds(data)
    parts = []
    for dtype in data["bytes_read"]:
        arms = [
            arm
            for arm in f.arms(data)
            if f.dtype_of(arm) == dtype and not f.is_plain(data, arm)
        ]
        head = ["arm", *kinds, "mean of kinds", "decode only", "CPU", "identical"]
        rows = [_drafts_row(data, arm, kinds) for arm in arms]
        rows.append(_repetition_row(data, f"specjax-{dtype}", kinds))
        parts += [f"### {dtype}", table(head, rows)]
    return parts


def _drafts_row(data: f.Data, arm: str, kinds: list[str]) -> list[str]:
    cells = []
    for kind in kinds:
        records = f.of(data, arm, kind)
        cell = f"{f.known(f.speed_up(data, arm, 'wall', kind)).value:.2f}×"
        tau, alpha = f.tau(records), f.alpha(records)
        cell += "" if tau is None else f" τ {tau:.2f}"
        cells.append(cell + ("" if alpha is None else f" α {alpha:.2f}"))
    same, whole = f.identical(f.of(data, arm))
    means = (f.speed_up(data, arm, clock) for clock in ("wall", "decode", "cpu"))
    return [arm, *cells, *(show(mean) for mean in means), f"{same} / {whole}"]


def _repetition_row(data: f.Data, arm: str, kinds: list[str]) -> list[str]:
    """How much of plain decoding's text repeats itself: such text is easily drafted."""

    def mean(kind: str | None) -> str:
        values = [r["repetition"] for r in f.of(data, arm, kind)]
        return f"{sum(values) / len(values):.0%}"

    cells = [mean(kind) for kind in kinds]
    name = "*plain output that repeats its own 8-grams*"
    return [name, *cells, mean(None), "", "", ""]


def _passes(data: f.Data) -> list[str]:
    parts = []
    for dtype in data["bytes_read"]:
        timed = f.Passes.of(data, dtype)
        head = ["W", "pass", "T(W)/T(plain)", "by CPU"]
        head += ["greedy", "beside", "by CPU", "τ", "sampled", "beside", "by CPU", "τ"]
        head += ["transformers' T(W)/T(plain)"]
        rows = [_pass_row(data, timed, dtype, width) for width in timed.widths()]
        floor = f.floor_ms(data, dtype)
        name = f"### {dtype}" + (f", floor {floor:.1f} ms" if floor else "")
        parts += [name, table(head, rows)]
    return parts


def _pass_row(data: f.Data, timed: f.Passes, dtype: str, width: int) -> list[str]:
    row = [
        str(width),
        show(timed.time("pass", width), 1),
        show(timed.growth(width)),
        f"{timed.growth(width, 'cpu').value:.2f}",
    ]
    for part in ("greedy", "sampled"):
        if width not in timed.widths(part):
            row += [NONE] * 4
            continue
        row += [
            show(timed.time(part, width), 1),
            percent(timed.overhead(part, width)),
            f"{f.known(timed.overhead(part, width, 'cpu')).value:.1%}",
            f"{timed.committed(part, width):.2f}",
        ]
    peer = f.peer_growth(data, dtype, width)
    return [*row, NONE if peer is None else f"{peer:.2f}"]


def _start(data: f.Data) -> list[str]:
    dtypes = dict.fromkeys(s["dtype"] for s in data["starts"])
    rows = [
        [d, *(show(f.start_seconds(data, d, c), 1) for c in ("cold", "warm"))]
        for d in dtypes
    ]
    return [table(["dtype", "cold", "warm"], rows)]
