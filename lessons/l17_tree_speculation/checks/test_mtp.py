"""Proves that an MTP layer out of a checkpoint computes what DeepSeek-V3's report says, and that
nothing is read from files that it does not fit.
"""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l06_mla.deepseek import load_decoder
from lessons.l17_tree_speculation.heads.heads import MTPDraft
from lessons.l17_tree_speculation.heads.mtp_files import load_mtp
from lessons.l17_tree_speculation.lab.mtp_checkpoint import CONFIG, LAYERS, write_checkpoint
from lessons.toolbox.model.config_json import CheckpointError

pytestmark = pytest.mark.usefixtures("seed")
TOKENS = 9

# ---------------------------------------------------------------- the report, in float64


def norm(x: Tensor, weight: Tensor, eps: float = CONFIG["rms_norm_eps"]) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x: Tensor, position: int) -> Tensor:
    """RoPE of pairs (2i, 2i + 1), one after the other. x: [4]."""
    out = torch.empty_like(x)
    for i in range(len(x) // 2):
        angle = position * CONFIG["rope_theta"] ** (-2 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        a, b = x[2 * i], x[2 * i + 1]
        out[2 * i], out[2 * i + 1] = a * cos - b * sin, a * sin + b * cos
    return out


def attention(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Section 2.1.1, head by head and query by query. x: [T, hidden_size], its place is its
    position.
    """
    nope, rope = CONFIG["qk_nope_head_dim"], CONFIG["qk_rope_head_dim"]
    rank, heads = CONFIG["kv_lora_rank"], CONFIG["num_attention_heads"]
    q_latent = norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"])
    q = (q_latent @ w["q_b_proj.weight"].T).unflatten(-1, (heads, -1))
    down = x @ w["kv_a_proj_with_mqa.weight"].T
    kv = norm(down[:, :rank], w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].T
    kv = kv.unflatten(-1, (heads, -1))
    out = x.new_zeros(len(x), heads, CONFIG["v_head_dim"])
    for head in range(heads):
        keys = [torch.cat([kv[s, head, :nope], turned(down[s, rank:], s)]) for s in range(len(x))]
        for t in range(len(x)):
            query = torch.cat([q[t, head, :nope], turned(q[t, head, nope:], t)])
            scores = torch.stack([query @ keys[s] for s in range(t + 1)])
            p = (scores * (nope + rope) ** -0.5).softmax(0)
            out[t, head] = p @ kv[: t + 1, head, nope:]
    return out.flatten(1) @ w["o_proj.weight"].T


def mlp(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    gate, up, down = (w[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    gated = x @ gate.T
    return (gated * gated.sigmoid() * (x @ up.T)) @ down.T


def experts(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Section 2.1.2: sigmoid scores, a bias that only chooses, groups by their best two."""
    out = mlp(w, "shared_experts", x)
    size = CONFIG["n_routed_experts"] // CONFIG["n_group"]
    for t, row in enumerate(x):
        scores = (w["gate.weight"] @ row).sigmoid()
        merit = scores + w["gate.e_score_correction_bias"]
        groups = sorted(
            range(CONFIG["n_group"]),
            key=lambda g: -merit[g * size : (g + 1) * size].topk(2).values.sum(),
        )[: CONFIG["topk_group"]]
        allowed = [e for e in range(len(merit)) if e // size in groups]
        chosen = sorted(allowed, key=lambda e: -merit[e])[: CONFIG["num_experts_per_tok"]]
        total = sum(scores[e] for e in chosen)
        for e in chosen:
            weight = CONFIG["routed_scaling_factor"] * scores[e] / total
            out[t] += weight * mlp(w, f"experts.{e}", row)
    return out


def part(w: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): x for key, x in w.items() if key.startswith(f"{name}.")}


def mtp(tensors: dict[str, Tensor], tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Section 2.2: (features: [T - 1, hidden_size], logits: [T - 1, V]) of the pairs (hidden state
    of token i, token i + 1). tokens: [T]; hidden: [T - 1, hidden_size].
    """
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    w = part(tensors, f"model.layers.{LAYERS}")
    rows = []
    for i, row in enumerate(hidden):
        embedding = tensors["model.embed_tokens.weight"][tokens[i + 1]]
        both = [norm(embedding, w["enorm.weight"]), norm(row, w["hnorm.weight"])]
        rows.append(w["eh_proj.weight"] @ torch.cat(both))
    x = torch.stack(rows)
    x = x + attention(part(w, "self_attn"), norm(x, w["input_layernorm.weight"]))
    x = x + experts(part(w, "mlp"), norm(x, w["post_attention_layernorm.weight"]))
    made = norm(x, w["shared_head.norm.weight"])
    return made, made @ tensors["lm_head.weight"].T


# ---------------------------------------------------------------- the layer


@pytest.fixture
def stored(tmp_path):
    return write_checkpoint(tmp_path / "deepseek")


@pytest.fixture
def folder(tmp_path, stored):
    return tmp_path / "deepseek"


def ours(folder, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(the target's hidden states, features, logits) of a text, in float64."""
    target = load_decoder(folder, dtype=torch.float64)
    draft = load_mtp(folder, target)
    attend = whole_sequence(target, len(tokens))
    hidden = target(torch.tensor(tokens), attend)[:-1]
    attend = whole_sequence(target, len(hidden))
    embeddings = target.embed_tokens(torch.tensor(tokens[1:]))
    features = draft(embeddings, draft.features(hidden), lambda q, k, v: attend(0, q, k, v))
    return hidden, features, target.logits(draft.hidden(features))


@torch.inference_mode()
def test_the_layer_of_a_checkpoint_computes_what_the_report_says(folder, stored):
    tokens = torch.randint(CONFIG["vocab_size"], (TOKENS,)).tolist()
    hidden, features, logits = ours(folder, tokens)
    wanted, said = mtp(stored, tokens, hidden)
    assert said.std() > 0.1, "the layer under test must say something"
    # 1e-7, because lesson 2 computes the angles of RoPE in float32 whatever the dtype
    torch.testing.assert_close(features, wanted, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(logits, said, atol=1e-7, rtol=1e-6)


class Swapped(MTPDraft):
    """The two halves in the order that the report prints."""

    def forward(self, embeddings, features, attend):
        both = [self.hnorm(features), self.enorm(embeddings)]
        return self.norm(self.layer(self.eh_proj(torch.cat(both, dim=-1)), attend))


class OneNorm(MTPDraft):
    """The weights of the two norms exchanged."""

    def forward(self, embeddings, features, attend):
        both = [self.hnorm(embeddings), self.enorm(features)]
        return self.norm(self.layer(self.eh_proj(torch.cat(both, dim=-1)), attend))


class NoFinalNorm(MTPDraft):
    """EAGLE's end: what the layer makes goes to the head as it is."""

    def forward(self, embeddings, features, attend):
        both = [self.enorm(embeddings), self.hnorm(features)]
        return self.layer(self.eh_proj(torch.cat(both, dim=-1)), attend)


class ThisToken(MTPDraft):
    """The embedding of token i beside the hidden state of token i, in place of token i + 1's."""

    def forward(self, embeddings, features, attend):
        return super().forward(embeddings.roll(1, dims=0), features, attend)


@pytest.mark.parametrize("slip", [Swapped, OneNorm, NoFinalNorm, ThisToken])
@torch.inference_mode()
def test_slips_of_the_layer_are_found(folder, stored, slip, monkeypatch):
    monkeypatch.setattr("lessons.l17_tree_speculation.heads.mtp_files.MTPDraft", slip)
    tokens = torch.randint(CONFIG["vocab_size"], (TOKENS,)).tolist()
    hidden, features, _ = ours(folder, tokens)
    wanted, _ = mtp(stored, tokens, hidden)
    assert (features - wanted).norm() > 0.05 * wanted.norm()


def test_the_target_is_the_same_with_and_without_the_layer(folder, stored):
    tokens = torch.randint(CONFIG["vocab_size"], (TOKENS,))
    found = []
    for tensors in (stored, without(stored, f"layers.{LAYERS}.")):
        save_file(tensors, folder / "model.safetensors")
        target = load_decoder(folder)
        found.append(target(tokens, whole_sequence(target, TOKENS)))
    assert torch.equal(*found)


# ---------------------------------------------------------------- files


def without(tensors: dict[str, Tensor], text: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if text not in name}


@torch.inference_mode()
def test_copies_may_be_left_out_and_further_layers_are_not_read(folder, stored):
    target = load_decoder(folder)
    wanted = load_mtp(folder, target).state_dict()
    again = without(without(stored, "shared_head.head"), f"layers.{LAYERS}.embed_tokens")
    more = part(again, f"model.layers.{LAYERS}")
    again |= {f"model.layers.{LAYERS + 1}.{name}": 1 + tensor for name, tensor in more.items()}
    save_file(again, folder / "model.safetensors")
    set_config(folder, num_nextn_predict_layers=2)
    found = load_mtp(folder, load_decoder(folder)).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def set_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "config, dropped, added, said",
    [
        (dict(num_nextn_predict_layers=0), "", {}, "has no MTP layer .*: got 0"),
        (dict(num_nextn_predict_layers=None), "", {}, "has no MTP layer"),
        ({}, "hnorm", {}, r"tensor hnorm\.weight of the MTP layer is missing"),
        ({}, "2.shared_head.norm", {}, r"shared_head\.norm\.weight of the MTP layer is missing"),
        ({}, "2.mlp.experts.3.up", {}, r"mlp\.experts\.3\.up_proj\.weight of the MTP layer is"),
        ({}, "", {"eh_proj.weight": torch.ones(48, 48)}, r"eh_proj.weight .*has shape \[48, 48\]"),
        ({}, "", {"e_proj.weight": torch.ones(48)}, "e_proj.weight in .* has no place"),
        ({}, "", {"embed_tokens.weight": torch.ones(61, 48)}, "differs from model.embed_tokens"),
        ({}, "", {"shared_head.head.weight": torch.ones(61, 48)}, "differs from lm_head.weight"),
        (dict(rope_theta=1e5), "", {}, "another shape than the target's"),
        (
            dict(quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128])),
            "",
            {},
            "the weights are quantized",
        ),
    ],
)
def test_a_layer_that_does_not_fit_is_refused_in_one_line(
    folder, stored, config, dropped, added, said
):
    target = load_decoder(folder)
    kept = without(stored, dropped) if dropped else stored
    save_file(
        kept | {f"model.layers.{LAYERS}.{name}": x for name, x in added.items()},
        folder / "model.safetensors",
    )
    set_config(folder, **config)
    with pytest.raises(CheckpointError, match=said) as error:
        load_mtp(folder, target)
    assert "\n" not in str(error.value)


def test_a_model_of_another_family_has_no_such_layer():
    with pytest.raises(CheckpointError, match=r"has no MTP layer .*model_type 'llama'"):
        load_mtp("models/tiny", load_decoder("models/tiny"))
