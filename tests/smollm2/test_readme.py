"""The README's Python example runs as it stands."""

import re
from pathlib import Path

import pytest

from specjax.checkpoints import CheckpointError, zoo

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.timeout(600)
def test_the_python_example_continues_its_prompt(capsys):
    try:
        zoo.fetch("smollm2-135m")
    except CheckpointError as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    assert "Paris" in capsys.readouterr().out
