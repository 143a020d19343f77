"""``dscore serve``."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from ds_command_kit.show import CommandError

# -- the options, in the order of the command ------------------------------------------------------

SERVER = "Server"
MODEL = "Model"
LIMITS = "Limits"
"""The headings of the help."""

Model = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="A folder in Hugging Face's format, or a GGUF file."),
]
Host = Annotated[
    str,
    typer.Option(
        metavar="HOST",
        rich_help_panel=SERVER,
        help="Where to listen; what others can reach needs a token.",
    ),
]
Port = Annotated[
    int,
    typer.Option(
        min=0, max=65535, metavar="PORT", rich_help_panel=SERVER, help="0: any that is free."
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=SERVER,
        help="What requests call the model. Default: the name of MODEL.",
    ),
]
DType = Annotated[
    Literal["fp32", "bf16", "fp16"] | None,
    typer.Option(
        metavar="DTYPE",
        rich_help_panel=MODEL,
        help="fp32, bf16 or fp16. Default: bf16 on accelerators, fp32 on CPUs.",
    ),
]
Quantize = Annotated[
    Literal["int8", "int4"] | None,
    typer.Option(
        metavar="int8|int4", rich_help_panel=MODEL, help="Weights of linear layers in 8 or 4 bits."
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", rich_help_panel=LIMITS, help="Most tokens of an answer."),
]
CacheTokens = Annotated[
    int | None,
    typer.Option(
        min=32,
        metavar="N",
        rich_help_panel=LIMITS,
        help="Tokens of all running requests. Default: 16384, or the context.",
    ),
]
MaxQueue = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel=LIMITS,
        help="Answers that may wait for their first token.",
    ),
]
MaxConnections = Annotated[
    int, typer.Option(min=1, metavar="N", rich_help_panel=LIMITS, help="Connections at a time.")
]
Timeout = Annotated[
    float,
    typer.Option(
        min=0.1,
        metavar="SECONDS",
        rich_help_panel=LIMITS,
        help="Seconds for a request, from its body to its end.",
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        rich_help_panel=LIMITS,
        help="Seconds that answers get to end after SIGTERM.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=SERVER,
        help="What requests must bear; or DSCORE_SERVE_TOKEN.",
    ),
]
TP = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel=MODEL,
        help="Processes that divide the model; see `dscore run`.",
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        rich_help_panel=MODEL,
        help="A checkpoint of ds_core, whose weights take the place of MODEL's.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", rich_help_panel=MODEL, help="Threads of a CPU that compute."),
]


# -- the command -----------------------------------------------------------------------------------


def serve(
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = None,
    dtype: DType = None,
    quantize: Quantize = None,
    max_tokens: MaxTokens = None,
    cache_tokens: CacheTokens = None,
    max_queue: MaxQueue = 256,
    max_connections: MaxConnections = 512,
    timeout: Timeout = 600.0,
    grace: Grace = 30.0,
    token_file: TokenFile = None,
    tp: TP = 1,
    checkpoint: Checkpoint = None,
    threads: Threads = None,
) -> None:
    """Serve MODEL over HTTP, in OpenAI's protocol: /v1/completions, /v1/chat/completions,
    /v1/models.

    /health says whether it serves, /metrics is for Prometheus.

    Exit codes:
      0: it was stopped, and every answer ended
      1: answers were cut off, or the model cannot be loaded

    Examples:
      dscore serve models/smollm2 --port 8080 --dtype bf16 --quantize int8
      dscore run --world 2 -m ds_cli serve models/smollm2 --tp 2
    """
    _check_extra()
    from ds_inference.serve.driver import follow
    from ds_inference.serve.http.server import Server, Settings, listen, token_from
    from ds_inference.serve.model import Choices, open_model
    from ds_inference.serve.requests import Limits

    _log_to_stderr()
    token = token_from(token_file)
    first = int(os.environ.get("RANK") or 0) == 0
    if first:
        listen(host, port, token).close()  # before minutes of loading
    served = open_model(
        model, name, Choices(dtype, quantize, cache_tokens, tp, threads, checkpoint)
    )
    if not first:
        _leave_the_end_to_rank_0()
        follow(served.generator, served.link)
        return
    # Enough for a prompt of the whole context, at 32 bytes of JSON a token.
    body = (1 << 20) + 32 * served.most_tokens
    limits = Limits(body=body, body_seconds=30.0, seconds=timeout, tokens=max_tokens)
    settings = Settings(host, port, limits, max_queue, max_connections, grace, token)

    def ready(address: str) -> None:
        typer.echo(f"{served.name} at {address}/v1 (context {served.most_tokens}; Ctrl-C ends it)")
        sys.stdout.flush()

    if not Server(served, settings, ready).serve_until_stopped():
        raise typer.Exit(1)


def _leave_the_end_to_rank_0() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _log_to_stderr() -> None:
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("ds_inference.serve").setLevel(logging.INFO)


def _check_extra() -> None:
    """Raise CommandError where the extra ``serve`` is missing: all but this command works then."""
    needed = ("uvicorn", "starlette", "transformers", "prometheus_client")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise CommandError(
            f"missing: {', '.join(missing)}; "
            "`pip install -c dist/constraints.txt 'dscore-inference[serve]'`"
            " in a clone of ds_core, after `make wheels`"
        )
