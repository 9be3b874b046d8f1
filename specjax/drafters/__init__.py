"""Drafters, one a file, and the registry that names them.

A new drafter is one file here and one line in ``DRAFTERS``; from outside the package,
``register``. Where things are:

- looked up: ``ngram``, ``suffix`` (with ``suffix_counts``, ``suffix_drafts``), and
  ``past_outputs``, a store that may be shared;
- a model of its own: ``draft_model``, ``draft_tree``, ``dynamic_tree`` (EAGLE-2's, for
  heads too), ``model_state``, and ``vocabulary`` for models of other tokens;
- heads over (hidden state, next token) pairs: ``features`` is what they have in common,
  ``head_chain`` drafts with them, ``eagle`` and ``mtp`` (``mtp_modules``,
  ``mtp_shared_choice``), ``hydra`` are the networks; ``medusa`` needs no memory;
- heads that fill in blocks: ``block``;
- drafters of drafters: ``cascade``, ``merged``, ``capped``, and ``simulated``, which
  accepts as often as it is told;
- what several share: ``chain`` grows a chain, ``drawing`` picks tokens, ``length``
  stops early, ``layouts`` reads what is published.
"""

from __future__ import annotations

from collections.abc import Callable

from specjax.decoding.interfaces import Drafter
from specjax.decoding.trees import full
from specjax.drafters.block import BlockChain, BlockTree
from specjax.drafters.block.slots import SlotHead
from specjax.drafters.cascade import Cascade
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.draft_tree import DraftTree, HeadTree
from specjax.drafters.dynamic_tree import HeadDynamicTree, ModelDynamicTree
from specjax.drafters.eagle.parallel import ParallelChain, ParallelHead
from specjax.drafters.features import FeatureHead
from specjax.drafters.head_chain import HeadChain
from specjax.drafters.hydra import HydraHeads
from specjax.drafters.length import Confidence
from specjax.drafters.medusa import MedusaChain, MedusaHeads, MedusaTree
from specjax.drafters.merged import MergedTree
from specjax.drafters.mtp import MTPHead, MTPModules
from specjax.drafters.mtp_modules import mtp_drafter, mtp_tree
from specjax.drafters.ngram import NGram
from specjax.drafters.null import NullDrafter
from specjax.drafters.registry import DrafterEntry, DrafterOptions, Source, needed
from specjax.drafters.suffix import Suffix

__all__ = [
    "DRAFTERS",
    "BlockChain",
    "BlockTree",
    "DraftModel",
    "DraftTree",
    "DrafterEntry",
    "DrafterOptions",
    "HeadChain",
    "HeadDynamicTree",
    "MedusaChain",
    "MedusaTree",
    "ModelDynamicTree",
    "NGram",
    "NullDrafter",
    "ParallelChain",
    "Source",
    "Suffix",
    "register",
]


def _model_chain(options: DrafterOptions) -> Drafter:
    model = needed(options.model, Source.MODEL)
    return DraftModel(model, options.k, pick=options.pick, length=_length(options))


def _length(options: DrafterOptions) -> Confidence | None:
    return Confidence(options.least) if options.least > 0 else None


def _draft_tree(options: DrafterOptions) -> Drafter:
    model = needed(options.model, Source.MODEL)
    return DraftTree(model, full(options.branching), options.siblings)


def _dynamic_tree(options: DrafterOptions) -> Drafter:
    model = needed(options.model, Source.MODEL)
    return ModelDynamicTree(model, options.top_k, options.k, options.nodes)


def _chain(
    make: Callable[..., Drafter],
    kind: type | tuple[type, ...],
    source: Source = Source.PART,
) -> Callable[[DrafterOptions], Drafter]:
    """How a chain of ``k`` drafts is made from a part of this kind."""

    def build(options: DrafterOptions) -> Drafter:
        part = needed(options.part, source, kind)
        return make(part, options.k, pick=options.pick, length=_length(options))

    return build


