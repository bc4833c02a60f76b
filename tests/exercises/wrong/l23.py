"""Wrong answers to lesson 23's exercises: slips of people who run many experts at once and
spread them over GPUs, with a hint for each.
"""

from functools import partial

import torch

from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 23.1 the kernel


def slipped_rows(
    x,
    weight,
    pairs,
    tile_experts,
    router,
    *,
    row_of=lambda pair, top_k: pair // top_k,
    expert_of=lambda tile, experts: experts[tile],
    scale_of=lambda router, pair, place: router.flatten()[pair],
    unused="skipped",
    padding="masked",
    transposed=False,
    columns=None,
    outputs=None,
    to=lambda pair, place: pair,
    add=False,
    tile_rows=16,
):
    """Slot by pair in PyTorch, with one slip, spelled by a switch."""
    num_pairs, top_k = router.numel(), router.shape[1]
    out = x.new_zeros(num_pairs, weight.shape[1])
    experts = tile_experts.tolist()
    size, width = min(columns or x.shape[1], x.shape[1]), outputs or weight.shape[1]
    for tile in range(len(experts)):
        expert = expert_of(tile, experts)
        if experts[tile] < 0:
            if unused == "skipped":
                continue
            expert = dict(last=len(weight) - 1, first=0)[unused]
        for at in range(tile_rows):
            place = tile * 16 + at
            pair = int(pairs[place])
            if pair >= num_pairs:
                if padding == "masked":
                    continue
                pair = num_pairs - 1 if padding == "last" else 0
            row = row_of(pair, top_k) % len(x)
            own = weight[expert % len(weight)]
            if transposed and own.shape[0] == own.shape[1]:
                own = own.T
            value = own[:width, :size] @ x[row, :size] * scale_of(router, pair, place % num_pairs)
            target = to(pair, place) % num_pairs
            if add:
                out[target, :width] += value
            else:
                out[target, :width] = value
    return out


