r"""Pictures in the engine: their rows take the place of embeddings, and name their K and V.

    llm = LLM("models/tiny-vision")
    llm.generate({"prompt": "# <image>\n# What is it?\n", "multi_modal_data": {"image": picture}})

The decoder, the cache, the scheduler and the kernels know nothing of it. A prompt holds the image
token as often as the picture has rows. Two places look behind it: the embedding, which puts the
picture's rows there, and the prefix cache, which must not take two pictures for the same prompt.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder, swap
from lessons.l14_continuous_batching.sequence import Step
from reference.engine.engine_args import EngineArgs
from reference.vision.pictures import Picture, normalized
from reference.vision.prompt import Placed, VisionInputs, inputs_for
from reference.vision.tower import Eyes

MOST_NUMBERS = 2**16  # pictures that a prefix cache tells apart without an end

# ---------------------------------------------------------------- their rows


class FeatureCache:
    """What the tower made of the pictures seen last. most_bytes: of memory; one picture always
    fits.
    """

    def __init__(self, eyes: Eyes, most_bytes: int):
        self.eyes = eyes
        self.most_bytes = most_bytes
        self.rows: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_bytes = 0
        self.num_computed = 0

    @torch.inference_mode()
    def __getitem__(self, picture: Picture) -> Tensor:
        """The rows of a picture: [N, text_size]."""
        if picture.digest in self.rows:
            self.rows.move_to_end(picture.digest)  # it was asked for last
        else:
            self.num_computed += 1
            pixels = normalized(picture.pixels, self.eyes.config)
            # Alone, because its rows must not depend on who came with it.
            rows = self.eyes(pixels[None].to(self.eyes.device, self.eyes.dtype))[0]
            self.rows[picture.digest] = rows
            self.num_bytes += rows.nbytes
            while len(self.rows) > 1 and self.num_bytes > self.most_bytes:
                _, oldest = self.rows.popitem(last=False)
                self.num_bytes -= oldest.nbytes
        return self.rows[picture.digest]


class Splice(NamedTuple):
    """Which tokens of a step are rows of pictures. at: [M] int64; rows: [M, text_size]."""

    at: Tensor
    rows: Tensor


class SplicedEmbedding(nn.Module):
    """An embedding that gives some tokens the rows of a picture. sight: which ones, in this
    step.
    """

    def __init__(self, embedding: nn.Module, sight: "Sight"):
        super().__init__()
        self.embedding = embedding
        # in a list, because a module would take an attribute with tensors for its own part
        self.sight = [sight]

    @property
    def weight(self) -> Tensor:
        return self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:  # [T] -> [T, hidden_size]
        x, splice = self.embedding(tokens), self.sight[0].splice
        return x if splice is None else x.index_copy(0, splice.at, splice.rows)


class Sight:
    """The eyes of an engine. most_cache_bytes: for rows of pictures."""

    def __init__(self, eyes: Eyes, inputs: VisionInputs, most_cache_bytes: int):
        self.inputs = inputs
        self.features = FeatureCache(eyes, most_cache_bytes)
        self.names = PictureNames(inputs.config.tokens_per_image)
        self.splice: Splice | None = None  # of the step under way

    def placed(self, ids: list[int], data: dict | None) -> tuple[list[int], tuple[Placed, ...]]:
        """The ids of a prompt with a token for each row of its pictures, and these. data: its
        multi_modal_data. Raises ValueError.
        """
        return self.inputs.place(ids, [] if data is None else self.inputs.read(data))

    def over_embedding(self, model: Decoder) -> Decoder:
        """A twin of the model whose embedding asks this. Its weights are shared."""
        return swap(model, {type(model.embed_tokens): partial(SplicedEmbedding, sight=self)})

    @contextmanager
    def over(self, step: Step) -> Iterator[None]:
        """Inside it the model sees the pictures of a step."""
        self.splice = self.splice_of(step)
        try:
            yield
        finally:
            self.splice = None

    def splice_of(self, step: Step) -> Splice | None:
        """The rows of pictures in a step's chunks; None for no such row. A chunk may begin and end
        within a picture, and begins behind it if a prefix cache knew its K and V: then no row needs
        its rows, and the tower does not run.
        """
        at, parts, row = [], [], 0
        for chunk in step.chunks:
            first = chunk.sequence.computed
            for placed in chunk.sequence.pictures:
                start = max(first, placed.start)
                end = min(first + chunk.count, placed.start + self.inputs.config.tokens_per_image)
                if start < end:
                    rows = self.features[placed.picture]
                    parts.append(rows[start - placed.start : end - placed.start])
                    at += range(row + start - first, row + end - first)
            row += chunk.count
        if not parts:
            return None
        rows = torch.cat(parts)
        return Splice(torch.tensor(at, device=rows.device), rows)


# ---------------------------------------------------------------- whose K and V


class PictureNames:
    """The numbers by which a prefix cache knows the rows of pictures: below zero, so that no token
    has them, and different for each row of each picture.

    A number is never given to a second picture. A picture that is forgotten and comes again gets
    new ones, and its old blocks are not found any more.
    """

    def __init__(self, tokens_per_image: int):
        self.tokens_per_image = tokens_per_image
        self.numbers: OrderedDict[bytes, int] = OrderedDict()
        self.next_number = 0

    def number_of(self, picture: Picture) -> int:
        """The number of what the model sees in a picture."""
        if picture.digest not in self.numbers:
            self.numbers[picture.digest] = self.next_number
            self.next_number += 1
        self.numbers.move_to_end(picture.digest)
        if len(self.numbers) > MOST_NUMBERS:
            self.numbers.popitem(last=False)
        return self.numbers[picture.digest]

    def rows_of(self, picture: Picture) -> range:
        """A name for each of its rows."""
        first = -1 - self.number_of(picture) * self.tokens_per_image
        return range(first, first - self.tokens_per_image, -1)

    def put(self, names: list[int], pictures: Sequence[Placed]) -> None:
        """Write the names of the pictures' rows where they are placed."""
        for start, picture in pictures:
            rows = self.rows_of(picture)
            names[start : start + len(rows)] = rows


def new_sight(eyes: Eyes, args: EngineArgs, max_model_len: int) -> Sight:
    """What an engine with these arguments needs to see. Raises ValueError."""
    inputs = inputs_for(eyes.config, args, max_model_len)
    return Sight(eyes, inputs, int(args.mm_processor_cache_gb * 2**30))
