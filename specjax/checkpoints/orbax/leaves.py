"""The leaves of a pytree by name, and what is expected of each.

A tree is kept as a flat dictionary: names such as ``target.blocks[3].k`` stand in the
files and in the errors, and what orbax makes of nested types never matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.errors import CheckpointError


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves under their paths, such as ``target.blocks[3].k``."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {_name(path): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise CheckpointError("two leaves of the tree have one name: rename a field")
    return named


def with_leaves(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """The same tree with other leaves in it, by name."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[_name(path)], tree)


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and place of a leaf; without a place of its own, none."""
    free = isinstance(leaf, jax.Array) and not leaf.committed
    place = None if free else getattr(leaf, "sharding", None)
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jax.ShapeDtypeStruct(jnp.shape(leaf), dtype, sharding=place)


def target(leaf: jax.ShapeDtypeStruct) -> Any:
    """What tells orbax how to restore a leaf.

    A leaf without a place comes to the host: what orbax puts on a device is bound to
    it, and programs are compiled anew for an array that is bound to a device.
    """
    if leaf.sharding is not None:
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=default)
    return np.empty(leaf.shape, leaf.dtype)


def unbound(restored: Any, leaf: jax.ShapeDtypeStruct, *, alias: bool) -> jax.Array:
    """A restored leaf as an array that is bound to no device unless ``leaf`` is.

    With ``alias`` its memory may be the host's, which must then not be donated.
    """
    if leaf.sharding is not None:
        return restored
    if isinstance(restored, jax.Array):
        data = jnp.array(np.asarray(jax.random.key_data(restored)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(restored))
    if alias:
        return jax.device_put(restored, may_alias=True)
    return jnp.array(restored)


def kinds_of(leaves: Mapping[str, Any]) -> dict[str, str]:
    """What each leaf is: ``"float32[2,64]"``."""
    return {name: _kind(abstract(leaf)) for name, leaf in leaves.items()}


def check_leaves(
    found: Mapping[str, str], expected: Mapping[str, str], where: str
) -> None:
    """Raise ``CheckpointError`` unless names, shapes and dtypes are the same."""
    names = [*expected, *(name for name in found if name not in expected)]
    wrong = [
        f"{name}: found {found.get(name, 'nothing')}, "
        f"expected {expected.get(name, 'nothing')}"
        for name in names
        if found.get(name) != expected.get(name)
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{where} does not fit: {'; '.join(wrong[:3])}{more}")


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path).removeprefix(".")


def _kind(leaf: jax.ShapeDtypeStruct) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
