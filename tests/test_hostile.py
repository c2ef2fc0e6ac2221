"""A hundred hostile files of every kind, by a seed, and text by hypothesis; `make fuzz` runs two thousand."""

import csv
import io
import pickle
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import yaml
from hostile import canary
from hostile.judging import Box, Case, judge
from hostile.kinds import KINDS, command
from hostile.running import planned, run_cases
from hostile.stock import Stock, make_stock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cmsf.cli.comparison import Comparison
from cmsf.data.sources.table import read_mapping, read_table, write_csv
from cmsf.evaluation.transfer.datasets import read_suite
from cmsf.recipes.recipe import Recipe
from cmsf.utils.errors import BadInput
from cmsf.utils.text import MAX_LINE, escape_unprintable, one_line

CASES = 100
SEED = 20_220

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WORDS = st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from(
    [
        "\x1b[2J",
        "a\nb",
        "\u202ex",
        "<script>",
        "a|b",
        "[/red]",
        "$x$",
        "9" * 5_000,
        "-1",
        "../x",
        "\\",
        "[",
        '"',
        "=1+1",
    ]
)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    before = torch.get_num_threads()
    made = make_stock(tmp_path_factory.mktemp("hostile") / "stock")
    torch.set_num_threads(before)
    return made


def test_a_hundred_hostile_files_are_read_or_refused_in_a_line_and_do_no_harm(stock: Stock, tmp_path: Path) -> None:
    outcomes = list(run_cases(stock, planned(CASES), SEED, tmp_path, processes=2))
    assert len(outcomes) == CASES
    assert {outcome.kind for outcome in outcomes} == set(KINDS)
    assert {outcome.exit_code for outcome in outcomes} == {0, 2}
    assert [(one.kind, one.number, one.complaints) for one in outcomes if one.complaints] == []


