"""The cache: found by any spelling, said so when absent, and changed by nothing that comes later."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from hooks import Cache, HookedModel, Site, edit, patch, zero
from probe import ProbeError
from tests.hooks.small import DENSE, DIMS, MODEL, MOE, ORACLE, TOKENS, B, T, everything

C_KV = Site(MOE, "c_KV")
SPELLINGS = ["blocks.1.c_KV", "blocks.1.hook_c_KV", "blocks.1.c^KV", "blocks.1.c^{KV}", C_KV, ("c_KV", 1), ("c^KV", 1)]


@pytest.mark.parametrize("key", SPELLINGS, ids=str)
def test_every_spelling_finds_the_tensor(key) -> None:
    _, cache = MODEL.run_with_cache(TOKENS)
    assert cache[key] is cache[C_KV]
    assert key in cache
    assert cache.get(key) is cache[C_KV]


@pytest.mark.parametrize(
    "names",
    [
        "blocks.1.c^KV",
        C_KV,
        ["blocks.1.c_KV"],
        {C_KV},
        ("blocks.1.c_KV", "blocks.1.hook_c_KV"),
        lambda name: name == "blocks.1.hook_c_KV",
    ],
    ids=["spelling", "site", "list", "set", "twice", "function"],
)
def test_the_filter_takes_a_spelling_several_or_a_function(names) -> None:
    _, cache = MODEL.run_with_cache(TOKENS, names_filter=names)
    assert list(cache) == [C_KV]
    assert len(cache) == 1
    assert cache[C_KV].shape == (B, T, DIMS.r_kv)


def test_without_a_filter_it_holds_all_in_order_but_what_is_made_on_request() -> None:
    _, cache = MODEL.run_with_cache(TOKENS)
    assert list(cache) == [site for site in MODEL.sites if site.tensor != "delta_heads"]
    assert len(cache) == len(list(cache.values())) == len(list(cache.items()))


def test_names_asked_in_any_order_come_in_the_order_of_the_card() -> None:
    _, cache = MODEL.run_with_cache(TOKENS, names_filter=["logits", "blocks.2.x_n", "blocks.0.O", "x_0"])
    assert {str(site) for site in cache} == {"x_0", "blocks.0.O", "blocks.2.x_n", "logits"}
    assert [str(site) for site in cache] == ["x_0", "blocks.0.O", "blocks.2.x_n", "logits"]


@pytest.mark.parametrize("names", [[], lambda name: False, lambda name: name == "blocks.1.c_KV"])
def test_a_filter_that_selects_nothing_is_an_error(names) -> None:
    with pytest.raises(KeyError, match="no tensor at all"):
        MODEL.run_with_cache(TOKENS, names_filter=names)


def test_a_filter_with_one_wrong_name_is_an_error() -> None:
    with pytest.raises(ProbeError, match=r"'c_kvv'.*Nearest: c_KV"):
        MODEL.run_with_cache(TOKENS, names_filter=["blocks.0.c_KV", "blocks.0.c_kvv"])


def test_options_that_we_do_not_have_are_not_swallowed() -> None:
    with pytest.raises(TypeError, match="pos_slice"):
        MODEL.run_with_cache(TOKENS, pos_slice=-1)
    with pytest.raises(TypeError, match="names"):
        MODEL.run_with_cache(TOKENS, names=["blocks.0.c_KV"])


def test_absent_tensors_are_named_with_what_is_there() -> None:
    _, cache = MODEL.run_with_cache(TOKENS, names_filter=["blocks.1.c_KV", "blocks.0.O"])
    with pytest.raises(KeyError, match=r"blocks\.1\.Q_R was not cached.* O, c_KV.*[Aa]sk for it"):
        cache["Q_R", 1]
    assert "blocks.1.Q_R" not in cache
    assert ("Q_R", 1) not in cache
    assert cache.get("blocks.1.Q_R") is None


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("blocks.1.c_kvv", "Nearest: c_KV"),
        ("c_KV", r"in every block.*blocks\.0\.c_KV"),
        ("blocks.9.c_KV", "block 9 does not exist.*0 to 2"),
        ("blocks.-1.c_KV", "block -1 does not exist"),
        (("c_KV", 9), "block 9"),
        ("blocks.1.g", "name g_e"),
        (3, "3 names no tensor"),
        (("c_KV", 1, "attn"), "names no tensor"),
    ],
    ids=str,
)
def test_what_names_nothing_is_an_error_and_not_contained(key, why: str) -> None:
    _, cache = MODEL.run_with_cache(TOKENS, names_filter="blocks.1.c_KV")
    with pytest.raises(ProbeError, match=why):
        cache[key]
    assert key not in cache


@pytest.mark.parametrize(
    ("rms", "inverse"), [("blocks.1.ln1.hook_scale", "blocks.1.s_attn"), ("ln_final.hook_scale", "s_final")]
)
def test_the_rms_of_transformer_lens_is_shown_as_rms(rms: str, inverse: str) -> None:
    _, cache = MODEL.run_with_cache(TOKENS)
    stream = cache["blocks.1.x_n" if "blocks" in rms else "blocks.2.x_next"]
    by_hand = (stream.pow(2).mean(-1, keepdim=True) + DIMS.eps).sqrt()
    torch.testing.assert_close(cache[rms], by_hand)
    torch.testing.assert_close(cache[inverse], 1 / by_hand)
    assert rms in cache


def test_a_cached_value_is_its_own_copy() -> None:
    """Q_C is a view of q_C where it is made; in the cache, writing to one leaves the other."""
    _, cache = MODEL.run_with_cache(TOKENS, names_filter=["blocks.1.q_C", "blocks.1.Q_C"])
    before = cache["Q_C", 1].clone()
    cache["q_C", 1].zero_()
    assert torch.equal(cache["Q_C", 1], before)


X_N = everything()["x_n", MOE]
WAYS: dict[str, Callable[[], tuple[Cache, list[torch.Tensor]]]] = {
    "logits and cache": lambda: (lambda made: (made[1], [made[0]]))(MODEL.run_with_cache(TOKENS)),
    "a run": lambda: (everything().cache, []),
    "reshaped alone": lambda: (MODEL.run(TOKENS, want=["*.Q_C", "*.V"]).cache, []),
    "some positions": lambda: (MODEL.run(TOKENS, want=None, pos=[0, 2]).cache, []),
    "in another dtype": lambda: (MODEL.run(TOKENS, want=None, dtype=torch.float64).cache, []),
    "an edited run": lambda: (everything(edits=zero("O", MOE)).cache, []),
    "from a base": lambda: (lambda base: (everything(base=base).cache, list(base.cache.values())))(everything()),
    "edited from a base": lambda: (
        lambda base: (everything(base=base, edits=zero("O", MOE)).cache, list(base.cache.values()))
    )(everything()),
    "patched": lambda: (
        lambda source: (everything(edits=patch("q_C", MOE, source=source)).cache, list(source.cache.values()))
    )(everything()),
    "a block alone": lambda: (MODEL.run_block(MOE, X_N, want=None).cache, [X_N]),
}
"""Ways to a cache, and tensors that are somebody else's."""