def _medusa_tree(options: DrafterOptions) -> Drafter:
    part = needed(options.part, Source.PART, MedusaHeads)
    return MedusaTree(part, full(options.branching))


def _hydra_tree(options: DrafterOptions) -> Drafter:
    heads = needed(options.part, Source.PART, HydraHeads)
    return HeadTree(heads, full(options.branching))


def _head_dynamic_tree(options: DrafterOptions) -> Drafter:
    head = needed(options.part, Source.PART, FeatureHead)
    return HeadDynamicTree(head, options.top_k, options.k, options.nodes)


def _mtp_tree(options: DrafterOptions) -> Drafter:
    part = needed(options.part, Source.TARGET, (MTPHead, MTPModules))
    return mtp_tree(part, options.top_k, options.k, options.nodes)


def _block_tree(options: DrafterOptions) -> Drafter:
    part = needed(options.part, Source.PART, SlotHead)
    return BlockTree(part, options.nodes)


_head_chain = _chain(HeadChain, FeatureHead)
_block_chain = _chain(BlockChain, SlotHead)


def _lookup_tree(options: DrafterOptions) -> Drafter:
    ngram = NGram(options.k, options.min_n, options.max_n)
    return MergedTree((Suffix(k=options.k, tree=True), ngram))


def _suffix_or_model(options: DrafterOptions) -> Drafter:
    return Cascade((Suffix(k=options.k), _model_chain(options)))


