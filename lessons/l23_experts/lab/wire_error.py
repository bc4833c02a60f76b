"""What FP8 on the way to the experts costs in precision: of one layer, and of a small model.

    python -m lessons.l23_experts.lab.wire_error

The model is Mixtral's decoder in small, in float32, with random weights, because the course's own
models have no experts. So it says how errors grow through layers, not how a trained model answers.
"""

import copy
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import swap
from lessons.l02_naive_attention.naive import generate, whole_sequence
from lessons.l06_mla.moe import MoE, MoEDecoder
from lessons.l20_parallelism.processes.group import Group
from lessons.l23_experts.naive import layer_config
from lessons.l23_experts.ranks.dispatch import CountedDispatchMoE
from lessons.l23_experts.ranks.wire import Float8, Plain
from lessons.toolbox.command import OneLineParser
from lessons.toolbox.model.config import ModelConfig, MoEConfig

SIZE, TOKENS, STEPS = 256, 512, 32
MOE = MoEConfig(8, 2, 256, norm_topk_prob=True)


class Error(NamedTuple):
    """Relative errors of rows, |difference| / |row|."""

    mean: float
    worst: float


def error_of(got: Tensor, want: Tensor) -> Error:
    """got, want: [T, H]."""
    errors = (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)
    return Error(float(errors.mean()), float(errors.max()))


@torch.no_grad()
def layer_errors(form: Plain | Float8) -> dict[str, Error]:
    """Of random rows, and of what a layer of experts makes of them, with `form` on the wire."""
    x = torch.randn(TOKENS, SIZE)
    moe = MoE(layer_config(SIZE, MOE)).eval()
    served = CountedDispatchMoE(copy.deepcopy(moe), Group.alone(), form)
    return {
        "rows": error_of(form.unpack(form.pack(x), x), x),
        "output": error_of(served(x), moe(x)),
    }


# ---------------------------------------------------------------- a model

LAYERS, VOCABULARY, PROMPT = 4, 512, 64


def new_model() -> MoEDecoder:
    """Mixtral's decoder in small, random weights in float32."""
    config = ModelConfig("mixtral", VOCABULARY, SIZE, LAYERS, 4, 2, SIZE // 4, SIZE, 1024, moe=MOE)
    return MoEDecoder(config).eval().requires_grad_(False)


def over_the_wire(model: MoEDecoder, form: Plain | Float8) -> MoEDecoder:
    """A twin whose rows go to their experts in this form."""

    def served(moe: MoE) -> CountedDispatchMoE:
        return CountedDispatchMoE(moe, Group.alone(), form)

    return swap(copy.deepcopy(model), {MoE: served})


class Agreement(NamedTuple):
    """Of a twin and a model. logits: relative errors of the rows; likeliest: the share of positions
    with the same likeliest token; first_difference: greedy tokens until one differs.
    """

    logits: Error
    likeliest: float
    first_difference: int


@torch.no_grad()
def model_errors(form: Plain | Float8) -> Agreement:
    """On one random prompt of PROMPT tokens, and STEPS greedy ones after it."""
    model = new_model()
    twin = over_the_wire(model, form)
    tokens = torch.randint(VOCABULARY, (PROMPT,))
    attend = whole_sequence(model, PROMPT)
    want, got = (each.logits(each(tokens, attend)) for each in (model, twin))
    same = (want.argmax(-1) == got.argmax(-1)).float().mean()
    outputs = [generate(each, [tokens.tolist()], STEPS)[0] for each in (model, twin)]
    pairs = enumerate(zip(*outputs))
    first = next((step for step, (a, b) in pairs if a != b), STEPS)
    return Agreement(error_of(got, want), float(same), first)


def main(arguments: list[str] | None = None) -> int:
    """Print the errors of both forms."""
    parser = OneLineParser(
        prog="python -m lessons.l23_experts.lab.wire_error",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    for name, form in {"as they are": Plain(), "FP8": Float8()}.items():
        torch.manual_seed(given.seed)
        errors, model = layer_errors(form), model_errors(form)
        print(f"rows {name}")
        for what, error in {**errors, "logits": model.logits}.items():
            print(f"  {what:8} mean error {error.mean:.2%}, worst {error.worst:.2%}")
        print(f"  likeliest token the same at {model.likeliest:.0%} of {PROMPT} positions,")
        print(f"  greedy tokens equal up to token {model.first_difference} of {STEPS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
