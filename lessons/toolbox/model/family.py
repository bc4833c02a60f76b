"""What the course knows of one family of models."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Family(NamedTuple):
    """How the config.json of one model_type is read. Keys stand in one string, between blanks.

    fields: from transformers' config, the fields of ModelConfig that are the family's own. needs
    and reads: keys that the file must and may hold, beside those of every family. fixed: the one
    supported value of keys that transformers does not know. read_as: the model_type whose class
    reads the file, if it is another one. rope_types: those that its RoPE object may have.
    also_called: {another name of a key: the key}. stored_as: {part of a tensor's name in the
    decoder: the same part in the checkpoints}. rope_by_layer: whether its rope_parameters hold one
    object for the layers with a window, and one for the others. rope_in_pairs: whether the rotary
    coordinates of a head are stored in pairs (2i, 2i + 1). predicts_further: whether layers may
    stand behind the last one, which predict tokens further ahead. may_be_zero: keys at which 0 says
    that there is none. eps: the key of what is added to a variance.
    """

    fields: Callable[[Any], dict[str, Any]]
    needs: str = ""
    reads: str = ""
    fixed: dict[str, Any] | None = None
    read_as: str = ""
    rope_types: str = "default linear llama3 yarn"
    also_called: dict[str, str] | None = None
    stored_as: dict[str, str] | None = None
    rope_by_layer: bool = False
    rope_in_pairs: bool = False
    predicts_further: bool = False
    may_be_zero: str = ""
    eps: str = "rms_norm_eps"
