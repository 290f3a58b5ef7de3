"""Prompt rows: what is refused, where spans end up, and which reference rows stand in for which prompts."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from experiments.prompts import Prompts, tasks
from hooks import HookedModel, patch, zero
from probe import TINY, Tokenizer
from probe.errors import BadEdit, BadText

ROW = {"clean": "When Mary and John went to the shop , John gave a drink to", "answer": "Mary", "wrong": "John"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


def test_spans_become_token_positions(tokenizer: Tokenizer) -> None:
    spans = {"IO": [5, 9], "names": [5, 18], "S2": [38, 42], "inside": [39, 41]}
    (prompt,) = Prompts.of([{**ROW, "spans": spans}], tokenizer).rows
    words = ["<bos>", *ROW["clean"].split()]
    assert {name: [words[i] for i in span] for name, span in prompt.spans.items()} == {
        "END": ["to"],
        "IO": ["Mary"],
        "names": ["Mary", "and", "John"],
        "S2": ["John"],
        "inside": ["John"],
    }


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({}, "the key 'clean' is missing"),
        ({**ROW, "asnwer": "Mary"}, r"unknown key 'asnwer'\. Nearest: answer"),
        ({**ROW, "answer": "Mary Xylophone"}, "answer: this model's vocabulary lacks 'Xylophone'"),
        ({**ROW, "wrong": "Xylophone"}, "wrong: this model's vocabulary lacks 'Xylophone'"),
        ({**ROW, "wrong": ["Paul", "Mary"]}, "wrong is 'Paul or Mary', and answer 'Mary': give two different words"),
        ({**ROW, "answer": ["Mary", "Mary Jones"]}, "answer: 'Mary' begins 'Mary Jones', and would be counted twice"),
        ({**ROW, "answer": []}, r"answer is \[\]; it should be text, or a list of spellings"),
        ({**ROW, "answer": ["Mary", 3]}, "it should be text, or a list of spellings"),
        ({**ROW, "wrong": "Mary"}, "give two different words"),
        ({"clean": ROW["clean"], "wrong": "John"}, "give two different words"),
        ({**ROW, "clean": "When Zebedee went"}, "lacks .*Zebedee"),
        ({**ROW, "clean": " "}, "empty"),
        ({**ROW, "clean": 3}, "clean is 3; it should be text"),
        ({**ROW, "corrupt": "When Mary and"}, "15 and 4 tokens and part at token 4, 'John' and the end; align them by"),
        ({**ROW, "corrupt": "When John went to the shop"}, "part at token 2, 'Mary' and 'John'"),
        ({**ROW, "corrupt": "When Zebedee"}, "corrupt: .*Zebedee"),
        ({**ROW, "corrupt": "When John", "spans": {"IO": [5, 9]}, "corrupt_spans": {}}, "only one of them has 'IO'"),
        ({**ROW, "corrupt": "When", "corrupt_spans": {"IO": [5, 9]}}, r"corrupt: span IO is \[5, 9\], outside"),
        ({**ROW, "corrupt_spans": {}}, "corrupt_spans goes with corrupt"),
        ({**ROW, "corrupt_slots": {"x": "Mary"}}, "corrupt_slots goes with slots"),
        ({**ROW, "template": "When {x}", "slots": {"x": "Mary"}}, "slots and clean are given"),
        ({"slots": {"x": "Mary"}}, "slots go with a template"),
        ({"template": "When {x}", "slots": {"x": "Mary"}, "corrupt": "When", "corrupt_slots": {}}, "leave out corrupt"),
        ({"template": "When {x}", "slots": {}}, "template 'When {x}': the slot 'x' is not filled"),
        ({"template": "When {x}", "slots": {"x": " "}}, "the slot 'x' is filled with ' '"),
        ({"template": "When {x} and {x}", "slots": {"x": "Mary"}}, "the slot 'x' stands twice"),
        ({"template": "When {x}", "slots": {"x": "Mary", "y": "John"}}, "there is no slot 'y'; it has x"),
        ({"template": "When {x", "slots": {"x": "Mary"}}, "template 'When {x': expected '}'"),
        ({"template": "When {}", "slots": {"x": "Mary"}}, "a slot is a name in braces"),
        ({**ROW, "spans": {"S1": [5, 99]}}, r"span S1 is \[5, 99\], outside the text"),
        ({**ROW, "spans": {"S1": [9, 5]}}, "outside the text"),
        ({**ROW, "spans": {"S1": [4, 5]}}, "no token is there"),
        ({**ROW, "spans": {"S1": [4]}}, r"should be \[first character"),
        ({**ROW, "spans": [4, 9]}, "spans is .* should be an object"),
        ("Mary", "a prompt is an object"),
    ],
)
def test_wrong_rows_are_told_with_file_and_line(row: Any, says: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps(ROW) + "\n\n" + json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(BadText, match=f"mine.jsonl:3: .*(?:{says})"):
        Prompts.load(file, tokenizer)
    with pytest.raises(BadText, match=f"prompts, row 1: .*(?:{says})"):
        Prompts.of([ROW, row], tokenizer)


@pytest.mark.parametrize(
    ("content", "says"),
    [("{'clean'}", "mine.jsonl:1: not JSON"), ("", "there is no prompt in it"), (None, "can't be read")],
)
def test_files_that_are_none(content: str | None, says: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(BadText, match=says):
        Prompts.load(file, tokenizer)


def test_unknown_task_names_the_nearest(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadText, match=r"no task 'iio'\. Nearest: ioi"):
        Prompts.load("iio", tokenizer)


@pytest.mark.parametrize("task", tasks())
def test_every_shipped_row_has_a_reference_row_of_its_shape(task: str, tokenizer: Tokenizer) -> None:
    prompts = Prompts.load(task, tokenizer)
    reference = prompts.reference
    assert reference is not None
    assert prompts.has() == ("answer", "wrong")
    for seed in (0, 1):
        for prompt, j in zip(prompts.rows, prompts.draw(reference, seed), strict=True):
            other = reference.rows[j]
            assert other.tokens != prompt.tokens
            assert other.shape == prompt.shape  # the template too
            assert other.group != prompt.group
    assert prompts.draw(reference, 0) == prompts.draw(reference, 0)
    assert prompts.draw(reference, 0) != prompts.draw(reference, 1)


def test_there_are_tasks() -> None:
    assert {"ioi", "capital", "induction", "job"} <= set(tasks())


def test_a_row_never_stands_in_for_itself(tokenizer: Tokenizer) -> None:
    prompts = Prompts.of([{"clean": "Paul Jones is a"}], tokenizer)
    same = Prompts.of([{"clean": "Paul Jones is a"}, {"clean": "Mary Jones lives in Rome"}], tokenizer)
    with pytest.raises(BadText, match="no other prompt of the shape of 'Paul Jones is a'"):
        prompts.draw(same, 0)


def test_another_group_and_the_same_template_are_preferred(tokenizer: Tokenizer) -> None:
    texts = {"a": "Paul Jones is a", "b": "Anna Smith is a", "c": "Tom Smith lives in"}
    rows = [{"clean": texts["a"], "group": "g", "template": "t"}]
    candidates = [
        {"clean": texts["c"], "group": "other", "template": "u"},
        {"clean": texts["b"], "group": "g", "template": "t"},
        {"clean": texts["b"], "group": "other", "template": "t"},
    ]
    prompts, reference = Prompts.of(rows, tokenizer), Prompts.of(candidates, tokenizer)
    assert {prompts.draw(reference, seed)[0] for seed in range(8)} == {2}
    assert {prompts.draw(Prompts(reference.rows[:2], tokenizer), seed)[0] for seed in range(8)} == {1}


def test_shapes_tell_lengths_spans_and_templates_apart(tokenizer: Tokenizer) -> None:
    rows = [
        {"clean": "Paul Jones is a"},
        {"clean": "Anna Smith is a"},
        {"clean": "Anna Smith is a", "spans": {"last": [5, 10]}},
        {"clean": "Anna Smith is a doctor"},
        {"clean": "Tom Smith is a", "template": "t"},
    ]
    assert list(Prompts.of(rows, tokenizer).shapes().values()) == [[0, 1], [2], [3], [4]]


def test_batch_pads_on_the_right(tokenizer: Tokenizer) -> None:
    prompts = Prompts.of([{"clean": "Paul Jones"}, {"clean": "Anna Smith is a"}], tokenizer)
    tokens, keep = prompts.batch()
    theirs = tokenizer.batch([prompt.clean for prompt in prompts.rows])
    assert torch.equal(tokens, theirs.tokens)
    assert keep is not None
    assert theirs.keep is not None
    assert torch.equal(keep, theirs.keep)
    assert prompts.subset([0]).batch().keep is None


def test_a_text_is_resampled_from_documents_cut_to_its_length(tokenizer: Tokenizer) -> None:
    prompts = Prompts.text("The capital of Peru is", tokenizer)
    reference = prompts.reference
    assert reference is not None
    documents = [json.loads(line)["text"] for line in (TINY / "reference" / "text.jsonl").open(encoding="utf-8")]
    starts = {" ".join(document.split()[:5]) for document in documents}
    assert {other.clean for other in reference.rows} == starts
    assert len({other.tokens for other in reference.rows}) == len(reference.rows)
    for other in reference.rows:
        assert list(other.tokens) == tokenizer.encode(other.clean)
    assert prompts.draw(reference, 0)
    assert prompts.has() == ()


def test_a_text_longer_than_all_documents_has_no_reference(tokenizer: Tokenizer) -> None:
    prompts = Prompts.text("the " * 40, tokenizer)
    assert prompts.reference is None
    assert "41 tokens" in prompts.notes[0]


# ---- spans in both texts ---------------------------------------------------------------------------------------------

CAPITAL: dict[str, Any] = {
    "template": "The capital of {subject} is",
    "slots": {"subject": "Peru"},
    "corrupt_slots": {"subject": "Chile"},
    "answer": "Lima",
    "wrong": "Santiago",
}


def test_a_template_makes_text_and_spans(tokenizer: Tokenizer) -> None:
    (made,) = Prompts.of([CAPITAL], tokenizer).rows
    spans = {"subject": [15, 19]}
    by_hand = {"clean": "The capital of Peru is", "corrupt": "The capital of Chile is", "spans": spans}
    (same,) = Prompts.of([{**by_hand, "answer": "Lima", "wrong": "Santiago"}], tokenizer).rows
    assert (made.clean, made.tokens, made.corrupt, made.spans) == (same.clean, same.tokens, same.corrupt, same.spans)
    assert made.corrupt_tokens == same.corrupt_tokens == tuple(tokenizer.encode("The capital of Chile is"))
    assert made.corrupt_spans == same.corrupt_spans == {"subject": range(4, 5), "END": range(5, 6)}


def test_braces_in_a_template_are_doubled(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadText, match=r"lacks '\{Peru\}'"):
        Prompts.of([{**CAPITAL, "template": "The capital of {{{subject}}}"}], tokenizer)


def test_unequal_lengths_are_aligned_by_span(tokenizer: Tokenizer) -> None:
    rows = [
        {**CAPITAL, "template": "{who} lives in {where} .", "slots": {"who": "Mary Jones", "where": "Rome"}}
        | {"corrupt_slots": {"who": "Paul"}},
        {
            "clean": "Mary Jones lives in Rome .",
            "corrupt": "Paul lives in Rome .",
            "spans": {"who": [0, 10], "where": [20, 24]},
            "corrupt_spans": {"who": [0, 4], "where": [14, 18]},
        },
    ]
    for prompt in Prompts.of(rows, tokenizer).rows:
        assert prompt.spans == {"who": range(1, 3), "where": range(5, 6), "END": range(6, 7)}
        assert prompt.corrupt_spans == {"who": range(1, 2), "where": range(4, 5), "END": range(5, 6)}
        back = prompt.swapped()
        assert (back.clean, back.spans) == (prompt.corrupt, prompt.corrupt_spans)
        assert back.answer == prompt.answer
        assert back.swapped() == prompt


def test_there_is_nothing_to_swap_without_a_corrupt_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadText, match="prompts: 'Paul Jones' has no corrupt text"):
        Prompts.of([{"clean": "Paul Jones"}], tokenizer).swapped()


# ---- files -----------------------------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    CAPITAL | {"answer": ["Lima", "Quito ."], "group": "Peru"},
    ROW | {"spans": {"S1": [14, 18], "S2": [38, 42]}, "template": "t", "corrupt": ROW["clean"]},
    {"clean": "Paul Jones"},
]


def as_jsonl(file: Path) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")


def as_csv(file: Path) -> None:
    keys = list(dict.fromkeys(key for row in ROWS for key in row))
    with file.open("w", encoding="utf-8-sig", newline="") as stream:  # as a spreadsheet writes it
        writer = csv.writer(stream)
        writer.writerow(keys)
        for row in ROWS:
            cells = [row.get(key, "") for key in keys]
            writer.writerow([cell if isinstance(cell, str) else json.dumps(cell) for cell in cells])


def as_parquet(file: Path) -> None:
    texts = pd.DataFrame(ROWS)
    for key in ("answer", "spans"):  # columns of one kind; written as JSON
        texts[key] = [json.dumps(row[key]) if isinstance(row.get(key), list | dict) else row.get(key) for row in ROWS]
    texts.to_parquet(file)  # slots are structs, spans JSON


@pytest.mark.parametrize(("ending", "write"), [("jsonl", as_jsonl), ("csv", as_csv), ("parquet", as_parquet)])
def test_every_kind_of_file_holds_the_same_rows(
    ending: str, write: Callable[[Path], None], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = tmp_path / f"mine.{ending}"
    write(file)
    for loaded in (Prompts.load(file, tokenizer), Prompts.load(str(file), tokenizer)):
        assert loaded.name == "mine"
        assert loaded.rows == Prompts.of(ROWS, tokenizer).rows
    answer = loaded.rows[0].answer
    assert answer is not None
    assert answer.spellings == ("Lima", "Quito .")
    assert [len(tokens) for tokens in answer.tokens] == [1, 2]


def test_structs_of_parquet_lack_what_other_rows_have(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [
        {"clean": "Paul Jones", "spans": {"a": [0, 4]}},
        {"clean": "Mary Jones", "spans": {"b": [5, 10]}},
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "mine.parquet")
    assert Prompts.load(tmp_path / "mine.parquet", tokenizer).rows == Prompts.of(rows, tokenizer).rows


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("mine.csv", "clean,spans\nPaul,\nPaul,{\n", "mine.csv:3: spans: not JSON"),
        ("mine.csv", "clean,answer\nPaul,Jones\nPaul\n", "mine.csv:3: it has more or fewer cells than the header's 2"),
        ("mine.csv", "clean\nPaul,Jones\n", "mine.csv:2: it has more or fewer cells"),
        ("mine.csv", "text\nPaul\n", "mine.csv:2: unknown key 'text'"),
        ("mine.csv", "clean\n", "there is no prompt in it"),
        ("mine.csv", 'clean\n"Paul\n', "mine.csv: can't be read"),
        ("mine.csv", None, "mine.csv: can't be read"),
        ("mine.parquet", "clean", "mine.parquet: can't be read"),
        ("mine.parquet", None, "mine.parquet: can't be read"),
        ("mine.txt", "Paul", r"mine.txt: prompts are read from \.jsonl, \.csv, \.parquet"),
    ],
)
def test_tables_that_are_none(name: str, content: str | None, says: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(BadText, match=says):
        Prompts.load(tmp_path / name, tokenizer)


def test_lines_end_at_line_feeds_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Others end lines of a text, and stand in one: of 9 that Python splits at, JSON has 3 as they are in a string."""
    rows = [{"clean": f"Mary{end}and{end}John", "group": f"a{end}b"} for end in "\u2028\u2029\x85"] + [ROW]
    file = tmp_path / "mine.jsonl"
    for end in ("\n", "\r\n"):
        text = end.join(json.dumps(row, ensure_ascii=False) for row in rows)
        file.write_bytes(text.encode())
        assert Prompts.load(file, tokenizer).rows == Prompts.of(rows, tokenizer).rows


