"""How settings are searched for: by Optuna in processes of this machine, or by Ray on its cluster."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from cmsf.errors import BadInput
from cmsf.evaluation.transfer.search import Found, Problem, Watch, search
from cmsf.files import check_no_link

TRIALS = 200
"""The paper's."""
_LONGEST = 80

Search = Callable[[Problem, str, Watch], Found]
"""The best settings of a problem; the name is that of the study, and stands for this problem alone."""


def searching(folder: Path, *, trials: int, processes: int, seed: int, storage: str | None, ray: bool) -> Search:
    """storage: the URL of a database that several machines may share; else each study is a journal in the folder."""
    if ray and storage is not None:
        raise BadInput("--storage is Optuna's, and Ray keeps its own; leave out one of --storage and --ray")
    for place in (folder.parent, folder):  # results/transfer of a run that somebody else may have made
        check_no_link(place)
    if ray:
        from cmsf.evaluation.transfer.ray_search import search_with_ray

        # Ray has no word for anybody before it is done.
        return lambda problem, name, watch: search_with_ray(problem, _as_file(name), trials, folder, processes, seed)
    return lambda problem, name, watch: search(
        problem, name, trials, storage or folder / f"{_as_file(name)}.journal", processes, seed, watch=watch
    )


def _as_file(name: str) -> str:
    """A data set may be called ../../anything; its file stays in the folder. A hash at its end tells it apart."""
    return re.sub(r"[^\w.-]+", "-", name)[-_LONGEST:].lstrip(".-")
