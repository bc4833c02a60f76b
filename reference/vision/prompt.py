"""Pictures in a prompt: one image token stands for each, and becomes as many as the picture has
rows.

    inputs = inputs_of(args, max_model_len)            # None for a model that does not see
    pictures = inputs.read({"image": [picture]})
    ids, placed = inputs.place(ids, pictures)

Nothing here needs the model, so a server can read and refuse pictures before the engine hears of
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lessons.toolbox.model.arguments import check_kind, refuse
from reference.checkpoints.any_checkpoint import llava_folder
from reference.engine.engine_args import EngineArgs
from reference.vision.config import VisionConfig, read_vision_config
from reference.vision.pictures import Picture, read_picture

KEYS = ({"prompt"}, {"prompt_token_ids"})
DATA = "multi_modal_data"


class Placed(NamedTuple):
    """A picture, and the place of its first row in the prompt."""

    start: int
    picture: Picture


@dataclass(frozen=True)
class VisionInputs:
    """What prompts may hold. most: pictures of a prompt."""

    config: VisionConfig
    most: int

    def read(self, data: dict[str, Any]) -> list[Picture]:
        """The pictures of vLLM's multi_modal_data: {"image": a picture, or a list of them}. Their
        number is checked before the first of them is decoded. Raises ValueError.
        """
        check_kind(dict, 'an object, {"image": pictures}', multi_modal_data=data)
        if strange := data.keys() - {"image"}:
            refuse(
                DATA, sorted(map(str, strange))[0], "'image', because this model reads nothing else"
            )
        images = data.get("image", [])
        images = list(images) if isinstance(images, (list, tuple)) else [images]
        self.check_count(len(images))
        return [read_picture(image, self.config, f"image[{at}]") for at, image in enumerate(images)]

    def check_count(self, count: int) -> None:
        """Raise ValueError for too many pictures."""
        if count > self.most:
            raise ValueError(
                f"image: got {count} pictures; accepted: at most {self.most} in a prompt "
                f"(limit_mm_per_prompt, max_model_len)"
            )

    def place(
        self, ids: Sequence[int], pictures: list[Picture]
    ) -> tuple[list[int], tuple[Placed, ...]]:
        """The prompt with a token for each row of its pictures, and where they stand.

        ids: with one image token for each picture, or already with all of them. Raises ValueError
        if they do not match.
        """
        token, rows = self.config.image_token_id, self.config.tokens_per_image
        if not pictures and token not in ids:
            return list(ids), ()
        found = [at for at, id in enumerate(ids) if id == token]
        if len(found) == len(pictures):
            expanded = []
            for id in ids:
                expanded += [id] * (rows if id == token else 1)
            starts = [at + nth * (rows - 1) for nth, at in enumerate(found)]
        else:
            expanded, starts = list(ids), found[::rows]
            whole = [at for start in starts for at in range(start, start + rows)]
            if len(starts) != len(pictures) or found != whole:
                raise ValueError(
                    f"prompt: got {len(found)} image tokens for {len(pictures)} pictures; "
                    f"accepted: one for each ({rows} in a row, where they stand for its rows)"
                )
        return expanded, tuple(map(Placed, starts, pictures))


def inputs_of(args: EngineArgs, max_model_len: int) -> VisionInputs | None:
    """What the model of these arguments can see; None for nothing. Raises ValueError."""
    folder = llava_folder(args.model)
    return None if folder is None else inputs_for(read_vision_config(folder), args, max_model_len)


def inputs_for(config: VisionConfig, args: EngineArgs, max_model_len: int) -> VisionInputs:
    """The same for a model whose eyes are known."""
    most = (max_model_len - 1) // config.tokens_per_image
    return VisionInputs(config, min(most, args.limit_mm_per_prompt["image"]))


def split(prompt: Any) -> tuple[Any, Any]:
    """A prompt in any of vLLM's forms as text or ids, and its multi_modal_data: None for none."""
    if not isinstance(prompt, dict) or prompt.keys() - {DATA} not in KEYS:
        return prompt, None
    (name,) = prompt.keys() - {DATA}
    return prompt[name], prompt.get(DATA) or None