def test_a_byte_order_mark_of_prompts_says_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    as_jsonl(file)
    before = Prompts.load(file, tokenizer).rows
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert Prompts.load(file, tokenizer).rows == before


def test_what_is_said_twice_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"clean": "Paul"}\n{"clean": "Paul", "clean": "Mary"}')
    with pytest.raises(BadText, match=r"mine\.jsonl:2: not JSON: clean is in it twice"):
        Prompts.load(tmp_path / "mine.jsonl", tokenizer)
    (tmp_path / "mine.csv").write_text("clean,answer,clean\nPaul,Jones,Mary\n")
    with pytest.raises(BadText, match=r"mine\.csv: it has the column 'clean' twice"):
        Prompts.load(tmp_path / "mine.csv", tokenizer)
    (tmp_path / "mine.csv").write_text('clean,spans\nPaul,"{""A"": [0, 1], ""A"": [1, 2]}"\n')
    with pytest.raises(BadText, match=r"mine\.csv:2: spans: not JSON: A is in it twice"):
        Prompts.load(tmp_path / "mine.csv", tokenizer)
    pq.write_table(pa.table([["Paul"], ["Mary"]], names=["clean", "clean"]), tmp_path / "mine.parquet")
    with pytest.raises(BadText, match=r"mine\.parquet: it has the column 'clean' twice"):
        Prompts.load(tmp_path / "mine.parquet", tokenizer)


