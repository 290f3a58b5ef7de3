"""Six studies as a researcher would write them: each fits in fifteen lines, runs, and shows what its prose says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from experiments import runs, spec

DOC = Path(__file__).parents[2] / "docs" / "six_studies.md"
MOST = 15


class Snippet(NamedTuple):
    language: str
    code: str


SNIPPETS = {
    name: Snippet(language, code)
    for name, language, code in re.findall(
        r"^<!-- study: (\w+) -->\n```(\w+)\n(.*?)^```$", DOC.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
}


def ran(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a snippet leaves behind: its names; of a spec, the frame and the pictures of its run folder."""
    monkeypatch.chdir(folder)
    language, code = SNIPPETS[name]
    names: dict[str, Any] = {}
    if language == "python":
        exec(compile(code, f"{DOC.name}: {name}", "exec"), names)
        plt.close("all")
    else:
        names["df"] = runs.run(spec.parse(tomllib.loads(code), name, folder), folder / "run")
        names["pictures"] = list((folder / "run" / "pictures").glob("*.png"))
    return names


def rows(df: pd.DataFrame, **values: Any) -> pd.DataFrame:
    for name, value in values.items():
        df = df[df[name] == value]
    return df


def one(df: pd.DataFrame, column: str, **values: Any) -> float:
    return float(rows(df, **values)[column].item())


def test_there_are_six_of_at_most_fifteen_lines() -> None:
    assert list(SNIPPETS) == ["ioi", "fact", "norms", "topic", "probe", "steer"]
    text = DOC.read_text(encoding="utf-8")
    assert text.count("\n```") == 2 * len(SNIPPETS), "every block of code is a study's"
    for name, (language, code) in SNIPPETS.items():
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= MOST, name
        assert max(map(len, lines)) <= 120, "a line is a line"
        assert language == "toml" or ";" not in code


def test_a_circuit_for_indirect_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ran("ioi", tmp_path, monkeypatch)
    heads, latents, routes, tested = (made[name] for name in ("heads", "latents", "routes", "tested"))
    best = heads.nlargest(1, "recovered").iloc[0]
    assert best["block"] == 3
    assert best["recovered"] == pytest.approx(1, abs=0.05)
    assert made["mover"] == f"blocks.3.O h={best['head']}"
    assert one(latents, "recovered", tensor="c_KV_hat", block=3, role="S2") == pytest.approx(1, abs=0.05)
    assert one(latents, "recovered", tensor="c_Q_hat", block=0, role="S2") == pytest.approx(0.86, abs=0.05)
    apart = latents[~latents["role"].isin(["S2"])]
    assert apart["recovered"].abs().max() < 0.02
    into = routes["receiver"].str.contains(".V ", regex=False)
    assert routes[into]["recovered"].max() == pytest.approx(0.3, abs=0.03)
    assert routes.loc[routes["recovered"].idxmax(), "sender"].startswith("blocks.0.O")
    assert routes[~into]["recovered"].abs().max() < 0.02
    faithful = rows(tested, test="faithfulness")
    own = faithful["against"].isna()
    assert faithful[own]["recovered"].item() == pytest.approx(1, abs=0.05)
    assert len(faithful[~own]) == 10
    assert abs(faithful[~own]["recovered"].median()) < 0.05


def test_where_a_fact_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ran("fact", tmp_path, monkeypatch)
    hops, parts, experts, needed = (made[name] for name in ("hops", "parts", "experts", "needed"))
    assert one(hops, "recovered", block=2, role="first") == pytest.approx(1, abs=0.02)
    assert one(hops, "recovered", block=3, role="last") == pytest.approx(0.91, abs=0.03)
    assert one(hops, "recovered", block=3, role="END") < 0.1
    routed = one(parts, "recovered", tensor="delta_routed", block=3, role="END")
    assert routed == pytest.approx(0.5, abs=0.05)
    best = experts.nlargest(1, "recovered").iloc[0]
    assert (best["block"], best["role"]) == (3, "END")
    assert best["recovered"] == pytest.approx(routed / 2, abs=0.05)
    said = rows(made["shown"], metric="log_probability").set_index(["block", "tensor"])["value"]
    assert said[2, "x_next"] == pytest.approx(-3.7, abs=0.1)
    assert said[3, "x_mid"] == pytest.approx(-1.5, abs=0.1)
    assert said[3, "x_next"] > -0.01
    lost = needed.nsmallest(2, "effect")
    assert lost["block"].tolist() == [2, 3]
    assert lost["expert"].tolist()[1] == best["expert"]
    assert lost["effect"].tolist() == pytest.approx([-3.8, -2.2], abs=0.1)
    assert lost["control"].abs().max() < 0.2


