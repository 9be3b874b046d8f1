"""Linear layers whose weights have a type: float32, bfloat16 or int8 with scales.

Weights stand as ``[out, in]`` and products accumulate in float32 (int32 for int8), the
two layouts that decide whether XLA's CPU backend takes its fast path.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, Int8

from pallas_kernels.skinny_matmul.api import ROWS, Weight, skinny_matmul
from specjax.models.axes import EXPERT, Axes
from specjax.models.tiles import in_tiles


class Linear(struct.PyTreeNode):
    """``y = x W^T + b``, with ``W`` float, or int8 with one float32 scale an output.

    An int8 weight meets activations that are rounded to int8 with one scale a row
    (W8A8): that is a numeric scheme of its own, not an approximation to be hidden.
    """

    weight: jax.Array  # [out, in] float32, bfloat16, float64 or int8
    scale: jax.Array | None = None  # [out] float32, int8 weights only
    bias: jax.Array | None = None  # [out]
    axes: Axes = struct.field(pytree_node=False, default=("out", "in"))
    """Logical names of the weight's two axes, for sharding rules."""
    tile: int | None = struct.field(pytree_node=False, default=None)
    """Rows of one product; ``None``: as many as there are."""
    divided: bool = struct.field(pytree_node=False, default=False)
    """Whether several devices hold the weight's parts: then no kernel reads it."""

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.weight.shape[0]

    @property
    def skinny(self) -> bool:
        """Whether a kernel multiplies its tiles.

        It does for the invariant mode: the bits of XLA's products are nobody's promise.
        """
        plain = self.weight.dtype == jnp.bfloat16 and self.scale is None
        return plain and self.tile == ROWS and not self.divided

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        """The product, in float32 (float64 for float64 weights)."""
        rows = x.reshape(-1, x.shape[-1])
        # a decoder brings its windows up to that; a head's single rows come as they are
        missing = max(fewest_rows(self.weight.dtype) - len(rows), 0)
        wide = jnp.pad(rows, [(0, missing), (0, 0)])
        y = in_tiles(self._product, wide, self.tile)[: len(rows)]
        if self.bias is not None:
            y = y + self.bias.astype(y.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _product(self, rows: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        weight, scale = self.weight, self.scale
        if scale is not None:
            return _int8_matmul(rows, weight, scale)
        if self.skinny:
            return skinny_matmul(rows, Weight(weight), invariant=True)
        return matmul(rows.astype(weight.dtype), weight)


class StackedLinear(struct.PyTreeNode):
    """One ``Linear`` an expert, all of one shape and one weight type."""

    weight: jax.Array  # [E, out, in]
    scale: jax.Array | None = None  # [E, out] float32, int8 weights only
    bias: jax.Array | None = None  # [E, out]
    axes: Axes = struct.field(pytree_node=False, default=(EXPERT, "out", "in"))
    """Logical names of the weight's three axes."""

    @property
    def result_dtype(self) -> jnp.dtype:
        """The dtype of products: float32, or float64 for float64 weights."""
        quantised = self.scale is not None
        return jnp.dtype(jnp.float32) if quantised else accumulator(self.weight.dtype)

    def at(self, expert: Int[Array, ""]) -> Linear:
        """The layer of one expert; a number out of range is brought into it."""

        def take(stack: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(stack, expert, keepdims=False)

        return Linear(
            weight=take(self.weight),
            scale=None if self.scale is None else take(self.scale),
            bias=None if self.bias is None else take(self.bias),
            axes=self.axes[1:],
        )

    def each(
        self, x: Float[Array, "S in"], experts: Int[Array, " S"]
    ) -> Float[Array, "S out"]:
        """Every row by a copy of its expert's weights."""
        weight = self.weight.at[experts].get(mode="clip")

        def product(rows: jax.Array) -> jax.Array:
            return jax.lax.dot_general(
                rows,
                weight,
                (((1,), (2,)), ((0,), (0,))),
                preferred_element_type=accumulator(weight.dtype),
            )

        return self._finish(x, experts, product)

    def grouped(
        self, x: Float[Array, "S in"], experts: Int[Array, " S"]
    ) -> Float[Array, "S out"]:
        """Every row by its expert's weights, the rows being sorted by expert.

        Rows of expert ``E``, which does not exist, stand last and give rubbish.
        """
        count = self.weight.shape[0]
        sizes = jnp.zeros((count,), jnp.int32).at[experts].add(1, mode="drop")

        def product(rows: jax.Array) -> jax.Array:
            return jax.lax.ragged_dot_general(
                rows,
                self.weight,
                sizes,
                _BY_GROUP,
                preferred_element_type=accumulator(self.weight.dtype),
            )

        return self._finish(x, experts, product)

    def _finish(
        self,
        x: Float[Array, "S in"],
        experts: Int[Array, " S"],
        product: Callable[[jax.Array], jax.Array],
    ) -> Float[Array, "S out"]:
        """What ``Linear`` does around its product."""

        def own(stack: jax.Array) -> jax.Array:
            return stack.at[experts].get(mode="clip")

        if self.scale is None:
            y = product(x.astype(self.weight.dtype))
        else:
            codes, row_scale = quantize_rows(x.astype(jnp.float32))
            y = product(codes).astype(jnp.float32) * row_scale[:, None]
            y = y * own(self.scale)
        return y if self.bias is None else y + own(self.bias).astype(y.dtype)


_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that products of ``dtype`` are summed and returned in."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype(jnp.int32)
    return np.promote_types(dtype, np.float32)


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x [M, in] @ weight [out, in]^T``, in the accumulator's dtype."""
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        preferred_element_type=accumulator(weight.dtype),
    )


def _int8_matmul(
    x: Float[Array, "M in"], weight: Int8[Array, "out in"], scale: Float[Array, " out"]
) -> Float[Array, "M out"]:
    codes, row_scale = quantize_rows(x.astype(jnp.float32))
    products = matmul(codes, weight).astype(jnp.float32)
    return products * row_scale[:, None] * scale


def quantize_rows(
    x: Float[Array, "rows n"],
) -> tuple[Int8[Array, "rows n"], Float[Array, " rows"]]:
    """Symmetric int8 with one scale a row: ``x`` is about ``codes * scale``.

    A row of zeros gets scale 1; a row that is not finite gets a scale that is not, so
    it flags itself and no other row.
    """
    largest = jnp.max(jnp.abs(x), axis=-1)
    # a maximum may drop a NaN; a sum of zeros times the row does not
    scale = jnp.where(largest > 0, largest / 127.0, 1.0) + jnp.sum(x * 0.0, axis=-1)
    codes = jnp.round(x / scale[:, None])
    codes = jnp.where(jnp.isfinite(codes), codes, 0.0)
    return jnp.clip(codes, -127, 127).astype(jnp.int8), scale


# Compiled: step by step, a small model took ten seconds to load instead of three.
@jax.jit
def quantize_linear(linear: Linear) -> Linear:
    """The same layer with int8 weights."""
    codes, scale = quantize_rows(linear.weight.astype(jnp.float32))
    return linear.replace(weight=codes, scale=scale)


def fewest_rows(dtype: jnp.dtype) -> int:
    """Rows below which XLA's CPU backend leaves its fast products for this dtype.

    It sends a one-row bfloat16 or int8 product to a matrix-vector routine that first
    converts the whole weight. Measured with jaxlib 0.10: three rows, and two.
    """
    if dtype == jnp.bfloat16:
        return 3
    if dtype == jnp.int8:
        return 2
    return 1
