"""Wrong answers to exercise 3.2, a pool that grows and forgets; l03.py registers them."""

from dataclasses import replace
from functools import partial

import torch

from lessons.l02_naive_attention.rope import new_cos_sin_cache
from solutions.l03_kv_cache import KVPool


class SlippedPool(KVPool):
    """The pool with one slip: the attributes named at the call differ from what the class says."""

    spare_slot = zeros = True
    growth = "blocks"  # how old slots come into the new buffers
    late = early = 0  # growth one token too late, one too early
    exact = False  # grows to what is needed, no more
    doubles = False  # twice the block, however many tokens come
    smallest = 64
    counts = "blocks"  # what a move adds to growth_copy_bytes
    table = True  # cos_sin_cache grows
    concat = False  # a step builds the buffers anew
    all_layers = False  # the slots of all layers are passed on
    from_layer_0 = False  # a stage's layers are counted from 0
    own_q = False  # reads with the q that came, not with what write returned
    swap = False  # K and V change places
    read = "right"
    use_first_block = True
    counts_itself = False  # appends behind what it wrote before
    window = "right"
    scale = "config"
    both = True  # written_bytes counts K and V
    takes = "last"  # who takes the free block
    moves = "held"  # how much of it is copied
    refuses = "both"
    shortens = True
    dtype_on_growth = None  # what the new buffers hold, default what the old ones did
    over = False  # at an exact power of two grows to the next one
    stores_all = False  # buffers for every layer, stored here or not

    def __init__(self, *args, slips, **kwargs):
        vars(self).update(slips)
        self.appended = 0
        super().__init__(*args, **kwargs)

    def new_slots(self, row, dtype, device):
        num_slots = self.num_blocks * self.block_size + self.spare_slot
        make = torch.zeros if self.zeros else torch.empty
        layers = self.config.num_hidden_layers if self.stores_all else len(self.layers)
        return make(layers, num_slots, *row, dtype=dtype, device=device)

    def reserve(self, tokens):
        if tokens + self.early <= self.block_size + self.late:
            return
        old = self.k_slots, self.v_slots
        old_k, old_v = self.blocks(self.k_slots), self.blocks(self.v_slots)
        held = self.block_size
        power = max(self.smallest, 1 << (tokens - (not self.over)).bit_length())
        self.block_size = tokens if self.exact else max(64, 2 * held) if self.doubles else power
        dtype = self.dtype_on_growth or old_k.dtype
        self.k_slots = self.new_slots(old_k.shape[-2:], dtype, old_k.device)
        self.v_slots = self.new_slots(old_v.shape[-2:], dtype, old_v.device)
        if self.growth == "flat":
            self.k_slots[:, : old[0].shape[1]] = old[0]
            self.v_slots[:, : old[1].shape[1]] = old[1]
        elif self.growth != "lost":
            moved = slice(0, 1) if self.growth == "first block" else slice(None)
            self.blocks(self.k_slots)[:, moved, :held] = old_k[:, moved]
            if self.growth != "k alone":
                self.blocks(self.v_slots)[:, moved, :held] = old_v[:, moved]
        self.growth_copy_bytes += {
            "blocks": old_k.nbytes + old_v.nbytes,
            "buffers": old[0].nbytes + old[1].nbytes,
            "new": self.k_slots.nbytes + self.v_slots.nbytes,
            "k alone": old_k.nbytes,
            "nothing": 0,
        }[self.counts]
        if self.table:
            self.cos_sin_cache = new_cos_sin_cache(self.config, self.block_size)

    def attending(self, batch, first_block=0):
        if self.counts_itself:
            new = torch.arange(len(batch.tokens)) + self.appended
            batch = replace(batch, slot_mapping=new)
            self.appended += len(batch.tokens)
        single = batch.max_seqlen_q == 1
        if self.read == "one token":
            single = len(batch.tokens) == 1
        read = self.ops.decode if single else self.ops.prefill
        read = {"always decode": self.ops.decode, "always prefill": self.ops.prefill}.get(
            self.read, read
        )
        first = first_block if self.use_first_block else 0

        def attend(layer, q, k, v):
            if self.concat:
                self.k_slots, self.v_slots = self.k_slots + 0, self.v_slots + 0
            index = layer if self.from_layer_0 else layer - self.layers.start
            index = slice(None) if self.all_layers else index
            k_slots, v_slots = self.k_slots[index], self.v_slots[index]
            if self.swap:
                k_slots, v_slots = v_slots, k_slots
            rotated = self.ops.write(q, k, v, k_slots, v_slots, batch, self.cos_sin_cache)
            size = 4 if self.both == "float32" else k.itemsize
            self.written_bytes += size * (k.numel() + (v.numel() if self.both else 0))
            if self.swap:
                k_slots, v_slots = v_slots, k_slots
            k_cache, v_cache = self.blocks(k_slots)[first:], self.blocks(v_slots)[first:]
            window = {
                "right": self.config.sliding_window(layer),
                "none": None,
                "of the last layer": self.config.sliding_window(1),
            }[self.window]
            scale = self.config.softmax_scale if self.scale == "config" else 1.0
            return read(q if self.own_q else rotated, k_cache, v_cache, batch, scale, window)

        return attend

    def forget(self, block, held):
        behind = block >= len(held) and self.refuses in ("both", "behind")
        negative = block < 0 and self.refuses in ("both", "negative")
        if behind or negative:
            raise ValueError(f"block: got {block}")
        held = list(held)
        last = len(held) - 1
        source = self.num_blocks - 1 if self.takes == "last block" else last
        if block >= len(held):
            return held
        if self.takes == "all move up":
            for b in range(block, last):
                self.move(b + 1, b, held[b + 1])
            return held[:block] + held[block + 1 :]
        count = {
            "held": held[last],
            "of the one that ended": held[block],
            "whole block": self.block_size,
        }[self.moves]
        if block != last and self.takes in ("last", "last block"):
            self.move(source, block, count)
        elif block != last and self.takes == "the other way":
            self.move(block, last, count)
        if self.takes == "erased":
            self.blocks(self.k_slots)[:, last] = 0
        if not self.shortens:
            return held
        held[block] = held[last]
        return held[:-1] if self.takes != "list alone" else held[:block] + held[block + 1 :]