@pytest.mark.parametrize("way", WAYS)
def test_every_cached_tensor_has_a_storage_of_its_own(way: str) -> None:
    cache, others = WAYS[way]()
    places = [value.untyped_storage().data_ptr() for value in (*cache.values(), *others)]
    assert len(set(places)) == len(places) > len(others)
    assert not set(places) & {weight.untyped_storage().data_ptr() for weight in ORACLE.weights().tensors.values()}
    for site, value in cache.items():
        assert value.untyped_storage().nbytes() == value.nbytes, f"{site} pins more than itself"
        assert value.is_contiguous(), site


def test_of_a_plain_run_only_what_others_hold_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of what is cached too, an O that lies head by head, and the logits that the caller gets."""
    copied: set[str] = set()
    keep = Cache.keep

    def counted(cache: Cache, site: Site, value: torch.Tensor, made: bool = False) -> None:
        keep(cache, site, value, made)
        if cache[site].data_ptr() != value.data_ptr():
            copied.add(site.tensor)

    monkeypatch.setattr(Cache, "keep", counted)
    MODEL.run_with_cache(TOKENS)
    assert copied == {"x_n", "Q_C", "Q_pe", "K_C", "V", "O", "logits"}
    copied.clear()
    MODEL.run(TOKENS, want=None)
    assert copied == {"x_n", "Q_C", "Q_pe", "K_C", "V", "O"}


@pytest.mark.parametrize(
    ("hooked", "above"), [(Site(MOE, "Q_C"), Site(MOE, "q_C")), (Site(MOE, "x_n"), Site(DENSE, "x_next"))], ids=str
)
def test_who_writes_into_a_live_value_leaves_what_was_cached_before(hooked: Site, above: Site) -> None:
    """A hook of torch's own gets no copy, and these share a storage where they are made."""
    handle = MODEL.get_submodule(hooked.hook).register_forward_hook(lambda module, args, out: out.zero_())
    try:
        caches = [MODEL.run_with_cache(TOKENS)[1], everything().cache]
    finally:
        handle.remove()
    for cache in caches:
        assert not cache[hooked].any()
        assert torch.equal(cache[above], everything()[above])


