"""Wrong answers to lesson 17's exercises: the museum's slips, and the hint for whoever made them."""

from functools import partial

import torch

from lessons.l02_naive_attention.sampling import draw
from lessons.l17_tree_speculation.naive import verify_tree
from lessons.l17_tree_speculation.trees.tree import Tree
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 17.1 a tree in numbers


def slipped_numbers(
    parents, held, *, positions="depth", slots="order", sees="path", itself=True, emits="one more"
):
    """predict_tree with some slips, spelled by switches."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    order = [held + node for node in range(len(parents))]
    by_depth = [held + depth for depth in depths]
    seen = {
        "path": depths,
        "all in front": list(range(len(parents))),
        "siblings": [sum(d <= depth for d in depths) - 1 for depth in depths],
        "parent": [min(depth, 1) for depth in depths],
    }[sees]
    entries = sum(held + count + itself for count in seen)
    most = {"one more": max(depths) + 1, "depth": max(depths), "nodes": len(parents)}[emits]
    return (
        order if positions == "order" else by_depth,
        by_depth if slots == "depth" else order,
        entries,
        most,
    )


def without_the_cache(parents, held):
    """The mask of the new nodes alone."""
    positions, slots, entries, most = slipped_numbers(parents, held)
    return positions, slots, entries - held * len(parents), most


for name, slip, hint in [
    (
        "positions_by_order",
        dict(positions="order"),
        "Two siblings stand at the same place of two texts: a position is held plus the depth.",
    ),
    (
        "slots_by_depth",
        dict(slots="depth"),
        "Siblings would overwrite each other's K and V: each node needs a slot of its own.",
    ),
    (
        "a_causal_mask",
        dict(sees="all in front"),
        "A node sees its way from the root, not every node in front of it: siblings are strangers.",
    ),
    (
        "siblings_see_each_other",
        dict(sees="siblings"),
        "Nodes of one depth belong to different texts, so none sees another.",
    ),
    (
        "only_the_parent_is_seen",
        dict(sees="parent"),
        "The whole way counts, not just its last step: grandparents are seen, too.",
    ),
    ("nodes_do_not_see_themselves", dict(itself=False), "A query sees its own key."),
    (
        "no_token_behind_the_path",
        dict(emits="depth"),
        "Behind the last node that stays the target samples one more.",
    ),
    (
        "emits_every_node",
        dict(emits="nodes"),
        "One path stays, never all of a tree: count along the longest way.",
    ),
]:
    answers.wrong("17.1", hint, name)(partial(slipped_numbers, **slip))
answers.wrong("17.1", "The mask has columns for what the cache held, and all of them are True.")(
    without_the_cache
)


@answers.alternative("17.1")
def by_walking_up(parents, held):
    def depth(node):
        return 0 if parents[node] < 0 else 1 + depth(parents[node])

    depths = [depth(node) for node in range(len(parents))]
    return (
        [held + d for d in depths],
        [*range(held, held + len(parents))],
        len(parents) * (held + 1) + sum(depths),
        1 + max(depths),
    )


@answers.alternative("17.1")
def by_a_mask(parents, held):
    sees = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if node:
            sees[node] |= sees[parent]
    counts = sees.sum(1).tolist()
    slots = [held + node for node in range(len(parents))]
    entries = len(parents) * held + int(sees.sum())
    return [held + count - 1 for count in counts], slots, entries, max(counts)


# ---------------------------------------------------------------- 17.2 Medusa's heads


def slipped_heads(
    hidden,
    weights,
    biases,
    lm_head,
    tokens,
    *,
    ahead=2,
    module="own",
    block="residual",
    end="cut",
    stacked=False,
):
    """medusa with some slips, spelled by switches."""
    guesses, losses, x = [], [], hidden
    for i in range(len(weights)):
        mine = 0 if module == "shared" else i
        start = x if stacked else hidden
        inner = start @ weights[mine].T
        if block != "no bias":
            inner = inner + biases[mine]
        bent = {
            "gelu": torch.nn.functional.gelu,
            "relu": torch.relu,
            "linear": lambda x: x,
        }.get(block, torch.nn.functional.silu)(inner)
        later = bent if block == "no residual" else start + bent
        x = later
        logits = later @ lm_head.T
        guesses.append(logits.argmax(-1))
        step = 2 if ahead == "same" else i + ahead
        labels = tokens.roll(-step) if end == "rolled" else tokens[step:]
        rows = logits if end == "rolled" else logits[: len(labels)]
        losses.append(torch.nn.functional.cross_entropy(rows, labels))
    return torch.stack(guesses), torch.stack(losses)


for name, slip, hint in [
    (
        "head_i_off_by_one",
        dict(ahead=1),
        "The target's own head has t + 1 already. Head 0 is one beyond it: t + 2.",
    ),
    (
        "every_head_learns_the_same_token",
        dict(ahead="same"),
        "Head i predicts i + 1 tokens beyond the target's head, so each has labels of its own.",
    ),
    (
        "three_beyond",
        dict(ahead=3),
        "Head 0 predicts one token beyond the target's own head, which predicts t + 1.",
    ),
    (
        "one_module_for_all_heads",
        dict(module="shared"),
        "All heads have the same weights: `[layer] * n` is one layer, n times.",
    ),
    (
        "no_residual",
        dict(block="no residual"),
        "The block adds to its input: x + SiLU(W x + b).",
    ),
    ("no_bias", dict(block="no bias"), "The bias belongs inside of the SiLU: W x + b."),
    ("relu_for_silu", dict(block="relu"), "It is SiLU: x · sigmoid(x)."),
    (
        "heads_behind_each_other",
        dict(stacked=True),
        "Every head starts from the target's hidden state, not from the head in front of it.",
    ),
    (
        "rolled_labels",
        dict(end="rolled"),
        "The last positions have no token that far ahead: leave them out, do not wrap around.",
    ),
]:
    answers.wrong("17.2", hint, name)(partial(slipped_heads, **slip))


@answers.alternative("17.2")
def all_heads_together(hidden, weights, biases, lm_head, tokens):
    inner = torch.einsum("kij,tj->kti", weights, hidden) + biases[:, None]
    logits = (hidden + inner * torch.sigmoid(inner)) @ lm_head.T
    logp = logits.log_softmax(-1)
    losses = []
    for i in range(len(weights)):
        count = len(tokens) - i - 2
        losses.append(-logp[i, torch.arange(count), tokens[i + 2 :]].mean())
    return logits.argmax(-1), torch.stack(losses)


@answers.alternative("17.2")
def with_modules(hidden, weights, biases, lm_head, tokens):
    guesses, losses = [], []
    for ahead, (weight, bias) in enumerate(zip(weights, biases), 2):
        x = hidden + torch.nn.functional.silu(torch.nn.functional.linear(hidden, weight, bias))
        logits = torch.nn.functional.linear(x, lm_head)
        guesses.append(logits.max(-1).indices)
        rows = logits[: len(tokens) - ahead].log_softmax(-1)
        losses.append(torch.nn.functional.nll_loss(rows, tokens[ahead:]))
    return torch.stack(guesses), torch.stack(losses)


# ---------------------------------------------------------------- 17.3 a verification


def slipped_walk(
    p, q, parents, tokens, u, *, rest="residual", share="without", ends="rest", goes="first"
):
    """verify_drawn with some slips, spelled by switches."""
    emitted, node = [], 0
    while True:
        over, left = p[node], q[node]
        stays = None
        children = [i for i, parent in enumerate(parents) if parent == node]
        for child in children:
            token = tokens[child]
            if u[child, 0] * left[token] < over[token]:
                stays = child
                if goes == "first":
                    break
                continue
            if rest != "never":
                over = (over - left).clamp(min=0)
            if rest not in ("never", "sums to less"):
                over = over / over.sum()
            if share in ("without", "sums to less"):
                left = torch.where(torch.arange(len(left)) == token, 0, left)
            if share == "without":
                left = left / left.sum().clamp(min=1e-300)
            if goes == "first only":
                break
        if stays is None:
            weights = {
                "rest": over,
                "target": p[node],
                "one residual": (p[node] - q[node]).clamp(min=0) if children else p[node],
                "root": p[0] if emitted else over,
                "last row": p[-1],
                "residual at a leaf": (
                    over if children else (p[node] - q[node].nan_to_num(nan=0.15)).clamp(min=0)
                ),
            }[ends]
            return [*emitted, int(draw(weights, u[node, 1:]))]
        emitted.append(tokens[stays])
        node = stays


def as_it_was(p, q, parents, tokens, u):
    """The code of the exercise."""
    emitted, node = [], 0
    while True:
        over, share = p[node], q[node]
        children = [i for i, parent in enumerate(parents) if parent == node]
        stays = None
        for child in children:
            if u[child, 0] * share[tokens[child]] < over[tokens[child]]:
                stays = child
            over = (over - share).clamp(min=0)
        if stays is None:
            weights = p[node] if len(children) > 1 else over
            return [*emitted, int(draw(weights, u[node, 1:]))]
        emitted.append(tokens[stays])
        node = stays


answers.wrong("17.3", "Bugs are left. Work the docstring's example by hand first.")(as_it_was)
for name, slip, hint in [
    (
        "residual_not_updated",
        dict(rest="never"),
        "The second child is held against what the first one left of p: max(0, p - q).",
    ),
    (
        "residual_sums_to_less",
        dict(rest="sums to less"),
        "The residual must be a distribution again before the next child is held against it.",
    ),
    (
        "q_not_updated",
        dict(share="never"),
        "The second child was drawn from q without the first: take it out, and make q sum to 1.",
    ),
    (
        "q_sums_to_less",
        dict(share="sums to less"),
        "Without the first child q no longer sums to 1, and the second was drawn as if it did.",
    ),
    (
        "drawn_from_p",
        dict(ends="target"),
        "What the children were asked for is covered already: draw from what p has become.",
    ),
    (
        "one_residual_for_all_siblings",
        dict(ends="one residual"),
        "Each rejected child takes its share from p: the residual of the first is not the last.",
    ),
    (
        "bonus_from_the_root",
        dict(ends="root"),
        "The token behind a path comes from the row of its last node.",
    ),
    (
        "bonus_from_the_last_node",
        dict(ends="last row"),
        "The last node of the tree is not the last of the path.",
    ),
    (
        "residual_at_a_leaf",
        dict(ends="residual at a leaf"),
        "Behind a leaf nothing was drawn, so nothing is subtracted: rows of q there hold anything.",
    ),
    (
        "the_last_that_stays",
        dict(goes="last"),
        "The first child that stays ends the question: its siblings are not asked.",
    ),
    (
        "only_the_first_child_is_asked",
        dict(goes="first only"),
        "If the first child goes, its siblings are asked in turn.",
    ),
]:
    answers.wrong("17.3", hint, name)(partial(slipped_walk, **slip))


@answers.wrong(
    "17.3",
    "A threshold keeps likely tokens too often and unlikely ones never (typical acceptance): the "
    "exact rule asks u.",
)
def typical_acceptance_called_exact(p, q, parents, tokens, u):
    emitted, node = [], 0
    while True:
        bound = min(0.09, 0.3 * float(torch.exp(-torch.special.entr(p[node]).sum())))
        children = [i for i, parent in enumerate(parents) if parent == node]
        stays = [child for child in children if p[node, tokens[child]] > bound]
        if not stays:
            return [*emitted, int(draw(p[node], u[node, 1:]))]
        emitted.append(tokens[stays[0]])
        node = stays[0]


@answers.alternative("17.3")
def by_the_lesson(p, q, parents, tokens, u):
    tree = Tree(tuple(parents))
    *path, last = verify_tree(p, q, tree, tokens, u)
    return [*(tokens[node] for node in path[1:]), last]


@answers.alternative("17.3")
def recursively(p, q, parents, tokens, u, node=0):
    over, left = p[node] + 0, q[node] + 0
    for child, parent in enumerate(parents):
        if parent != node:
            continue
        token = tokens[child]
        if u[child, 0] * left[token] < over[token]:
            return [token, *recursively(p, q, parents, tokens, u, child)]
        over = torch.relu(over - left)
        over /= over.sum()
        left[token] = 0
        left = left / left.sum() if left.sum() > 0 else left
    return [int(draw(over, u[node, 1:]))]


# ---------------------------------------------------------------- 17.4 one path


def slipped_path(
    cache,
    block_table,
    block_size,
    held,
    path,
    tokens,
    last,
    left,
    stop,
    *,
    moves="together",
    places="table",
    begins=1,
    cut=True,
    stops=True,
    bonus=True,
    holds="all but the newest",
):
    """keep_path with some slips, spelled by switches."""

    def slot(place):
        if places == "contiguous":
            return place
        return block_table[place // block_size] * block_size + place % block_size

    source = [slot(held + node) for node in path]
    target = [slot(held + place) for place in range(len(path))]
    after = cache.clone()
    if moves == "together":
        after[target] = cache[source]
    if moves == "one by one":
        for a, b in zip(reversed(source), reversed(target)):
            after[b] = after[a]
    if moves == "exchanged":
        after[target], after[source] = cache[source], cache[target]
    emitted = []
    for token in [*(tokens[node] for node in path[begins:]), *([last] if bonus else [])]:
        emitted.append(token)
        if (stops and token in stop) or (cut and len(emitted) == left):
            break
    now = held + len(emitted) + (holds == "the newest as well")
    if holds == "the whole tree":
        now = held + len(tokens)
    return after, now, emitted


for name, slip, hint in [
    (
        "cache_not_compacted",
        dict(moves="never"),
        "The path's rows lie where their nodes were. The next step will look behind `held`.",
    ),
    (
        "rows_overwrite_each_other",
        dict(moves="one by one"),
        "A row's new place may hold a row that has not moved yet. Read all, then write all.",
    ),
    (
        "rows_exchanged",
        dict(moves="exchanged"),
        "Rows that do not stay need no place: nothing but the path's new places may change.",
    ),
    (
        "slots_without_the_table",
        dict(places="contiguous"),
        "A sequence's places are spread over blocks: go through the block table.",
    ),
    (
        "root_emitted_again",
        dict(begins=0),
        "The root was emitted by the pass that sampled it.",
    ),
    (
        "max_tokens_overshot",
        dict(cut=False),
        "A path may be longer than what the request may still emit: cut at left.",
    ),
    (
        "stop_token_inside_the_path_ignored",
        dict(stops=False),
        "Whatever stands behind a stop token was never said.",
    ),
    (
        "no_token_behind_the_path",
        dict(bonus=False),
        "The token that the target sampled behind the path is emitted, too.",
    ),
    (
        "the_newest_is_held",
        dict(holds="the newest as well"),
        "The newest token has not run, so its K is not there: all but the newest are held.",
    ),
    (
        "the_whole_tree_is_held",
        dict(holds="the whole tree"),
        "Only the path stays. What lies behind it will be written over.",
    ),
]:
    answers.wrong("17.4", hint, name)(partial(slipped_path, **slip))


@answers.alternative("17.4")
def with_index_select(cache, block_table, block_size, held, path, tokens, last, left, stop):
    places = torch.arange(held, held + max(path) + 1)
    slots = torch.tensor(block_table)[places // block_size] * block_size + places % block_size
    rows = cache.index_select(0, slots[torch.tensor(path)])
    after = cache.index_copy(0, slots[: len(path)], rows)
    said = [*(tokens[node] for node in path[1:]), last]
    said = said[:left]
    ends = [index for index, token in enumerate(said) if token in stop]
    said = said[: ends[0] + 1] if ends else said
    return after, held + len(said), said


@answers.alternative("17.4")
def only_what_moves(cache, block_table, block_size, held, path, tokens, last, left, stop):
    moving = [(held + node, held + place) for place, node in enumerate(path) if node != place]
    after = torch.empty_like(cache).copy_(cache)
    if moving:
        both = [
            [block_table[at // block_size] * block_size + at % block_size for at in move]
            for move in moving
        ]
        source, target = zip(*both)
        after[list(target)] = cache[list(source)]
    emitted = []
    for token in (*(tokens[node] for node in path[1:]), last):
        if len(emitted) == left:
            break
        emitted.append(token)
        if token in stop:
            break
    return after, held + len(emitted), emitted
