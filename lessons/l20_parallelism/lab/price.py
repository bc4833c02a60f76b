"""The picture of the notebook's sliders: what a step reads and what it talks, over the number of
GPUs that share each layer.
"""

from matplotlib.axes import Axes

from lessons.l01_roofline.planner.models import find_model
from lessons.l20_parallelism.planner.links import LINKS, machine_of
from lessons.l20_parallelism.planner.scaling import Step, decode_step, prefill
from lessons.l20_parallelism.planner.shares import Layout
from lessons.toolbox.draw.figure import GREY, PALETTE, ROLES, ClassFigure, frame, style
from lessons.toolbox.measure.hardware import CHIPS

SIZES = (1, 2, 4, 8)
CONTEXT = 4096


@style()
def draw_price(
    tp: int = 8,
    link: str = "nvlink4",
    batch: int = 1,
    model: str = "llama-3-70b",
    gpu: str = "h100",
) -> ClassFigure:
    """A decode step of `batch` sequences, and the prefill of one prompt. tp: of SIZES, the one in
    the title; link: a name of LINKS.
    """
    shape, machine = find_model(model), machine_of(CHIPS[gpu], inside=link)
    layouts = [Layout(tp=size) for size in SIZES]
    decodes = [decode_step(shape, machine, layout, batch, CONTEXT) for layout in layouts]
    prefills = [prefill(shape, machine, layout, CONTEXT) for layout in layouts]
    at = SIZES.index(tp)
    faster = [steps[0].seconds / steps[at].seconds for steps in (decodes, prefills)]
    fig, panels = frame(
        f"{tp} GPUs over {LINKS[link].name}: decoding {faster[0]:.1f}×, the prefill "
        f"{faster[1]:.1f}× as fast as one",
        f"PREDICTED, nothing measured · {model}, {machine.chip.name}, 16 bits · batch {batch}, "
        f"{CONTEXT} tokens",
        (12, 4.8),
        (1, 1),
    )
    names = "a decode step", f"a prompt of {CONTEXT} tokens"
    for ax, steps, name in zip(panels, (decodes, prefills), names):
        _bars(ax, steps, at)
        ax.set_title(name)
    panels[0].set_ylabel("ms (lower is better)")
    panels[0].legend(loc="upper right")
    return fig


def _bars(ax: Axes, steps: list[Step], at: int) -> None:
    """Reading or computing below, talking on top, the efficiency above; one bar is framed."""
    places = range(len(steps))
    floors = [1e3 * step.floor_s for step in steps]
    talks = [1e3 * step.communication_s for step in steps]
    looks = (
        dict(color=PALETTE[0], label="reads and computes"),
        dict(color=ROLES["naive"].colour, hatch="//", edgecolor="white", label="talks"),
    )
    ax.bar(places, floors, 0.6, **looks[0])
    ax.bar(places, talks, 0.6, bottom=floors, **looks[1])
    top = max(step.seconds for step in steps) * 1e3
    for place, step in zip(places, steps):
        share = steps[0].seconds / step.seconds / SIZES[place]
        weight = "bold" if place == at else "normal"
        height = 1e3 * step.seconds + 0.02 * top
        ax.text(place, height, f"{share:.0%}", ha="center", fontweight=weight)
    ax.set_xticks(places, [str(size) for size in SIZES])
    ax.set_xlabel("GPUs that share each layer · on top: efficiency", color=GREY)
    ax.set_ylim(0, 1.12 * top)
