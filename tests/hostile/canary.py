"""Payloads that run code where a file is loaded in an unsafe way; what they do is make a folder that must never be."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

NAME = "canary"


class Canary:
    """Unpickling it makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (str(self.place / NAME),)


def sings(place: Path) -> bool:
    return (place / NAME).exists()


def in_a_pickle(place: Path) -> bytes:
    return pickle.dumps({"state_dict": Canary(place)})


def in_a_torch_file(place: Path) -> bytes:
    """The zip archive that torch writes, with our pickle in it."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", in_a_pickle(place))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return made.getvalue()


def in_an_array(place: Path) -> bytes:
    made = io.BytesIO()
    np.lib.format.write_array(made, np.array([Canary(place)], dtype=object), allow_pickle=True)
    return made.getvalue()


def in_an_npz(place: Path) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("x.npy", in_an_array(place))
    return made.getvalue()


def in_yaml(place: Path) -> str:
    return f"name: !!python/object/apply:os.makedirs ['{place / NAME}']\n"
