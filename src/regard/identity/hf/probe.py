"""What can be found out about a Hugging Face model: which layers call the attention interface, and where their heads come from.

Found by running it, as names promise nothing: some models take any key and never call its function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CombinationError, RegardError
from .flight import Handle
from .install import install
from .interface import HERE, RECORDED, InterfaceCall


def expect_hub(model: nn.Module) -> Any:
    """The same model, with whatever transformers adds to a module; raise for any other."""
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise CombinationError(
            "models other than our own are reached through transformers: pip install transformers"
        ) from error
    if not isinstance(model, PreTrainedModel):
        raise CombinationError(
            f"a {type(model).__name__} is no model of transformers, so there is no interface to its attention"
        )
    return model


def probe(model: nn.Module) -> tuple[list[InterfaceCall], object]:
    """Two tokens through the model under our key: the calls that came, in their order, and what the model gave back.

    Identities are not read meanwhile: there may be one for each row of another batch.
    """
    config = expect_hub(model).config
    device = next(model.parameters()).device
    tokens = torch.tensor([[1, 2]], device=device).clamp_max(max(int(config.get_text_config().vocab_size) - 1, 0))
    given: dict[str, Tensor | bool] = {"input_ids": tokens}
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens
    elif getattr(config, "use_cache", None) is not None:
        given["use_cache"] = False
    training, calls = model.training, list[InterfaceCall]()
    model.eval()
    uninstall = install(model)
    token = RECORDED.set(calls)
    try:
        with torch.no_grad(), HERE.held(dict.fromkeys(model.modules())):
            out = model(**given)
    except RegardError:
        raise
    except Exception as error:
        raise CombinationError(
            f"a {type(model).__name__} does not run on two tokens under another attention: {type(error).__name__}: {error}"
        ) from error
    finally:
        RECORDED.reset(token)
        uninstall()
        model.train(training)
    return calls, out


def layers_of(model: nn.Module, calls: list[InterfaceCall], *, whole: bool) -> dict[int, nn.Module]:
    """The layers that called, by their number; encoder, decoder and cross-attention in the order of their calls.

    `whole` refuses a model some of whose layers never called.
    """
    config, kind = expect_hub(model).config, type(model).__name__
    modules = list(dict.fromkeys(c.module for c in calls))
    if not modules:
        raise CombinationError(
            f"a {kind} never calls the attention interface of transformers, so whatever is put in would be ignored; "
            "LLaMA, Mistral, Qwen, Gemma, GPT-2 and some three hundred others do call it"
        )
    own = [i for m in modules if isinstance(i := getattr(m, "layer_idx", None), int)]
    by_name = not config.is_encoder_decoder and len(set(own)) == len(modules)
    layers = dict(zip(own if by_name else range(len(modules)), modules, strict=True))
    if len(calls) < _depth(config) and (whole or not by_name):
        named = f"; name these with layers= to reach a part of it: {sorted(layers)}" if by_name else ""
        raise CombinationError(
            f"of {_depth(config)} layers of this {kind}, {len(calls)} call the attention interface of transformers{named}"
        )
    return layers


def _depth(config: Any) -> int:
    if config.is_encoder_decoder:
        ends = [("encoder_layers", "num_layers"), ("decoder_layers", "num_decoder_layers")]
        encoder, decoder = (next((int(getattr(config, n)) for n in names if hasattr(config, n)), 0) for names in ends)
        return encoder + 2 * decoder
    return int(getattr(config.get_text_config(), "num_hidden_layers", 0))


@dataclass(frozen=True)
class HeadLayout:
    """How heads lie in what a layer projects."""

    width: int
    heads: int
    key_heads: int
    sideways: frozenset[tuple[nn.Module, str]] = frozenset()
    """Layers and names whose norm works on (B, heads, N, D) rather than on (B, N, heads, D)."""

    @classmethod
    def of(cls, config: Any) -> HeadLayout:
        if not hasattr(config, "num_attention_heads"):
            raise CombinationError(
                f"a {config.model_type} has no attention heads (a state-space or recurrent model, perhaps): an identity is read by "
                "attention, and nothing else in a model would read it"
            )
        heads = int(config.num_attention_heads)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(int(width), heads, int(getattr(config, "num_key_value_heads", None) or heads))

    def parts(self, name: str, x: Tensor, dim: int = -1) -> dict[str, Tensor]:
        """q, k and v of a projection that gives all three."""
        if len(name) == 1:
            return {name: x}
        sizes = [n * self.width for n in (self.heads, self.key_heads, self.key_heads)]
        return dict(zip(name, x.split(sizes, dim), strict=True))


def projections(module: nn.Module) -> dict[str, nn.Module] | None:
    """What gives q, k and v before RoPE; one module for all three, or none that we know."""
    parts = dict(module.named_children())
    if all(f"{name}_proj" in parts for name in "qkv"):
        normed = {n: next((parts[p] for p in (f"{n}_norm", f"{n}_layernorm") if p in parts), None) for n in "qkv"}
        return {n: normed[n] or parts[f"{n}_proj"] for n in "qkv"}
    whole = next((parts[name] for name in ("qkv_proj", "c_attn") if name in parts), None)
    return None if whole is None else {"qkv": whole}


def catches(module: nn.Module, layout: HeadLayout, into: Callable[[nn.Module, str, Tensor], None]) -> list[Handle]:
    """Hooks that hand over what a layer projects, as (B, heads, N, D); to be removed by the caller."""

    def hook(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def caught(_: nn.Module, given: object, out: Tensor) -> None:
            for n, x in layout.parts(name, out).items():
                x = x if x.ndim == 4 else x.unflatten(-1, (-1, layout.width))
                into(module, n, x if (module, n) in layout.sideways else x.transpose(1, 2))

        return caught

    return [part.register_forward_hook(hook(name)) for name, part in (projections(module) or {}).items()]


def value_weight(layer: nn.Module, layout: HeadLayout) -> Tensor:
    """W_V as (G·D, M), as our own models hold it; GPT-2 keeps its weights lying on their side."""
    whole = (projections(layer) or {}).get("qkv")
    weight = (layer.get_submodule("v_proj") if whole is None else whole).weight
    assert isinstance(weight, Tensor)
    if whole is None:
        return weight
    upright = weight if isinstance(whole, nn.Linear) else weight.mT
    return layout.parts("qkv", upright, 0)["v"].contiguous()


def out_weight(layer: nn.Module) -> Tensor:
    """W_o as (M, H·D), by the names that it has in transformers."""
    parts = dict(layer.named_children())
    name = next((n for n in ("o_proj", "out_proj", "c_proj", "dense") if n in parts), None)
    if name is None:
        raise CombinationError(f"where the heads of a {type(layer).__name__} come together is not known: it has no o_proj")
    weight = parts[name].weight
    assert isinstance(weight, Tensor)
    return weight if isinstance(parts[name], nn.Linear) else weight.mT


__all__ = ["HeadLayout", "catches", "expect_hub", "layers_of", "out_weight", "probe", "projections", "value_weight"]
