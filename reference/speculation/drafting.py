"""From a speculative_config to a proposer: what drafts is loaded, held to the target, and given
room.
"""

from pathlib import Path

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l16_speculative_sampling.drafts import check_tokenizers, check_vocabulary
from lessons.l17_tree_speculation.arguments import check_model
from lessons.l17_tree_speculation.heads.heads import KINDS, Heads, MedusaHeads
from lessons.l17_tree_speculation.heads.heads_files import find_heads, load_heads
from lessons.l17_tree_speculation.heads.mtp_files import load_mtp
from lessons.l17_tree_speculation.heads.parallel import ParallelDraft, read_mask_token
from lessons.l17_tree_speculation.trees.tree import Tree, best_tree
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config_json import CheckpointError, read_json
from reference.checkpoints.any_checkpoint import stored_method
from reference.engine.engine_args import EngineArgs
from reference.engine.model import load_model
from reference.engine.model_runner import ModelRunner
from reference.engine.packed import packed_heads
from reference.speculation.head_proposers import EagleProposer, MedusaProposer
from reference.speculation.proposers import (
    DraftModelProposer,
    NgramProposer,
    ParallelDraftProposer,
)
from reference.speculation.protocol import Proposer
from reference.speculation.speculative_config import (
    ALIASES,
    AUTO,
    DRAFT,
    HEADS,
    MEDUSA,
    MTP,
    NGRAM,
    PROBABILISTIC,
    SUFFIX,
    WITHOUT_MODEL,
    SpeculativeConfig,
)
from reference.speculation.suffix_proposer import SuffixProposer
from reference.speculation.tree_guesses import DrawnIfSampled, RankedAsAsked

# what drafts, as it was loaded; None for text alone
Drafter = Decoder | ParallelDraft | Heads | None


def load_drafter(config: SpeculativeConfig | None, target: Decoder, tokenizer) -> Drafter:
    """What drafts, on the target's device and in its dtype. Raises ValueError, in one line, for
    what does not fit the target.
    """
    if config is None or config.method in WITHOUT_MODEL:
        return None
    if config.method == DRAFT:
        if (kind := kind_of_heads(config.model)) is not None:
            refuse(
                "speculative_config method", DRAFT, f"{kind!r} for {config.model}, which is heads"
            )
        check_tokenizers(tokenizer, config.model)
        draft = load_model(config.model, target.device, target.dtype)
        check_vocabulary(target, draft)
        if config.parallel_drafting:
            return ParallelDraft(draft, read_mask_token(config.model))
        return draft
    if config.method != MTP or config.speculative_token_tree is not None:
        check_model(target)
    if config.method == MTP and kind_of_heads(config.model) is None:
        return load_any_mtp(config.model, target)
    heads = load_heads(config.model, target)
    kind = ALIASES.get(heads.kind, heads.kind)  # of both generations of EAGLE
    if kind != config.method:
        refuse("speculative_config method", config.method, f"{kind!r} for {config.model}")
    check_depth(config, heads)
    return heads


def load_any_mtp(name_or_path: str, target: Decoder) -> Heads:
    """The MTP layer of a checkpoint of numbers or of codes. Raises CheckpointError."""
    if stored_method(name_or_path) is None:
        return load_mtp(name_or_path, target)
    from reference.checkpoints.quantized_checkpoint import load_quantized_mtp
    from reference.weights.quantization import multiply_for

    return load_quantized_mtp(name_or_path, target, multiply_for(target.device, target.dtype))


def check_depth(config: SpeculativeConfig, heads: Heads) -> None:
    """Raise ValueError for drafts that are longer than there are heads."""
    if not isinstance(heads, MedusaHeads):
        return
    tree, most = tree_of(config, heads), len(heads.heads)
    name, given = "num_speculative_tokens", config.num_speculative_tokens
    if tree is not None:
        name, given = "speculative_token_tree", config.speculative_token_tree
    if (given if tree is None else tree.depth) > most:
        accepted = f"at most {most} one behind the other, the heads of {config.model}"
        refuse(f"speculative_config {name}", given, accepted)


def tree_of(config: SpeculativeConfig, drafter: Drafter) -> Tree | None:
    """The shape of this engine's drafts; None: chains. Raises ValueError for "auto" with heads of
    which it was never measured how often they are right.
    """
    if config.speculative_token_tree != AUTO:
        return config.tree
    if drafter.acceptance is None:
        refuse(
            "speculative_config speculative_token_tree",
            AUTO,
            f"a list of ranks, because config.json of {config.model} has no 'acceptance'",
        )
    return best_tree(drafter.acceptance, config.num_speculative_tokens + 1)


def kind_of_heads(name_or_path: str) -> str | None:
    """The method for a folder of heads; None for anything else. Raises CheckpointError."""
    try:
        folder = find_heads(name_or_path)
    except CheckpointError:
        return None  # a hub name, perhaps
    kind = read_json(Path(folder, "config.json")).get("kind")
    return ALIASES.get(kind, kind) if kind in tuple(KINDS) else None


def new_proposer(args: EngineArgs, drafter: Drafter, runner: ModelRunner, new_runner) -> Proposer:
    """Who drafts for the target that `runner` runs. new_runner(model, max_model_len): a runner over
    a pool with as many blocks as the target's.
    """
    config, pool = args.speculative_config, runner.pool
    if config.method == NGRAM:
        return NgramProposer(config.prompt_lookup_max, config.prompt_lookup_min)
    if config.method == SUFFIX:
        return SuffixProposer(config.suffix_limits)
    choice = DrawnIfSampled() if config.draft_sample_method == PROBABILISTIC else RankedAsAsked()
    if config.method in HEADS:
        drafter = packed_heads(drafter)
    if config.method == MEDUSA:
        return MedusaProposer(drafter, runner.model, choice)
    if config.method in HEADS:
        room = pool.num_blocks, pool.block_size, runner.max_model_len
        return EagleProposer(drafter, runner.model, choice, *room, args.kv_cache_dtype)
    if drafter.config.state is not None:
        accepted = "one whose layers all attend, because a draft's own states would have to go back"
        refuse("speculative_config model", config.model or drafter.config.model_type, accepted)
    # Behind the draft's own context the target decodes plainly.
    context = min(runner.max_model_len, drafter.config.max_position_embeddings)
    if isinstance(drafter, ParallelDraft):
        return ParallelDraftProposer(new_runner(drafter.model, context), drafter.mask_token)
    return DraftModelProposer(new_runner(drafter, context))
