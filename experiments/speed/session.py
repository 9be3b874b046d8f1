"""The measurement: all sections, one after another, in one process on its own cores."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specjax.analysis import records
from specjax.checkpoints import Checkpoint, prompt_ids
from specjax.cli.cache import turn_on_compilation_cache
from specjax.cli.console import steps
from specjax.prompts import KINDS, bundled_prompts
from speed import bandwidth, decode, machine, ours, passes, peers, starts

Save = Callable[[], None]
Step = Callable[[str], None]
KEPT = (
    "dtypes",
    "per_kind",
    "tokens",
    "repeats",
    "ks",
    "rounds_per_call",
    "settle",
    "context",
    "pass_repeats",
    "passes",
    "warm_starts",
)


def measure(
    options: Any, data: dict[str, Any], widths: tuple[int, ...], save: Save
) -> None:
    """Fill ``data``, and have it saved whenever something was added."""
    turn_on_compilation_cache()
    usage = machine.Usage()
    data["options"] = {name: getattr(options, name) for name in KEPT}
    data["versions"] = records.versions()
    data["commit"] = records.commit()
    checkpoints = ours.load_all(options.model, options.dtypes)
    data["model"] = any_of(checkpoints).source
    data["bytes_read"] = {
        dtype: ours.bytes_read(loaded.decoder) for dtype, loaded in checkpoints.items()
    }
    data["bandwidth"] = []
    with steps(_count_steps(options, widths)) as step:
        _bandwidth(data, step)
        save()
        if "decode" in options.sections:
            _decode(options, data, checkpoints, step, save)
        if "passes" in options.sections:
            _passes(options, data, checkpoints, widths, step, save)
        if "start" in options.sections:
            _starts(options, data, step, save)
        _bandwidth(data, step)
    data["usage"] = usage.report()
    save()


def _count_steps(options: Any, widths: tuple[int, ...]) -> int:
    prompts = options.per_kind * len(KINDS)
    arms = len(options.dtypes) * (1 + len(options.ks))
    if options.peers_python is not None:
        arms += len(peers.ARMS)
    sampled = sum(width in passes.SAMPLED_WIDTHS for width in widths)
    timed = len(options.dtypes) * (2 * len(widths) + sampled)
    each = {
        # each arm is compiled or loaded, then warmed up
        "decode": 2 * arms + options.repeats * prompts,
        "passes": timed + options.pass_repeats,
        "start": len(starts.DTYPES) * (1 + options.warm_starts),
    }
    bandwidths = 2 * len(options.dtypes)
    return bandwidths + sum(each[section] for section in options.sections)


def _bandwidth(data: dict[str, Any], step: Step) -> None:
    for dtype, size in data["bytes_read"].items():
        step(f"reading as much memory as {dtype} weights take")
        found = bandwidth.measure(size, data["cores_used"])
        data["bandwidth"].append({"dtype": dtype, **found})


def _decode(
    options: Any,
    data: dict[str, Any],
    checkpoints: dict[str, Checkpoint],
    step: Step,
    save: Save,
) -> None:
    texts = read_texts(any_of(checkpoints), options.per_kind)
    capacity = max(len(text.ids) for text in texts) + options.tokens
    mine = ours.make_arms(
        checkpoints,
        options.ks,
        capacity=capacity,
        rounds_per_call=options.rounds_per_call,
    )
    data["engine"] = {
        "capacity": capacity,
        "prefill_width": mine[0].engine.options.prefill_width,
        "widths": {str(a.k): list(a.engine.round_options.widths) for a in mine},
    }
    worker = start_peers(options, data)
    data["decode"] = []
    try:
        arms = decode.prepare(mine, worker, texts, step)
        found = decode.trials(
            arms,
            texts,
            tokens=options.tokens,
            repeats=options.repeats,
            settle=options.settle,
            step=step,
        )
        for trial in found:
            data["decode"] += trial
            save()
    finally:
        if worker is not None:
            worker.close()


def _passes(
    options: Any,
    data: dict[str, Any],
    checkpoints: dict[str, Checkpoint],
    widths: tuple[int, ...],
    step: Step,
    save: Save,
) -> None:
    decoders = {dtype: loaded.decoder for dtype, loaded in checkpoints.items()}
    texts = read_texts(any_of(checkpoints), None)
    ids = [token for text in texts for token in text.ids][: options.context + 1]
    parts = passes.parts(decoders, ids, widths, options.passes)
    data["passes"], data["peer_passes"] = [], []
    worker = start_peers(options, data)
    try:
        for turn in passes.measure(parts, options.pass_repeats, step):
            data["passes"] += turn
            if worker is not None:
                data["peer_passes"] += peer_passes(worker, widths, options.context)
            save()
    finally:
        if worker is not None:
            worker.close()


def _starts(options: Any, data: dict[str, Any], step: Step, save: Save) -> None:
    data["starts"] = []
    for start in starts.measure(options.model, options.warm_starts, step):
        data["starts"].append(start)
        save()


def any_of(checkpoints: dict[str, Checkpoint]) -> Checkpoint:
    """What they have in common can be asked of the first."""
    return next(iter(checkpoints.values()))


def read_texts(checkpoint: Checkpoint, per_kind: int | None) -> list[decode.Text]:
    """The bundled prompts in tokens."""
    assert checkpoint.tokenizer is not None
    return [
        decode.Text(prompt.id, prompt.kind, prompt_ids(prompt, checkpoint.tokenizer))
        for prompt in bundled_prompts(KINDS, per_kind)
    ]


def start_peers(options: Any, data: dict[str, Any]) -> peers.Peers | None:
    """A worker, if there is an environment for it; its versions are kept."""
    if options.peers_python is None:
        return None
    log = Path(tempfile.gettempdir()) / "decode_speed_peers.log"
    worker = peers.Peers(
        options.peers_python, options.peers_models, options.threads, log
    )
    data["peers"] = worker.ask(op="info")["versions"]
    return worker


def peer_passes(
    worker: peers.Peers, widths: tuple[int, ...], context: int
) -> list[dict[str, Any]]:
    """transformers' passes, timed by its own worker: one median a width."""
    found = []
    for dtype in ("float32", "bfloat16"):
        answer = worker.ask(
            op="step_times",
            arm=f"hf-{dtype}",
            context=context,
            rows=list(widths),
            repeats=3,
        )
        found += [
            {"dtype": dtype, "width": int(width), "wall": times["median"]}
            for width, times in answer["rows"].items()
        ]
    return found
