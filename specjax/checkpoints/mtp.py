"""Loading the layers of a target's own checkpoint that predict further tokens."""

from __future__ import annotations

import re

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.load import Checkpoint
from specjax.checkpoints.quantised import open_reader
from specjax.drafters.mtp import MTPHead, MTPModules
from specjax.drafters.mtp_shared_choice import SharedChoiceHead
from specjax.models.build import Builder, WeightType
from specjax.models.families import FAMILIES

COPIES = r".*\.(embed_tokens|shared_head\.head)\.weight"
"""Tensors of these layers that repeat the target's own."""


def load_mtp(
    target: Checkpoint, dtype: WeightType = WeightType.FLOAT32
) -> MTPHead | MTPModules:
    """The MTP head of a target that is already loaded, or its several modules.

    The target's folder is opened again; every tensor of the layers must be of use. The
    embedding and the output head are the target's, by reference: copies that a file
    holds are not read.

    Raises ``CheckpointError`` if there is no MTP, saying what was looked for, and as
    ``load`` does.
    """
    family = FAMILIES[target.raw_config["model_type"]]
    config, path = target.config, target.path
    if family.mtp is None:
        known = ", ".join(sorted(n for n, each in FAMILIES.items() if each.mtp))
        raise CheckpointError(
            f"{path}: models of the family {config.family!r} have no MTP layers (these "
            f"have: {known}); choose another drafter"
        )
    if config.heads_ahead == 0:
        raise CheckpointError(
            f"{path}: the configuration says that there are no MTP layers "
            "(num_nextn_predict_layers or mtp_num_hidden_layers is 0, or not there)"
        )
    if not path.is_dir() or not list(path.glob("*.safetensors*")):
        raise CheckpointError(
            f"{path} is no folder of safetensors files, which MTP layers are read from;"
            " load the target from the folder that it was published in"
        )
    reader = open_reader(path, target.raw_config)
    patterns = "|".join(family.left_to_mtp(config))
    if not any(re.fullmatch(patterns, name) for name in reader.infos):
        raise CheckpointError(
            f"{path} holds no MTP layers: there is no tensor whose name matches "
            f"{patterns!r}; they were left out when it was converted"
        )
    try:
        modules = family.mtp(config, Builder(reader, WeightType(dtype)))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from error
    # all else was read, or left alone, when the target was loaded
    reader.finish((rf"(?!({patterns})\Z).*", COPIES))
    assert config.ahead is not None
    kind = SharedChoiceHead if config.ahead.shares_choice else MTPHead
    ends = target.decoder.ends
    heads = tuple(kind(ends=ends, module=module) for module in modules)
    return heads[0] if len(heads) == 1 else MTPModules(heads)
