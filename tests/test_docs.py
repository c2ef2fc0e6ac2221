"""README and docs keep their word: snippets run, and the flags, links, files, names and tests they mention exist."""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import timm
import torch
from helpers import images_of_classes, put_into_hub_cache
from PIL import Image

from cmsf import cli
from cmsf.cli.parser import Parser
from cmsf.evaluation.transfer import read_suite
from cmsf.recipes import METHODS, check_recipe_name
from cmsf.recipes.recipe import Recipe, parse_value

ROOT, THIS = Path(__file__).parents[1], Path(__file__).name
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN_BY_HAND = [page for page in PAGES if page.parent.name != "results"]

IMAGENET = "ImageNet is not here"
FOLLOWS = "the command before it is not run"
NOT_RUN = {
    "torchrun": "several processes; tests/test_distributed.py starts some",
    "srun": "needs Slurm",
    "cmsf labels imagenet/": IMAGENET,
    "cmsf train cmsf-self --data in100.csv": IMAGENET,
    "cmsf evaluate runs/photos --with few-labels": "fine-tunes for 1,000 steps; tests/test_few_labels.py does",
    "cmsf evaluate runs/photos --with transfer": "50 trials in processes; tests/test_transfer_search.py does",
    "cmsf train cmsf-semi": "takes several seconds; tests/test_pseudo_labels.py trains it",
    "cmsf finetune runs/few": FOLLOWS,
    "cmsf predict runs/few-classifier": FOLLOWS,
    "cmsf labels photos/ --corrections": "no label is suspect among so few images; tests/test_suspects.py does",
    "cmsf train cmsf-sup --data photos/ --labels labels.csv": FOLLOWS,
    "cmsf report runs/photos runs/msf --out ab.html": "README's is run",
    "cmsf train cmsf-self --data photos/ --out runs/live --report": "tests/test_report.py does",
    "make": "sets up an environment",
}
"""Commands that are parsed but not run, by how they begin, and why."""

FLAGS_OF_OTHERS = {
    *("--max-restarts", "--nproc-per-node"),  # torchrun
    *("--choosing", "--seed"),  # scripts/make_sample.py
}
NAMES_OF_OTHERS = {"FORCE_COLOR", "MASTER_ADDR", "MASTER_PORT", "OPENBLAS_CORETYPE", "Training_01", "Testing_01"}


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    fence = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    text = page.read_text(encoding="utf-8")
    for found in fence.finditer(text):
        yield Block(page, text.count("\n", 0, found.start()) + 2, *found.groups())


