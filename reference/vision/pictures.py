"""From a picture of any kind and size to what the tower takes: CLIP's preprocessing, and a name.

    picture = read_picture(Image.open("red.png"), config)
    picture.pixels     # [S, S, 3] uint8: what the model sees of it
    picture.digest     # SHA-256 of that: two pictures of one digest have the same K and V

A Picture is small, can be pickled, and holds no open file.
"""

import hashlib
import io
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lessons.toolbox.model.arguments import refuse, shown
from reference.vision.config import VisionConfig

# Decoders whose files say how large a picture is before anything is decoded, and that run no
# program.
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
MOST_PIXELS = 2**24  # of a picture; 4096 x 4096
MOST_RATIO = 64  # of the long edge to the short one


@dataclass(frozen=True)
class Picture:
    """pixels: [S, S, 3] uint8. digest: SHA-256 of them, 32 bytes."""

    pixels: np.ndarray
    digest: bytes

    @classmethod
    def of(cls, pixels: np.ndarray) -> "Picture":
        """pixels: [S, S, 3] uint8."""
        pixels = np.ascontiguousarray(pixels)
        return cls(pixels, hashlib.sha256(pixels.tobytes()).digest())


def decode(data: bytes, name: str) -> Image.Image:
    """The picture in a file's bytes, as RGB. name: of the argument, for errors. Raises ValueError,
    in one line, for what is no picture, and for one of too many pixels before it takes their
    memory.
    """
    kinds = ", ".join(FORMATS)
    try:
        with warnings.catch_warnings():
            # Pillow warns of large pictures; ours is the smaller limit, and an error.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(*picture.size, name)
        return picture.convert("RGB")  # decodes; of an animation the first frame
    except TooLarge:
        raise
    except Image.DecompressionBombError:
        raise too_large("more than Pillow opens", name) from None
    except Exception as error:  # because decoders raise whatever a broken file makes them raise
        said = str(error) if isinstance(error, OSError) else type(error).__name__
        said = "no such file" if "cannot identify" in said else said
        raise ValueError(
            f"{name}: got {len(data)} bytes that are no picture ({shown(said)[1:-1]}); accepted: a "
            f"whole file of {kinds}"
        ) from None


class TooLarge(ValueError):
    """A picture of more pixels than are decoded."""


def too_large(size: str, name: str) -> TooLarge:
    """The error of a picture that is too large."""
    return TooLarge(
        f"{name}: got a picture of {size}; accepted: at most {MOST_PIXELS} pixels, and a long edge "
        f"of at most {MOST_RATIO} times the short one"
    )


def check_size(width: int, height: int, name: str) -> None:
    """Raise TooLarge for a picture that would take too much memory, decoded or resized."""
    short, long = sorted((width, height))
    if not short or width * height > MOST_PIXELS or long > MOST_RATIO * short:
        raise too_large(f"{width} x {height} pixels", name)


def read_picture(image: Any, config: VisionConfig, name: str = "image") -> Picture:
    """What the model sees of an image, as CLIP's image processor makes it: RGB, the short edge
    scaled to image_size, the middle cut out.

    image: a PIL.Image, an array [H, W, 3] uint8, the bytes of a file, or a Picture. Raises
    ValueError for anything else.
    """
    if isinstance(image, Picture):
        want = (config.image_size, config.image_size, 3)
        if image.pixels.shape != want:
            refuse(name, image.pixels.shape, f"a Picture of shape {want}")
        return image
    if isinstance(image, (bytes, bytearray)):
        image = decode(bytes(image), name)
    if isinstance(image, np.ndarray):
        fits = image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
        if not fits:
            refuse(name, f"{image.dtype} {image.shape}", "an array [H, W, 3] of uint8")
        check_size(image.shape[1], image.shape[0], name)
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        refuse(name, image, "a PIL.Image, an array [H, W, 3] of uint8, or a file's bytes")
    check_size(*image.size, name)
    return Picture.of(cropped(image.convert("RGB"), config.image_size))


def cropped(image: Image.Image, size: int) -> np.ndarray:
    """The middle of a picture whose short edge becomes `size`: [size, size, 3] uint8."""
    width, height = image.size
    short = min(width, height)
    width, height = int(size * width / short), int(size * height / short)
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    top, left = (height - size) // 2, (width - size) // 2
    return pixels[top : top + size, left : left + size]


def normalized(pixels: np.ndarray, config: VisionConfig) -> Tensor:
    """pixels: [S, S, 3] uint8 -> [3, S, S] float32, each channel by its mean and deviation."""
    scaled = torch.from_numpy(pixels.astype(np.float32)) / 255
    return ((scaled - torch.tensor(config.mean)) / torch.tensor(config.std)).permute(2, 0, 1)