def test_norms_and_massive_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ran("norms", tmp_path, monkeypatch)
    growth, outliers, sinks = (made[name] for name in ("growth", "outliers", "sinks"))
    assert growth[0, True] == pytest.approx(20, abs=1)
    assert growth[0, False] == pytest.approx(6.5, abs=0.3)
    between = outliers[(outliers["tensor"] == "x_next") & (outliers["block"] < 3)]
    assert between["feature"].nunique() == 2
    assert set(between["token"]) == {"."}
    assert (between["value"] / between["base"]).abs().max() == pytest.approx(14, abs=1)
    assert sinks["value"].max() == pytest.approx(0.23, abs=0.02)
    assert sinks["base"].iloc[0] == pytest.approx(0.1, abs=0.01)
    assert made["picture"].get_lines()


def test_experts_of_a_topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ran("topic", tmp_path, monkeypatch)
    told, block, expert = made["told"], made["block"], made["expert"]
    assert (told["value"].min(), told["value"].max()) == pytest.approx((0.34, 0.82), abs=0.02)
    assert (told["base"].min(), told["base"].max()) == pytest.approx((0.10, 0.26), abs=0.02)
    assert block == 3
    use = rows(made["beyond"], block=block, expert=expert)
    assert (use["value"].item(), use["base"].item()) == pytest.approx((0.75, 0.25), abs=0.03)
    names = {"Sarah", "Tom", "James", "Mary", "Paul", "Emma", "Gloria", "Walter"}
    assert made["tokens"]["token"].isin(names).mean() > 0.8
    for df in made["needed"]:
        assert abs(one(df, "effect", block=block, expert=expert)) < 0.01
    worst = made["needed"][1].nsmallest(1, "effect").iloc[0]
    assert (worst["prompts"], worst["block"]) == ("job", 2)
    assert worst["effect"] == pytest.approx(-2.3, abs=0.1)


def test_a_probe_with_controls_and_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ran("probe", tmp_path, monkeypatch)
    df = made["df"]
    itself = df[df["against"].isna() & df["group"].isna()]
    at_country = itself[itself["role"] == "subject[-1]"]
    assert at_country[at_country["source"].isna()]["value"].min() > 0.93
    assert at_country[at_country["source"].notna()]["value"].min() > 0.87
    assert set(at_country[at_country["source"].notna()]["prompts"]) == {"language"}
    at_end = itself[itself["role"] == "END"]
    own, other = at_end[at_end["source"].isna()], at_end[at_end["source"].notna()]
    assert own["value"].min() == one(own, "value", block=0, tensor="c_KV") < 0.3
    assert own["value"].max() == one(own, "value", block=3, tensor="x_next") > 0.95
    early = other[(other["block"] < 3) | (other["tensor"] != "x_next")]
    assert (early["value"] < early["base"] + 0.1).all()
    assert set(df["against"].dropna()) == {"shuffled", "random", "tokens"}
    assert df[df["against"].notna()]["value"].max() < 0.34
    assert df[df["group"] == "held out"]["value"].item() > 0.9
    assert made["pictures"]


def test_steering_with_side_effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ran("steer", tmp_path, monkeypatch)
    df = made["doses"]
    said = rows(df, metric="continuation:1:contains=are").set_index("alpha")["value"]
    assert (said[-1], said[1]) == (0, 1)
    moved = rows(df, metric="logit_difference:are/is")
    assert (moved["effect"].abs() > moved["control"].abs() + 4 * moved["spread"]).all()
    effect = moved.set_index("alpha")["effect"]
    assert (-effect[-0.5], effect[0.5]) == pytest.approx((6.5, 4.1), abs=0.2)
    loss = rows(df, metric="loss").set_index("alpha")["effect"]
    assert (loss[-1], loss[1]) == pytest.approx((0.8, 0.8), abs=0.05)
    assert abs(loss[[-0.5, 0.5]]).max() < 0.1
    assert len(list(tmp_path.glob("*.png"))) == 2