class OnlyK(SlippedPool):
    """Moves K and leaves V."""

    def move(self, source, target, tokens):
        blocks = self.blocks(self.k_slots)
        blocks[:, target, :tokens] = blocks[:, source, :tokens]


class ChangesHeld(KVPool):
    """Right, but the caller's list is shortened."""

    def forget(self, block, held):
        remaining = super().forget(block, held)
        held[:] = remaining
        return held


SLIPS = [
    (
        "no_spare_slot",
        dict(spare_slot=False),
        "A slot of -1 is Python's last. Without a slot more, it is the last block's last one.",
    ),
    (
        "garbage",
        dict(zeros=False),
        "torch.empty holds whatever was in memory, NaN perhaps. New slots hold zeros.",
    ),
    (
        "growth_loses_slots",
        dict(growth="lost"),
        "After growth the old slots are gone: move the blocks to the new buffers.",
    ),
    (
        "growth_keeps_slot_numbers",
        dict(growth="flat"),
        "Blocks are longer now, so block 1 begins at another slot. Copy block by block.",
    ),
    ("growth_of_one_block", dict(growth="first block"), "Only block 0 moves. All blocks do."),
    ("growth_of_k_alone", dict(growth="k alone"), "K moves, and V does not."),
    ("table_stays", dict(table=False), "cos_sin_cache still ends where the old block did."),
    ("grows_late", dict(late=1), "Your block grows one token too late: tokens <= block_size fit."),
    ("grows_early", dict(early=1), "Your block grows although the token fits."),
    (
        "grows_to_fit",
        dict(exact=True),
        "You grow to what is needed now, so the next token copies everything again: quadratic.",
    ),
    ("grows_once", dict(doubles=True), "You double once. A long prompt may need more than that."),
    ("grows_from_one", dict(smallest=1), "A block that grows has SMALLEST_BUCKET slots at least."),
    (
        "counts_nobodys_slot",
        dict(counts="buffers"),
        "You count the slot that belongs to no sequence. Only blocks are copied.",
    ),
    ("counts_new_slots", dict(counts="new"), "You count the new buffers; only old blocks move."),
    ("counts_k_alone", dict(counts="k alone"), "You count K alone; V moves as well."),
    ("counts_nothing", dict(counts="nothing"), "growth_copy_bytes stays 0 although blocks moved."),
    (
        "concat_in_disguise",
        dict(concat=True),
        "Each step builds the buffers anew. Write into the ones you have.",
    ),
    ("all_layers", dict(all_layers=True), "ops get the slots of one layer, not of all."),
    (
        "layers_from_0",
        dict(from_layer_0=True),
        "A pool may store some layers alone: layer `layers.start` is its first.",
    ),
    (
        "unrotated_q",
        dict(own_q=True),
        "ops.write returns q, rotated; you attend with the q that came in.",
    ),
    ("k_and_v_swapped", dict(swap=True), "K and V have changed places."),
    (
        "always_decodes",
        dict(read="always decode"),
        "ops.decode is for one new token of each sequence. A prompt brings more.",
    ),
    (
        "decodes_one_token",
        dict(read="one token"),
        "A batch of single tokens is decoded too: look at max_seqlen_q, not at the packed length.",
    ),
    (
        "always_prefills",
        dict(read="always prefill"),
        "One new token of each sequence is a step for ops.decode.",
    ),
    (
        "ignores_first_block",
        dict(use_first_block=False),
        "The batch's first sequence is in first_block, and you read block 0.",
    ),
    (
        "counts_itself",
        dict(counts_itself=True),
        "You append after what you wrote before. The batch says where its tokens go.",
    ),
    ("no_window", dict(window="none"), "You ignore config.sliding_window(layer)."),
    ("one_window", dict(window="of the last layer"), "Each layer has its own window."),
    ("no_scale", dict(scale="none"), "The scale is config.softmax_scale."),
    ("written_k_alone", dict(both=False), "written_bytes counts K alone; V is written as well."),
    (
        "all_move_up",
        dict(takes="all move up"),
        "In your list everyone moves up. Only the last sequence has to move, into the free block.",
    ),
    (
        "takes_the_last_block",
        dict(takes="last block"),
        "You copy the pool's last block. The last sequence may be before it.",
    ),
    (
        "float32_after_growth",
        dict(dtype_on_growth=torch.float32),
        "Your new buffers have another dtype than the old ones.",
    ),
    (
        "grows_past_a_power_of_two",
        dict(over=True),
        "128 tokens fit into 128 slots; your block grows to 256.",
    ),
    (
        "written_float32",
        dict(both="float32"),
        "written_bytes counts 4 bytes a number whatever the dtype.",
    ),
    (
        "stores_all_layers",
        dict(stores_all=True),
        "The pool stores `layers` alone, and you make room for all of the model's.",
    ),
    ("moves_the_wrong_way", dict(takes="the other way"), "You copy the ended sequence."),
    (
        "list_alone",
        dict(takes="list alone"),
        "In your list everyone moves up. Only the last sequence has to move, into the free block.",
    ),
    ("erases", dict(takes="erased"), "Nothing need be erased: nothing after a length is read."),
    (
        "moves_too_few",
        dict(moves="of the one that ended"),
        "You copy as many tokens as the ended sequence had. The last one may have more.",
    ),
    (
        "moves_the_whole_block",
        dict(moves="whole block"),
        "You copy the whole block. Only the tokens in use are needed.",
    ),
    ("list_stays", dict(shortens=False), "The one that ended is still in your list."),
    (
        "takes_any_block",
        dict(refuses="negative"),
        "There is no sequence in that block: ValueError.",
    ),
    (
        "takes_negative_blocks",
        dict(refuses="behind"),
        "Block -1 is Python's last one, not a sequence: ValueError.",
    ),
]


def add_to(answers):
    """Register them."""
    for name, slips, hint in SLIPS:
        answers.wrong("3.2", hint, name)(partial(SlippedPool, slips=slips))
    answers.wrong("3.2", "move copies K and forgets V.", "moves_k_alone")(partial(OnlyK, slips={}))
    answers.wrong("3.2", "`held` is the caller's: return another list.")(ChangesHeld)
