"""Memory and open files of a process that trains as long as the soak does."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from statistics import median
from typing import Any

FLAT = 0.02
"""How much more memory than after the first quarter of the time is still none."""


class Watch(threading.Thread):
    def __init__(self, out: Path, flags: list[str]) -> None:
        super().__init__(daemon=True)
        command = [sys.executable, "-m", "cmsf", "train", *flags, "--epochs", "100000", "--out", str(out)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.over = threading.Event()
        self.memory: list[int] = []
        self.files: list[int] = []

    def run(self) -> None:
        page, place = os.sysconf("SC_PAGE_SIZE"), Path(f"/proc/{self.process.pid}")
        while not self.over.wait(0.5):
            self.memory.append(int((place / "statm").read_text().split()[1]) * page)
            self.files.append(len(list((place / "fd").iterdir())))

    def end(self) -> dict[str, Any]:
        self.over.set()
        self.join()
        alive = self.process.poll() is None
        self.process.terminate()
        self.process.wait()
        warm = len(self.memory) // 4
        later = self.memory[warm:]
        size = max(1, len(later) // 10)
        levels = [median(later[start : start + size]) for start in range(0, size * 10, size)]
        growth = (max(levels) - levels[0]) / levels[0]
        return {
            "samples": len(self.memory),
            "MB by tenths, after a quarter of the time": [round(level / 1e6, 1) for level in levels],
            "growth": round(growth, 4),
            "open files": {"first": self.files[warm], "last": self.files[-1], "most": max(self.files[warm:])},
            "alive to the end": alive,
            "flat": alive and growth <= FLAT and self.files[-1] <= max(self.files[warm : warm + 20]) + 2,
        }