# The judge sees what it is there to see


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        ("import subprocess; subprocess.run(['true'])", "started a process"),
        ("import os; os.system('true')", "started a process"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "asked the network"),
        ("open('../given/new', 'w').close()", "wrote outside"),
        ("import os; os.mkdir('../new')", "wrote outside"),
        ("import os; os.remove('../precious.txt')", "wrote outside"),
        ("import os; os.mkdir('../out-of-it')", "wrote outside"),
        ("import os; os.symlink('../precious.txt', 'link'); open('link', 'a').close()", "wrote outside"),
        ("import os; os.symlink('..', 'link'); os.remove('link/precious.txt')", "wrote outside"),
        ("print('\\x1b[2J')", "printed"),
        ("print('x' * 1000)", "a line of 1000 characters"),
        ("1 / 0", "raised ZeroDivisionError"),
        ("bytearray(8 << 30)", "raised MemoryError"),
        ("b'x' * (2000 << 20)", "took 20"),
        ("import os; os._exit(3)", "the process ended"),
        ("while True: pass", "not done after"),
    ],
)
def test_harm_is_seen(harm: str, complaint: str, stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(stock: Stock, box: Box, random: Random) -> Case:
        return Case(lambda: exec(harm) or 0)

    monkeypatch.setitem(KINDS, "harm", made)
    monkeypatch.setattr("hostile.running.SECONDS", 2.0 if complaint == "not done after" else 30.0)
    (outcome,) = run_cases(stock, [("harm", 0)], 0, tmp_path)
    assert complaint in "; ".join(outcome.complaints)


def test_the_canary_is_alive(tmp_path: Path) -> None:
    """Each payload does its harm where it is loaded in an unsafe way."""
    loads = {
        "pickle": lambda place: pickle.loads(canary.in_a_pickle(place)),
        "torch": lambda place: torch.load(io.BytesIO(canary.in_a_torch_file(place)), weights_only=False),
        "npy": lambda place: np.load(io.BytesIO(canary.in_an_array(place)), allow_pickle=True),
        "npz": lambda place: np.load(io.BytesIO(canary.in_an_npz(place)), allow_pickle=True)["x"],
        "yaml": lambda place: yaml.unsafe_load(canary.in_yaml(place)),
    }
    for name, load in loads.items():
        place = tmp_path / name
        assert not canary.sings(place)
        load(place)
        assert canary.sings(place), name


def test_what_is_not_damaged_is_read(stock: Stock, tmp_path: Path) -> None:
    """Else all would be refused, and nothing would be tested."""
    for number, arguments in enumerate(
        (
            ("recipes", stock.run / "recipe.yaml"),
            ("data", stock.photos, "--out", tmp_path / "sheet.png"),
            ("labels", stock.arrays),
            ("labels", f"wds:{stock.path / 'shard.tar'}"),
            ("evaluate", stock.run, "--workers", "0"),
            ("predict", stock.classifier, "--data", stock.photos, "--out", tmp_path / "p.csv", "--workers", "0"),
            ("embed", stock.run, "--data", stock.photos, "--out", tmp_path / "f.npz", "--workers", "0"),
        )
    ):
        box = Box(tmp_path / str(number))
        box.out.mkdir(parents=True)
        verdict = judge(box, Case(command(*arguments)))
        assert (verdict.exit_code, verdict.complaints) == (0, []), verdict.output
    for kind, content in stock.images.items():
        (tmp_path / "kinds" / kind).mkdir(parents=True)
        (tmp_path / "kinds" / kind / "a.png").write_bytes(content)
    verdict = judge(Box(tmp_path), Case(command("data", tmp_path / "kinds", "--out", tmp_path / "out.png")))
    assert "broken: none" in verdict.output


# Text by hypothesis


@few
@given(WORDS)
def test_what_is_shown_steers_nothing_and_is_one_line(words: str) -> None:
    shown = one_line(words)
    assert len(shown) <= MAX_LINE
    assert escape_unprintable(shown) == shown
    assert shown.isprintable() or all(
        letter.isspace() or ord(letter) > 127 for letter in shown if not letter.isprintable()
    )
    assert not set(shown) & set("\x1b\x9b\n\r\0\u202e\u2066\u2028")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


@few
@given(st.dictionaries(st.sampled_from(["k", "lr", "name", "epochs", "backbone", "init", "bank_size"]) | WORDS, VALUES))
def test_any_values_make_a_recipe_or_are_refused(values: dict[str, object]) -> None:
    text = yaml.safe_dump(values, allow_unicode=True)
    with suppress(BadInput):
        read = Recipe.from_yaml(text, "it")
        assert read == Recipe.from_yaml(read.to_yaml(), "it")


@few
@given(text=st.text(st.sampled_from("ab0:-[]{},&*!<>|'\"#%@` \n\t?.~\x00é"), max_size=120))
def test_any_text_is_a_recipe_and_a_suite_or_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "any.yaml"
    file.write_text(text, encoding="utf-8")
    for read in (Recipe.read, read_suite):
        with suppress(BadInput):
            read(file)


@few
@given(
    rows=st.lists(st.tuples(WORDS, WORDS), max_size=6),
    header=st.sampled_from(["path,label", "index,label", "class,group", "path"]),
)
def test_any_table_is_read_or_refused(rows: list[tuple[str, str]], header: str, tmp_path: Path) -> None:
    file = tmp_path / "any.csv"
    with file.open("w", encoding="utf-8", newline="") as stream:
        stream.write(header + "\n")
        csv.writer(stream).writerows(row[: header.count(",") + 1] for row in rows)
    for read in (read_table, read_mapping):
        with suppress(BadInput):
            read(file)


@few
@given(rows=st.lists(st.tuples(WORDS, WORDS), max_size=6))
def test_what_is_written_as_csv_comes_back(rows: list[tuple[str, str]], tmp_path: Path) -> None:
    file = tmp_path / "written.csv"
    write_csv(file, ("path", "label"), rows)
    with file.open(encoding="utf-8", newline="") as stream:
        assert list(csv.reader(stream, strict=True)) == [["path", "label"], *map(list, rows)]


@few
@given(WORDS, WORDS, WORDS)
def test_any_names_make_a_table_of_the_same_shape(run: str, column: str, title: str) -> None:
    found = Comparison(title)
    figure = {"quoted": "accuracy", "accuracy": {"value": 1.0, "low": 0.0, "high": 2.0}}
    found.add(run, {column: figure})
    markdown, latex = found.markdown().splitlines(), found.latex().splitlines()
    assert len(markdown) == 5
    assert [line.replace("\\\\", "").replace("\\|", "").count("|") for line in markdown[2:]] == [3, 3, 3]
    assert not any("<" in line for line in markdown)
    assert len(latex) == 8
    assert not latex[5].startswith(("[", "*"))
    found.show("table")
