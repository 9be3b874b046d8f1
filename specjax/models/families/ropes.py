"""Rotary settings, in the old spelling and in the new.

Old: ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor`` beside each other.
New: all of them in ``rope_parameters``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from specjax.models.families.fields import Fields
from specjax.models.rope import (
    LinearScaling,
    Llama3Scaling,
    Rope,
    Scaling,
    YarnScaling,
)


@dataclasses.dataclass(frozen=True)
class RopeSettings:
    """Rotary positions before it is known how wide a head is."""

    theta: float
    partial: float
    """The share of a head's dimensions that turn."""
    scaling: Scaling | None
    score_factor: float = 1.0
    """What DeepSeek's models multiply the scale of the scores by."""

    def rope(self, head_dim: int) -> Rope:
        """For heads of this size."""
        dims = int(head_dim * self.partial)
        return Rope(theta=self.theta, dims=dims, scaling=self.scaling)


def rope_settings(
    fields: Fields, *, theta: float = 10000.0, partial: float = 1.0
) -> RopeSettings:
    """From either spelling; ``theta`` and ``partial`` are the family's defaults."""
    new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    theta = fields.number("rope_theta", theta)
    partial = fields.number("partial_rotary_factor", partial)
    told = new if new is not None else old or {}
    name = "rope_parameters" if new is not None else "rope_scaling"
    return _settings(fields, Fields(told, name), theta, partial, name)


def rope_of_layer(
    fields: Fields, kind: str, *, theta: float, old_theta: str, scaled: bool
) -> RopeSettings:
    """Of one kind of layer, where kinds differ.

    New: ``rope_parameters`` holds an object a kind. Old: ``old_theta`` names the field
    of this kind's theta, and ``rope_scaling`` is meant for kinds that are ``scaled``.
    """
    new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    theta = fields.number(old_theta, theta)
    if new is not None and any(isinstance(part, Mapping) for part in new.values()):
        where = f"rope_parameters.{kind}"
        return _settings(fields, Fields(new.get(kind) or {}, where), theta, 1.0, where)
    told = {} if not scaled else new if new is not None else old or {}
    return _settings(fields, Fields(told, "rope_scaling"), theta, 1.0, "rope_scaling")


def _settings(
    fields: Fields, told: Fields, theta: float, partial: float, name: str
) -> RopeSettings:
    theta = told.number("rope_theta", theta)
    partial = told.number("partial_rotary_factor", partial)
    if partial > 1:
        raise fields.error("partial_rotary_factor", f"{partial} is more than 1")
    # positions of a text are equal on the three axes of images
    told.ignore("mrope_section", "mrope_interleaved")
    kind = told.text("rope_type|type", "default")
    factor = 1.0
    scaling: Scaling | None = None
    match kind:
        case "default" | "mrope":
            told.ignore("factor", "original_max_position_embeddings")
        case "linear":
            scaling = LinearScaling(told.number("factor"))
        case "llama3":
            scaling = Llama3Scaling(
                factor=told.number("factor"),
                low_freq_factor=told.number("low_freq_factor"),
                high_freq_factor=told.number("high_freq_factor"),
                original_max_position_embeddings=told.integer(
                    "original_max_position_embeddings"
                ),
            )
        case "yarn":
            scaling, factor = _yarn(fields, told)
        case _:
            known = "default, linear, llama3, yarn"
            raise fields.error(name, f"rope type {kind!r} is not implemented ({known})")
    told.finish()
    return RopeSettings(theta, partial, scaling, factor)


def _yarn(fields: Fields, told: Fields) -> tuple[YarnScaling, float]:
    """The scaling, and the factor of the scores (DeepSeek's ``mscale_all_dim``)."""
    most = fields.integer("max_position_embeddings", 2048)
    original = told.integer(
        "original_max_position_embeddings",
        fields.integer("original_max_position_embeddings|initial_context_length", most),
    )
    factor = told.number("factor", most / original)
    scale = told.optional_number("mscale")
    scale_all = told.optional_number("mscale_all_dim")
    if scale is not None and scale_all is not None:
        attention = _magnitude(factor, scale) / _magnitude(factor, scale_all)
    else:
        attention = _magnitude(factor, 1.0)
    scaling = YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=told.number("beta_fast", 32.0),
        beta_slow=told.number("beta_slow", 1.0),
        truncate=told.boolean("truncate", True),
        attention_factor=told.number("attention_factor", attention),
    )
    magnitude = 1.0 if scale_all is None else _magnitude(factor, scale_all)
    return scaling, magnitude**2


def _magnitude(factor: float, scale: float) -> float:
    """YaRN's growth of scores with the stretch."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def interleaved_rows(heads: int, head_dim: int, start: int, dims: int) -> list[int]:
    """Rows of a projection, put so that pairs ``(2i, 2i+1)`` become ``(i, i+dims/2)``.

    Of every head the dimensions ``start .. start + dims - 1`` turn; the rest stay where
    they are. Queries and keys are both put so, and their products are the same.
    """
    turned = [*range(start, start + dims, 2), *range(start + 1, start + dims, 2)]
    order = [*range(start), *turned, *range(start + dims, head_dim)]
    return [head * head_dim + row for head in range(heads) for row in order]
