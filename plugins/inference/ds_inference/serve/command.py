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

DType = Literal["fp32", "bf16", "fp16"]
Bits = Literal["int8", "int4"]


def serve(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A folder in Hugging Face's format, or a GGUF file."),
    ],
    host: Annotated[
        str, typer.Option(help="Where to listen; what others can reach needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What requests call the model. Default: the name of MODEL.")
    ] = None,
    dtype: Annotated[
        DType | None, typer.Option(help="Default: bf16 on accelerators, fp32 on CPUs.")
    ] = None,
    quantize: Annotated[
        Bits | None, typer.Option(help="Weights of linear layers in 8 or 4 bits.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            min=32, help="Tokens of all running requests. Default: 16384, or the context."
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Answers that may wait for their first token.")
    ] = 256,
    max_connections: Annotated[int, typer.Option(min=1, help="Connections at a time.")] = 512,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for a request, from its body to its end.")
    ] = 600.0,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that answers get to end after SIGTERM.")
    ] = 30.0,
    token_file: Annotated[
        Path | None, typer.Option(help="What requests must bear; or DSCORE_SERVE_TOKEN.")
    ] = None,
    tp: Annotated[
        int, typer.Option(min=1, help="Ranks that divide the model; see `dscore run`.")
    ] = 1,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A checkpoint of ds_core, whose weights take the place of MODEL's."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of a CPU that compute.")
    ] = None,
) -> None:
    """Serve MODEL over HTTP, in OpenAI's protocol: /v1/completions, /v1/chat/completions,
    /v1/models.

    /health says whether it serves, /metrics is for Prometheus. SIGTERM and Ctrl-C end it in order.
    """
    needed = ("uvicorn", "starlette", "transformers", "prometheus_client")
    # An extra of the distribution: without it all but this command works.
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise CommandError(f"missing: {', '.join(missing)}; pip install 'ds-inference[serve]'")
    from ds_inference.serve.driver import follow
    from ds_inference.serve.http.server import Server, Settings, listen, token_from
    from ds_inference.serve.model import Choices, open_model
    from ds_inference.serve.requests import Limits

    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("ds_inference.serve").setLevel(logging.INFO)
    token = token_from(token_file)
    first = int(os.environ.get("RANK") or 0) == 0
    if first:
        listen(host, port, token).close()  # before minutes of loading
    served = open_model(
        model, name, Choices(dtype, quantize, cache_tokens, tp, threads, checkpoint)
    )
    if not first:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # rank 0 says when to end
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
