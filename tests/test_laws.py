"""The laws of the design, each over every tensor of the card: dense and MoE blocks, with and without a query latent."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from hooks import HookedModel, Run, Site, resample, zero
from probe import Dims, random_weights
from probe.dims import Yarn

SIZES = Dims(
    d=48,
    r_q=20,
    r_kv=16,
    h=3,
    n=8,
    r=4,
    v=10,
    f=56,
    e=12,
    k=3,
    m=16,
    m_s=32,
    V=40,
    moe=(False, True),
    eps=1e-5,
    scaling=2.5,
    norm_topk=True,
    n_group=3,
    topk_group=2,
    theta=1e3,
    yarn=Yarn(factor=4.0, original=16, beta_fast=4.0, beta_slow=1.0, mscale=0.7, mscale_all_dim=1.3),
)
DIRECT = Dims(**{**vars(SIZES), "r_q": None, "n_group": 1, "topk_group": 1, "norm_topk": False})
MODELS = {"latent": HookedModel(random_weights(SIZES, 1)), "direct": HookedModel(random_weights(DIRECT, 2))}
B, T = 3, 7
TOKENS = torch.randint(0, SIZES.V, (B, T), generator=torch.Generator().manual_seed(3))
REFERENCE = torch.randint(0, SIZES.V, (160, T + 2), generator=torch.Generator().manual_seed(4))

EVERY = [pytest.param(kind, site, id=f"{kind}-{site}") for kind, model in MODELS.items() for site in model.sites]
"""Every site of both models."""


def node(kind: str, site: Site):
    return MODELS[kind].sites.node(site)


def is_reading(kind: str, site: Site) -> bool:
    return bool(getattr(node(kind, site), "read_only", ""))


EDITABLE = [p for p in EVERY if not is_reading(*p.values) and p.values[1].tensor != "experts"]
HOOKABLE = [p for p in EVERY if not is_reading(*p.values)]


@pytest.fixture(scope="module")
def bases() -> dict[str, Run]:
    return {kind: model.run(TOKENS, want=list(model.sites)) for kind, model in MODELS.items()}


@pytest.fixture(scope="module")
def sources() -> dict[str, Run]:
    return {kind: model.run(REFERENCE, want=list(model.sites)) for kind, model in MODELS.items()}


def position_dim(kind: str, site: Site) -> str:
    return "T" if "T" in node(kind, site).shape else "S"


def edits_at(kind: str, site: Site, sources: dict[str, Run]):
    """Whole, at one position, and of one head, where the tensor has heads."""
    at = {position_dim(kind, site): 3}
    yield zero(str(site))
    yield zero(str(site), **at)
    yield resample(str(site), source=sources[kind], seed=5)
    yield resample(str(site), source=sources[kind], seed=6, **at)
    if "h" in getattr(node(kind, site), "axes", ()):
        yield zero(str(site), h=1, **at)
        yield resample(str(site), source=sources[kind], seed=7, h=[0, 2])


def nudge(kind: str, site: Site):
    """A hook that changes the value for certain: other experts, or noise as large as the tensor."""

    def hook(value: Tensor, hook: object) -> Tensor:
        if value.dtype == torch.int64:
            return (value + 1) % SIZES.e
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(8)).to(value.dtype)
        masked = value < -1e30
        return torch.where(masked, value, value + noise * value[~masked].std())

    return hook


def logits(kind: str, **kwargs) -> Tensor:
    return MODELS[kind].run(TOKENS, **kwargs)["logits"]


def test_both_kinds_of_block_and_every_name_are_here() -> None:
    names = {kind: {(s.block, s.tensor) for s in model.sites} for kind, model in MODELS.items()}
    assert len(names["latent"]) == 40 + 53 + 5
    assert len(names["direct"]) == 36 + 49 + 5


# ---- 1: an edit that does nothing changes nothing, bit for bit -------------------------------------------------------


@pytest.mark.parametrize(("kind", "site"), HOOKABLE)
def test_law_1_a_hook_that_returns_its_value_changes_nothing(kind: str, site: Site, bases) -> None:
    made = MODELS[kind].run_with_hooks(TOKENS, fwd_hooks=[(site.hook, lambda value, hook: value)])
    assert torch.equal(made, bases[kind]["logits"])


@pytest.mark.parametrize(("kind", "site"), EDITABLE)
def test_law_1_resampling_from_the_run_itself_changes_nothing(kind: str, site: Site, bases) -> None:
    if site.tensor in ("gates", "g_e", "u_e", "a_e", "h_e", "y_e"):
        pytest.skip("taken from random tokens that chose the expert: not an identity even from the run itself")
    same = resample(str(site), source=bases[kind], rows=range(B))
    assert torch.equal(logits(kind, edits=[same]), bases[kind]["logits"])
    assert torch.equal(logits(kind, edits=[same], base=bases[kind]), bases[kind]["logits"])


# ---- 2: partial equals whole ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "site"), EDITABLE)
def test_law_2_recomputing_what_an_edit_reaches_equals_a_full_run(kind: str, site: Site, bases, sources) -> None:
    for edit in edits_at(kind, site, sources):
        whole = MODELS[kind].run(TOKENS, edits=[edit], want=list(MODELS[kind].sites))
        part = MODELS[kind].run(TOKENS, edits=[edit], want=list(MODELS[kind].sites), base=bases[kind])
        assert part.touched == whole.touched
        for at in MODELS[kind].sites:
            assert torch.equal(part[at], whole[at]), f"{edit.label}: {at}"


def test_law_2_less_is_computed(bases) -> None:
    """A partial run makes only what is below the edit: nothing before the block, in it only descendants."""
    model = MODELS["latent"]
    made: list[Site] = []

    def tap(site: Site, value: Tensor) -> Tensor:
        made.append(site)
        return value

    edited = Site(1, "gates")
    model.decoder.run(TOKENS, want=[Site(1, "x_next")], edited=[edited], known=bases["latent"].cache, tap=tap)
    below = model.sites.card(1).descendants(["gates"])
    assert {s.tensor for s in made if s.block == 1} == {"gates"} | below
    assert all(s.block == 1 for s in made)


# ---- 3: only descendants move; every hook has power, and fires once ------------------------------------------------


@pytest.mark.parametrize(("kind", "site"), EDITABLE)
def test_law_3_only_descendants_move_and_nothing_before_the_position(kind: str, site: Site, bases, sources) -> None:
    model, base = MODELS[kind], bases[kind]
    at = {position_dim(kind, site): 3}
    for edit in (zero(str(site), **at), resample(str(site), source=sources[kind], seed=9, **at)):
        edited = model.run(TOKENS, edits=[edit], want=list(model.sites))
        below = model.sites.card(site.block).descendants([site.tensor]) | {site.tensor}
        for other in model.sites:
            if not comes_after(other, site) and (other.block != site.block or other.tensor not in below):
                assert torch.equal(edited[other], base[other]), f"{edit.label} moved {other}"
            # not to the bit: an expert's product may round otherwise when other tokens join or leave it
            shape = model.sites.node(other).shape
            was, now = before_position(base[other], shape, 3), before_position(edited[other], shape, 3)
            if other.tensor == "delta_experts":
                now = now[:, :, : SIZES.k]  # experts that only the source chose stand behind the k slots
            torch.testing.assert_close(now, was, rtol=1e-5, atol=1e-5, msg=lambda why, at=other: f"{at}: {why}")


def comes_after(site: Site, other: Site) -> bool:
    def depth(s: Site) -> int:
        return s.block if s.block is not None else (-1 if s.tensor == "x_0" else SIZES.blocks)

    return depth(site) > depth(other)


def before_position(value: Tensor, shape: tuple[str, ...], position: int) -> Tensor:
    if "T" in shape and "S" in shape:
        return value[:, :, :position, :position]
    return value[:, :position]


@pytest.mark.parametrize(("kind", "site"), HOOKABLE)
def test_law_3_every_hook_has_power(kind: str, site: Site, bases) -> None:
    made = MODELS[kind].run_with_hooks(TOKENS, fwd_hooks=[(site.hook, nudge(kind, site))])
    assert (made - bases[kind]["logits"]).abs().max() > 1e-3


@pytest.mark.parametrize(("kind", "site"), EDITABLE)
def test_law_3_zero_and_resample_act_on_every_tensor(kind: str, site: Site, bases, sources) -> None:
    for edit in (zero(str(site)), resample(str(site), source=sources[kind], seed=5)):
        assert (logits(kind, edits=[edit]) - bases[kind]["logits"]).abs().max() > 1e-3, edit.label


@pytest.mark.parametrize("kind", MODELS)
def test_law_3_each_listed_hook_fires_exactly_once(kind: str) -> None:
    fired: Counter[str] = Counter()
    model = MODELS[kind]
    model.run_with_hooks(
        TOKENS, fwd_hooks=[(name, lambda value, hook: fired.update([hook.name])) for name in model.hook_dict]
    )
    assert fired == Counter(dict.fromkeys(model.hook_dict, 1))


def test_law_3_heads_are_made_only_on_request_and_sum_to_what_attention_writes(bases) -> None:
    model = MODELS["latent"]
    assert "blocks.1.delta_heads" not in model.run_with_cache(TOKENS)[1]
    heads = model.run_with_cache(TOKENS, names_filter="blocks.1.attn.hook_result")[1]["delta_heads", 1]
    torch.testing.assert_close(heads.sum(2), bases["latent"]["blocks.1.delta_attn"], rtol=0, atol=1e-5)


# ---- 4: watching changes nothing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "site"), EVERY)
def test_law_4_watching_one_tensor_changes_nothing(kind: str, site: Site, bases) -> None:
    made, cache = MODELS[kind].run_with_cache(TOKENS, names_filter=str(site))
    assert torch.equal(made, bases[kind]["logits"])
    assert torch.equal(cache[site], bases[kind][site])
    assert list(cache) == [site]


@pytest.mark.parametrize("seed", range(8))
def test_law_4_watching_any_set_changes_nothing(seed: int, bases) -> None:
    model = MODELS["latent"]
    picks = torch.rand(len(list(model.sites)), generator=torch.Generator().manual_seed(seed)) < 0.3
    chosen = [site for site, pick in zip(model.sites, picks.tolist(), strict=True) if pick]
    made, cache = model.run_with_cache(TOKENS, names_filter=chosen)
    assert torch.equal(made, bases["latent"]["logits"])
    assert all(torch.equal(cache[site], bases["latent"][site]) for site in chosen)


def test_law_4_more_queries_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probe.numerics.QUERY_CHUNK", 3)
    model = MODELS["latent"]
    plain = model(TOKENS)
    watched, _ = model.run_with_cache(TOKENS)
    assert torch.equal(plain, watched)


# ---- 5: what is cached stays ---------------------------------------------------------------------------------------


def test_law_5_no_two_cached_tensors_share_memory(bases) -> None:
    for base in bases.values():
        held = [value.untyped_storage().data_ptr() for value in base.cache.values()]
        assert len(set(held)) == len(held)


@pytest.mark.parametrize(("kind", "site"), HOOKABLE)
def test_law_5_an_in_place_hook_changes_neither_cache_nor_ancestors(kind: str, site: Site, bases) -> None:
    model = MODELS[kind]

    def spoil(value: Tensor, hook: object) -> None:
        value.zero_()

    with model.hooks(fwd_hooks=[(site.hook, spoil)]), pytest.warns(UserWarning, match="return the tensor"):
        made, cache = model.run_with_cache(TOKENS)
    assert torch.equal(made, bases[kind]["logits"])
    assert all(torch.equal(value, bases[kind][at]) for at, value in cache.items())


@pytest.mark.parametrize(("kind", "site"), EDITABLE)
def test_law_5_what_a_base_holds_survives_edits_from_it(kind: str, site: Site, bases) -> None:
    before = {at: value.clone() for at, value in bases[kind].cache.items()}
    run = MODELS[kind].run(TOKENS, want=[site], edits=[zero(str(site))], base=bases[kind])
    run[site].fill_(7)
    assert all(torch.equal(bases[kind][at], value) for at, value in before.items())


# ---- 7: after any exception, the model is as it was ----------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(("kind", "site"), EVERY)
def test_law_7_after_an_exception_the_model_is_as_it_was(kind: str, site: Site, error, bases) -> None:
    def fail(value: Tensor, hook: object) -> None:
        raise error("on purpose")

    model = MODELS[kind]
    with pytest.raises(error, match="on purpose"):
        model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.x_n", nudge(kind, site)), (site.hook, fail)])
    assert not model.watched()
    assert torch.equal(model(TOKENS), bases[kind]["logits"])


def test_law_7_a_hook_that_cannot_be_added_takes_the_others_with_it(bases) -> None:
    model = MODELS["latent"]
    with pytest.raises(KeyError, match="c_kvv"):
        model.run_with_hooks(
            TOKENS, fwd_hooks=[("blocks.0.x_n", nudge("latent", Site(0, "x_n"))), ("blocks.0.c_kvv", print)]
        )
    assert not model.watched()


def test_law_7_caching_leaves_the_users_own_hooks(bases) -> None:
    model = MODELS["latent"]
    model.add_hook("blocks.0.c_KV", nudge("latent", Site(0, "c_KV")))
    try:
        hooked = model(TOKENS)
        made, _ = model.run_with_cache(TOKENS)
        assert torch.equal(made, hooked)
        assert torch.equal(model(TOKENS), hooked)
        assert not torch.equal(hooked, bases["latent"]["logits"])
    finally:
        model.reset_hooks()
    assert torch.equal(model(TOKENS), bases["latent"]["logits"])
