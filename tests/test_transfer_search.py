"""The search for the classifier's settings: it can be killed, resumed, shared and repeated."""

import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
import torch
from forked import PATIENCE, Started
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from cmsf.evaluation.linear import LinearClassifier
from cmsf.evaluation.transfer import tune as tune_module
from cmsf.evaluation.transfer.trial import Problem, Settings, fit, validation_accuracy
from cmsf.evaluation.transfer.tune import TuningResult, tune
from cmsf.utils.errors import BadInput


def small_problem(images: int = 120, per_class: bool = False) -> Problem:
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(2 * images) % 3
    centres = torch.randn(3, 6, generator=generator)
    features = centres[label] + torch.randn(2 * images, 6, generator=generator)
    return Problem(features[:images], label[:images], features[images:], label[images:], 3, per_class)


@pytest.fixture(autouse=True)
def _quick_trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this process, that is; up to 1000 iterations take seconds even of this, and longer on two threads."""
    monkeypatch.setattr("cmsf.evaluation.transfer.trial._ITERATIONS", (1, 12))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def kept(journal: Path, name: str = "a") -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=name, storage=JournalStorage(JournalFileBackend(str(journal)))).trials


def finished(trials: list[optuna.trial.FrozenTrial]) -> dict[int, dict[str, float]]:
    return {trial.number: trial.params for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)}


def test_the_same_seed_gives_the_same_search_and_another_does_not(tmp_path: Path) -> None:
    def drawn(file: str, seed: int) -> list[dict[str, float]]:
        tune(small_problem(), "a", 12, tmp_path / file, 1, seed)
        return [trial.params for trial in kept(tmp_path / file)]

    first = drawn("first", 0)
    assert first == drawn("again", 0)
    assert first != drawn("other", 1)


def test_the_best_is_the_best_completed_trial_and_its_value_can_be_had_again(tmp_path: Path) -> None:
    problem = small_problem(per_class=True)
    found = tune(problem, "a", 25, tmp_path / "journal", 1, 0)
    complete = [trial for trial in kept(tmp_path / "journal") if trial.state is TrialState.COMPLETE]
    assert found.value == max(trial.value for trial in complete)
    layer = fit(problem.train, problem.train_label, 3, found.best)
    assert validation_accuracy(layer, problem) == found.value
    assert found.trials == {"complete": len(complete), "pruned": 25 - len(complete), "failed": 0}


def test_hopeless_trials_are_pruned_and_only_if_asked_for(tmp_path: Path) -> None:
    problem = small_problem()
    found = tune(problem, "a", 20, tmp_path / "pruned", 1, 0)
    assert found.trials["pruned"] > 0
    best = found.value
    lost = [trial for trial in kept(tmp_path / "pruned") if trial.state is TrialState.PRUNED]
    assert any(max(trial.intermediate_values.values()) < best for trial in lost)
    assert tune(problem, "a", 20, tmp_path / "all", 1, 0, prune=False).trials["pruned"] == 0


def test_a_search_goes_on_where_it_was_and_a_finished_one_is_returned_at_once(tmp_path: Path) -> None:
    problem, journal = small_problem(), tmp_path / "journal"
    tune(problem, "a", 5, journal, 1, 0)
    before = finished(kept(journal))
    more = tune(problem, "a", 9, journal, 1, 0)
    after = finished(kept(journal))
    assert len(after) == 9
    assert before.items() <= after.items()
    again = tune(problem, "a", 9, journal, 1, 0)
    assert (again.best, again.value, again.trials) == (more.best, more.value, more.trials)
    assert finished(kept(journal)) == after
    tune(problem, "uninterrupted", 9, journal, 1, 0)
    assert finished(kept(journal, "uninterrupted")) == after


def test_two_processes_share_the_trials_and_print_nothing_where_there_is_no_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = tune(small_problem(), "a", 16, tmp_path / "journal", 2, 0)
    trials = kept(tmp_path / "journal")
    assert len(finished(trials)) == 16
    assert found.trials["complete"] + found.trials["pruned"] == 16
    assert len({tuple(trial.params.values()) for trial in trials}) == len(trials)
    assert isinstance(found, TuningResult)
    assert isinstance(found.best, Settings)
    assert capfd.readouterr() == ("", "")


def test_a_database_will_do_and_processes_may_share_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/search.db"
    tune(small_problem(), "a", 3, url, 1, 0)
    found = tune(small_problem(), "a", 8, url, 2, 0)
    assert found.trials == {"complete": found.trials["complete"], "pruned": 8 - found.trials["complete"], "failed": 0}
    assert len(finished(optuna.load_study(study_name="a", storage=url).trials)) == 8


def test_trials_that_another_machine_runs_are_counted_and_given_up_when_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trial of three is another machine's, which is dead, but not known to be before its heartbeat is overdue."""
    url = f"sqlite:///{tmp_path}/search.db"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = RDBStorage(url, heartbeat_interval=1, grace_period=2)
        theirs = optuna.create_study(storage=other, study_name="a", direction="maximize").ask()
    other.record_heartbeat(theirs._trial_id)
    monkeypatch.setattr("cmsf.evaluation.transfer.tune._HEARTBEAT", 1)
    begun = time.monotonic()
    found = tune(small_problem(), "a", 3, url, 1, 0)
    assert time.monotonic() - begun > 3
    assert found.trials["complete"] + found.trials["pruned"] == 3
    assert found.trials["failed"] == 1


