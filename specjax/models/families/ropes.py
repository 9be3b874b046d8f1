"""Rotary settings, in the old spelling and in the new.

Old: ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor`` beside each other.
New: all of them in ``rope_parameters``. Where both are there they must agree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from specjax.models.families.fields import Fields
from specjax.models.rope import (
    LinearScaling,
    Llama3Scaling,
    Rope,
    Scaling,
    YarnScaling,
)

THETA = 10000.0
KINDS = ("full_attention", "sliding_attention")
"""Of layers that may turn differently."""


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


def rope_settings(fields: Fields, *, partial: bool = False) -> RopeSettings:
    """From either spelling. ``partial``: heads of the family may turn in part."""
    new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    theta = fields.number("rope_theta", THETA)
    share = fields.number("partial_rotary_factor", 1.0)
    settings = _settings(
        fields, old if new is None else new, _name(new), theta=theta, share=share
    )
    if new is not None and old is not None:
        _same_scaling(fields, old, settings, theta, share)
    _same(fields, "rope_theta", theta, settings.theta, _name(new))
    _same(fields, "partial_rotary_factor", share, settings.partial, _name(new))
    if settings.partial > 1 or (settings.partial < 1 and not partial):
        most = "more than 1" if partial else "not implemented here (only 1 is)"
        raise fields.error("partial_rotary_factor", f"{settings.partial} is {most}")
    return settings


def rope_of_layer(
    fields: Fields, kind: str, *, old_theta: str, scaled: bool
) -> RopeSettings:
    """Of one kind of layer, where kinds differ.

    New: ``rope_parameters`` holds an object a kind. Old: ``old_theta`` names the field
    of this kind's theta, and ``rope_scaling`` is meant for kinds that are ``scaled``.
    """
    new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    theta = fields.number(old_theta)
    if new is not None and set(new) & set(KINDS):
        told, name = new.get(kind), f"rope_parameters.{kind}"
        strangers = sorted(set(new) - set(KINDS))
        if strangers:
            raise fields.error("rope_parameters", f"not implemented: {strangers}")
    else:
        told, name = (old if new is None else new) if scaled else None, _name(new)
    settings = _settings(fields, told, name, theta=theta, share=1.0)
    _same(fields, old_theta, theta, settings.theta, name)
    if new is not None and old is not None and scaled:
        _same_scaling(fields, old, settings, theta, 1.0)
    if settings.partial != 1:
        raise fields.error("partial_rotary_factor", "only 1 is implemented")
    return settings


def _name(new: Mapping[str, Any] | None) -> str:
    return "rope_scaling" if new is None else "rope_parameters"


def _same(fields: Fields, name: str, outer: float, inner: float, where: str) -> None:
    """Refuse a field beside the object that says otherwise."""
    if fields.has(name) and outer != inner:
        raise fields.error(name, f"{outer} contradicts {where}: {inner}")


def _same_scaling(
    fields: Fields,
    old: Mapping[str, Any],
    settings: RopeSettings,
    theta: float,
    share: float,
) -> None:
    """Refuse ``rope_scaling`` beside ``rope_parameters`` that say something else."""
    other = _settings(fields, old, "rope_scaling", theta=theta, share=share)
    told = (settings.scaling, settings.score_factor)
    if told != (other.scaling, other.score_factor):
        raise fields.error(
            "rope_scaling",
            f"contradicts rope_parameters: {other.scaling} and {settings.scaling}",
        )


def _settings(
    fields: Fields,
    raw: Mapping[str, Any] | None,
    name: str,
    *,
    theta: float,
    share: float,
) -> RopeSettings:
    """``theta`` and ``share`` are what stands beside the object."""
    if raw is not None and not isinstance(raw, Mapping):
        raise fields.error(name, f"an object is needed, found {raw!r}")
    told = Fields(raw or {}, name)
    theta = told.number("rope_theta", theta)
    partial = told.number("partial_rotary_factor", share)
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
                original_max_position_embeddings=_original_length(fields, told),
            )
        case "yarn":
            scaling, factor = _yarn(fields, told)
        case _:
            known = "default, linear, llama3, yarn"
            raise fields.error(name, f"rope type {kind!r} is not implemented ({known})")
    told.finish()
    return RopeSettings(theta, partial, scaling, factor)


def _original_length(fields: Fields, told: Fields) -> int:
    """The context that the model was first trained for: said within, beside, or not."""
    name = "original_max_position_embeddings"
    within = told.optional_integer(name)
    beside = fields.optional_integer(f"{name}|initial_context_length")
    if within is not None and beside is not None and within != beside:
        raise fields.error(name, f"contradicts itself: {beside} and, within, {within}")
    return within or beside or fields.integer("max_position_embeddings")


def _yarn(fields: Fields, told: Fields) -> tuple[YarnScaling, float]:
    """The scaling, and the factor of the scores (DeepSeek's ``mscale_all_dim``)."""
    original = _original_length(fields, told)
    factor = told.number("factor", fields.integer("max_position_embeddings") / original)
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
    dims += dims % 2  # an odd number is rounded up, as where they turn
    turned = [*range(start, start + dims, 2), *range(start + 1, start + dims, 2)]
    order = [*range(start), *turned, *range(start + dims, head_dim)]
    return [head * head_dim + row for head in range(heads) for row in order]
