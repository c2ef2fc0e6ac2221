"""The search on a real local Ray cluster."""

import sys
from pathlib import Path

import pytest
from test_transfer_search import small_problem

from cmsf.evaluation.transfer.ray import tune_with_ray
from cmsf.evaluation.transfer.trial import fit, validation_accuracy
from cmsf.utils.errors import BadInput


def test_ray_finds_settings_ends_what_it_started_and_does_not_begin_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr("cmsf.evaluation.transfer.trial._ITERATIONS", (1, 32))  # drawn here, so it holds there too
    problem = small_problem()
    found = tune_with_ray(problem, "a", 24, tmp_path, 2, 0)
    assert sum(found.trials.values()) == 24
    assert found.trials["pruned"] > 0
    assert found.trials["failed"] == 0
    layer = fit(problem.train, problem.train_label, problem.classes, found.best)
    assert validation_accuracy(layer, problem) == found.value
    assert not ray.is_initialized()
    assert capfd.readouterr().out == ""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)  # one that is there is used, and left
    again = tune_with_ray(problem, "a", 24, tmp_path, 2, 0)
    assert (again.best, again.value, again.trials) == (found.best, found.value, found.trials)
    with pytest.raises(BadInput, match="begun with 24 trials, not 25"):
        tune_with_ray(problem, "a", 25, tmp_path, 2, 0)
    assert ray.is_initialized()
    ray.shutdown()


def test_without_ray_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=r"pip install cmsf\[ray\]"):
        tune_with_ray(small_problem(), "a", 1, tmp_path, 1, 0)