def test_of_two_processes_that_begin_the_last_trial_at_once_the_second_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_module, "_needs_trial", lambda *_, turns=iter([True] * 4 + [False]): next(turns))
    found = tune(small_problem(), "a", 3, tmp_path / "journal", 1, 0, prune=False)
    assert found.trials == {"complete": 3, "pruned": 0, "failed": 0}
    assert len(kept(tmp_path / "journal")) == 4


def search_on(journal: Path, processes: int) -> None:
    tune(small_problem(2000), "a", 400, journal, processes, 0)


def started(folder: Path, journal: Path, processes: int) -> Started:
    """A search in a process of its own, after its first finished trials."""
    here = {"TMPDIR": str(folder)}  # who is killed cannot tidy up
    process = Started(search_on, journal, processes, environment=here)
    deadline = time.monotonic() + PATIENCE
    while not journal.exists() or journal.read_bytes().count(b'"op_code":6') < 5:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no trial finished"
        time.sleep(0.05)
    return process


def children(parent: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(processes: list[int]) -> None:
    deadline = time.monotonic() + 20
    while not all(map(gone, processes)):
        assert time.monotonic() < deadline, "a worker outlived its search"
        time.sleep(0.05)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_search_loses_no_finished_trial(tmp_path: Path, processes: int) -> None:
    journal = tmp_path / "journal"
    process = started(tmp_path, journal, processes)
    workers = children(process.pid)
    process.kill()
    process.wait()
    wait_for(workers)
    with journal.open("ab") as file:
        file.write(b'{"op_code":4,"wor')  # as if it had been killed while it wrote
    before = finished(kept(journal))
    wanted = len(before) + 3
    found = tune(small_problem(2000), "a", wanted, journal, 1, 0)
    trials = kept(journal)
    assert before.items() <= finished(trials).items()
    assert len(finished(trials)) == wanted == found.trials["complete"] + found.trials["pruned"]
    assert not [trial for trial in trials if trial.state is TrialState.RUNNING]


def test_a_worker_that_dies_is_an_error_and_no_hang(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    process = started(tmp_path, journal, 2)
    workers = [pid for pid in children(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "killed (SIGKILL); no finished trial is lost" in errors
    wait_for(workers)


def test_an_interrupt_stops_all_processes_and_leaves_no_trial_behind(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    process = started(tmp_path, journal, 2)
    workers = children(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    wait_for(workers)
    trials = kept(journal)
    assert len(finished(trials)) > 0
    assert not [trial for trial in trials if trial.state is TrialState.RUNNING]


def test_a_journal_is_for_one_search_at_a_time(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    process = started(tmp_path, journal, 1)
    with pytest.raises(BadInput, match="another search is using it"):
        tune(small_problem(2000), "a", 400, journal, 1, 0)
    process.kill()
    process.wait()


@pytest.mark.parametrize("content", [b"half a line", b"not JSON\n{}\n", b"[]\n", b'{"op_code":0}\n', b"\xff\xfe\n\n"])
def test_a_damaged_journal_is_said_to_be_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    journal = tmp_path / "journal"
    journal.write_bytes(content)
    with pytest.raises(BadInput, match="not a readable search journal"):
        tune(small_problem(), "a", 1, journal, 1, 0)
    assert journal.read_bytes() == content


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:////no/such/folder/search.db", "unable to open database file"),
        ("postgresql://me:secret@localhost/none", r"postgresql://me:\*\*\*@localhost/none"),
        ("what is this", "takes a database's URL"),
    ],
)
def test_a_database_that_cannot_be_reached_is_said_to_be(url: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        tune(small_problem(), "a", 1, url, 1, 0)


def test_no_trials_are_no_search(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="at least 1 trial, not 0"):
        tune(small_problem(), "a", 0, tmp_path / "journal", 1, 0)


def test_a_search_of_other_images_is_not_gone_on_with(tmp_path: Path) -> None:
    tune(small_problem(), "a", 1, tmp_path / "journal", 1, 0)
    with pytest.raises(BadInput, match="begun on other images"):
        tune(small_problem(90), "a", 2, tmp_path / "journal", 1, 0)


def test_the_measure_is_top_1_or_its_mean_over_classes() -> None:
    val, label = torch.tensor([[1.0], [1.0], [1.0], [-1.0]]), torch.tensor([0, 0, 0, 1])
    always_first = LinearClassifier(torch.tensor([[1.0], [0.0]]), torch.tensor([2.0, 0.0]))
    top_1, per_class = (Problem(val, label, val, label, 2, choice) for choice in (False, True))
    assert validation_accuracy(always_first, top_1) == 75
    assert validation_accuracy(always_first, per_class) == 50
    not_a_number = LinearClassifier(torch.full((2, 1), torch.nan), torch.zeros(2))
    assert validation_accuracy(not_a_number, Problem(val, 1 - label, val, 1 - label, 2, False)) == 0
