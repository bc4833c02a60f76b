"""Wrong answers to lesson 23's exercises: slips of people who run many experts at once and
spread them over GPUs, with a hint for each.
"""

import torch

from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()

# ---------------------------------------------------------------- 23.1 the kernel

answers.slips(
    "23.1",
    """
    pair_as_a_row: Pair p is a choice of a token: its row of x is p // k.
    - (pair // TOP_K)[:, None]
    + pair[:, None]

    pair_modulo_k: pair % k is which choice it is. The token is p // k.
    - (pair // TOP_K)[:, None]
    + (pair % TOP_K)[:, None]

    choices_in_columns: The k choices of a token are side by side: its row of x is p // k.
    - (pair // TOP_K)[:, None]
    + (pair % (num_pairs // TOP_K))[:, None]

    tile_as_an_expert: An expert may have several tiles or none: load tile_experts + tile.
    - tl.load(tile_experts_ptr + tl.program_id(0)).to(tl.int64)
    + tl.program_id(0).to(tl.int64)

    first_tile_s_expert: All tiles use the expert of tile 0: load tile_experts + program_id(0).
    - tl.load(tile_experts_ptr + tl.program_id(0))
    + tl.load(tile_experts_ptr)

    next_expert: The experts are shifted by one matrix: an expert begins at expert · N · K.
    - (expert * num_outputs + n)
    + ((expert + 1) * num_outputs + n)

    unused_tiles_run_the_last_expert: −1 is no index from the end. Such a tile must not store
        anything.
    - tile_experts,
    + tile_experts % len(weight),

    unused_tiles_are_not_asked: A tile of expert −1 is not used: return before you load, because its
        matrix would be in front of the first one.
    - if expert < 0:
    -     return

    unused_tiles_run_expert_0: A tile of expert −1 is not used, and its places are old: return at
        once.
    - if expert < 0:
    -     return
    + expert = tl.maximum(expert, 0)

    unused_tiles_store_zeros: A tile of expert −1 stores nothing, because its places are old: its
        zeros may come after another tile's rows.
    - if expert < 0:
    -     return
    + is_used = expert >= 0
    + expert = tl.maximum(expert, 0)
    - acc *= tl.load(router_ptr + pair, mask=is_pair, other=0.0)[:, None]
    + acc *= tl.load(router_ptr + pair, mask=is_pair & is_used, other=0.0)[:, None]

    place_in_32_bits: All weights together are more than 2³¹ numbers: the expert's place needs 64
        bits.
    - tl.load(tile_experts_ptr + tl.program_id(0)).to(tl.int64)
    + tl.load(tile_experts_ptr + tl.program_id(0))

    tails_of_columns_dropped: K need not be a multiple of BLOCK_K: the last block is partly empty,
        and counts.
    - range(0, size, BLOCK_K)
    + range(0, size // BLOCK_K * BLOCK_K, BLOCK_K)

    padding_writes_the_last_row: T · k is no pair: mask the loads and the store with pair <
        num_pairs.
    - is_pair = pair < num_pairs
    + pair = tl.minimum(pair, num_pairs - 1)
    + is_pair = pair < num_pairs

    padding_writes_row_0: Padding of a tile was stored into row 0: mask the store with pair <
        num_pairs.
    - is_pair = pair < num_pairs
    + pair = tl.where(pair < num_pairs, pair, 0)
    + is_pair = pair < num_pairs

    router_forgotten: Each row counts as much as the router says: multiply by router of the pair.
    - acc *= tl.load(router_ptr + pair, mask=is_pair, other=0.0)[:, None]

    router_of_the_token: router has a number for each pair: load router + pair, not the one of its
        token.
    - router_ptr + pair
    + router_ptr + pair // TOP_K

    router_of_the_first_choice: Both choices of a token got the weight of the first one.
    - router_ptr + pair
    + router_ptr + pair // TOP_K * TOP_K

    router_by_place: router is in the order of the pairs, not in that of the tiles.
    - acc *= tl.load(router_ptr + pair,
    + place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    + acc *= tl.load(router_ptr + place % num_pairs,

    router_squared: The router's weight counts once: on the way in or on the way out, not both.
    - acc *= tl.load(router_ptr + pair, mask=is_pair, other=0.0)[:, None]
    + acc *= tl.load(router_ptr + pair, mask=is_pair, other=0.0)[:, None]
    + acc *= tl.load(router_ptr + pair, mask=is_pair, other=0.0)[:, None]

    rows_in_the_order_of_tiles: The row of a pair is out[pair]: store where the pair says, not where
        the tile is.
    - out = out_ptr + pair[:, None]
    + place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    + out = out_ptr + (place % num_pairs)[:, None]

    rows_added_to_tokens: out has a row for each pair. Adding up the choices of a token comes later.
    - out_ptr + pair[:, None]
    + out_ptr + (pair // TOP_K)[:, None]
    - tl.store(
    + tl.atomic_add(

    transposed: An expert is [N, K]: row n of it meets the row of x. You read it transposed.
    - (expert * num_outputs + n)[None, :] * size + k[:, None]
    + (expert * size + k)[:, None] * num_outputs + n[None, :]

    first_block_of_columns: Only the first BLOCK_K columns are multiplied: add up over all blocks.
    - range(0, size, BLOCK_K)
    + range(0, BLOCK_K, BLOCK_K)

    first_block_of_outputs: Outputs after BLOCK_N are missing: n begins at program_id(1) · BLOCK_N.
    - n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    + n = tl.arange(0, BLOCK_N)

    half_a_tile: A tile has 16 places, and half of them were left out.
    - is_pair = pair < num_pairs
    + is_pair = (pair < num_pairs) & (tl.arange(0, BLOCK_M) < BLOCK_M // 2)

    copies_rows: Rows of x are copied for each pair: read them where they are stored.
    - (pair // TOP_K)[:, None]
    + pair[:, None]
    - x,
    - weight,
    + x.repeat_interleave(top_k, 0),
    + weight,

    copies_experts: You copied an expert for each row. Read it where it is stored.
    - (expert * num_outputs + n)
    + (tl.program_id(0) * BLOCK_M * num_outputs + n)
    - weight,
    - pairs,
    + weight[tile_experts.clamp(min=0).repeat_interleave(block_m)],
    + pairs,
    """,
)


