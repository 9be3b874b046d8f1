"""Compiled programs are kept in the user's cache, unless something else is set up."""

import jax
import pytest

from specjax.cli.cache import turn_on_compilation_cache

NAMES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
    before = {name: getattr(jax.config, name) for name in NAMES}
    for name in NAMES:
        monkeypatch.delenv(name.upper(), raising=False)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_users_cache_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    jax.config.update(NAMES[0], None)
    jax.config.update(NAMES[1], 1.0)
    turn_on_compilation_cache()
    assert [getattr(jax.config, name) for name in NAMES] == [
        str(tmp_path / "jax"),
        0,
        -1,
    ]


def test_what_is_set_up_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv(NAMES[1].upper(), "3")
    jax.config.update(NAMES[0], str(tmp_path / "mine"))
    jax.config.update(NAMES[1], 3.0)
    turn_on_compilation_cache()
    assert getattr(jax.config, NAMES[0]) == str(tmp_path / "mine")
    assert getattr(jax.config, NAMES[1]) == 3.0
