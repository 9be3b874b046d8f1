"""``--help`` teaches."""

import pytest

COMMANDS = (
    *("demo", "generate", "bench", "calibrate", "inspect", "parity", "simulate"),
    "zoo",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_subcommand_has_an_example(run, command):
    result = run(command, "--help")
    assert result.status == 0
    assert f"Example: `specjax {command}" in result.out


def test_the_list_of_subcommands(run):
    result = run("--help")
    assert result.status == 0
    for name in COMMANDS:
        assert f"• {name}" in result.out
    assert "Exit status" in result.out


def test_choices_and_defaults_are_shown(run):
    text = run("generate", "--help").out
    for part in (
        "NAME[:WHERE]",
        "specjax drafters",
        "float32|bfloat16|int8",
        "greedy|coupled",
    ):
        assert part in text
    assert "(default: 128)" in text
