"""The course's reference pages agree with themselves, with the code and with the numbers behind
them.
"""

import math
import re
from functools import lru_cache
from pathlib import Path

from book.glossary import entries
from book.links import slug
from lessons.l00_gpu_and_triton.coalescing import sectors_of_stride
from lessons.l01_roofline import calculators
from lessons.l01_roofline.calculators import kv_bytes_per_token
from lessons.l01_roofline.planner.models import find_model
from lessons.l16_speculative_sampling.more.speed import speedup
from lessons.toolbox.measure.hardware import CHIPS

REPOSITORY = Path(__file__).resolve().parents[1]
LESSONS = REPOSITORY / "lessons"
# "Lesson 7" alone, or as a link into the room of lesson 7
BEHIND_A_DEFINITION = re.compile(
    r" \*(?:\[Lesson (\d+)\]\(l(\d\d)_\w+/README\.md\)|Lesson (\d+))\*$"
)


def page(name: str) -> str:
    """A page beside the lessons."""
    return (LESSONS / name).read_text(encoding="utf-8")


def glossary() -> dict[str, str]:
    """{term: what is under it}, in the order of the page."""
    return entries(page("GLOSSARY.md"))


def rows(name: str, columns: int) -> list[list[str]]:
    """The cells of all tables of so many columns on a page, without heads and rules."""
    lines = [line for line in page(name).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    rules = {i for i, line in enumerate(lines) if re.fullmatch(r"\|[\s:|-]+\|", line)}
    return [
        row
        for i, row in enumerate(cells)
        if i not in rules and i + 1 not in rules and len(row) == columns
    ]


# ---------------------------------------------------------------- GLOSSARY.md


def test_the_glossary_is_in_order_and_no_term_stands_twice():
    terms = [re.sub(r"[^a-z0-9 ]", "", term.lower().replace("-", " ")) for term in glossary()]
    assert terms == sorted(terms)
    anchors = [slug(term) for term in re.findall(r"^### (.*)$", page("GLOSSARY.md"), re.MULTILINE)]
    assert len(anchors) == len(set(anchors)) > 100


def test_a_term_is_defined_in_a_few_sentences_and_names_its_lesson():
    for term, body in glossary().items():
        found = BEHIND_A_DEFINITION.search(body)
        assert found, f"{term}: the lesson is missing behind {body!r}"
        linked, room, _ = found.groups()
        assert room is None or int(room) == int(linked), f"{term}: the link leads to another lesson"
        sentences = re.findall(r"[.)](?= |$)", body[: found.start()])
        assert 1 <= len(sentences) <= 5 and "\n" not in body, f"{term}: {body}"


def test_the_numbers_of_the_glossary():
    text = page("GLOSSARY.md")
    h200, kib = CHIPS["h200"], 1024
    llama, deepseek = find_model("llama-3-8b"), find_model("deepseek-v3")
    assert f"{kv_bytes_per_token(llama) / kib:.0f} KiB a token" in glossary()["KV cache"]
    assert f"{kv_bytes_per_token(deepseek) / kib:.1f} KiB a token" in glossary()["MLA"]
    assert f"An H200 has {h200.sm_count}." in glossary()["SM"]
    assert f"{h200.memory_bytes / 1e9:.0f} GB on an H200" in glossary()["HBM"]
    assert f"{h200.memory_bytes_per_s / 1e12:.1f} TB/s by its data sheet" in text
    ridge = h200.bf16_flops_per_s / h200.memory_bytes_per_s
    assert f"{ridge:.0f} FLOP/byte on an H200" in glossary()["ridge"]
    times = h200.bf16_flops_per_s / h200.fp32_flops_per_s
    assert f"about {times:.0f} times" in glossary()["matrix unit"]
    assert f"up to {h200.shared_memory_bytes // kib} KiB for a block" in glossary()["shared memory"]
    under_way_mb = h200.memory_bytes_per_s * 1e-6 / 1e6
    assert f"{under_way_mb:.1f} MB must be under way" in glossary()["Little's law"]


# ---------------------------------------------------------------- NOTATION.md


def symbols() -> list[list[str]]:
    """Rows of NOTATION.md: symbol, meaning, unit or shape, names in code, lesson."""
    return rows("NOTATION.md", columns=5)


def test_a_symbol_has_one_meaning():
    names = [name.strip() for row in symbols() for name in row[0].split(",")]
    assert len(names) == len(set(names)) > 30


@lru_cache(maxsize=1)
def identifiers() -> set[str]:
    """Every name in the code of the lessons and of the engine."""
    files = [*LESSONS.rglob("*.py"), *(REPOSITORY / "reference").rglob("*.py")]
    return {name for file in files for name in re.findall(r"\w+", file.read_text("utf-8"))}


def test_a_symbol_names_the_code_and_the_lesson():
    for symbol, _, _, in_code, lesson in symbols():
        (number, room) = re.fullmatch(r"\[(\d+)\]\(l(\d\d)_\w+/README\.md\)", lesson).groups()
        assert int(number) == int(room), symbol
        names = re.findall(r"`(\w+)`", in_code)
        assert names, f"{symbol}: no name in code"
        for name in names:
            assert is_in_code(name), f"{symbol}: no code has {name}"


def is_in_code(name: str) -> bool:
    """Whether the code has such a name, or one with such an ending (`_ms`)."""
    return any(
        known == name or (name[0] == "_" and known.endswith(name)) for known in identifiers()
    )


# ---------------------------------------------------------------- GUIDES.md


def test_every_correction_says_where_it_is_derived():
    corrections = rows("GUIDES.md", columns=3)
    assert len(corrections) > 40
    for printed, true, place in corrections:
        number, room = re.fullmatch(
            r"\[lesson (\d+)\]\(l(\d\d)_\w+/(?:README|MORE)\.md#[\w-]+\)", place
        ).groups()
        assert int(number) == int(room) and printed and true, printed


def guide(printed: str) -> str:
    """What is true instead of the first text on the left that contains `printed`."""
    return next(true for left, true, _ in rows("GUIDES.md", columns=3) if printed in left)


def most_tokens_per_s(chip: str, bits: float, context: int) -> tuple[int, float]:
    """Sequences of Llama-3-70B that fit into 90 % of one GPU, and tokens/s by the floor."""
    gpu, model = CHIPS[chip], find_model("llama-3-70b")
    weights = calculators.weight_bytes(model, bits)
    kept = kv_bytes_per_token(model)
    count = calculators.sequences_that_fit(0.9 * gpu.memory_bytes, weights, kept, context)
    floor = calculators.decode_floor(
        model, count, context, gpu.memory_bytes_per_s, gpu.bf16_flops_per_s, bits
    )
    return count, count / max(floor.bytes_moved / floor.bandwidth, floor.flops / floor.peak)


def test_the_hardware_of_the_guides():
    ridges = {
        name: round(CHIPS[name].bf16_flops_per_s / CHIPS[name].memory_bytes_per_s)
        for name in ("a100", "h100", "h200")
    }
    said = guide("ridge of an A100")
    assert said.startswith(f"{ridges['a100']},")
    assert f"H100: {ridges['h100']}, H200: {ridges['h200']}." in said
    a100, model = CHIPS["a100"], find_model("llama-3-70b")
    weights = calculators.weight_bytes(model)
    read = model.params_read(1)  # all but the input embedding
    memory_ms = 1e3 * 2 * read / a100.memory_bytes_per_s
    compute_ms = 1e3 * 2 * read / a100.bf16_flops_per_s
    said = guide("on one A100")
    assert f"{memory_ms:.1f} ms against {compute_ms:.3f} ms, {memory_ms / compute_ms:.0f}×" in said
    assert f"{weights / 1e9:.0f} GB of weights need two" in said
    assert calculators.gpus_needed(weights, a100.memory_bytes) == 2
    for chip, bits, context, fit in (
        ("h100", 8, 4096, 1),
        ("h100", 8, 512, 8),
        ("l40s", 4.5, 2048, 5),
    ):
        count, rate = most_tokens_per_s(chip, bits, context)
        said = guide("one H100" if chip == "h100" else "one L40S")
        assert count == fit and f"at most {rate:.0f}" in said
    assert f"{calculators.weight_bytes(model, 4) / 1e9:.1f} GB" in guide("RTX 4090")
    assert f"{4 * 4.5 * 24 * 365 / 12:,.0f} dollars a month" in guide("10 billion")
    assert f"{calculators.cost_per_million_tokens(3, 100):.2f}" == "8.33"


def test_the_caches_of_the_guides():
    for printed, name in (
        ("Llama-2-7B:", "llama-2-7b"),
        ("Mixtral", "mixtral-8x7b"),
        ("405B", "llama-3-405b"),
    ):
        assert guide(printed).startswith(f"{kv_bytes_per_token(find_model(name)) / 1024:.0f} KiB")
    both = [math.exp(x) / (1 + math.exp(2)) for x in (0, 2)]
    assert f"({both[0]:.3f}, {both[1]:.3f})" in guide("softmax of two parts")
    falcon, llama = find_model("falcon-40b"), find_model("llama-2-70b")
    assert f"{falcon.num_key_value_heads} KV heads for {falcon.num_attention_heads}" in guide(
        "Falcon"
    )
    assert guide("as MHA").startswith(f"{llama.num_attention_heads},")


def test_the_formulas_of_the_guides():
    """Those of the paging, batching and speculating rows that fit on a line."""
    harmonic = sum(1 / n for n in range(1, 33))
    assert f"{harmonic:.2f} for geometric" in guide("23×") and f"{32 / 26:.2f}×" in guide("23×")
    assert f"{7.5 / 187.5:.1%} at 180 tokens" in guide("eliminates")
    assert f"{2048 / 86.5:.1f}×" in guide("20×") and f"{0.8**32:.4f}" in guide("accept_mask")
    assert f"{1e-9 / (1e-9 + 1e-8):.2f} instead" in guide("1e-8")
    assert f"{1000 // 16} whole blocks" in guide("prefix_hash")
    assert f"{speedup(0.8, 4, 0.1):.2f}×" in guide("2–3×")
    head_gb = 128_256 * 4096 * 2 / 1e9
    assert f"is {head_gb:.2f} GB, so four are {4 * head_gb:.1f} GB" in guide("Medusa needs")
    said = guide("`mask` makes")
    assert f"{sectors_of_stride(8)} for a distance of 8 float32" in said
    assert f"{sectors_of_stride(1)} for neighbours" in said
