"""Runs programs in processes forked from one that has imported the front-ends: the imports take
longer than the runs.

Each process gets torchrun's environment variables. Usage: ``python warm.py PACKAGE...``, then one
job per line on its standard input, as JSON: ``{"argv": [program, ...], "ranks": 2}``; it answers
with ``{"code": 0, "output": "..."}``.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer
    for name in sys.argv[1:]:
        importlib.import_module(name)
    while line := sys.stdin.readline():
        answers.write(json.dumps(serve(**json.loads(line))) + "\n")
        answers.flush()


def serve(argv: list[str], ranks: int, seconds: float = 150) -> dict[str, Any]:
    """Run `argv` on `ranks` processes; the others end soon after one has failed, and all after
    `seconds`.
    """
    with socket.socket() as chosen, tempfile.TemporaryFile() as output:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
        chosen.close()
        running = {}
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                _become(argv, rank, ranks, port, output.fileno())
            running[child] = rank
        code = 0
        end = time.monotonic() + seconds
        while running:
            done, status = os.waitpid(-1, os.WNOHANG)
            if done in running:
                del running[done]
                if failed := os.waitstatus_to_exitcode(status):
                    code = code or failed
                    end = min(end, time.monotonic() + 3)
            elif time.monotonic() > end:
                for child in running:
                    os.kill(child, signal.SIGKILL)
                code = code or 124
                end = float("inf")
            else:
                time.sleep(0.02)
        output.seek(0)
        return {"code": code, "output": output.read().decode(errors="replace")}


def _become(argv: list[str], rank: int, ranks: int, port: int, output: int) -> None:
    """Run the program in this process and end it."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="none",
    )
    sys.argv[:] = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    try:
        runpy.run_path(argv[0], run_name="__main__")
        sys.stdout.flush()
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    sys.exit(0)  # what is registered to run at the end of a process runs


if __name__ == "__main__":
    main()
