"""Nothing is asked of the network that a user has not named."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import write_npz
from PIL import Image

_WATCHED = """
import sys

def hook(event, given):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.gethostbyname"):
        local = event == "socket.connect" and isinstance(given[1], str)  # a socket of this machine, by its path
        if not local:
            print(f"NETWORK {event} {given}", file=sys.stderr, flush=True)

sys.addaudithook(hook)
"""
_WORK = """
from cmsf.cli import main

run, tuned, data = sys.argv[1:4]
small = ["--epochs", "1", "--batch-size", "8", "--projection-hidden", "8", "--projection-dim", "4"]
assert main(["train", "cmsf-sup-small", "--data", data, "--out", run, "--quiet", *small]) == 0
assert main(["evaluate", run, "--with", "knn", "linear"]) == 0
assert main(["finetune", run, "--out", tuned, "--epochs", "1", "--quiet"]) == 0
assert main(["predict", tuned, "--data", data, "--out", tuned + ".csv"]) == 0
assert main(["embed", run, "--data", data, "--out", tuned + ".npz"]) == 0
"""
_LOCAL_PARQUET = """
from cmsf.data import open_source

assert len(open_source(sys.argv[1]).train) == 2
"""
_CONTROL = """
import socket

try:
    socket.create_connection(("127.0.0.1", 9), timeout=1)
except OSError:
    pass
"""


def watched(script: str, *arguments: object, home: Path) -> subprocess.CompletedProcess[str]:
    quiet = {"HOME": str(home), "HF_HOME": str(home / "hf"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", _WATCHED + script, *map(str, arguments)],
        env=os.environ | quiet,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_call_of_the_network_would_be_seen(tmp_path: Path) -> None:
    assert "NETWORK socket.connect" in watched(_CONTROL, home=tmp_path).stderr


def test_training_evaluating_tuning_predicting_and_embedding_ask_nothing_of_the_network(tmp_path: Path) -> None:
    data = write_npz(tmp_path / "bars.npz", per_class=8, classes=3, side=16)
    done = watched(_WORK, tmp_path / "run", tmp_path / "tuned", data, home=tmp_path)
    assert (done.returncode, "NETWORK" in done.stderr) == (0, False), done.stderr[-2000:]


def test_a_parquet_file_of_images_on_this_machine_is_opened_without_telling_anybody(tmp_path: Path) -> None:
    """The library would count it as a download."""
    pytest.importorskip("datasets")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    cells = [{"bytes": (tmp_path / "a.png").read_bytes(), "path": name} for name in ("a.png", "b.png")]
    pq.write_table(pa.table({"image": cells, "label": [0, 1]}), tmp_path / "images.parquet")
    done = watched(_LOCAL_PARQUET, tmp_path / "images.parquet", home=tmp_path)
    assert (done.returncode, "NETWORK" in done.stderr) == (0, False), done.stderr[-2000:]