# ---- with a model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> HookedModel:
    return HookedModel.load()


def patched_by_hand(model: HookedModel, prompts: Prompts, place: Callable[[Any], tuple[int, int]]) -> torch.Tensor:
    """The last logits of each row, run alone, with one vector of x_mid from the other text, also run alone."""
    found = []
    for prompt in prompts.rows:
        here, there = place(prompt)
        with torch.no_grad():
            _, cache = model.run_with_cache(torch.tensor([prompt.corrupt_tokens]), names_filter="blocks.1.x_mid")

            def hook(
                value: torch.Tensor, hook: Any, h: int = here, new: torch.Tensor = cache["x_mid", 1][0, there]
            ) -> Any:
                value[0, h] = new
                return value

            logits = model.run_with_hooks(torch.tensor([prompt.tokens]), fwd_hooks=[("blocks.1.x_mid", hook)])
        found.append(logits[0, -1])
    return torch.stack(found)


def last(prompts: Prompts, logits: torch.Tensor) -> torch.Tensor:
    return torch.stack([row[len(prompt.tokens) - 1] for row, prompt in zip(logits, prompts.rows, strict=True)])


def test_edits_by_span_on_prompts_of_equal_length(model: HookedModel, tokenizer: Tokenizer) -> None:
    prompts = Prompts.load("ioi", tokenizer).subset(range(0, 60, 10))
    run = model.run(*prompts.batch(), edits=[zero("O", block=2, T="S2")], spans=prompts.spans)
    other = model.run(*prompts.swapped().batch(), want=["blocks.1.x_mid"], spans=prompts.swapped().spans)
    moved = model.run(*prompts.batch(), edits=[patch("x_mid", 1, source=other, T="S2")], spans=prompts.spans)
    for b, prompt in enumerate(prompts.rows):
        (place,) = prompt.spans["S2"]
        single = model.run(torch.tensor([prompt.tokens]), edits=[zero("O", block=2, T=place)])["logits"][0, -1]
        torch.testing.assert_close(run["logits"][b, len(prompt.tokens) - 1], single, atol=1e-4, rtol=1e-4)
    assert run.touched == (len(prompts) * model.dims.h,)
    by_hand = patched_by_hand(model, prompts, lambda prompt: (prompt.spans["S2"][0],) * 2)
    torch.testing.assert_close(last(prompts, moved["logits"]), by_hand, atol=1e-4, rtol=1e-4)


