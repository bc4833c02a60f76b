"""Bad input to a kernel's wrapper: each wrong dtype, device, shape or stride must be refused in one
line that names the argument.

    for name in ("q", "k", "v"):
        assert_refused(decode_attention, dict(q=q, k=k, v=v, softmax_scale=1.0), name)
"""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

KINDS = ("dtype", "device", "shape", "stride")


def wrong_variants(x: Tensor, kinds: Sequence[str] = KINDS) -> dict[str, Tensor]:
    """{what is wrong: x with that wrong}. x: any shape, one dimension at least.

    dtype: int8 (float32 for integers); device: "meta", which no kernel reads; shape: one dimension
    more, and one element more in the last; stride: the last dimension not dense. Raises ValueError
    for an unknown kind.
    """
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ValueError(f"kinds {unknown}; accepted: {', '.join(KINDS)}")
    found = {}
    if "dtype" in kinds:
        other = torch.int8 if x.dtype.is_floating_point else torch.float32
        found[f"dtype {other}"] = x.to(other)
    if "device" in kinds:
        found["device meta"] = x.to("meta")
    if "shape" in kinds:
        found["one dimension more"] = x[None]
        found["one element more in the last dimension"] = torch.cat([x, x[..., -1:]], dim=-1)
    if "stride" in kinds and x.shape[-1] > 1:  # one element lies dense with any stride
        found["last dimension not dense"] = x.repeat_interleave(2, dim=-1)[..., ::2]
    return found


def assert_message(function: Callable, arguments: dict, message: str) -> None:
    """Raise AssertionError unless `function(**arguments)` raises a ValueError of one line in which
    the pattern `message` is found.
    """
    try:
        function(**arguments)
    except ValueError as error:
        assert "\n" not in str(error) and re.search(message, str(error)), str(error)
    else:
        raise AssertionError(f"accepted; expected a ValueError with {message!r}")


def assert_refused(
    function: Callable, arguments: dict, name: str, kinds: Sequence[str] = KINDS
) -> None:
    """Call `function(**arguments)` with each wrong variant of `arguments[name]`: each must raise a
    ValueError of one line.

    The line must hold `name`. Raises AssertionError with everything that was accepted, or refused
    in another way. Leave a kind out where the function accepts it: a wrapper that takes any length
    has no wrong last dimension.
    """
    complaints = []
    for wrong, variant in wrong_variants(arguments[name], kinds).items():
        try:
            function(**{**arguments, name: variant})
        except ValueError as error:
            if "\n" in str(error) or name not in str(error):
                complaints.append(
                    f"{wrong}: the message is not one line that names {name!r}: {error}"
                )
        except Exception as error:
            complaints.append(f"{wrong}: {type(error).__name__} instead of ValueError: {error}")
        else:
            complaints.append(f"{wrong}: accepted")
    assert not complaints, (
        f"{getattr(function, '__name__', function)} with a wrong {name}:\n  "
        + "\n  ".join(complaints)
    )
