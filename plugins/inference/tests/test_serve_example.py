"""examples/serve: the quickstart's GPT as a GPT-2 of transformers, and its three commands."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ds_testing.processes import clean_environment, run

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_it_is_the_same_model() -> None:
    spec = importlib.util.spec_from_file_location("serve_example", EXAMPLES / "serve/serve.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    gpt = example.GPT().eval()
    tokens = torch.randint(256, (2, 64))
    with torch.no_grad():
        torch.testing.assert_close(
            example.as_gpt2(gpt.state_dict())(tokens).logits, gpt.logits(tokens)
        )
    every = bytes(range(128)).decode() + "añ€𝄞"
    tokenizer = example.byte_tokenizer()
    assert (
        tokenizer.encode(every) == list(every.encode())
        and tokenizer.decode(list(every.encode())) == every
    )


@pytest.mark.slow
def test_its_three_commands(tmp_path: Path) -> None:
    text = (EXAMPLES / "serve/README.md").read_text()
    block = re.search(r"```sh[^\n]*\n(.*?)```", text, re.DOTALL)
    assert block is not None
    train, serve, talk = block[1].replace("examples/", f"{EXAMPLES}/").splitlines()
    env = clean_environment()
    dscore = f"{sys.executable} -m ds_cli"
    run(
        [*train.replace("dscore", dscore).split(), "--steps", "4"],
        cwd=tmp_path,
        env=env,
        timeout=300,
    )
    words = serve.replace("python", sys.executable).removesuffix(" &").split()
    with subprocess.Popen(
        [*words, "--port", "0"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[2]
            command = [sys.executable, *talk.split()[1:2], "The ", "--server", address]
            assert len(run(command, cwd=tmp_path, env=env)) > len("The ") + 10
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()
