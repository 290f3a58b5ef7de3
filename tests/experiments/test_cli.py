"""The command line in-process: what it prints, its exit codes, and that no error shows a traceback."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from experiments import frames
from experiments.cli import app, foreign_rooms
from experiments.tables import tensor_tables
from probe import TINY, Dims, around, card
from tests.probe.small import k2

PROMPT = "The capital of Peru is"


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def lines(result: Result) -> list[list[str]]:
    """The words of every line of a run that went well."""
    assert result.exit_code == 0, result.output
    return [re.split(r"  +", line.strip()) for line in result.stdout.splitlines()]


# ---- the card --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("latent", [True, False])
def test_tensors_lists_all_of_a_kind(kind: str, latent: bool) -> None:
    got = lines(run("tensors", "--block-kind", kind, *([] if latent else ["--no-query-latent"])))
    names = [words[1] for words in got if len(words) > 5 and words[0] != "step"]
    expected = card(moe=kind == "moe", query_latent=latent)
    assert names == [*expected.hooked, *around()]


def test_tensors_without_a_kind_shows_each_row_once() -> None:
    got = lines(run("tensors"))
    names = [words[1] for words in got if len(words) > 5 and words[0] != "step"]
    own = [name for name in card(moe=True) if card(moe=True)[name] is not card(moe=False).get(name)]
    assert names == [*card(moe=False).hooked, *own, *around()]
    assert set(names) == {*card(moe=False).hooked, *card(moe=True).hooked, *around()}


def test_a_row_says_number_symbol_formula_shape_dtype_and_spellings() -> None:
    by_name = {words[1]: words for words in lines(run("tensors")) if len(words) > 5}
    spellings = "attn.hook_kv_latent, self_attn.kv_a_layernorm"
    assert by_name["c_KV_hat"] == ["5", "c_KV_hat", "ĉ^KV", "w_KV ⊙ n_KV", "B T r_kv", "act", spellings]
    assert by_name["s_attn"][-1] == "ln1.hook_scale (its reciprocal)"


def test_nothing_is_cut_in_a_pipe() -> None:
    out = run("tensors").stdout
    assert "…" not in out
    assert max(map(len, out.splitlines())) > 100


def test_a_terminal_gets_its_width(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "90")
    for table in tensor_tables("moe", True):
        table.print()
    out = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= 90
    assert all(re.search(rf"\b{name} ", out) for name in (*card(moe=True).hooked, *around()))  # a name is never folded


def test_params_prints_the_atlas_table() -> None:
    out = run("params").stdout
    numbers = ("497,500,160", "101,124,096", "396,361,728", "17,059,365,248", "1,026,408,232,448")
    assert all(re.search(rf"\b{number}$", out, re.M) for number in numbers)


@pytest.mark.parametrize("path", [TINY, TINY / "config.json"])
def test_params_of_a_config(path: Path) -> None:
    got = {words[0]: words[-1] for words in lines(run("params", str(path))) if words}
    dims = Dims.from_config(TINY)
    assert got["Embedding"] == f"{dims.V * dims.d:,}"
    assert "Kimi K2" not in run("params", str(path)).stdout


def test_params_of_a_config_says_what_load_would_refuse(tmp_path: Path) -> None:
    """In one line, after the count, which is right all the same."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(k2(quantization_config={"quant_method": "awq", "bits": 4})))
    result = run("params", str(path))
    (line,) = (line for line in result.stdout.splitlines() if "would be refused" in line)
    assert line.startswith("its weights would be refused: quantization_config.quant_method: 'awq' is not read")
    assert "1,026,408,232,448" in result.stdout
    path.write_text(json.dumps(k2()))
    assert "would be refused" not in run("params", str(path)).stdout
    assert "would be refused" not in run("params").stdout


def test_what_of_a_text_may_not_be_meant_is_a_note() -> None:
    result = run("norms", "--prompt", "<bos> When Mary", "--tensor", "O")
    assert result.exit_code == 0, result.output
    assert "note: the text '<bos> When Mary' begins with <bos>, and gets another in front" in result.stderr
    assert "Warning" not in result.stderr


# ---- the studies -----------------------------------------------------------------------------------------------------


def test_ablate_a_prompt_by_head(tmp_path: Path) -> None:
    result = run("ablate", "--prompt", PROMPT, "--tensor", "O", "--by", "head", "--out", str(tmp_path / "a" / "b"))
    got = lines(result)
    assert re.fullmatch(r"answer: 'Lima', the model's own first choice; wrong: '\w+', its second", got[0][0])
    table = [words for words in got if len(words) == 6]
    assert table[0] == ["block", "tensor", "head 0", "head 1", "head 2", "head 3"]
    assert [words[:2] for words in table[1:]] == [[str(i), "O"] for i in range(4)]
    df = frames.read(tmp_path / "a" / "b" / "ablation.parquet")
    assert df.equals(frames.read(tmp_path / "a" / "b" / "ablation.csv"))
    assert set(df["prompts"]) == {PROMPT}
    assert {words[1] for words in table[1:]} == {"O"}
    assert (tmp_path / "a" / "b" / "effects.png").stat().st_size > 1000
    effect = df[(df["metric"] == "logit_difference") & (df["block"] == 0) & (df["head"] == 0)]["effect"].iloc[0]
    assert float(table[1][2].replace("−", "-")) == pytest.approx(effect, abs=0.051)  # three digits


def test_ablate_whole_tensors_says_what_is_one_and_what_is_left_out() -> None:
    result = run("ablate", "--prompt", PROMPT, "--how", "zero", "--block", "1", "--metric", "kl")
    by_name = {words[0]: words for words in lines(result) if len(words) == 2}
    assert by_name["O"] == ["O", "= s_attn"]
    assert by_name["x_mid"] == ["x_mid", "= x_n"]  # block 0 wasn't asked for, so x_n of block 1 is no repetition
    assert "left out: blocks.1.delta_heads cannot be edited" in result.stdout
    assert "left out: blocks.1.experts holds integers" in result.stdout


