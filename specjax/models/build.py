"""From named tensors to parameters: what a family file builds a decoder with.

A family file asks for tensors by their checkpoint names; where they come from (a
safetensors file, a GGUF file, a random generator) is the reader's business, and what
they are stored as is the weight type's.
"""

from __future__ import annotations

import enum
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from specjax.models.axes import EMBED, VOCAB, Axes
from specjax.models.linear import Linear, quantize_linear
from specjax.models.norms import RMSNorm


class WeightType(enum.StrEnum):
    """What linear layers are stored as; the residual stream stays in float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    FLOAT64 = "float64"  # tests; needs jax_enable_x64

    @property
    def dense(self) -> jnp.dtype:
        """The dtype of embeddings, and of linear layers that are not quantised."""
        if self is WeightType.INT8:
            return jnp.dtype(jnp.bfloat16)
        return jnp.dtype(self.value)

    @property
    def vector(self) -> jnp.dtype:
        """The dtype of norm gains, gates and biases: never less than float32."""
        return np.promote_types(self.dense, np.float32)


@runtime_checkable
class TensorReader(Protocol):
    """A source of named tensors."""

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor, of just this shape, in its stored float type.

        Raises an error that names the tensor and the file if it is missing, has another
        shape or is not of a float type.
        """
        ...


class Builder:
    """Reads tensors and makes the layers of a decoder out of them."""

    def __init__(self, reader: TensorReader, weights: WeightType) -> None:
        self._reader = reader
        self._weights = weights

    def vector(self, name: str, *shape: int) -> jnp.ndarray:
        """Gains, gates, biases, convolution taps: float32 whatever the weight type."""
        return jnp.asarray(self._reader.read(name, shape), self._weights.vector)

    def norm(
        self, name: str, size: int, eps: float, *, centred: float = 0.0
    ) -> RMSNorm:
        """A norm from ``name`` + ``.weight``, which is stored less ``centred``."""
        return RMSNorm(weight=self.vector(f"{name}.weight", size) + centred, eps=eps)

    def linear(
        self, name: str, outputs: int, inputs: int, *, bias: bool, axes: Axes
    ) -> Linear:
        """A linear layer from ``name`` + ``.weight`` (and ``.bias``)."""
        weight = jnp.asarray(self._reader.read(f"{name}.weight", (outputs, inputs)))
        offset = self.vector(f"{name}.bias", outputs) if bias else None
        return self._typed(Linear(weight=weight, bias=offset, axes=axes))

    def embedding(self, name: str, vocab: int, size: int) -> jnp.ndarray:
        """The embedding matrix ``[vocab, size]``."""
        matrix = self._reader.read(f"{name}.weight", (vocab, size))
        return jnp.asarray(matrix, self._weights.dense)

    def tied_head(self, embedding: jnp.ndarray) -> Linear:
        """The output head that is the embedding matrix (its own copy under int8)."""
        return self._typed(Linear(weight=embedding, axes=(VOCAB, EMBED)))

    def _typed(self, linear: Linear) -> Linear:
        if self._weights is WeightType.INT8:
            return quantize_linear(
                linear.replace(weight=jnp.asarray(linear.weight, jnp.float32))
            )
        return linear.replace(weight=jnp.asarray(linear.weight, self._weights.dense))
