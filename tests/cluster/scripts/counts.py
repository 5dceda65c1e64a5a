"""Counts steps and prints them until the file ``enough`` lies in its folder. It needs no framework, so its job starts in a second.

``FAULT=<rank>:<step>:<kind>`` makes that rank do it at that step; several have commas between them. ``DEAF``: ranks ignore SIGTERM.
"""

import os
import signal
import subprocess
import time

FLOOD = 192 << 20


def fault(step: int) -> None:
    for plan in os.environ.get("FAULT", "").split(","):
        if plan == f"{os.environ['KEEPSTEP_RANK']}:{step}:orphan":
            subprocess.Popen(["setsid", "sh", "-c", "sleep 3001 & sleep 3002"])
            subprocess.Popen(["setsid", "env", "-i", "sleep", os.environ.get("HIDDEN", "3003")])
        if plan == f"{os.environ['KEEPSTEP_RANK']}:{step}:flood":
            for _ in range(FLOOD >> 18):
                os.write(1, (b"x" * 1023 + b"\n") * 256)
        if plan == f"{os.environ['KEEPSTEP_RANK']}:{step}:binary":
            os.write(1, bytes(range(256)) * 4096 + "🚀".encode() + b"\nafter the bytes\n")


if os.environ.get("DEAF"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
step = 0
while not os.path.exists("enough"):
    step += 1
    fault(step)
    print(f"step={step} ", flush=True)
    time.sleep(0.02)
print("finished", flush=True)
