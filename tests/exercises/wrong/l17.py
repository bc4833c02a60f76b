"""Wrong answers to lesson 17's exercises: the museum's slips, each with a hint."""

import torch

from lessons.l02_naive_attention.sampling import draw
from lessons.l17_tree_speculation.naive import verify_tree
from lessons.l17_tree_speculation.trees.tree import Tree
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 17.1 a tree in numbers

answers.slips(
    "17.1",
    """
    positions_by_order: Two siblings have the same place in two texts: a position is held plus the
        depth.
    - [held + depth for depth in depths]
    + [held + node for node in range(len(parents))]

    slots_by_depth: Siblings would overwrite each other's K and V: each node needs a slot of its
        own.
    - slots = [held + node for node in range(len(parents))]
    + slots = positions

    a_causal_mask: A node sees its way from the root, not every node before it: siblings are
        strangers.
    - sum(held + depth + 1 for depth in depths)
    + sum(held + node + 1 for node in range(len(parents)))

    siblings_see_each_other: Nodes of one depth belong to different texts, so none sees another.
    - sum(held + depth + 1 for depth in depths)
    + sum(held + sum(other <= depth for other in depths) for depth in depths)

    only_the_parent_is_seen: The whole way counts, not just its last step: grandparents are seen,
        too.
    - held + depth + 1
    + held + min(depth, 1) + 1

    nodes_do_not_see_themselves: A query sees its own key.
    - held + depth + 1
    + held + depth

    no_token_after_the_path: After the last node that stays the target samples one more.
    - max(depths) + 1
    + max(depths)

    emits_every_node: One path stays, never all of a tree: count along the longest way.
    - max(depths) + 1
    + len(parents)

    without_the_cache: The mask has columns for what the cache held, and all of them are True.
    - held + depth + 1
    + depth + 1

    the_last_node_is_the_deepest: The last node of a tree may be near the root: take the longest way.
    - max(depths) + 1
    + depths[-1] + 1

    level_by_level: A tree need not be listed level by level: a node is one deeper than its parent.
    - depths.append(depths[parent] + 1)
    + depths.append(depths[-1] + (depths[parent] == depths[-1]))

    one_deeper_than_a_number: The parent's number is not its depth.
    - depths.append(depths[parent] + 1)
    + depths.append(parent + 1)
    """,
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

answers.slips(
    "17.2",
    """
    head_i_off_by_one: The target's own head has t + 1 already. Head 0 is one beyond it: t + 2.
    - index + 2
    + index + 1

    every_head_learns_the_same_token: Head i predicts i + 1 tokens beyond the target's head, so each
        has its own labels.
    - index + 2
    + 2

    three_beyond: Head 0 predicts one token beyond the target's own head, which predicts t + 1.
    - index + 2
    + index + 3

    one_module_for_all_heads: All heads have the same weights: `[layer] * n` is one layer, n times.
    - later = hidden
    + weight, bias = weights[0], biases[0]
    + later = hidden

    no_residual: The block adds to its input: x + SiLU(W x + b).
    - hidden + torch.nn.functional.silu
    + torch.nn.functional.silu

    no_bias: The bias belongs inside of the SiLU: W x + b.
    - weight.T + bias
    + weight.T

    relu_for_silu: It is SiLU: x · sigmoid(x).
    - torch.nn.functional.silu
    + torch.relu

    heads_in_a_chain: Every head starts from the target's hidden state, not from the head in front
        of it.
    - later = hidden + torch.nn.functional.silu(hidden @ weight.T + bias)
    + later = hidden = hidden + torch.nn.functional.silu(hidden @ weight.T + bias)

    rolled_labels: The last positions have no token that far ahead: leave them out, do not wrap
        around.
    - logits[:-ahead], tokens[ahead:]
    + logits, tokens.roll(-ahead)

    weight_not_transposed: W x of a row x is x Wᵀ.
    - hidden @ weight.T
    + hidden @ weight

    loss_summed: A mean is over the positions that have a label: yours is their sum.
    - logits[:-ahead], tokens[ahead:])
    + logits[:-ahead], tokens[ahead:], reduction="sum")

    labels_behind: You pair hidden states with tokens that came before them: shift the other way.
    - logits[:-ahead], tokens[ahead:])
    + logits[ahead:], tokens[:-ahead])

    softmax_without_maximum: exp of a large logit is inf: subtract the largest one first, or take
        log_softmax.
    - loss = torch.nn.functional.cross_entropy(logits[:-ahead], tokens[ahead:])
    + shares = logits.exp() / logits.exp().sum(-1, keepdim=True)
    + loss = -shares[:-ahead].gather(1, tokens[ahead:, None]).log().mean()
    """,
)


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

answers.slips(
    "17.3",
    """
    as_it_was: Bugs are left. Work the docstring's example by hand first.
    - token = tokens[child]
    - if u[child, 0] * share[token] < rest[token]:
    -     stays = child
    -     break
    - rest = (rest - share).clamp(min=0)
    - rest = rest / rest.sum()
    - share = share.clone()
    - share[token] = 0
    - share = share / share.sum().clamp(min=1e-300)
    + if u[child, 0] * share[tokens[child]] < rest[tokens[child]]:
    +     stays = child
    + rest = (rest - share).clamp(min=0)
    - return [*emitted, int(draw(rest, u[node, 1:]))]
    + weights = p[node] if parents.count(node) > 1 else rest
    + return [*emitted, int(draw(weights, u[node, 1:]))]

    residual_not_updated: The second child is held against what the first one left of p: max(0, p -
        q).
    - rest = (rest - share).clamp(min=0)
    - rest = rest / rest.sum()

    residual_sums_to_less: The residual must be a distribution again before the next child is held
        against it.
    - rest = rest / rest.sum()

    q_not_updated: The second child was drawn from q without the first: take it out, and make q sum
        to 1.
    - share = share.clone()
    - share[token] = 0
    - share = share / share.sum().clamp(min=1e-300)

    q_sums_to_less: Without the first child q no longer sums to 1, and the second was drawn as if it
        did.
    - share = share / share.sum().clamp(min=1e-300)

    drawn_from_p: What the children were asked for is covered already: draw from what p has become.
    - draw(rest, u
    + draw(p[node], u

    one_residual_for_all_siblings: Each rejected child takes its share from p: the residual of the
        first is not the last.
    - return [*emitted, int(draw(rest, u[node, 1:]))]
    + rest = (p[node] - q[node]).clamp(min=0) if node in parents else p[node]
    + return [*emitted, int(draw(rest, u[node, 1:]))]

    bonus_from_the_root: The token after a path comes from the row of its last node.
    - draw(rest, u
    + draw(p[0] if emitted else rest, u

    bonus_from_the_last_node: The last node of the tree is not the last of the path.
    - draw(rest, u
    + draw(p[-1], u

    residual_at_a_leaf: After a leaf nothing was drawn, so nothing is subtracted: rows of q there
        hold anything.
    - return [*emitted, int(draw(rest, u[node, 1:]))]
    + if node not in parents:
    +     rest = (rest - share.nan_to_num(nan=0.15)).clamp(min=0)
    + return [*emitted, int(draw(rest, u[node, 1:]))]

    the_last_that_stays: The first child that stays ends the question: its siblings are not asked.
    - stays = child
    - break
    + stays = child
    + continue

    only_the_first_child_is_asked: If the first child goes, its siblings are asked in turn.
    - share = share / share.sum().clamp(min=1e-300)
    + break

    typical_acceptance_called_exact: A threshold keeps likely tokens too often and unlikely ones
        never (typical acceptance): the exact rule asks u.
    - rest, share = p[node], q[node]
    + rest = p[node]
    + bound = min(0.09, 0.3 * float(torch.exp(-torch.special.entr(rest).sum())))
    - token = tokens[child]
    - if u[child, 0] * share[token] < rest[token]:
    + if rest[tokens[child]] > bound:
    - rest = (rest - share).clamp(min=0)
    - rest = rest / rest.sum()
    - share = share.clone()
    - share[token] = 0
    - share = share / share.sum().clamp(min=1e-300)

    at_most: A child stays only if u · q is below p: a token that the target never takes has p = 0.
    - u[child, 0] * share[token] < rest[token]
    + u[child, 0] * share[token] <= rest[token]

    draws_with_the_number_of_the_test: u[node, 1] draws the token after a node. You take u[node, 0].
    - u[node, 1:]
    + u[node, :1]

    q_without_the_child_too_early: The residual is what is left of p under the q that the child was
        drawn from, so the child leaves q afterwards.
    - rest = (rest - share).clamp(min=0)
    - rest = rest / rest.sum()
    - share = share.clone()
    - share[token] = 0
    - share = share / share.sum().clamp(min=1e-300)
    + share = share.clone()
    + share[token] = 0
    + share = share / share.sum().clamp(min=1e-300)
    + rest = (rest - share).clamp(min=0)
    + rest = rest / rest.sum()
    """,
)


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

answers.slips(
    "17.4",
    """
    cache_not_compacted: The path's rows are where their nodes were. The next step reads the rows
        right after `held`.
    - kept[slots[: len(path)]] = cache[slots[path]]

    rows_overwrite_each_other: A row's new place may hold a row that has not moved yet. Read all,
        then write all.
    - kept[slots[: len(path)]] = cache[slots[path]]
    + for place in reversed(range(len(path))):
    +     kept[slots[place]] = kept[slots[path[place]]]

    rows_exchanged: Rows that do not stay need no place: nothing but the path's new places may
        change.
    - kept[slots[: len(path)]] = cache[slots[path]]
    + kept[slots[: len(path)]], kept[slots[path]] = cache[slots[path]], cache[slots[: len(path)]]

    slots_without_the_table: A sequence's places are spread over blocks: go through the block table.
    - block_table[place // block_size] * block_size + place % block_size
    + place

    root_emitted_again: The root was emitted by the pass that sampled it.
    - path[1:]
    + path

    max_tokens_overshot: A path may be longer than what the request may still emit: cut at left.
    - or len(emitted) == left

    stop_token_inside_the_path_ignored: What comes after a stop token is not part of the answer.
    - token in stop or len(emitted) == left
    + len(emitted) == left

    no_token_after_the_path: The token that the target sampled after the path is emitted, too.
    - [*(tokens[node] for node in path[1:]), last]
    + [tokens[node] for node in path[1:]]

    the_newest_is_held: The newest token has not run, so its K is not there: all but the newest are
        held.
    - held + len(emitted), emitted
    + held + len(emitted) + 1, emitted

    the_whole_tree_is_held: Only the path stays. What comes after it will be overwritten.
    - held + len(emitted), emitted
    + held + len(tokens), emitted

    only_emitted_rows_move: All rows of the path move, also those behind what left or stop cut off.
    - kept[slots[: len(path)]] = cache[slots[path]]
    - emitted = []
    + emitted = []
    - return kept, held + len(emitted), emitted
    + kept[slots[: len(emitted)]] = cache[slots[path[: len(emitted)]]]
    + return kept, held + len(emitted), emitted

    stop_token_not_emitted: The stop token itself is emitted. Nothing comes after it.
    - emitted.append(token)
    - if token in stop or len(emitted) == left:
    -     break
    + if token in stop:
    +     break
    + emitted.append(token)
    + if len(emitted) == left:
    +     break

    left_and_one_more: You emit left + 1 tokens.
    - len(emitted) == left
    + len(emitted) > left

    first_tokens_of_the_tree: The path's tokens are tokens[node], not the first ones of the tree.
    - (tokens[node] for node in path[1:])
    + tokens[1 : len(path)]

    stopped_by_the_root: The root was emitted by an earlier pass. Only what this pass emits ends it.
    - emitted = []
    + emitted = []
    + if tokens[0] in stop:
    +     return kept, held + 1, emitted

    stopped_by_any_node: Only what is emitted can stop the text, and a node that does not stay is not.
    - if token in stop or
    + if stop & {token, *tokens[1:]} or

    stop_beats_left: Count first: a stop token that comes after the first `left` tokens does not let
        more of them out.
    - if token in stop or len(emitted) == left:
    -     break
    + if token in stop:
    +     break
    + else:
    +     emitted = emitted[:left]

    stopped_by_the_last_one: The first stop token that is emitted ends the pass, not the last.
    - emitted = []
    - for token in [*(tokens[node] for node in path[1:]), last]:
    -     emitted.append(token)
    -     if token in stop or len(emitted) == left:
    -         break
    + emitted = [*(tokens[node] for node in path[1:]), last][:left]
    + ends = [at for at, token in enumerate(emitted) if token in stop]
    + emitted = emitted[: ends[-1] + 1] if ends else emitted
    """,
)


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