def test_ablate_takes_answers_and_a_file(tmp_path: Path) -> None:
    result = run("ablate", "--prompt", PROMPT, "--answer", "Quito", "--tensor", "O", "--how", "zero")
    assert "change of log probability" in result.stdout
    assert "first choice" not in result.stdout
    file = tmp_path / "mine.jsonl"
    file.write_text('{"clean": "Paul Jones is a"}\n', encoding="utf-8")
    assert "mine, n = 1" in run("ablate", "--task", str(file), "--tensor", "O", "--how", "zero").stdout


def test_ablate_by_position_shows_tokens() -> None:
    got = lines(run("ablate", "--prompt", PROMPT, "--tensor", "x_mid", "--by", "position", "--how", "zero"))
    assert ["block", "tensor", "0 <bos>", "1 The", "2 capital", "3 of", "4 Peru", "5 is"] in got


def test_norms_prints_each_tensor(tmp_path: Path) -> None:
    got = lines(run("norms", "--prompt", PROMPT, "--block", "1", "--out", str(tmp_path)))
    got = got[: next(i for i, words in enumerate(got) if words[0].startswith("Growth"))]
    names = [words[1] for words in got if words[0] == "1"]
    assert "first choice" not in got[0]
    by_name = {words[1]: words for words in got if words[0] == "1"}
    assert re.fullmatch(r"head \d+, feature \d+", by_name["Q_R"][5])
    assert re.fullmatch(r"head \d+, key \d+", by_name["S"][5])
    assert len(by_name["s_attn"]) == 4  # a scale has no channels
    assert names == [name for name in card(moe=True).hooked if name not in ("experts", "delta_heads")]
    assert {path.name for path in tmp_path.iterdir()} == {"norms.parquet", "norms.csv", "norms.png", "sinks.png"}


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tensor", "c_kvv"], "no tensor of a dense block is spelt 'c_kvv'. Nearest: c_KV (c^KV)"),
        (["--block", "99"], "block 99 does not exist: this model has blocks 0 to 3."),
        (["--block", "-1"], "block -1 does not exist"),
        (["--model", "/nonexistent"], "/nonexistent: there is no such directory."),
        (["--prompt", "The capital of Wakanda is"], "lacks 'Wakanda'"),
        (["--prompt", " "], "the text is empty"),
        (["--prompt", "the " * 40], "--how zero"),
        (["--metric", "kll"], "there is no metric 'kll'"),
        (["--tensor", "experts"], "zero `gates`"),
        (["--tensor", "c_KV", "--by", "head"], "c_KV has no dim 'h'"),
        (["--answer", "Xanadu"], "answer: this model's vocabulary lacks 'Xanadu'"),
        (["--at", "subject"], "row 0 has no span 'subject'; it has END"),
        (["--how", "zero", "--draws", "2"], "nothing to draw"),
    ],
)
def test_a_run_that_fails_says_why_in_a_sentence(words: list[str], says: str) -> None:
    result = run("ablate", *(["--prompt", PROMPT] if "--prompt" not in words else []), *words)
    assert result.exit_code == 1
    assert says in result.stderr
    assert result.stderr.startswith("k2probe: ")
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output


def test_directories_that_hold_no_model(tmp_path: Path) -> None:
    result = run("ablate", "--prompt", PROMPT, "--model", str(tmp_path))
    assert (result.exit_code, "config" in result.stderr) == (1, True)
    result = run("params", str(tmp_path))
    assert (result.exit_code, "config" in result.stderr) == (1, True)
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    result = run("norms", "--prompt", PROMPT, "--model", str(tmp_path))
    assert (result.exit_code, "safetensors" in result.stderr) == (1, True)


@pytest.mark.parametrize("command", [["ablate", "--prompt", PROMPT], ["norms", "--prompt", PROMPT], ["demo"]])
def test_a_place_that_cannot_be_written_is_told_before_anything_is_computed(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hooks.HookedModel.load", lambda *_: pytest.fail("the model was loaded first"))
    file = tmp_path / "file"
    file.touch()
    result = run(*command, "--out", str(file / "out"))
    assert result.exit_code == 1
    assert result.stderr == f"k2probe: can't write to {file / 'out'}: Not a directory.\n"


@pytest.mark.parametrize(
    "words",
    [
        ["ablate"],
        ["norms", "--prompt", PROMPT, "--task", "ioi"],
        ["ablate", "--prompt", PROMPT, "--by", "neuron"],
        ["ablate", "--prompt", PROMPT, "--how", "median"],
        ["ablate", "--prompt", PROMPT, "--block", "one"],
        ["ablate", "--task", "ioi", "--answer", "Mary"],
        ["ablate", "--prompt", PROMPT, "--draws", "0"],
        ["tensors", "--block-kind", "sparse"],
        ["frob"],
        ["--frob"],
    ],
)
def test_wrong_usage_is_2(words: list[str]) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_our_own_faults_are_not_hushed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.tables.tensor_tables", lambda *_: 1 / 0)
    assert isinstance(run("tensors").exception, ZeroDivisionError)


# ---- start -----------------------------------------------------------------------------------------------------------


def test_another_package_of_our_rooms_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert foreign_rooms() is None
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hooks")
    wrong = foreign_rooms()
    assert wrong is not None
    assert wrong.startswith("the package 'hooks' on the path isn't k2-probe's: ")
    assert str(tmp_path / "hooks") in wrong


def test_help_answers_at_once() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", "experiments", "--help"], cwd=root, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert b"ablate" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5  # of the processor, not the wall
