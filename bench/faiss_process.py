"""faiss in a process of its own: its OpenBLAS reads once, when it is loaded, which processor it is to believe in."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

CORE_TYPE = "OPENBLAS_CORETYPE"


class Faiss:
    """An index that is built beforehand, and searched on call."""

    def __init__(self, train: np.ndarray, query: np.ndarray, threads: int, core_type: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, threads), daemon=True)
        with _environment(core_type):
            self._process.start()
        self._here.send((train, query))
        self.kernels: str = self._here.recv()

    def search(self, k: int) -> Any:
        self._here.send(k)
        return self._here.recv()

    def close(self) -> None:
        self._here.send(None)
        self._process.join()


def kernels_for_this_processor(library: str) -> str | None:
    """Which kernels the OpenBLAS that came with this library has chosen."""
    found = (info for info in threadpool_info() if info["internal_api"] == "openblas" and library in info["filepath"])
    return next((info["architecture"] for info in found), None)


def _serve(there: Connection, threads: int) -> None:
    import faiss

    faiss.omp_set_num_threads(threads)
    train, query = there.recv()
    index = faiss.IndexFlatIP(train.shape[1])
    index.add(train)
    there.send(kernels_for_this_processor("faiss"))
    while (k := there.recv()) is not None:
        there.send(index.search(query, k)[1])


@contextmanager
def _environment(core_type: str | None) -> Iterator[None]:
    before = os.environ.pop(CORE_TYPE, None)
    try:
        if core_type is not None:
            os.environ[CORE_TYPE] = core_type
        yield
    finally:
        os.environ.pop(CORE_TYPE, None)
        if before is not None:
            os.environ[CORE_TYPE] = before