for name, slip, hint in [
    (
        "pair_as_a_row",
        dict(row_of=lambda pair, top_k: pair),
        "Pair p is a choice of a token: its row of x is p // k.",
    ),
    (
        "pair_modulo_k",
        dict(row_of=lambda pair, top_k: pair % top_k),
        "pair % k is which choice it is. The token is p // k.",
    ),
    (
        "choices_in_columns",
        dict(row_of=lambda pair, top_k: pair + 1 - top_k if top_k > 1 else pair),
        "The k choices of a token are side by side: its row of x is p // k.",
    ),
    (
        "tile_as_an_expert",
        dict(expert_of=lambda tile, experts: tile),
        "An expert may have several tiles or none: load tile_experts + tile.",
    ),
    (
        "first_tile_s_expert",
        dict(expert_of=lambda tile, experts: experts[0]),
        "All tiles use the expert of tile 0: load tile_experts + program_id(0).",
    ),
    (
        "next_expert",
        dict(expert_of=lambda tile, experts: experts[tile] + 1),
        "The experts are shifted by one matrix: an expert begins at expert · N · K.",
    ),
    (
        "unused_tiles_run_the_last_expert",
        dict(unused="last"),
        "−1 is no index from the end. Such a tile must not store anything.",
    ),
    (
        "unused_tiles_run_expert_0",
        dict(unused="first"),
        "A tile of expert −1 is not used, and its places are old: return at once.",
    ),
    (
        "padding_writes_the_last_row",
        dict(padding="last"),
        "T · k is no pair: mask the loads and the store with pair < num_pairs.",
    ),
    (
        "padding_writes_row_0",
        dict(padding="first"),
        "Padding of a tile was stored into row 0: mask the store with pair < num_pairs.",
    ),
    (
        "router_forgotten",
        dict(scale_of=lambda router, pair, place: 1.0),
        "Each row counts as much as the router says: multiply by router of the pair.",
    ),
    (
        "router_of_the_token",
        dict(scale_of=lambda router, pair, place: router.flatten()[pair // router.shape[1]]),
        "router has a number for each pair: load router + pair, not the one of its token.",
    ),
    (
        "router_of_the_first_choice",
        dict(scale_of=lambda router, pair, place: router[pair // router.shape[1], 0]),
        "Both choices of a token got the weight of the first one.",
    ),
    (
        "router_by_place",
        dict(scale_of=lambda router, pair, place: router.flatten()[place]),
        "router is in the order of the pairs, not in that of the tiles.",
    ),
    (
        "router_squared",
        dict(scale_of=lambda router, pair, place: router.flatten()[pair] ** 2),
        "The router's weight counts once: on the way in or on the way out, not both.",
    ),
    (
        "rows_in_the_order_of_tiles",
        dict(to=lambda pair, place: place),
        "The row of a pair is out[pair]: store where the pair says, not where the tile is.",
    ),
    (
        "rows_added_to_tokens",
        dict(to=lambda pair, place: pair // 2, add=True),
        "out has a row for each pair. Adding up the choices of a token comes later.",
    ),
    (
        "transposed",
        dict(transposed=True),
        "An expert is [N, K]: row n of it meets the row of x. You read it transposed.",
    ),
    (
        "first_block_of_columns",
        dict(columns=16),
        "Only the first BLOCK_K columns are multiplied: add up over all blocks.",
    ),
    (
        "first_block_of_outputs",
        dict(outputs=16),
        "Outputs after BLOCK_N are missing: n begins at program_id(1) · BLOCK_N.",
    ),
    (
        "half_a_tile",
        dict(tile_rows=8),
        "A tile has 16 places, and half of them were left out.",
    ),
]:
    answers.wrong("23.1", hint, name)(partial(slipped_rows, **slip))


@answers.wrong("23.1", "Rows of x are copied for each pair: read them where they are stored.")
def copies_rows(x, weight, pairs, tile_experts, router):
    copied = x.repeat_interleave(router.shape[1], 0)
    right = slipped_rows(x, weight, pairs, tile_experts, router)
    return right + 0 * copied[:, :1]


@answers.wrong("23.1", "You copied an expert for each row. Read it where it is stored.")
def copies_experts(x, weight, pairs, tile_experts, router):
    right = slipped_rows(x, weight, pairs, tile_experts, router)
    return right + 0 * weight[torch.zeros(len(right), dtype=torch.long)][:, :, 0]


answers.alternative("23.1")(slipped_rows)


@answers.alternative("23.1")
def tile_by_tile(x, weight, pairs, tile_experts, router):
    """A product for each tile."""
    num_pairs, top_k = router.numel(), router.shape[1]
    out = torch.zeros(num_pairs, weight.shape[1])
    for expert, places in zip(tile_experts.tolist(), pairs.view(-1, 16)):
        own = places[places < num_pairs].long()
        if expert >= 0:
            scales = router.view(-1)[own]
            out[own] = (x[own // top_k] * scales[:, None]) @ weight[expert].T
    return out


# ---------------------------------------------------------------- 23.2 experts on other ranks


def slipped_layer(
    x,
    logits,
    experts,
    top_k,
    capacity,
    ranks,
    *,
    weigh="chosen",
    layout="blocks",
    local_of="right",
    sends="pairs",
    count="expert",
    drop="counted",
    full=0,
    dropped_rows="zero",
    combine="add",
    back="pairs",
    order="rank first",
    by_hand=False,
):
    """experts_on_ranks with one slip, spelled by a switch."""
    per_rank, size = len(experts[0]), ranks.size
    travel = _turned if by_hand else ranks.all_to_all
    weights, pairs, rows, wanted = [], [], [], []
    for rank in range(size):
        best = logits[rank].topk(top_k, dim=-1)
        every = logits[rank].softmax(-1)
        weights.append(
            {
                "chosen": best.values.softmax(-1),
                "all": every.gather(-1, best.indices),
                "equal": torch.full_like(best.values, 1 / top_k),
                "ones": torch.ones_like(best.values),
                "sigmoid": best.values.sigmoid(),
                "logits": best.values,
                "of tokens": best.values.softmax(0),
                "first alone": (torch.arange(top_k) == 0).float().expand_as(best.values),
            }[weigh].flatten()
        )
        chosen = best.indices.flatten()
        owner = {"blocks": chosen // per_rank, "dealt": chosen % size, "own": 0 * chosen + rank}
        owner = owner[layout]
        to_each = [torch.where(owner == other)[0] for other in range(size)]
        pairs.append(to_each)
        rows.append([x[rank][pair // top_k] for pair in to_each])
        wanted.append([chosen[pair] for pair in to_each])
    if sends == "all":
        ranks.all_to_all([[own.repeat(size, 1) for _ in x] for own in x])
    rows, wanted = travel(rows), travel(wanted)
    outs_of, dropped = [], 0
    for rank in range(size):
        own = [sent.clone() if dropped_rows == "kept" else 0 * sent for sent in rows[rank]]
        taken = [0] * per_rank
        sources = list(range(size))
        for source in reversed(sources) if order == "last rank first" else sources:
            if count == "source":
                taken = [0] * per_rank
            places = list(enumerate(wanted[rank][source].tolist()))
            for at, expert in reversed(places) if order == "last token first" else places:
                local = {"right": expert % per_rank, "by size": expert // size, "first": 0}[
                    local_of
                ]
                local = local % per_rank
                used = sum(taken) if count == "rank" else taken[local]
                if used >= capacity + full:
                    dropped += drop == "counted"
                    continue
                taken[local] += 1
                own[source][at] = rows[rank][source][at] @ experts[rank][local].T
        outs_of.append(own)
    outs_of = travel(outs_of) if back != "kept" else outs_of
    outs = []
    for rank in range(size):
        out = torch.zeros_like(x[rank])
        flat = weights[rank]
        for number, (pair, answer) in enumerate(zip(pairs[rank], outs_of[rank])):
            if len(answer) != len(pair):
                raise ValueError("rows of another rank came back")
            by = flat[: len(pair)] if back == "unsorted weights" else flat[pair]
            share = answer * by[:, None] ** (2 if combine == "squared" else 1)
            token = pair // top_k
            if combine == "indexed":
                out[token] += share
            elif combine == "stored":
                out[token] = share
            elif combine == "modulo":
                out.index_add_(0, pair % max(1, len(out)), share)
            elif combine == "first rank" and number:
                continue
            else:
                out.index_add_(0, token, share)
        outs.append(out)
    if drop == "tokens":
        dropped = sum(int((out == 0).all(-1).sum()) for out in outs)
    if combine == "reduced" and len({len(out) for out in outs}) == 1:
        outs = ranks.all_reduce(outs)
    return outs, dropped


def _turned(parts):
    """all_to_all without a wire."""
    return [[own[rank] for own in parts] for rank in range(len(parts))]


BUGS = dict(
    weigh="all",
    layout="dealt",
    local_of="by size",
    count="source",
    drop="silent",
    combine="indexed",
)


for name, slip, hint in [
    ("as_it_was", BUGS, "All five bugs are still there."),
    (
        "weights_not_renormalised",
        dict(weigh="all"),
        "A token's weights sum to less than 1: the softmax runs over its top_k logits.",
    ),
    (
        "experts_dealt_like_cards",
        dict(layout="dealt", local_of="by size"),
        "Rank 0 holds the first E / size experts, and so on. You deal them out one by one.",
    ),
    (
        "wrong_expert_of_the_right_rank",
        dict(local_of="by size"),
        "A rank's own number of an expert is expert − rank · E / size.",
    ),
    (
        "choices_on_one_rank_lost",
        dict(combine="indexed"),
        "out[index] += rows keeps one of several rows with the same index. Use index_add_.",
    ),
    (
        "answers_stored_over_each_other",
        dict(combine="stored"),
        "A token's experts are summed. You store the last one.",
    ),
    (
        "room_for_each_sender",
        dict(count="source"),
        "The capacity is that of an expert in a step, whichever rank sends the rows.",
    ),
    (
        "room_for_a_rank",
        dict(count="rank"),
        "The capacity is that of each expert, not of its rank.",
    ),
    (
        "dropped_silently",
        dict(drop="silent"),
        "Rows found no room, and your count says 0. The caller has to be told.",
    ),
    (
        "tokens_counted",
        dict(drop="tokens"),
        "Counted are pairs of a token and an expert, not tokens that lost all of theirs.",
    ),
    (
        "one_too_many",
        dict(full=1),
        "An expert takes `capacity` rows, and yours took one more.",
    ),
    (
        "nothing_is_dropped",
        dict(full=10**6),
        "The capacity has no effect: no expert may take more rows than that.",
    ),
    (
        "a_dropped_row_passes_through",
        dict(dropped_rows="kept"),
        "For a row that finds no room the expert's share is zero, not the row itself.",
    ),
    (
        "the_last_rank_goes_first",
        dict(order="last rank first"),
        "Of two ranks the lower one counts first.",
    ),
    (
        "the_last_token_goes_first",
        dict(order="last token first"),
        "Of two tokens of a rank the first counts first.",
    ),
    ("equal_weights", dict(weigh="equal"), "The experts count by the router, not equally."),
    ("no_weights", dict(weigh="ones"), "The router's weights are missing."),
    (
        "sigmoid",
        dict(weigh="sigmoid"),
        "The weights are a softmax over the token's top_k logits, not sigmoids.",
    ),
    ("logits_as_weights", dict(weigh="logits"), "Logits are no weights: take their softmax."),
    (
        "softmax_over_tokens",
        dict(weigh="of tokens"),
        "The softmax runs over the experts of a token, not over the tokens.",
    ),
    (
        "only_the_best_expert",
        dict(weigh="first alone"),
        "All top_k experts of a token count, not the best alone.",
    ),
    (
        "weights_in_another_order",
        dict(back="unsorted weights"),
        "Answers come back in the order in which the pairs were sent: weights[pair].",
    ),
    ("weighted_twice", dict(combine="squared"), "The router's weight counts once."),
    (
        "pairs_as_tokens",
        dict(combine="modulo"),
        "Pair p belongs to token p // top_k.",
    ),
    (
        "answers_of_rank_0_alone",
        dict(combine="first rank"),
        "A token's answers come from several ranks: add up all of them.",
    ),
    (
        "answers_not_sent_back",
        dict(back="kept"),
        "The answers stay on the experts' ranks: a second all_to_all brings them back.",
    ),
    (
        "each_rank_asks_its_own_experts",
        dict(layout="own"),
        "Each rank used its own experts. An expert of another rank has other weights.",
    ),
    (
        "summed_over_the_ranks",
        dict(combine="reduced"),
        "Here each rank has tokens of its own, so their results must not be summed.",
    ),
    (
        "all_rows_to_all_ranks",
        dict(sends="all"),
        "Every row travels to every rank. Send it to the ranks of its experts only.",
    ),
    (
        "read_from_the_list",
        dict(by_hand=True),
        "Rows of another rank must come through `ranks.all_to_all`.",
    ),
]:
    answers.wrong("23.2", hint, name)(partial(slipped_layer, **slip))


answers.alternative("23.2")(slipped_layer)


@answers.alternative("23.2")
def by_sorting(x, logits, experts, top_k, capacity, ranks):
    """Pairs sorted by expert; room by a running count in the order of arrival."""
    held, size = experts[0].shape[0], ranks.size
    sent_rows, sent_ids, orders, shares = [], [], [], []
    for own, scores in zip(x, logits):
        values, ids = scores.sort(dim=-1, descending=True)
        ids, exps = ids[:, :top_k].reshape(-1), (values - values[:, :1])[:, :top_k].exp()
        shares.append((exps / exps.sum(-1, keepdim=True)).reshape(-1))
        order = ids.sort(stable=True).indices
        ends = torch.bincount(ids // held, minlength=size).tolist()
        orders.append(order)
        sent_rows.append(list(own[order // top_k].split(ends)))
        sent_ids.append(list(ids[order].split(ends)))
    got_rows, got_ids = ranks.all_to_all(sent_rows), ranks.all_to_all(sent_ids)
    results, lost = [], 0
    for rank in range(size):
        rows, ids = torch.cat(got_rows[rank]), torch.cat(got_ids[rank]) - rank * held
        result = torch.zeros_like(rows)
        for expert in range(held):
            arrived = (ids == expert).nonzero()[:, 0]
            lost += max(0, len(arrived) - capacity)
            result[arrived[:capacity]] = rows[arrived[:capacity]] @ experts[rank][expert].T
        results.append(list(result.split([len(part) for part in got_rows[rank]])))
    outs = []
    for own, order, share, back in zip(x, orders, shares, ranks.all_to_all(results)):
        whole = torch.empty(len(order), own.shape[1])
        whole[order] = torch.cat(back)
        outs.append((whole * share[:, None]).unflatten(0, (-1, top_k)).sum(1))
    return outs, lost
