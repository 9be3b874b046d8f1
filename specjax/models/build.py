"""From named tensors to parameters: what a family file builds a decoder with.

A family file asks for tensors by their checkpoint names; where they come from (a
safetensors file, a GGUF file, a random generator) is the reader's business, and what
they are stored as is the weight type's.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.axes import EMBED, EXPERT, LATENT, MLP, VOCAB, Axes
from specjax.models.config import MoEConfig
from specjax.models.feedforward.experts import Experts
from specjax.models.feedforward.router import Router
from specjax.models.linear import Linear, StackedLinear, quantize_linear
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
    def stored(self) -> jnp.dtype:
        """The dtype of the weights of linear layers."""
        return jnp.dtype(jnp.int8) if self is WeightType.INT8 else self.dense

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

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name: for layouts that vary."""
        ...


class Builder:
    """Reads tensors and makes the layers of a decoder out of them."""

    def __init__(self, reader: TensorReader, weights: WeightType) -> None:
        self._reader = reader
        self._weights = weights

    def read(self, name: str, *shape: int) -> np.ndarray:
        """A tensor as it is stored: of a float type of numpy or ml_dtypes.

        For layouts that are taken apart or put in another order before they become
        layers (``linear_from``). It may be a view of a file: do not write to it.
        """
        return self._reader.read(name, shape)

    def integers(self, name: str, *shape: int) -> np.ndarray:
        """A tensor of ids or truth values, in its stored type.

        Raises ``ValueError`` if the source has none of that kind.
        """
        read = getattr(self._reader, "integers", None)
        if read is None:
            raise ValueError(f"tensor {name!r}: this source holds no integers")
        return read(name, shape)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name: for layouts that vary."""
        return self._reader.has(name)

    def dense(self, array: np.ndarray) -> jnp.ndarray:
        """An array in memory, of the weights' dtype (bfloat16 under int8)."""
        return jnp.asarray(array, self._weights.dense)

    def vector(self, name: str, *shape: int) -> jnp.ndarray:
        """Gains, gates, biases, routers: float32 whatever the weight type."""
        return jnp.asarray(self.read(name, *shape), self._weights.vector)

    def norm(
        self, name: str, size: int, eps: float, *, centred: float = 0.0
    ) -> RMSNorm:
        """A norm from ``name`` + ``.weight``, which is stored less ``centred``."""
        return RMSNorm(weight=self.vector(f"{name}.weight", size) + centred, eps=eps)

    def linear(
        self, name: str, outputs: int, inputs: int, *, bias: bool, axes: Axes
    ) -> Linear:
        """A linear layer from ``name`` + ``.weight`` (and ``.bias``)."""
        weight = self.read(f"{name}.weight", outputs, inputs)
        offset = self.read(f"{name}.bias", outputs) if bias else None
        return self.linear_from(weight, offset, axes)

    def linear_from(
        self, weight: np.ndarray, bias: np.ndarray | None, axes: Axes
    ) -> Linear:
        """A linear layer from ``weight [out, in]`` and ``bias [out]`` in memory."""
        offset = None if bias is None else jnp.asarray(bias, self._weights.vector)
        return self._typed(Linear(weight=jnp.asarray(weight), bias=offset, axes=axes))

    def embedding(self, name: str, vocab: int, size: int) -> jnp.ndarray:
        """The embedding matrix ``[vocab, size]``."""
        matrix = self.read(f"{name}.weight", vocab, size)
        return jnp.asarray(matrix, self._weights.dense)

    def tied_head(self, embedding: jnp.ndarray) -> Linear:
        """The output head that is the embedding matrix (its own copy under int8)."""
        return self._typed(Linear(weight=embedding, axes=(VOCAB, EMBED)))

    def router(
        self,
        config: MoEConfig,
        hidden: int,
        weight: str,
        *,
        bias: str | None = None,
        selection_bias: str | None = None,
    ) -> Router:
        """A router, from the full names of its tensors.

        Raises ``ValueError`` where the names are not those that the config asks for.
        """
        wanted = config.router.bias, config.router.selection_bias
        if wanted != (bias is not None, selection_bias is not None):
            raise ValueError(
                f"{weight}: the config says (bias, selection_bias) = {wanted}, and the "
                f"names are {bias!r} and {selection_bias!r}"
            )
        experts = config.num_experts

        def offset(name: str | None) -> jnp.ndarray | None:
            return None if name is None else self.vector(name, experts)

        return Router(
            config=config.router,
            weight=self.vector(weight, experts, hidden),
            bias=offset(bias),
            selection_bias=offset(selection_bias),
        )

    def experts_from_parts(
        self,
        config: MoEConfig,
        hidden: int,
        *,
        gate: Sequence[str] | None,
        up: Sequence[str],
        down: Sequence[str],
    ) -> Experts:
        """Experts from one name an expert and layer, as for ``linear``.

        Each is followed by ``.weight`` and is ``[size, hidden]``, of ``down``
        ``[hidden, size]``; ``hidden`` gives way to ``config.latent_dim`` where that is
        set. ``gate`` is ``None`` for plain experts.
        """
        inner = config.latent_dim or hidden
        _check_names(config, {"gate": gate, "up": up, "down": down})

        def wide() -> Iterator[np.ndarray]:
            for names in zip(*([up] if gate is None else [gate, up]), strict=True):
                parts = [self.read(f"{n}.weight", config.size, inner) for n in names]
                yield np.concatenate(parts)

        narrow = (self.read(f"{name}.weight", inner, config.size) for name in down)
        return self.experts(config, hidden, wide(), narrow)

    def experts_fused(
        self,
        config: MoEConfig,
        hidden: int,
        *,
        up: str,
        down: str,
        up_bias: str | None = None,
        down_bias: str | None = None,
        transposed: bool = False,
        interleaved: bool = False,
    ) -> Experts:
        """Experts from tensors that hold all of them, by their full names.

        ``up [E, 2 size, hidden]`` has the gate's rows first (``[E, size, hidden]`` of
        plain experts), or, ``interleaved``, gate and up by turns; ``down`` is
        ``[E, hidden, size]``. ``transposed``: the last two axes change places. Biases
        are ``[E, 2 size]`` and ``[E, hidden]``. ``hidden`` gives way to
        ``config.latent_dim`` where that is set.
        """
        experts, wide = config.num_experts, config.wide
        inner = config.latent_dim or hidden

        def stacked(name: str, outputs: int, inputs: int) -> np.ndarray:
            if transposed:
                return self.read(name, experts, inputs, outputs).swapaxes(1, 2)
            return self.read(name, experts, outputs, inputs)

        def halves(rows: np.ndarray) -> np.ndarray:
            return np.concatenate([rows[0::2], rows[1::2]]) if interleaved else rows

        def offset(name: str | None, outputs: int) -> np.ndarray | None:
            return None if name is None else self.read(name, experts, outputs)

        up_offset = offset(up_bias, wide)
        return self.experts(
            config,
            hidden,
            map(halves, stacked(up, wide, inner)),
            stacked(down, inner, config.size),
            up_bias=up_offset if up_offset is None else halves(up_offset.T).T,
            down_bias=offset(down_bias, inner),
        )

    def experts(
        self,
        config: MoEConfig,
        hidden: int,
        up: Iterable[np.ndarray],
        down: Iterable[np.ndarray],
        *,
        up_bias: np.ndarray | None = None,
        down_bias: np.ndarray | None = None,
    ) -> Experts:
        """Experts from their weights in memory, taken one by one.

        ``up`` gives ``[2 size, hidden]``, the gate's rows first (``[size, hidden]`` of
        plain experts), ``down`` ``[hidden, size]``; ``up_bias`` is ``[E, 2 size]`` and
        ``down_bias`` ``[E, hidden]``. ``hidden`` gives way to ``config.latent_dim``
        where that is set.
        """
        inner = config.latent_dim or hidden
        axis = EMBED if config.latent_dim is None else LATENT
        experts, wide, size = config.num_experts, config.wide, config.size
        return Experts(
            config=config,
            up=self._stack(
                (experts, wide, inner), up, up_bias, axes=(EXPERT, MLP, axis)
            ),
            down=self._stack(
                (experts, inner, size), down, down_bias, axes=(EXPERT, axis, MLP)
            ),
        )

    def _stack(
        self,
        shape: tuple[int, int, int],
        layers: Iterable[np.ndarray],
        bias: np.ndarray | None,
        *,
        axes: Axes,
    ) -> StackedLinear:
        """Each layer is written to its place at once: there is no second whole copy."""
        weight = _aligned_empty(shape, self._weights.stored)
        scale = np.empty(shape[:2], np.float32)
        for place, layer in zip(range(shape[0]), layers, strict=True):
            if layer.shape != shape[1:]:
                raise ValueError(
                    f"expert {place}: a weight of {layer.shape}, not {shape[1:]}"
                )
            if self._weights is WeightType.INT8:
                typed = self._typed(Linear(weight=jnp.asarray(layer)))
                weight[place], scale[place] = typed.weight, typed.scale
            else:
                weight[place] = layer
        int8 = self._weights is WeightType.INT8
        return StackedLinear(
            # (``jnp.asarray`` would copy)
            weight=jax.device_put(weight, may_alias=True),
            scale=jnp.asarray(scale) if int8 else None,
            bias=None if bias is None else jnp.asarray(bias, self._weights.vector),
            axes=axes,
        )

    def _typed(self, linear: Linear) -> Linear:
        if self._weights is WeightType.INT8:
            return quantize_linear(
                linear.replace(weight=jnp.asarray(linear.weight, jnp.float32))
            )
        return linear.replace(weight=jnp.asarray(linear.weight, self._weights.dense))


def _aligned_empty(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    """An array that JAX's CPU backend adopts as it is instead of copying it."""
    alignment = 64
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)


def _check_names(config: MoEConfig, parts: dict[str, Sequence[str] | None]) -> None:
    if (parts["gate"] is None) != (config.kind == "plain"):
        has = "no gate" if config.kind == "plain" else "a gate"
        raise ValueError(f"{config.kind} experts have {has}")
    for part, names in parts.items():
        if names is not None and len(names) != config.num_experts:
            raise ValueError(
                f"{config.num_experts} experts, and {len(names)} names of {part}"
            )
