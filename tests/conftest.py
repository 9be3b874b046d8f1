"""Settings for every test.

Helpers that tests share live in specjax.testing; tests do not import each other.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import flax.struct
import hypothesis
import jax
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# Set through jax.config, not the environment: a plugin may have imported jax before.
# What the environment says comes first (the Makefile sets the same values).
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_numpy_dtype_promotion", "strict")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    jax.config.update("jax_compilation_cache_dir", str(REPOSITORY / ".cache/jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# Device 0 stays the default; the others cost nothing until a test uses them.
if "XLA_FLAGS" not in os.environ:
    jax.config.update("jax_num_cpu_devices", 8)

# JAX rebuilds pytrees with shapes, numpy arrays or None in place of their arrays, so
# their constructors cannot be held to the annotations. Functions are.
flax.struct.PyTreeNode.__no_type_check__ = True

# No deadline: the first example of a test compiles. In CI the examples are always
# the same, so that a red run means a change and not a draw.
hypothesis.settings.register_profile(
    "specjax",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)
hypothesis.settings.load_profile("specjax")


@pytest.fixture
def cpu_devices() -> list[jax.Device]:
    """Eight virtual CPU devices, for tests of sharding."""
    devices = jax.devices("cpu")
    assert len(devices) == 8, "unset XLA_FLAGS, or let it ask for 8 host devices"
    return devices


@pytest.fixture(autouse=True)
def _needs_accelerator(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("device") and jax.default_backend() == "cpu":
        pytest.skip("needs an accelerator (see JAX_PLATFORMS)")


QUICK = ("checkpoints", "cli", "drafters", "experiments", "prompts", "testing", "zoo")
"""Folders whose tests compile without XLA's expensive passes, which takes half the
time. Where a program's bits are the subject (models, state, decoding, acceptance,
conformance, kernels) it is compiled as everywhere; by `make test-full` all are."""

_quick = pytest.StashKey[bool]()


@pytest.fixture(autouse=True, scope="module")
def _compiled_quickly(request: pytest.FixtureRequest) -> None:
    folder = request.path.relative_to(REPOSITORY / "tests").parts[0]
    sampled = "not full" in request.config.getoption("markexpr")
    quick = sampled and folder in QUICK
    if request.config.stash.get(_quick, None) != quick:
        jax.clear_caches()  # no test shall compare programs of both kinds
        jax.config.update("jax_disable_most_optimizations", quick)
        request.config.stash[_quick] = quick


MOST_MAPPINGS = 40_000
"""Of memory, in one process: Linux allows 65 530 (vm.max_map_count), a compiled engine
takes some 900, and a process that asks for more crashes inside XLA."""


@pytest.fixture(autouse=True)
def _few_mappings() -> Iterator[None]:
    yield
    try:
        with Path("/proc/self/maps").open("rb") as maps:
            count = sum(1 for _ in maps)
    except OSError:
        return  # no Linux
    if count > MOST_MAPPINGS:
        jax.clear_caches()
