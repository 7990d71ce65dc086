"""Two real checkpoints that ship inside packages: SmolLM2-135M as GGUF, MiniLM as safetensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from tiny import near
from torch import Tensor

from regard import Padding
from regard.models import Bert, Llama, mean_pooled
from regard.models.convert.gguf import GGUF
from regard.models.tokenizer import Tokenizer, load_tokenizer
from regard.nn import Cache

TEXT = "The sun is a star. It gives light and warmth to the Earth, which travels once around it in 365 days."
LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


@pytest.fixture(scope="module")
def small(smollm2: Path) -> Llama:
    return Llama.from_pretrained(smollm2).eval()


@pytest.fixture(scope="module")
def words(smollm2: Path) -> Tokenizer:
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> hf.LlamaForCausalLM:
    """transformers' LLaMA, filled by hand from the same file through gguf's own reader."""
    import gguf

    config = hf.LlamaConfig(
        vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536, rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    state: dict[str, Tensor] = {}
    for tensor in gguf.GGUFReader(smollm2).tensors:
        value = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            if part in ("attn_q", "attn_k"):
                heads = 9 if part == "attn_q" else 3
                value = value.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
            state[f"model.layers.{layer}.{LAYER[part]}.weight"] = value
        else:
            state[{"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[name]] = value
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@torch.no_grad()
def test_smollm2_gives_transformers_logits(small: Llama, theirs: hf.LlamaForCausalLM, words: Tokenizer) -> None:
    x = torch.tensor([words.encode(TEXT)])
    expected = theirs(input_ids=x).logits
    near(small(x).logits, expected)
    first = small(x[:, :-1], caches=[Cache()] * 30)
    near(small(x[:, -1:], caches=first.caches).logits, expected[:, -1:])


@torch.no_grad()
def test_smollm2_left_padded_gives_transformers_logits(small: Llama, theirs: hf.LlamaForCausalLM, words: Tokenizer) -> None:
    rows = [words.encode(TEXT)[:12], words.encode("Water boils")]
    lengths = torch.tensor([len(r) for r in rows])
    x = torch.tensor([[2] * (12 - len(r)) + r for r in rows])
    keep = torch.arange(12) >= 12 - lengths[:, None]
    expected = theirs(input_ids=x, attention_mask=keep.long()).logits
    near(small(x, allow=Padding(lengths, side="left")).logits[keep], expected[keep])


@torch.no_grad()
def test_smollm2_answers(small: Llama, words: Tokenizer) -> None:
    ids = words.encode(words.chat([{"role": "user", "content": "What is the capital of France?"}]))
    x, caches, said = torch.tensor([ids]), [Cache()] * 30, list[int]()
    for _ in range(12):
        out = small(x, caches=caches)
        x, caches = out.logits[:, -1:].argmax(-1), out.caches
        if int(x) in words.eos_ids:
            break
        said.append(int(x))
    assert words.decode(said) == "The capital of France is Paris."


def test_smollm2_config_is_read_from_the_file(small: Llama) -> None:
    c = small.config
    assert (c.vocabulary, c.width, c.depth, c.heads, c.key_heads, c.hidden) == (49152, 576, 30, 9, 3, 1536)
    assert (c.rope.base, c.eps, c.tied, c.context) == (100000.0, 1e-5, True, 8192)


def test_our_gguf_header_says_what_gguf_says(smollm2: Path) -> None:
    import gguf

    reader, file = gguf.GGUFReader(smollm2), GGUF(smollm2)
    assert {t.name: tuple(map(int, t.shape[::-1])) for t in reader.tensors} == dict(file.shapes)
    for name, value in file.metadata.items():
        if isinstance(value, list):
            assert len(reader.fields[name].data) == len(value), name
            assert reader.fields[name].contents(slice(-50, None)) == value[-50:], name
        else:
            assert reader.fields[name].contents() == value, name


def test_smollm2_tokenizer_reads_digits_one_by_one_and_comes_back(words: Tokenizer) -> None:
    assert len(words.encode("1234")) == 4
    for text in (TEXT, "  two  spaces\n\ttabs", "Tschüß 日本 🙂", "def f(x):\n    return x ** 2", ""):
        assert words.decode(words.encode(text)) == text
    assert words.encode("<|im_start|>user<|im_end|>")[0] == 1
    assert words.eos_ids == (2,)


@torch.no_grad()
def test_minilm_gives_transformers_vectors(minilm: Path) -> None:
    ours, theirs = Bert.from_pretrained(minilm).eval(), hf.BertModel.from_pretrained(minilm).eval()
    words = load_tokenizer(minilm)
    lines = ["a man is eating food", "someone has a meal", "the stock market fell sharply today"]
    rows = [words.encode(line, framed=True) for line in lines]
    assert rows[0] == words.encode(f"[CLS] {lines[0]} [SEP]")
    lengths = torch.tensor([len(r) for r in rows])
    x = torch.tensor([r + [0] * (int(lengths.max()) - len(r)) for r in rows])
    keep = torch.arange(x.shape[1]) < lengths[:, None]
    out = theirs(input_ids=x, attention_mask=keep.long())
    mine = ours(x, allow=Padding(lengths))
    assert mine.last is not None
    near(mine.last[keep], out.last_hidden_state[keep])
    assert mine.pooled is not None
    near(mine.pooled, out.pooler_output)
    vectors = mean_pooled(mine.last, keep)
    assert vectors[0] @ vectors[1] > 0.5 > vectors[0] @ vectors[2]
