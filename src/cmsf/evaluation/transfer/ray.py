"""The same search on a Ray cluster: Optuna samples, Ray schedules the trials and prunes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cmsf.evaluation.transfer.trial import MAX_ITERATIONS, Problem, Settings, run_trial, sample_settings
from cmsf.evaluation.transfer.tune import FIRST_RUNG, REDUCTION, TuningResult, quiet_optuna
from cmsf.utils.errors import BadInput

_VALUE, _ITERATION, _COMPLETE = "value", "iteration", "complete"


def tune_with_ray(problem: Problem, name: str, trials: int, folder: Path, processes: int, seed: int) -> TuningResult:
    """Maximises validation accuracy as `tune` does, on the cluster of RAY_ADDRESS or a local one of `processes`.

    Continues what `folder` has under this name, by Tune's own restore: trials that were running begin anew. A finished
    search is returned at once, and cannot be extended to more trials than it began with.
    """
    if trials < 1:
        raise BadInput(f"a search needs at least 1 trial, not {trials}")
    # Ray reads these when it is imported.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new one prints tables even when told to be silent
    try:
        from ray import tune
    except ImportError:
        raise BadInput("searching with Ray needs Ray Tune; pip install cmsf[ray]") from None
    with quiet_optuna(), _cluster(processes):
        # Into the object store once; every worker maps it from there.
        trainable = tune.with_resources(tune.with_parameters(_trainable, problem=problem), {"cpu": 1})
        results = _tuner(trainable, name, trials, folder.resolve(), seed).fit()
        rows = [(result.config, result.metrics or {}, result.error) for result in results]
    if len(rows) < trials:
        raise BadInput(f"the search {name} was begun with {len(rows)} trials, not {trials}; choose another name")
    failed = sum(error is not None for _, _, error in rows)
    complete = [(metrics[_VALUE], config) for config, metrics, _ in rows if metrics.get(_COMPLETE)]
    if not complete:
        raise BadInput(f"none of {len(rows)} trials was completed, {failed} failed; see {folder / name}")
    # Ray lists trials in no order to rely on: of equally good ones, the shortest.
    value, best = max(complete, key=lambda row: (row[0], -row[1]["iterations"], row[1]["lr"]))
    counts = {"complete": len(complete), "pruned": len(rows) - len(complete) - failed, "failed": failed}
    return TuningResult(Settings(**best), value, counts)


def _tuner(trainable: Any, name: str, trials: int, folder: Path, seed: int) -> Any:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    path = str(folder / name)
    if tune.Tuner.can_restore(path):
        return tune.Tuner.restore(path, trainable, resume_unfinished=True, restart_errored=True)
    config = tune.TuneConfig(
        metric=_VALUE,
        mode="max",
        search_alg=OptunaSearch(_space, metric=_VALUE, mode="max", seed=seed),
        scheduler=ASHAScheduler(_ITERATION, max_t=MAX_ITERATIONS, grace_period=FIRST_RUNG, reduction_factor=REDUCTION),
        num_samples=trials,
        reuse_actors=True,  # a new process would import torch for every trial
    )
    run = tune.RunConfig(name=name, storage_path=str(folder), verbose=0)
    return tune.Tuner(trainable, tune_config=config, run_config=run)


def _space(trial: Any) -> None:
    """Samples the settings, which Ray reads off the trial; a function with a name, for Ray pickles it."""
    sample_settings(trial)


def _trainable(config: dict[str, Any], problem: Problem) -> None:
    from ray import tune

    def report(iteration: int, value: float, complete: bool = False) -> None:
        tune.report({_VALUE: value, _ITERATION: iteration, _COMPLETE: complete})

    torch.set_num_threads(1)
    settings = Settings(**config)
    report(settings.iterations, run_trial(problem, settings, report), complete=True)


@contextmanager
def _cluster(processes: int) -> Iterator[None]:
    """Uses the cluster that is initialised, or else starts one and shuts it down."""
    import ray

    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        ray.init("local", num_cpus=processes, include_dashboard=False, **quiet)
    try:
        yield
    finally:
        ray.shutdown()