def test_a_cache_that_is_written_into_leaves_the_logits_and_their_graph() -> None:
    weights = ORACLE.weights()
    W = weights.tensors[MOE, "W_O"].requires_grad_()
    model, found = HookedModel(weights), []
    for write in (False, True):
        logits, cache = model.run_with_cache(TOKENS)
        before = logits.detach().clone()
        for value in cache.values() if write else ():
            value.zero_()
        assert torch.equal(logits, before)
        found += torch.autograd.grad(logits.pow(2).sum(), W)
    assert torch.equal(*found)


def test_what_is_cached_in_inference_mode_is_like_any_other() -> None:
    with torch.inference_mode():
        caches = [MODEL.run_with_cache(TOKENS)[1], everything().cache]
    assert not any(value.is_inference() for cache in caches for value in cache.values())


def test_what_a_hook_returned_can_be_changed_afterwards() -> None:
    mine = torch.ones(B, T, DIMS.r_kv)
    with MODEL.hooks(fwd_hooks=[(C_KV, lambda value, hook: mine)]):
        _, cache = MODEL.run_with_cache(TOKENS, names_filter=C_KV)
    mine.zero_()
    assert bool((cache[C_KV] == 1).all())


def test_what_an_edit_returned_can_be_changed_afterwards() -> None:
    mine = torch.ones(B, T, DIMS.r_kv)
    run = everything(edits=edit("c_KV", lambda value: mine, block=MOE))
    mine.zero_()
    assert bool((run[C_KV] == 1).all())


def test_the_cache_shows_what_descendants_saw() -> None:
    with MODEL.hooks(fwd_hooks=[("blocks.1.O", lambda value, hook: 2 * value)]):
        _, cache = MODEL.run_with_cache(TOKENS)
    _, plain = MODEL.run_with_cache(TOKENS)
    assert torch.equal(cache["O", 1], 2 * plain["O", 1])
    torch.testing.assert_close(cache["delta_attn", 1], 2 * plain["delta_attn", 1])


def test_a_runs_cache_shows_the_edited_value_and_later_edits_leave_it() -> None:
    base = everything()
    run = MODEL.run(TOKENS, want="blocks.1.O", edits=[zero("O", MOE, h=1)], base=base)
    kept = run["O", 1].clone()
    assert not run["O", 1][:, :, 1].any()
    assert base["O", 1][:, :, 1].all()
    MODEL.run(TOKENS, edits=[zero("x_n", DENSE)])
    assert torch.equal(run["O", 1], kept)


def test_nothing_keeps_a_dropped_cache_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        _, cache = MODEL.run_with_cache(TOKENS)
        seen = [weakref.ref(value) for value in cache.values()]
        run = everything(edits=[zero("O", MOE)])
        seen += [weakref.ref(value) for value in run.cache.values()]
        del cache, run
        assert not [ref for ref in seen if ref() is not None]
    finally:
        gc.enable()


def test_it_prints_its_size() -> None:
    _, cache = MODEL.run_with_cache(TOKENS, names_filter=["x_0", "blocks.0.O", "blocks.1.O"])
    assert repr(cache) == "Cache(3 tensors of 2 blocks)"
    assert len(Cache(MODEL.sites)) == 0
