"""TransformerLens at home: the config its functions ask for, and a run's tensors as its `ActivationCache`.

Its names are spellings of the card's tensors, so `run_with_hooks` and `transformer_lens.patching` need only the config.
`ActivationCache` wants its names as real keys, and a model whose norm gains are folded into what reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformer_lens import ActivationCache
from transformer_lens.utilities.components_utils import get_act_name

from probe.decoder import Decoder
from probe.engine import Weights
from probe.errors import BadEdit, BadText, UnknownDim, UnknownTensor
from probe.heads import per_head
from probe.numerics import inverse_rms, normalise
from probe.sites import Site, Sites
from probe.text import Tokenizer


@dataclass(frozen=True)
class LensConfig:
    """A model's sizes under TransformerLens' names; what a model of this architecture has no one value of is left out.

    ``normalization_type`` is RMS (gains are weights), or RMSPre where they are folded away.
    """

    n_layers: int
    n_heads: int
    n_key_value_heads: int
    d_model: int
    d_mlp: int
    d_vocab: int
    n_ctx: int | None
    eps: float
    device: torch.device
    dtype: torch.dtype
    normalization_type: str = "RMS"
    final_rms: bool = True
    act_fn: str = "silu"
    gated_mlp: bool = True
    attn_only: bool = False
    positional_embedding_type: str = "rotary"

    @property
    def d_head(self) -> NoReturn:
        """Refused: heads have three widths here.

        Raises:
            UnknownDim: always; the message names the three.
        """
        raise UnknownDim(
            "a head has no one width in MLA: q = n + r for queries and keys, v for values; see model.dims."
        )


def lens_config(weights: Weights, normalization_type: str = "RMS") -> LensConfig:
    """The config of a model on these weights."""
    dims, gain = weights.dims, weights.read(None, "w_final")
    return LensConfig(
        n_layers=dims.blocks,
        n_heads=dims.h,
        n_key_value_heads=dims.h,
        d_model=dims.d,
        d_mlp=dims.f,
        d_vocab=dims.V,
        n_ctx=dims.max_positions,
        eps=dims.eps,
        device=gain.device,
        dtype=gain.dtype,
        normalization_type=normalization_type,
    )


def lens_names(sites: Sites, site: Site) -> Iterator[tuple[str, bool]]:
    """TransformerLens' names of a site, each with whether it means the reciprocal."""
    node = sites.node(site)
    inverse = getattr(node, "inverse", "")
    for name in (*node.also, *([inverse] if inverse else [])):
        if "hook_" in name:
            yield name if site.block is None else f"blocks.{site.block}.{name}", name == inverse


class _Norm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x, inverse_rms(x, self.eps))


@dataclass(frozen=True)
class _Block:
    """A block's weights as TransformerLens calls them."""

    weights: Weights
    block: int

    @property
    def attn(self) -> _Block:
        return self

    @property
    def mlp(self) -> _Block:
        return self

    @property
    def W_O(self) -> Tensor:
        return per_head(self.weights, self.block, "W_O")

    @property
    def W_out(self) -> Tensor:
        if self.weights.dims.moe[self.block]:
            raise UnknownTensor(
                f"block {self.block} is a MoE, so it has no neurons of one MLP: name h_e and h_s (neurons),"
                " delta_experts and delta_shared (what they write)."
            )
        return self.weights.read(self.block, "W_2")


class FoldedModel:
    """What `ActivationCache` asks its model for: weights by TransformerLens' names, the final gain folded into ``W_U``.

    So ``cache.accumulated_resid(apply_ln=True)[-1] @ cache.model.W_U`` are the logits, in fp32 to rounding.
    """

    def __init__(self, weights: Weights, tokenizer: Tokenizer | None) -> None:
        self.weights, self.tokenizer = weights, tokenizer
        self.cfg = lens_config(weights, "RMSPre")
        self.blocks = [_Block(weights, i) for i in range(weights.dims.blocks)]
        self.ln_final = _Norm(weights.dims.eps).eval()

    @property
    def W_U(self) -> Tensor:
        """The head with the final norm's gain folded in, [d V]."""
        return self.weights.read(None, "w_final")[:, None] * self.weights.read(None, "W_U")

    unembed = W_U

    @property
    def b_U(self) -> Tensor:
        """There is no bias: zeros."""
        return torch.zeros(self.cfg.d_vocab, device=self.cfg.device, dtype=self.cfg.dtype)

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Tensor:
        """There is no bias: zeros, whatever the layer."""
        return torch.zeros(self.cfg.d_model, device=self.cfg.device, dtype=self.cfg.dtype)

    def to_single_token(self, word: str) -> int:
        """The id of one token.

        Raises:
            BadText: there is no tokenizer, or the word is not one token.
        """
        if self.tokenizer is None:
            raise BadText("this model has no tokenizer; give token ids.")
        return self.tokenizer.id(word)

    def tokens_to_residual_directions(self, tokens: Any) -> Tensor:
        """The columns of ``W_U`` of some tokens, [… d]."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        columns: Tensor = self.W_U.T[torch.as_tensor(tokens, device=self.cfg.device)]
        return columns


class LensCache(ActivationCache):
    """TransformerLens' own cache, its methods unchanged; a key that it lacks is an error that names the remedy."""

    def __init__(self, values: dict[str, Tensor], model: FoldedModel, sites: Sites) -> None:
        super().__init__(values, model)
        self.sites = sites

    def __getitem__(self, key: Any) -> Tensor:
        try:
            return super().__getitem__(key)
        except KeyError:
            spelling = key if isinstance(key, str) else get_act_name(*key)
        site = self.sites.find(spelling if "." in spelling or spelling.startswith("hook_") else get_act_name(spelling))
        raise UnknownTensor(f"{site} was not cached in this run; ask for it by name when running.")


def activation_cache(cache: Mapping[Site, Tensor], decoder: Decoder, tokenizer: Tokenizer | None) -> LensCache:
    """A run's tensors as TransformerLens' `ActivationCache`: under its names, and under our hooks' names too.

    ``hook_scale`` is the rms there, so 1/s of ours. The tensors are the cache's own, not copies.

    Raises:
        BadEdit: the cache is of a model of other sizes, or holds some positions only: patches go by position.
    """
    if getattr(cache, "pos", None) is not None:
        raise BadEdit("this cache holds some positions only (pos=); TransformerLens' counts them from the first.")
    sites, values = decoder.sites, {}
    known = frozenset(sites)
    for site, value in cache.items():
        if site not in known:
            raise BadEdit(f"{site} is no tensor of this model; the cache is another model's.")
        values[site.hook] = value
        for name, inverse in lens_names(sites, site):
            values[name] = value.reciprocal() if inverse else value
    return LensCache(values, FoldedModel(decoder.weights, tokenizer), sites)