def blocks_in(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def commands(block: Block) -> list[list[str]]:
    """The words of each command of a shell block, comments left out."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines for part in line.split("&&") if (words := shlex.split(part, comments=True))]


def arguments(words: list[str]) -> list[str] | None:
    """What a command hands to cmsf, directly or by `-m cmsf`; None where it is not ours."""
    if "cmsf" not in words:
        return None
    after = words[words.index("cmsf") + 1 :]
    return after[:-1] if after[-1:] == ["&"] else after


def asks_for_help(given: list[str]) -> bool:
    """Whether a command prints its help, and so ends the process."""
    return given[-1:] in (["--help"], ["--help-all"])


def code_spans(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def flags(span: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[a-z][a-z-]*", span)


def make_parsers() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(prog="cmsf")
    return parser, cli.add_commands(parser)


def run_commands(page: Path) -> None:
    """Run the shell commands of a page one after another, but for those that are listed."""
    for block in (block for block in blocks(page) if block.language == "sh"):
        for words in commands(block):
            given, line = arguments(words), shlex.join(words)
            if given is not None and not line.startswith(tuple(NOT_RUN)) and not asks_for_help(given):
                assert cli.main(given) == 0, f"{block.name}: {line}"


def efficientnet() -> dict[str, torch.Tensor]:
    """Weights that are not contiguous in memory, as files of other libraries have them."""
    network = timm.create_model("tf_efficientnet_lite0").to(memory_format=torch.channels_last)
    assert not all(tensor.is_contiguous() for tensor in network.state_dict().values())
    return network.state_dict()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which README's commands were run; before, it had the files they name, and a suite of data sets."""
    folder = tmp_path_factory.mktemp("docs")
    for name, per_class in {"photos": 9, "test": 2, "new": 1}.items():
        images, label = images_of_classes(per_class, classes=3, side=8)
        for number, (pixels, class_number) in enumerate(zip(images, label, strict=True)):
            file = folder / name / f"class {class_number}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    few = [path for place in sorted((folder / "photos").iterdir()) for path in sorted(place.iterdir())[:3]]
    rows = [f"{path.relative_to(folder / 'photos').as_posix()},{path.parent.name}" for path in few]
    (folder / "few.csv").write_text("\n".join(["path,label", *rows]))
    (folder / "sets.yaml").write_text("shapes: photos\n")
    renamed = {f"layer {number}": tensor for number, tensor in enumerate(efficientnet().values())}
    torch.save(renamed, folder / "efficientnet-lite0.pth")
    put_into_hub_cache(timm.create_model("resnet18").state_dict(), "resnet18.a1_in1k", folder / "hub")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with contextlib.chdir(folder):
            run_commands(README)
        yield folder


@pytest.fixture
def inside(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workspace)
    return workspace


def test_the_readmes_commands_leave_what_they_promise(workspace: Path) -> None:
    for name in ("predictions.csv", "suspects.csv", "report.html", "runs/photos", "runs/msf", "runs/photos-classifier"):
        assert (workspace / name).exists(), name


@pytest.mark.parametrize("page", [page for page in PAGES if page != README], ids=lambda page: page.stem)
def test_the_shell_commands_of_a_page_run_after_those_of_the_readme(page: Path, inside: Path) -> None:
    run_commands(page)


@pytest.mark.parametrize("block", blocks_in("python"), ids=lambda block: block.name)
def test_python_blocks_run(block: Block, inside: Path) -> None:
    exec(compile(block.text, block.name, "exec"), {"__name__": "__main__"})


def test_every_command_in_a_shell_block_is_understood() -> None:
    parser, _ = make_parsers()
    found = 0
    for block in blocks_in("sh"):
        for given in filter(None, map(arguments, commands(block))):
            if not asks_for_help(given):
                check_arguments(parser, given, block.name)
                found += 1
    assert found > 30


def check_arguments(parser: Parser, given: list[str], where: str) -> None:
    """Every flag exists, and a setting of a recipe has a value that it may have."""
    chosen, unknown = parser.parse_known_args(given)
    assert not unknown, where
    settings = {name: value for name, value in vars(chosen).items() if name in Recipe.__dataclass_fields__}
    if given[0] == "train":
        Recipe().changed({name: parse_value(name, value) for name, value in settings.items()})
        if chosen.recipe is not None:
            check_recipe_name(chosen.recipe)


def test_every_command_in_a_sentence_has_its_flags() -> None:
    _, subparsers = make_parsers()
    for page in WRITTEN_BY_HAND:
        for span in code_spans(page):
            if found := re.match(r"cmsf ([a-z]+)", span):
                assert set(flags(span)) <= set(subparsers[found[1]].options()), f"{page.name}: {span}"


def test_shell_blocks_are_valid_bash() -> None:
    for block in blocks_in("sh"):
        checked = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
        assert checked.returncode == 0, f"{block.name}: {checked.stderr}"


def test_what_is_not_run_is_there() -> None:
    lines = [shlex.join(words) for block in blocks_in("sh") for words in commands(block)]
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in lines)] == []


