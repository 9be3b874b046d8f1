"""What holds for the project as a whole."""

import importlib
import pkgutil
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import pallas_kernels
import specjax

REPOSITORY = Path(__file__).resolve().parent.parent

PUBLIC_PACKAGES = sorted(
    module.name
    for package in (specjax, pallas_kernels)
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    if not module.name.rpartition(".")[2].startswith("_")
)


@pytest.mark.parametrize("name", PUBLIC_PACKAGES)
def test_imports(name):
    importlib.import_module(name)


def test_version_is_the_one_of_the_distribution():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    assert specjax.__version__ == project["project"]["version"]


def test_no_file_names_a_path_of_somebodys_machine():
    # A lone slash before the folder: not the tail of a URL or of a longer path.
    private = re.compile(rb"(?<![\w.~)}\]-])/(?:root|work|home/\w+|Users/\w+)/")
    listing = subprocess.run(
        # The checkout may belong to another user, as it does in containers.
        ["git", "-c", "safe.directory=*", "ls-files", "-z"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    tracked = [REPOSITORY / name for name in listing.stdout.decode().split("\0")]
    files = [path for path in tracked if path.is_file() and not path.is_symlink()]
    assert files
    assert [str(p) for p in files if private.search(p.read_bytes())] == []
