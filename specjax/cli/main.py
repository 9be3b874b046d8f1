"""``specjax``: subcommands, exit codes, errors."""

from __future__ import annotations

import functools
import io
import operator
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import tyro

import specjax
from specjax.cli.bench import Bench
from specjax.cli.cache import turn_on_compilation_cache
from specjax.cli.calibrate import Calibrate
from specjax.cli.console import print_error
from specjax.cli.convert import Convert
from specjax.cli.demo import Demo
from specjax.cli.drafters import Drafters
from specjax.cli.errors import USER_ERRORS
from specjax.cli.generate import Generate
from specjax.cli.inspect import Inspect
from specjax.cli.parity import Parity
from specjax.cli.simulate import Simulate
from specjax.cli.zoo import Zoo

OK, FAILED, BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141

COMMANDS: dict[str, tuple[type, str]] = {
    "demo": (Demo, "Decode a real model with and without drafts, and compare"),
    "generate": (Generate, "Continue one prompt"),
    "bench": (Bench, "Compare drafters and k on many prompts"),
    "calibrate": (Calibrate, "Time the parts of a round, and say which drafts pay"),
    "convert": (Convert, "Keep a model as it is decoded with, converted once"),
    "drafters": (Drafters, "List what can draft, and what each is made from"),
    "inspect": (Inspect, "Say what is in a checkpoint"),
    "parity": (Parity, "Compare checkpoints with reference outputs"),
    "simulate": (Simulate, "Play rounds with coins, and compare with the law"),
    "zoo": (Zoo, "List and fetch models by name"),
}
"""Subcommands by name, with what the list of them says."""

DESCRIPTION = """\
Speculative decoding in JAX: draft, verify, accept, commit.

Start with `specjax demo`. Every subcommand has its own --help, with an example.
Exit status: 0 fine, 1 tokens or numbers that should be equal are not, 2 bad input."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a terminal that cannot show a character must not end the run
        sys.stdout.reconfigure(errors="replace")
    if arguments == ["--version"]:
        print(f"specjax {specjax.__version__}, jax {metadata.version('jax')}")
        return OK
    try:
        command = parse(arguments)
        turn_on_compilation_cache()
        return command.run(arguments)
    except SystemExit as stop:  # the parser's: 0 after --help, else 2
        return stop.code if isinstance(stop.code, int) else BAD_INPUT
    except BrokenPipeError:
        # the reader has gone (`| head`); Python's last flush must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except USER_ERRORS as error:
        if "--debug" in arguments:
            traceback.print_exc()
        print_error(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED


def parse(arguments: Sequence[str]) -> Any:
    """The subcommand's options; exits with a message if they cannot be parsed."""
    # a given description would stand in a subcommand's own help as well
    listing = not arguments or arguments[0] not in COMMANDS
    forms: list[Any] = [
        Annotated[
            command,
            tyro.conf.subcommand(name, description=summary if listing else None),
        ]
        for name, (command, summary) in COMMANDS.items()
    ]
    return tyro.cli(
        functools.reduce(operator.or_, forms),
        prog="specjax",
        description=DESCRIPTION,
        args=arguments,
        config=(
            tyro.conf.OmitArgPrefixes,
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.FlagCreatePairsOff,
        ),
    )
