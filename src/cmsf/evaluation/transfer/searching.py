"""How settings are searched for: by Optuna in processes of this machine, or by Ray on its cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cmsf.errors import BadInput
from cmsf.evaluation.transfer.search import Found, Problem, search

TRIALS = 200
"""The paper's."""

Search = Callable[[Problem, str], Found]
"""The best settings of a problem; the name is that of the study, and stands for this problem alone."""


def searching(folder: Path, *, trials: int, processes: int, seed: int, storage: str | None, ray: bool) -> Search:
    """storage: the URL of a database that several machines may share; else each study is a journal in the folder."""
    if ray and storage is not None:
        raise BadInput("--storage is Optuna's, and Ray keeps its own; leave out one of --storage and --ray")
    if ray:
        from cmsf.evaluation.transfer.ray_search import search_with_ray

        return lambda problem, name: search_with_ray(problem, name, trials, folder, processes, seed)
    return lambda problem, name: search(problem, name, trials, storage or folder / f"{name}.journal", processes, seed)
