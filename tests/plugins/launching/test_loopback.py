"""What listens for the ranks of one node listens on loopback alone."""

from __future__ import annotations

import os
import subprocess

import pytest

PROGRAM = """
import datetime, os, sys
from pathlib import Path
if sys.argv[1] == "loopback":
    from shardwright.plugins.launching.elastic import stay_on_loopback
    stay_on_loopback()
from importlib import import_module
rendezvous = import_module("torch.distributed.rendezvous")
store = rendezvous._create_c10d_store("127.0.0.1", int(sys.argv[2]), 0, 1, datetime.timedelta(seconds=20))
store.set("key", "value")
assert store.get("key") == b"value"
port = f":{int(sys.argv[2]):04X}"
for table in ("tcp", "tcp6"):
    for line in Path("/proc/net", table).read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[1].endswith(port):
            print(words[1].partition(":")[0])
"""


@pytest.mark.parametrize(("how", "alone"), [("loopback", True), ("torch", False)])
def test_a_store_listens_on_loopback_alone(how: str, alone: bool) -> None:
    """The other half fails when torch itself stays on loopback, and the workaround can go."""
    from shardwright.plugins.launching.launch import free_port

    program = [os.environ["PYTHON_EXEC"], "-c", PROGRAM, how, str(free_port())]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    listening = set(done.stdout.split())
    assert listening
    assert (listening == {"0100007F"}) == alone, done.stdout