def test_suites_in_the_docs_are_read(tmp_path: Path) -> None:
    for number, block in enumerate(blocks_in("yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block.text)
        assert read_suite(file)


def test_every_flag_that_is_mentioned_exists() -> None:
    _, subparsers = make_parsers()
    known = {flag for parser in subparsers.values() for flag in parser.options()} | FLAGS_OF_OTHERS
    for page in WRITTEN_BY_HAND:
        for span in code_spans(page):
            assert set(flags(span)) <= known, f"{page.name}: {span}"


def test_every_recipe_that_is_mentioned_exists() -> None:
    method = re.compile(rf"({'|'.join(map(re.escape, METHODS))})([+-][a-z0-9+-]*)?")
    for page in WRITTEN_BY_HAND:
        for span in filter(method.fullmatch, code_spans(page)):
            check_recipe_name(span)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)|^\[\d+\]: (\S+)$", text, flags=re.MULTILINE):
            place, _, anchor = "".join(target).partition("#")
            if "://" in place:
                continue
            there = (page.parent / place).resolve() if place else page
            assert there.exists(), f"{page.name}: {place}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), flags=re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_every_file_that_is_mentioned_exists() -> None:
    anywhere = {path.name for top in ("src", "tests", "bench", "scripts", "docs") for path in (ROOT / top).rglob("*.*")}
    for page in WRITTEN_BY_HAND:
        for span in code_spans(page):
            if re.fullmatch(r"[\w./-]+\.py", span):
                places = [ROOT / span, ROOT / "src/cmsf" / span, ROOT / "tests" / span]
                here = span in anywhere if "/" not in span else any(place.is_file() for place in places)
                assert here, f"{page.name}: {span}"


def test_every_name_of_the_code_that_is_mentioned_exists() -> None:
    """Code spans such as `EmbeddingCache.exchange` or `make_learner` are words of the code."""
    sources = [path for top in ("src", "tests", "bench") for path in (ROOT / top).rglob("*.py") if path.name != THIS]
    words = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in sources)))
    for page in WRITTEN_BY_HAND:
        for span in code_spans(page):
            name = span.removesuffix("()")
            if re.fullmatch(r"[A-Za-z_][\w.]*", name) and re.search(r"_|[a-z][A-Z]", name) and "." not in name[-5:]:
                assert set(name.split(".")) <= words | NAMES_OF_OTHERS, f"{page.name}: {span}"


def test_the_tree_in_contributing_is_the_tree() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text[text.index("    src/cmsf/\n") : text.index("    tests/  ")]
    package, files, packages = "", 0, set()
    for line in tree.splitlines()[1:]:
        if found := re.match(r"    (│   )?[├└]── ([\w./]+)", line):
            inside, name = found.groups()
            package = package if inside else name
            place = ROOT / "src/cmsf" / (f"{package}{name}" if inside else name)
            assert place.exists(), line
            files, packages = files + 1, packages | {package}
    assert files > 50
    assert {path.name for path in (ROOT / "src/cmsf").iterdir() if path.name != "__pycache__"} == {
        package.rstrip("/") for package in packages
    }


def test_every_test_that_is_mentioned_exists() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    names = {*re.findall(r"def (test_\w+)", source), *(path.stem for path in (ROOT / "tests").rglob("test_*.py"))}
    for page in WRITTEN_BY_HAND:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"\btest_\w+", text)) - names == set(), page.name


def test_every_name_in_the_table_of_symbols_is_where_it_says() -> None:
    """Entries such as `method/search.py`: `search`, `Neighbours.row`."""
    text = (ROOT / "docs/paper-to-code.md").read_text(encoding="utf-8")
    entries = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", text)
    assert len(entries) > 20
    for file, names in entries:
        defined = set(names_in(ROOT / "src/cmsf" / file))
        for name in re.findall(r"`([\w.]+)`", names):
            assert name in defined, f"{file} has no {name}"


def names_in(file: Path) -> Iterator[str]:
    """The names that a module defines at its top, and those of its classes' methods and fields."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        yield from _names(node)
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            yield from (f"{next(_names(node))}.{name}" for name in _names(inner))


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_the_readme_fits_on_a_few_screens() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) >= 120] == []


def test_lines_of_prose_are_short() -> None:
    for page in WRITTEN_BY_HAND:
        prose = [line for line in page.read_text(encoding="utf-8").splitlines() if not line.startswith("|")]
        assert [line for line in prose if len(line) >= 120] == [], page.name