def test_edits_by_span_on_prompts_of_unequal_length(model: HookedModel, tokenizer: Tokenizer) -> None:
    rows = [
        {"template": "{who} lives in {where} . The capital of {subject} is"}
        | {"slots": {"who": "Mary Jones", "where": "Rome", "subject": "Peru"}, "corrupt_slots": slots}
        for slots in ({"who": "Paul", "subject": "Chile"}, {"where": "Rome and Lima", "subject": "Chile"})
    ]
    prompts = Prompts.of(rows, tokenizer)
    other = prompts.swapped()
    assert [len(p.tokens) - len(o.tokens) for p, o in zip(prompts.rows, other.rows, strict=True)] == [1, -2]
    source = model.run(*other.batch(), want=["blocks.1.x_mid"], spans=other.spans)

    def patched(place: str) -> torch.Tensor:
        edit = patch("x_mid", 1, source=source, T=place)
        return last(prompts, model.run(*prompts.batch(), edits=[edit], spans=prompts.spans)["logits"])

    by_hand = patched_by_hand(model, prompts, lambda p: (p.spans["subject"][0], p.corrupt_spans["subject"][0]))
    torch.testing.assert_close(patched("subject"), by_hand, atol=1e-4, rtol=1e-4)
    assert (by_hand - last(prompts, model.run(*prompts.batch())["logits"])).abs().max() > 0.1
    by_hand = patched_by_hand(model, prompts, lambda p: (p.spans["who"][-1], p.corrupt_spans["who"][-1]))
    torch.testing.assert_close(patched("who[-1]"), by_hand, atol=1e-4, rtol=1e-4)
    with pytest.raises(BadEdit, match="row 0 names 2 positions here and 1 in the source"):
        patched("who")