def in_pytorch(x, weight, pairs, tile_experts, router):
    """A product for each tile."""
    num_pairs, top_k = router.numel(), router.shape[1]
    out = torch.zeros(num_pairs, weight.shape[1])
    for expert, places in zip(tile_experts.tolist(), pairs.view(-1, 16)):
        own = places[places < num_pairs].long()
        if expert >= 0:
            scales = router.view(-1)[own]
            out[own] = (x[own // top_k] * scales[:, None]) @ weight[expert].T
    return out


attacks(answers, "23.1", in_pytorch)


@triton.jit
def place_kernel(
    x_ptr,
    weight_ptr,
    pairs_ptr,
    tile_experts_ptr,
    router_ptr,
    out_ptr,
    num_pairs,
    size,
    num_outputs,
    top_k,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program for each place and block of outputs: one row of x times its expert."""
    place = tl.program_id(0)
    expert, pair = tl.load(tile_experts_ptr + place // 16), tl.load(pairs_ptr + place)
    expert = expert.to(tl.int64)
    if (expert >= 0) & (pair < num_pairs):
        k, n = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + pair // top_k * size + k, mask=k < size, other=0.0)
        x *= tl.load(router_ptr + pair)
        at = (expert * num_outputs + n)[:, None] * size + k[None, :]
        mask = (n < num_outputs)[:, None] & (k < size)[None, :]
        product = tl.sum(tl.load(weight_ptr + at, mask=mask, other=0.0) * x[None, :], axis=1)
        tl.store(out_ptr + pair * num_outputs + n, product, mask=n < num_outputs)


@answers.alternative("23.1")
def place_by_place(x, weight, pairs, tile_experts, router):
    num_outputs, size = weight.shape[1:]
    out = torch.zeros(router.numel(), num_outputs)
    place_kernel[(len(pairs), triton.cdiv(num_outputs, 8))](
        x,
        weight,
        pairs,
        tile_experts,
        router,
        out,
        len(out),
        size,
        num_outputs,
        router.shape[1],
        BLOCK_K=triton.next_power_of_2(size),
        BLOCK_N=8,
    )
    return out


@triton.jit
def turned_kernel(
    x_ptr,
    weight_ptr,
    pairs_ptr,
    tile_experts_ptr,
    router_ptr,
    out_ptr,
    num_pairs,
    size,
    num_outputs,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program a tile, the product turned round: an expert's rows times x, [N, 16 pairs]. A tile
    that is not used has no pair.
    """
    tile, lane = tl.program_id(0), tl.arange(0, BLOCK)
    expert = tl.load(tile_experts_ptr + tile)
    pair = tl.load(pairs_ptr + tile * BLOCK + lane)
    is_pair = (pair < num_pairs) & (expert >= 0)
    matrix = weight_ptr + tl.maximum(expert, 0).to(tl.int64) * num_outputs * size
    router = tl.load(router_ptr + pair, mask=is_pair, other=0.0)
    for first in range(0, num_outputs, BLOCK):
        n = first + lane
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for start in range(0, size, BLOCK):
            k = start + lane
            w_at, x_at = n[:, None] * size + k[None, :], pair // TOP_K * size
            w_mask = (n < num_outputs)[:, None] & (k < size)[None, :]
            x_mask = is_pair[None, :] & (k < size)[:, None]
            w = tl.load(matrix + w_at, mask=w_mask, other=0.0)
            x = tl.load(x_ptr + x_at[None, :] + k[:, None], mask=x_mask, other=0.0)
            total = tl.dot(w, x * router[None, :], total, input_precision="ieee")
        out_at = pair[None, :] * num_outputs + n[:, None]
        tl.store(out_ptr + out_at, total, mask=is_pair[None, :] & (n < num_outputs)[:, None])


@answers.alternative("23.1")
def turned_round(x, weight, pairs, tile_experts, router):
    out = x.new_zeros(router.numel(), weight.shape[1])
    turned_kernel[(len(tile_experts),)](
        x,
        weight,
        pairs,
        tile_experts,
        router,
        out,
        router.numel(),
        x.shape[1],
        weight.shape[1],
        TOP_K=router.shape[1],
        BLOCK=16,
    )
    return out


# ---------------------------------------------------------------- 23.2 experts on other ranks

answers.slips(
    "23.2",
    """
    as_it_was: All five bugs are still there.
    - best = logits[rank].topk(top_k, dim=-1)
    - weights.append(best.values.softmax(-1).flatten())
    + best = logits[rank].softmax(-1).topk(top_k, dim=-1)
    + weights.append(best.values.flatten())
    - expert // per_rank
    + expert % ranks.size
    - taken = [0] * per_rank
    - own = [
    + own = [
    - for at, expert in
    + taken = [0] * per_rank
    + for at, expert in
    - expert % per_rank
    + expert // ranks.size
    - dropped += 1
    +
    - out.index_add_(0, pair // top_k, answer * weights[rank][pair, None])
    + out[pair // top_k] += answer * weights[rank][pair, None]

    weights_not_renormalised: A token's weights sum to less than 1: the softmax runs over its top_k
        logits.
    - best = logits[rank].topk(top_k, dim=-1)
    - weights.append(best.values.softmax(-1).flatten())
    + best = logits[rank].softmax(-1).topk(top_k, dim=-1)
    + weights.append(best.values.flatten())

    experts_dealt_like_cards: Rank 0 holds the first E / size experts, and so on. You deal them out
        one by one.
    - expert // per_rank
    + expert % ranks.size
    - expert % per_rank
    + expert // ranks.size

    wrong_expert_of_the_right_rank: A rank's own number of an expert is expert − rank · E / size.
    - expert % per_rank
    + expert // ranks.size

    choices_on_one_rank_lost: out[index] += rows keeps one of several rows with the same index. Use
        index_add_.
    - out.index_add_(0, pair // top_k, answer * weights[rank][pair, None])
    + out[pair // top_k] += answer * weights[rank][pair, None]

    answers_stored_over_each_other: A token's experts are summed. You store the last one.
    - out.index_add_(0, pair // top_k, answer * weights[rank][pair, None])
    + out[pair // top_k] = answer * weights[rank][pair, None]

    room_for_each_sender: The capacity is that of an expert in a step, whichever rank sends the
        rows.
    - taken = [0] * per_rank
    - own = [
    + own = [
    - for at, expert in
    + taken = [0] * per_rank
    + for at, expert in

    room_for_a_rank: The capacity is that of each expert, not of its rank.
    - taken[local] == capacity
    + sum(taken) == capacity

    dropped_silently: Rows found no room, and your count says 0. The caller has to be told.
    - dropped += 1

    tokens_counted: Counted are pairs of a token and an expert, not tokens that lost all of theirs.
    - return outs, dropped
    + return outs, sum(int((out == 0).all(-1).sum()) for out in outs)

    one_too_many: An expert takes `capacity` rows, and yours took one more.
    - taken[local] == capacity
    + taken[local] > capacity

    nothing_is_dropped: The capacity has no effect: no expert may take more rows than that.
    - taken[local] == capacity
    + False

    a_dropped_row_passes_through: For a row that finds no room the expert's share is zero, not the
        row itself.
    - torch.zeros_like(sent)
    + sent.clone()

    the_last_rank_goes_first: Of two ranks the lower one counts first.
    - for source in range(ranks.size):
    + for source in reversed(range(ranks.size)):

    the_last_token_goes_first: Of two tokens of a rank the first counts first.
    - enumerate(wanted[rank][source].tolist())
    + reversed([*enumerate(wanted[rank][source].tolist())])

    first_choices_go_first: The first tokens count first, with all of their choices; no token's
        first choice passes another one's second.
    - to_each = [torch.where(owner == other)[0] for other in range(ranks.size)]
    + order = torch.arange(len(owner)).view(-1, top_k).T.flatten()
    + to_each = [order[owner[order] == other] for other in range(ranks.size)]

    equal_weights: The experts count by the router, not equally.
    - best.values.softmax(-1)
    + torch.full_like(best.values, 1 / top_k)

    no_weights: The router's weights are missing.
    - answer * weights[rank][pair, None]
    + answer

    sigmoid: The weights are a softmax over the token's top_k logits, not sigmoids.
    - best.values.softmax(-1)
    + best.values.sigmoid()

    logits_as_weights: Logits are no weights: take their softmax.
    - best.values.softmax(-1)
    + best.values

    softmax_over_tokens: The softmax runs over the experts of a token, not over the tokens.
    - best.values.softmax(-1)
    + best.values.softmax(0)

    only_the_best_expert: All top_k experts of a token count, not the best alone.
    - best.values.softmax(-1)
    + (torch.arange(top_k) == 0).float().expand_as(best.values)

    weights_in_another_order: Answers come back in the order in which the pairs were sent:
        weights[pair].
    - weights[rank][pair, None]
    + weights[rank][: len(pair), None]

    weighted_twice: The router's weight counts once.
    - weights[rank][pair, None]
    + weights[rank][pair, None] ** 2

    pairs_as_tokens: Pair p belongs to token p // top_k.
    - pair // top_k, answer
    + pair % len(out), answer

    answers_of_rank_0_alone: A token's answers come from several ranks: add up all of them.
    - zip(pairs[rank], answers[rank])
    + zip(pairs[rank][:1], answers[rank][:1])

    answers_not_sent_back: The answers stay on the experts' ranks: a second all_to_all brings them
        back.
    - answers = ranks.all_to_all(answers)

    each_rank_asks_its_own_experts: Each rank used its own experts. An expert of another rank has
        other weights.
    - expert // per_rank
    + torch.full_like(expert, rank)

    summed_over_the_ranks: Here each rank has tokens of its own, so their results must not be
        summed.
    - return outs, dropped
    + return ranks.all_reduce(outs), dropped

    all_rows_to_all_ranks: Every row travels to every rank. Send it to the ranks of its experts
        only.
    - rows, wanted = ranks.all_to_all(rows)
    + ranks.all_to_all([[own.repeat_interleave(top_k, 0)] * ranks.size for own in x])
    + rows, wanted = ranks.all_to_all(rows)

    read_from_the_list: Rows of another rank must come through `ranks.all_to_all`.
    - ranks.all_to_all(rows), ranks.all_to_all(wanted)
    + [*zip(*rows)], [*zip(*wanted)]
    - ranks.all_to_all(answers)
    + [*zip(*answers)]
    """,
)


@answers.wrong(
    "23.2", "Your collectives carry nothing: a rank has its own tokens and experts alone."
)
def beside_empty_messages(x, logits, experts, top_k, capacity, ranks):
    """All in one loop, with every rank's entries at hand."""
    for _ in range(3):
        ranks.all_to_all([[x[0][:0]] * ranks.size for _ in x])
    matrices, taken, dropped = torch.cat(list(experts)), [0] * (len(experts[0]) * len(experts)), 0
    outs = [torch.zeros_like(own) for own in x]
    for own, scores, out in zip(x, logits, outs):
        for token, row in enumerate(scores):
            best = row.topk(top_k)
            for weight, expert in zip(best.values.softmax(-1), best.indices.tolist()):
                if taken[expert] == capacity:
                    dropped += 1
                    continue
                taken[expert] += 1
                out[token] += weight * (own[token] @ matrices[expert].T)
    return outs, dropped


answers.slips(
    "23.2",
    """
    rank_0_runs_all_experts: An expert runs on the rank that holds it. Rank 0 reads the others'
        matrices.
    - owner = expert // per_rank
    + owner = torch.zeros_like(expert)
    - taken = [0] * per_rank
    + taken = [0] * per_rank * ranks.size
    - local = expert % per_rank
    + local = expert
    - experts[rank][local].T
    + torch.cat(list(experts))[local].T

    weights_of_rank_0: Each rank weighs the rows of its own tokens, by its own logits.
    - best = logits[rank].topk(top_k, dim=-1)
    + best = logits[rank].topk(top_k, dim=-1)
    + scale = 1 + 0 * logits[rank].sum() + 1e-2 * logits[0].mean()
    - best.values.softmax(-1)
    + (scale * best.values).softmax(-1)
    """,
)


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


# ---------------------------------------------------------------- 23.3 a test

answers.slips(
    "23.3",
    """
    one_choice_alone: With k = 1 a pair is a token, and many slips do not show. Try k = 2 and 3.
    - g = torch.Generator()
    + top_k = 1
    + g = torch.Generator()

    whole_blocks: Kernels go wrong at tails: let K and N be no multiples of 16.
    - g = torch.Generator()
    + size, outputs = (-(-n // 16) * 16 for n in (size, outputs))
    + g = torch.Generator()

    one_block: A loop over blocks shows with more than one: let K and N be larger than 16.
    - g = torch.Generator()
    + size, outputs = min(size, 16), min(outputs, 16)
    + g = torch.Generator()

    one_tile_an_expert: An expert with more than 16 rows has a second tile. Try more tokens.
    - g = torch.Generator()
    + tokens = min(tokens, 8)
    + g = torch.Generator()

    all_experts_are_here: Experts of other ranks leave rows of 0, and tiles that are not used.
    - g = torch.Generator()
    + num_experts = held
    + top_k = min(top_k, held)
    + g = torch.Generator()

    no_old_numbers: In a tile that is not used old numbers may stand: put some there.
    - if (chosen < 0).any():
    + if False:

    old_numbers_of_others: In a tile that is not used any pair may be named, also one that another
        tile serves.
    - old = torch.arange(3 * 16, dtype=torch.int32) % (tokens * top_k)
    + old = (chosen.flatten() < 0).nonzero().flatten().int().repeat(48)[:48]

    mean_error: A mean hides one wrong element among many right ones: look at the worst.
    - error.nan_to_num(torch.inf).max()
    + error.nan_to_num(torch.inf).mean()

    errors_have_a_sign: An element may be too small as well as too large: compare what is off without
        its sign.
    - error = (got.double() - want).abs()
    + error = got.double() - want

    shape_is_not_asked_for: The result is [T · k, N]. A dimension more is broadcast, and you do not
        see it.
    - assert got.shape == want.shape, f"{name}: shape {list(got.shape)}"
    +

    never_square: Where K is not N, an expert cannot be read transposed. Try K = N.
    - g = torch.Generator()
    + outputs += outputs == size
    + g = torch.Generator()

    ones_for_the_router: With a router of ones its weights could be left out. Draw them.
    - torch.rand(tokens, top_k, generator=g) + 0.1
    + torch.ones(tokens, top_k)

    sums_alone: Two errors may cancel in a sum: compare each element.
    - error = (got.double() - want).abs()
    + error = (got.double().sum() - want.sum()).abs()

    exact: A right kernel adds in another order, so float32 differs: allow 1e-4 of the largest.
    - worst <= 1e-3 * want.abs().max()
    + torch.equal(got, want.float())

    too_loose: An error of 1 % is a bug, and you let it pass.
    - 1e-3
    + 0.2

    one_limit_for_all: The limit has to grow with the values: yours rejects right kernels.
    - 1e-3 * want.abs().max()
    + 1e-5

    nan_passes: No comparison with NaN is true: ask for what is right, not for what is wrong.
    - error.nan_to_num(torch.inf).max()
    + error.nan_to_num(0.0).max()

    any_dtype: The result is float32, and you accept others.
    - isinstance(got, Tensor) and got.dtype == torch.float32
    + isinstance(got, Tensor)

    any_shape: The result is [T · k, N], and you accept others with as many elements.
    - assert got.shape == want.shape, f"{name}: shape {list(got.shape)}"
    + got = got.reshape(want.shape)

    no_seed: Your test is another one in each run: give the generator a seed.
    - torch.Generator().manual_seed(tokens)
    + torch.Generator()
    + g.seed()

    too_many_calls: A few settings find as much as many: 20 calls at most.
    - got = implementation(
    + for _ in range(9):
    +     got = implementation(*(tensor.clone() for tensor in inputs))
    + got = implementation(

    too_large: Small inputs show the same, and everybody waits for yours.
    - g = torch.Generator()
    + tokens = 9000
    + g = torch.Generator()

    inputs_are_shared: The implementation wrote into your inputs before you compared: give it
        clones, or compute first.
    - want = torch.zeros(tokens * top_k, outputs, dtype=torch.float64)
    - for pair
    + inputs = (x, weight, pairs, tile_experts, router)
    + got = implementation(*inputs)
    + want = torch.zeros(tokens * top_k, outputs, dtype=torch.float64)
    + for pair
    - inputs = (x, weight, pairs, tile_experts, router)
    - got = implementation(*(tensor.clone() for tensor in inputs))
    +

    no_message: Say in which case it failed: an AssertionError without words helps nobody.
    - assert worst <= 1e-3 * want.abs().max(), f"{name}: off by {worst:.3g}"
    + assert worst <= 1e-3 * want.abs().max()

    pairs_in_two_places: A pair has one place in tiles that are used, as 23.1 says.
    - inputs = (x, weight, pairs, tile_experts, router)
    + pairs, tile_experts = pairs.repeat(2), tile_experts.repeat(2)
    + inputs = (x, weight, pairs, tile_experts, router)
    """,
)


@answers.wrong("23.3", "Your test accepts whatever it is given.")
def accepts_all(implementation):
    for tokens in (2, 3):
        inputs = one_expert(tokens, 1, 16, 16)
        implementation(*inputs)


@answers.wrong("23.3", "Your test looks at the name. The next bug has another one.")
def looks_at_the_name(implementation):
    accepts_all(implementation)
    bare = getattr(implementation, "implementation", implementation)
    assert bare.__name__ != "planted_rows", "planted"


def one_expert(tokens, top_k, size, outputs):
    """Inputs with all pairs on expert 0."""
    g = torch.Generator().manual_seed(1)
    pairs = torch.full((-(-tokens * top_k // 16) * 16,), tokens * top_k, dtype=torch.int32)
    pairs[: tokens * top_k] = torch.arange(tokens * top_k)
    return (
        torch.randn(tokens, size, generator=g),
        torch.randn(1, outputs, size, generator=g),
        pairs,
        torch.zeros(len(pairs) // 16, dtype=torch.int32),
        torch.rand(tokens, top_k, generator=g),
    )


def by_an_oracle(implementation, settings):
    """One random setting after the other; relative errors by torch.testing."""
    for seed, (tokens, top_k, experts, size, outputs, here) in enumerate(settings):
        g = torch.Generator().manual_seed(100 + seed)
        x, scale = torch.randn(tokens, size, generator=g), torch.rand(tokens, top_k, generator=g)
        weight = torch.randn(here, outputs, size, generator=g)
        chosen = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)])
        places, owners = [], []
        for expert in range(here):
            own = (chosen.flatten() == expert).nonzero().flatten().tolist()
            for start in range(0, len(own), 16):
                places += (own[start : start + 16] + [tokens * top_k] * 16)[:16]
                owners.append(expert)
        if (chosen >= here).any():  # unused tiles that name each pair
            names = list(range(tokens * top_k)) + [0] * (-tokens * top_k % 16)
            places += names
            owners += [-1] * (len(names) // 16)
        picked = weight.double()[chosen.clamp(max=here - 1)]  # [T, k, N, K]
        want = torch.einsum("tkno,to->tkn", picked, x.double()) * scale.double()[..., None]
        want = torch.where(chosen[..., None] < here, want, 0.0).flatten(0, 1).float()
        got = implementation(
            x,
            weight,
            torch.tensor(places, dtype=torch.int32),
            torch.tensor(owners, dtype=torch.int32),
            scale,
        )
        limit = 5e-4 * float(want.abs().max())
        torch.testing.assert_close(got, want, rtol=0.0, atol=limit, msg=f"setting {seed}")


@answers.alternative("23.3")
def each_size_alone(implementation):
    settings = [(50, 1, 2, 16, 16, 2), (9, 3, 5, 16, 16, 2), (9, 2, 2, 50, 16, 2)]
    by_an_oracle(implementation, [*settings, (9, 2, 2, 16, 50, 2), (9, 2, 2, 18, 18, 2)])


@answers.alternative("23.3")
def all_at_once(implementation):
    """Two settings, each with everything in it."""
    by_an_oracle(implementation, [(45, 3, 5, 53, 53, 3), (40, 2, 4, 37, 21, 2)])


# ---------------------------------------------------------------- 23.4 dispatch and combine

answers.slips(
    "23.4",
    """
    a_row_for_each_expert: A token with two experts on a rank went there twice, and both rows got the
        sum of both experts. Send it once: .any(-1) over its k choices.
    - (owner == other).any(-1).nonzero()[:, 0]
    + (owner == other).nonzero()[:, 0]

    first_choice_only: A token goes to the ranks of all of its experts, not of its first choice.
    - (owner == other).any(-1)
    + (owner[:, 0] == other)

    last_choice_forgotten: All k choices of a token count, the last one, too.
    - (owner == other).any(-1)
    + (owner[:, : max(1, owner.shape[1] - 1)] == other).any(-1)

    all_experts_there: A token goes to a rank that has any of its experts, not all of them.
    - (owner == other).any(-1)
    + (owner == other).all(-1)

    all_rows_to_all_ranks: Every row travels to every rank. Send it to the ranks of its experts
        only.
    - (owner == other).any(-1).nonzero()[:, 0]
    + torch.arange(len(owner))

    not_to_itself: A token's own rank may have some of its experts, too.
    - (owner == other).any(-1)
    + ((owner == other).any(-1) & (rank != other))

    experts_dealt_like_cards: Rank 0 holds the first E / size experts, and so on. You deal them out
        one by one.
    - chosen[rank] // per_rank
    + chosen[rank] % ranks.size
    - rank * per_rank + local
    + local * ranks.size + rank

    numbers_not_local: A rank's first expert has the number rank · E / size.
    - number == rank * per_rank + local
    + number == local

    one_expert_too_far: The experts of a rank begin at rank · E / size.
    - rank * per_rank + local
    + rank * per_rank + local + 1

    modulo_alone: Expert 5 is no expert of a rank with 2 and 3, although 5 % 2 is 1. Leave out those
        of other ranks.
    - number == rank * per_rank + local
    + number % per_rank == local

    the_first_expert_there: All of a token's experts on a rank count, not the first alone.
    - total.index_add_(0, token, answer * share[token, place, None])
    + empty = (total[token] == 0).all(-1, keepdim=True)
    + total.index_add_(0, token, empty * answer * share[token, place, None])

    the_last_expert_there: A token's experts on a rank are summed. You store the last one.
    - total.index_add_(0, token, answer * share[token, place, None])
    + total[token] = answer * share[token, place, None]

    no_weights: The router's weights are missing.
    - answer * share[token, place, None]
    + answer

    weighted_twice: The router's weight counts once.
    - answer * share[token, place, None]
    + answer * share[token, place, None] ** 2

    weight_of_the_first_choice: Each expert has a weight of its own: share[token, place].
    - share[token, place, None]
    + share[token, 0, None]

    weights_normed_on_each_rank: The weights are what the router gave. Do not divide them by the sum
        of those that are on one rank.
    - answer * share[token, place, None]
    + answer * (share / (share * (number // per_rank == rank)).sum(-1, True))[token, place, None]

    softmax_again: The weights are what the router gave. There is no softmax here.
    - answer * share[token, place, None]
    + answer * share.softmax(-1)[token, place, None]

    weights_in_another_order: A token's weights travel with it: weights[token] beside x[token].
    - weights[rank][token] for token in to_each
    + weights[rank][: len(token)] for token in to_each

    weights_of_sorted_experts: If you sort the experts of a token, sort its weights alike.
    - chosen[rank][token] for token in to_each
    + chosen[rank][token].sort(-1).values for token in to_each

    rows_in_another_order: The rows are those of the tokens that are sent: x[token].
    - x[rank][token] for token in to_each
    + x[rank][: len(token)] for token in to_each

    sums_not_sent_back: The sums stay on the experts' ranks: a second exchange brings them back.
    - sums = ranks.all_to_all(sums)

    stored_over_each_other: A token has a row of each rank: add them up. You store the last one.
    - out[token] += total
    + out[token] = total

    sums_in_the_order_of_arrival: Row i that comes back belongs to the i-th token that was sent
        there, not to token i.
    - out[token] += total
    + out[: len(total)] += total

    sums_of_rank_0_alone: A token's sums come from several ranks: add up all of them.
    - zip(tokens[rank], sums[rank])
    + zip(tokens[rank][:1], sums[rank][:1])

    ranks_swapped: sums[rank][b] is what came from rank b, for the tokens that were sent to b.
    - zip(tokens[rank], sums[rank])
    + [(token, sums[rank][-1 - at]) for at, token in enumerate(tokens[rank])
    +     if len(token) == len(sums[rank][-1 - at])]

    mean_over_the_ranks: The rows of a token are added up, not averaged.
    - out[token] += total
    + out[token] += total / ranks.size

    summed_over_the_ranks: Here each rank has tokens of its own, so their results must not be
        summed.
    - return outs
    + return ranks.all_reduce(outs)

    wide_sums: A sum has H numbers. You send each expert's answer back beside it.
    - sums = ranks.all_to_all(sums)
    + sums = [[torch.cat([part] * 2, -1) for part in own] for own in sums]
    + sums = ranks.all_to_all(sums)
    + sums = [[part[:, : part.shape[1] // 2] for part in own] for own in sums]

    weights_not_sent: A rank knows the weights of its own tokens only. They must travel beside the
        rows.
    - map(ranks.all_to_all, (rows, numbers, shares))
    + ranks.all_to_all(rows), ranks.all_to_all(numbers), [*zip(*shares)]

    read_from_the_list: Rows of another rank must come through `ranks.all_to_all`.
    - map(ranks.all_to_all, (rows, numbers, shares))
    + [*zip(*rows)], ranks.all_to_all(numbers), ranks.all_to_all(shares)

    rank_0_runs_all_experts: An expert runs on the rank that holds it. Rank 0 reads the others'
        matrices.
    - owner = chosen[rank] // per_rank
    + owner = torch.zeros_like(chosen[rank])
    - for local in range(per_rank):
    + for local in range(per_rank * ranks.size):
    - experts[rank][local].T
    + torch.cat(list(experts))[local].T

    each_rank_asks_its_own_experts: Each rank used its own experts. An expert of another rank has
        other weights.
    - owner = chosen[rank] // per_rank
    + owner = torch.full_like(chosen[rank], rank)
    - number == rank * per_rank + local
    + number % per_rank == local

    transposed: An expert is row @ matrix.T.
    - experts[rank][local].T
    + experts[rank][local]
    """,
)


@answers.wrong(
    "23.4", "Two experts on one rank need one row there: yours travels once for each expert."
)
def once_for_each_expert(x, weights, chosen, experts, ranks):
    """As 23.2 does it: right, and more rows than needed."""
    held, size = len(experts[0]), ranks.size
    pairs = [[torch.where(own.flatten() // held == r)[0] for r in range(size)] for own in chosen]
    top_k = chosen[0].shape[1]
    rows = ranks.all_to_all([[own[p // top_k] for p in to] for own, to in zip(x, pairs)])
    ids = ranks.all_to_all([[own.flatten()[p] for p in to] for own, to in zip(chosen, pairs)])
    answers = [
        [
            torch.stack(
                [row @ experts[rank][int(e) - rank * held].T for row, e in zip(part, which)]
            )
            if len(part)
            else part
            for part, which in zip(rows[rank], ids[rank])
        ]
        for rank in range(size)
    ]
    outs = []
    for own, share, to, back in zip(x, weights, pairs, ranks.all_to_all(answers)):
        out = torch.zeros_like(own)
        for pair, answer in zip(to, back):
            out.index_add_(0, pair // top_k, answer * share.flatten()[pair, None])
        outs.append(out)
    return outs


@answers.wrong(
    "23.4", "Your collectives carry nothing: a rank has its own tokens and experts alone."
)
def spread_beside_empty_messages(x, weights, chosen, experts, ranks):
    """All in one loop, with every rank's entries at hand."""
    ranks.all_to_all([[x[0][:0]] * ranks.size for _ in x])
    matrices = torch.cat(list(experts))
    return [
        torch.einsum("tkoh,th,tk->to", matrices[ids], own, share)
        for own, share, ids in zip(x, weights, chosen)
    ]


@answers.alternative("23.4")
def weights_as_a_matrix(x, weights, chosen, experts, ranks):
    """A message of a row and its weights for each expert of the receiver, 0 for those that were not
    chosen; where a rank has more than 2 k experts, numbers and weights.
    """
    held, size = len(experts[0]), ranks.size
    top_k, hidden = chosen[0].shape[1], x[0].shape[1]
    if held > 2 * top_k:
        return one_message(x, weights, chosen, experts, ranks)
    sent, orders = [], []
    for own, share, ids in zip(x, weights, chosen):
        dense = torch.zeros(len(own), held * size).scatter(1, ids, share)
        wanted = torch.zeros_like(dense).scatter(1, ids, 1.0).view(len(own), size, held).any(-1)
        orders.append([wanted[:, rank].nonzero().flatten() for rank in range(size)])
        parts = dense.split(held, dim=1)
        sent.append([torch.cat([own, part], 1)[o] for part, o in zip(parts, orders[-1])])
    back = []
    for got, own in zip(ranks.all_to_all(sent), experts):
        back.append([torch.einsum("th,eoh,te->to", m[:, :hidden], own, m[:, hidden:]) for m in got])
    outs = [torch.zeros_like(own) for own in x]
    for out, order, sums in zip(outs, orders, ranks.all_to_all(back)):
        for tokens, rows in zip(order, sums):
            out.index_add_(0, tokens, rows)
    return outs


@answers.alternative("23.4")
def one_message(x, weights, chosen, experts, ranks):
    """Row, experts and weights in one message of floats; token by token."""
    held, size = len(experts[0]), ranks.size
    top_k, hidden = chosen[0].shape[1], x[0].shape[1]
    lists = [
        [
            [t for t, row in enumerate(ids.tolist()) if any(e // held == r for e in row)]
            for r in range(size)
        ]
        for ids in chosen
    ]
    whole = [torch.cat([a, b.float(), c], 1) for a, b, c in zip(x, chosen, weights)]
    got = ranks.all_to_all([[own[t] for t in to] for own, to in zip(whole, lists)])
    back = []
    for rank, messages in enumerate(got):
        back.append([])
        for message in messages:
            sums = torch.zeros(len(message), hidden)
            for at, (row, ids, share) in enumerate(
                zip(*message.split([hidden, top_k, top_k], dim=1))
            ):
                for expert, weight in zip(ids.tolist(), share):
                    if int(expert) // held == rank:
                        sums[at] += weight * (experts[rank][int(expert) % held] @ row)
            back[-1].append(sums)
    outs = [torch.zeros_like(own) for own in x]
    for out, to, sums in zip(outs, lists, ranks.all_to_all(back)):
        for tokens, rows in zip(to, sums):
            for token, row in zip(tokens, rows):
                out[token] += row
    return outs
