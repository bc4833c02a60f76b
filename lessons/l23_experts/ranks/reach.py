"""How many ranks and nodes a token's rows go to, if its router is even.

    places_reached(256, 32, 8)             # of 32 GPUs: 7.27
    places_reached(256, 4, 8, 8, 4)        # of 4 nodes, with 4 of 8 groups of experts: 2.93

A token chooses k of E experts, and a place has E / P of them. There are C(E, k) choices, and
C(E − E/P, k) of them miss the place. So a token reaches, in the mean,

    P · (1 − C(E − E/P, k) / C(E, k)) places

A router with groups first chooses some groups, and then k experts of these. Then the mean is taken
over all choices of groups.
"""

from functools import cache
from itertools import combinations
from math import comb

from lessons.toolbox.model.arguments import check_whole, refuse


def places_reached(
    num_experts: int, size: int, top_k: int, num_groups: int = 1, top_groups: int = 1
) -> float:
    """Of `size` places, ranks or nodes, those that have one or more of a token's experts, in the
    mean. The experts are on the places in order, equally many on each; groups are neighbours, too.
    Raises ValueError.
    """
    check_whole(size=size, top_k=top_k, num_groups=num_groups, top_groups=top_groups)
    for name, count in (("size", size), ("num_groups", num_groups)):
        if num_experts % count:
            refuse(name, count, f"a divisor of {num_experts}, the experts")
    width, per_place = num_experts // num_groups, num_experts // size
    if not top_groups <= num_groups or top_k > top_groups * width:
        refuse("top_groups", top_groups, f"1 to {num_groups}, with {top_k} experts or more")
    total = 0.0
    for place in range(size):
        first, end = place * per_place, (place + 1) * per_place
        own = [max(0, min(end, (g + 1) * width) - max(first, g * width)) for g in range(num_groups)]
        total += hit(tuple(sorted(own)), width, top_k, top_groups)
    return total


@cache
def hit(own: tuple[int, ...], width: int, top_k: int, top_groups: int) -> float:
    """The share of tokens that have an expert at a place. own: the place's experts of each group,
    of `width` experts each.
    """
    choices = list(combinations(own, top_groups))
    pool = top_groups * width
    missed = sum(comb(pool - sum(chosen), top_k) for chosen in choices)
    return 1 - missed / (len(choices) * comb(pool, top_k))