def test_200_rows_of_unequal_length_in_one_batch_are_those_rows_one_by_one(
    model: HookedModel, tokenizer: Tokenizer
) -> None:
    rows = [row for task in tasks() for row in Prompts.load(task, tokenizer).rows[:30]][:200]
    prompts = Prompts(tuple(rows), tokenizer)
    assert len(prompts) == 200
    assert len({len(prompt.tokens) for prompt in rows}) > 5
    edits = [zero("O", block=1, h=1, T="END")]
    batched = last(prompts, model.run(*prompts.batch(), edits=edits, spans=prompts.spans)["logits"])
    plain = last(prompts, model.run(*prompts.batch())["logits"])
    alone = [prompts.subset([i]) for i in range(200)]
    single = [model.run(*one.batch(), edits=edits, spans=one.spans)["logits"][0, -1] for one in alone]
    torch.testing.assert_close(batched, torch.stack(single), atol=1e-4, rtol=1e-4)
    assert (batched - plain).abs().amax(-1).min() > 1e-3  # the edit acts in every row


def test_documents_are_plain_text(tokenizer: Tokenizer) -> None:
    some = Prompts.documents(tokenizer, 3)
    assert (len(some), some.has(), some.name) == (3, (), "reference/text")
    texts = [json.loads(line)["text"] for line in (TINY / "reference" / "text.jsonl").read_text().splitlines()]
    assert [prompt.clean for prompt in some.rows] == texts[:3]
    assert len(Prompts.documents(tokenizer)) == len(texts)
    with pytest.raises(BadText, match=f"holds {len(texts)} documents, and 999 are asked for"):
        Prompts.documents(tokenizer, 999)