DRAFTERS: dict[str, DrafterEntry] = {
    "none": DrafterEntry(
        lambda o: NullDrafter(), "nothing: plain decoding", drafts=False
    ),
    "ngram": DrafterEntry(
        lambda o: NGram(o.k, o.min_n, o.max_n),
        "what followed the same words before",
        reference="Saxena 2023; 2304.04487",
    ),
    "suffix": DrafterEntry(
        lambda o: Suffix(k=o.k),
        "what most often followed the same words before",
        reference="2411.04975",
    ),
    "suffix-tree": DrafterEntry(
        lambda o: Suffix(k=o.k, tree=True),
        "the same, as a tree of k nodes",
        reference="2411.04975",
    ),
    "lookup-tree": DrafterEntry(
        _lookup_tree, "suffix-tree and ngram, as one tree of at most 2 k nodes"
    ),
    "suffix-or-model": DrafterEntry(
        _suffix_or_model,
        "suffix where it finds something, else a smaller model",
        source=Source.MODEL,
        uses=frozenset({"pick", "least"}),
    ),
    "draft-model": DrafterEntry(
        _model_chain,
        "a smaller model, best with the same tokenizer",
        source=Source.MODEL,
        uses=frozenset({"pick", "least"}),
        q="one-hot or drawn",
        reference="2211.17192; 2302.01318",
    ),
    "draft-tree": DrafterEntry(
        _draft_tree,
        "a tree of fixed shape from a smaller model",
        takes_k=False,
        source=Source.MODEL,
        uses=frozenset({"branching", "siblings"}),
        q="one-hot, i.i.d. or without replacement",
        reference="2305.09781",
    ),
    "medusa": DrafterEntry(
        _chain(MedusaChain, MedusaHeads),
        "heads on the last hidden state, one a draft",
        source=Source.PART,
        uses=frozenset({"pick", "least"}),
        q="one-hot or drawn",
        reference="2401.10774",
    ),
    "medusa-tree": DrafterEntry(
        _medusa_tree,
        "the heads' best tokens, as a tree of fixed shape",
        takes_k=False,
        source=Source.PART,
        parts=("medusa",),
        uses=frozenset({"branching"}),
        reference="2401.10774",
    ),
    "hydra": DrafterEntry(
        _chain(HeadChain, HydraHeads),
        "such heads, each told what was drafted before it",
        source=Source.PART,
        uses=frozenset({"pick", "least"}),
        q="one-hot or drawn",
        reference="2402.05109",
    ),
    "hydra-tree": DrafterEntry(
        _hydra_tree,
        "the best tokens of such heads, as a tree of fixed shape",
        takes_k=False,
        source=Source.PART,
        parts=("hydra",),
        uses=frozenset({"branching"}),
        reference="2402.05109",
    ),
    "dynamic-tree": DrafterEntry(
        _dynamic_tree,
        "a tree of k levels from a smaller model, wide where it is unsure",
        source=Source.MODEL,
        uses=frozenset({"top_k", "nodes"}),
        reference="2406.16858",
    ),
    "eagle1": DrafterEntry(
        _head_chain,
        "a head that predicts the target's next hidden state",
        source=Source.PART,
        uses=frozenset({"pick", "least"}),
        q="one-hot or drawn",
        reference="2401.15077",
    ),
    "eagle2": DrafterEntry(
        _head_dynamic_tree,
        "a tree of k levels from EAGLE's or EAGLE-3's head, wide where it is unsure",
        source=Source.PART,
        parts=("eagle1", "eagle3"),
        uses=frozenset({"top_k", "nodes"}),
        reference="2406.16858",
    ),
    "eagle3": DrafterEntry(
        _head_chain,
        "a head on hidden states of several layers",
        source=Source.PART,
        uses=frozenset({"pick", "least"}),
        q="one-hot or drawn",
        reference="2503.01840; 2605.09992",
    ),
    "p-eagle": DrafterEntry(
        _chain(ParallelChain, ParallelHead),
        "EAGLE-3's head with a slot for every draft, all read in one pass",
        source=Source.PART,
        uses=frozenset({"pick", "least"}),
        q="one-hot or drawn",
        reference="2602.01469",
    ),
    "mtp": DrafterEntry(
        _chain(mtp_drafter, (MTPHead, MTPModules), Source.TARGET),
        "the target's own layers that predict further tokens",
        source=Source.TARGET,
        uses=frozenset({"pick", "least"}),
        q="one-hot or drawn",
        reference="2412.19437",
    ),
    "mtp-tree": DrafterEntry(
        _mtp_tree,
        "a tree of k levels from one such layer, wide where it is unsure",
        source=Source.TARGET,
        uses=frozenset({"top_k", "nodes"}),
        reference="2412.19437; 2406.16858",
    ),
    "dflash": DrafterEntry(
        _block_chain,
        "a block filled in at once from hidden states of several layers",
        source=Source.PART,
        uses=frozenset({"pick", "least"}),
        q="one-hot or drawn",
        reference="2602.06036",
    ),
    "dflash2": DrafterEntry(
        _block_chain,
        "such a block, and a walk over the best tokens of its slots",
        source=Source.PART,
        uses=frozenset({"pick", "least"}),
        q="one-hot or drawn",
        reference="inco.ai 2026",
    ),
    "dspark": DrafterEntry(
        _block_chain,
        "such a block, corrected by the tokens before and judged by a head",
        source=Source.PART,
        uses=frozenset({"pick", "least"}),
        q="one-hot or drawn",
        reference="2607.05147",
    ),
    "ddtree": DrafterEntry(
        _block_tree,
        "the best paths through such a block, as a tree",
        takes_k=False,
        source=Source.PART,
        parts=("dflash", "dflash2", "dspark"),
        uses=frozenset({"nodes"}),
        reference="2604.12989",
    ),
}
"""By name."""


def register(
    name: str, build: Callable[[DrafterOptions], Drafter], summary: str = ""
) -> None:
    """Add a drafter to ``DRAFTERS``, as if it stood there.

    Raises ``ValueError`` if the name is taken: a drafter must not change its meaning.
    """
    if name in DRAFTERS:
        raise ValueError(f"a drafter named {name!r} is there already: choose another")
    DRAFTERS[name] = DrafterEntry(build, summary)
