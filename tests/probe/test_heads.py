"""What a head's matrices say, against what the block computes."""

from __future__ import annotations

import pytest
import torch

from hooks import HookedModel
from probe import Dims, random_weights
from probe.dims import Yarn
from probe.errors import BadEdit
from probe.heads import PER_HEAD, absorbed_ov, absorbed_qk, per_head, split_scores

DIMS = Dims(
    d=40, r_q=20, r_kv=16, h=3, n=8, r=4, v=10, f=56, e=8, k=3, m=16, m_s=16, V=40, moe=(False, True),
    eps=1e-6, scaling=2.5, norm_topk=True, n_group=1, topk_group=1, theta=1e3,
    yarn=Yarn(factor=8.0, original=16, beta_fast=2.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip
TOKENS = torch.randint(0, DIMS.V, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["latent", "direct"])
def model(request: pytest.FixtureRequest) -> HookedModel:
    dims = DIMS if request.param == "latent" else Dims(**{**vars(DIMS), "r_q": None})
    return HookedModel(random_weights(dims, 5))


def close(one: torch.Tensor, two: torch.Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=2e-5)


def test_per_head_views_make_the_heads(model: HookedModel) -> None:
    run = model.run(TOKENS, want=None)
    weights = model.decoder.weights
    latent = run["c_Q_hat", 1] if model.dims.r_q else run["x_attn", 1]
    inputs = {
        "W_UQ": (latent, "Q_C"),
        "W_QR": (latent, "Q_pe"),
        "W_UK": (run["c_KV_hat", 1], "K_C"),
        "W_UV": (run["c_KV_hat", 1], "V"),
    }
    for name, (x, made) in inputs.items():
        by_head = per_head(weights, 1, name)
        close(torch.einsum("bti,hio->btho", x, by_head), run[made, 1])
        assert by_head.untyped_storage().data_ptr() == weights.read(1, name).untyped_storage().data_ptr(), "a view"
    close(torch.einsum("bthv,hvd->btd", run["O", 1], per_head(weights, 1, "W_O")), run["delta_attn", 1])
    assert set(PER_HEAD) == {*inputs, "W_O"}
    with pytest.raises(BadEdit, match="W_DKV has no head axis"):
        per_head(weights, 1, "W_DKV")


def test_a_score_is_its_content_and_its_position(model: HookedModel) -> None:
    run = model.run(TOKENS, want=None)
    parts = split_scores(run["Q_C", 1], run["K_C", 1], run["Q_R", 1], run["k_R", 1], model.dims)
    visible = run["S", 1] > -1e30
    close((parts.content + parts.position)[visible], run["S", 1][visible])
    assert parts.content.std() > 0.1
    assert parts.position.std() > 0.1


def test_absorbed_through_the_latents(model: HookedModel) -> None:
    run = model.run(TOKENS, want=[site for site in model.sites if site.block == 1])
    weights = model.decoder.weights
    latent = run["c_Q_hat", 1] if model.dims.r_q else run["x_attn", 1]
    content = torch.einsum("btq,hqk,bsk->bhts", latent, absorbed_qk(weights, 1), run["c_KV_hat", 1]) * model.dims.tau
    close(content, split_scores(run["Q_C", 1], run["K_C", 1], run["Q_R", 1], run["k_R", 1], model.dims).content)
    written = torch.einsum("bhts,bsk,hkd->bthd", run["A", 1], run["c_KV_hat", 1], absorbed_ov(weights, 1))
    close(written, run["delta_heads", 1])
    close(written.sum(2), run["delta_attn", 1])
