"""`dscore serve` as users start it: a process of its own, with a tiny random llama."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import torch  # noqa: E402
from ds_testing.processes import clean_environment  # noqa: E402
from tiny_model import make  # noqa: E402
from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: E402

TOKEN = "a-secret-of-this-test"


@contextlib.contextmanager
def served(*words: str) -> Iterator[openai.OpenAI]:
    """A client of `dscore serve WORDS`, which must end with 0 after SIGTERM, and must not show its token."""
    command = [sys.executable, "-m", "ds_cli", "serve", "--port", "0", "--threads", "1", *words]
    env = clean_environment(DSCORE_SERVE_TOKEN=TOKEN)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert " at http://127.0.0.1:" in line, process.communicate()
            with openai.OpenAI(base_url=line.split()[2], api_key=TOKEN, max_retries=0, timeout=60) as client:
                yield client
            process.send_signal(signal.SIGTERM)
            said = "".join(process.communicate(timeout=60))
            assert process.returncode == 0 and TOKEN not in said and "a private matter" not in said, said
        finally:
            process.kill()


def test_a_llama_answers_as_transformers_does(tmp_path: Path) -> None:
    make(tmp_path / "tiny")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "tiny").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    prompt = "a private matter"
    ids = torch.tensor([tokenizer.encode(prompt)])
    right = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    with served(str(tmp_path / "tiny"), "--max-tokens", "40") as ai:
        asked = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 12}
        assert ai.completions.create(**asked).choices[0].text == tokenizer.decode(right)
        streamed = ai.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == tokenizer.decode(right)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
        chat = {"model": "tiny", "messages": messages, "seed": 5, "max_completion_tokens": 8, "logprobs": True}
        one, two = (ai.chat.completions.create(**chat) for _ in range(2))
        expected = "<s>system\nBe brief.<s>user\na private matter<s>assistant\n"
        assert one.usage.prompt_tokens == len(tokenizer.encode(expected, add_special_tokens=False))
        assert one.choices[0].message == two.choices[0].message and len(one.choices[0].logprobs.content) == 8
        with pytest.raises(openai.BadRequestError, match="an assistant cannot be asked"):
            ai.chat.completions.create(model="tiny", messages=[{"role": "assistant", "content": "a"}])


def test_what_cannot_be_served_is_told_at_once(tmp_path: Path) -> None:
    from ds_cli.show import CommandError
    from ds_inference.serve.model import Choices, open_model

    with pytest.raises(CommandError, match=r"has no config\.json; MODEL is a folder"):
        open_model(tmp_path, None, Choices())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CommandError, match="cannot be loaded by transformers"):
        open_model(tmp_path, None, Choices())
