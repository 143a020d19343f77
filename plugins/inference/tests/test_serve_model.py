"""`dscore serve` as users start it: a process of its own, with a tiny random llama."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import torch  # noqa: E402
from ds_testing.processes import clean_environment  # noqa: E402
from hostility import attack  # noqa: E402
from serving import ask  # noqa: E402
from tiny_model import make  # noqa: E402
from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: E402

TOKEN = "a-secret-of-this-test"


@contextlib.contextmanager
def served(*words: str, ranks: int = 1, token: str = TOKEN) -> Iterator[tuple[openai.OpenAI, int]]:
    """A client of `dscore serve WORDS` and the process's id; it must end in order after SIGTERM,
    and show no token.
    """
    dscore = [sys.executable, "-m", "ds_cli"]
    launch = [*dscore, "run", "--nproc", str(ranks), "--module", "ds_cli"] if ranks > 1 else dscore
    env = clean_environment(**({"DSCORE_SERVE_TOKEN": token} if token else {}))
    command = [*launch, "serve", "--port", "0", "--threads", "1", *words]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert " at http://127.0.0.1:" in line, line
            with openai.OpenAI(
                base_url=line.split()[2], api_key=token or "none", max_retries=0, timeout=60
            ) as client:
                yield client, process.pid
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
            errors.seek(0)
            said = errors.read()
            # the launcher's, whom the signal reached
            ends = 0 if ranks == 1 else 128 + signal.SIGTERM
            assert (
                process.returncode == ends and TOKEN not in said and "a private matter" not in said
            ), said
            assert "0 answers have" in said and "Traceback" not in said
        finally:
            process.terminate()


def test_a_llama_answers_as_transformers_does(tmp_path: Path) -> None:
    make(tmp_path / "tiny")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "tiny").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    prompt = "a private matter"
    ids = torch.tensor([tokenizer.encode(prompt)])
    right = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[
        0, ids.shape[1] :
    ]
    with served(str(tmp_path / "tiny"), "--max-tokens", "40") as (ai, _):
        asked = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 12}
        assert ai.completions.create(**asked).choices[0].text == tokenizer.decode(right)
        streamed = ai.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == tokenizer.decode(right)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
        chat = {
            "model": "tiny",
            "messages": messages,
            "seed": 5,
            "max_completion_tokens": 8,
            "logprobs": True,
        }
        one, two = (ai.chat.completions.create(**chat) for _ in range(2))
        expected = "<s>system\nBe brief.<s>user\na private matter<s>assistant\n"
        assert one.usage.prompt_tokens == len(tokenizer.encode(expected, add_special_tokens=False))
        assert (
            one.choices[0].message == two.choices[0].message
            and len(one.choices[0].logprobs.content) == 8
        )
        with pytest.raises(openai.BadRequestError, match="an assistant cannot be asked"):
            ai.chat.completions.create(
                model="tiny", messages=[{"role": "assistant", "content": "a"}]
            )


def test_what_cannot_be_served_is_told_at_once(tmp_path: Path) -> None:
    from ds_command_kit.show import CommandError
    from ds_inference.serve.model import Choices, open_model

    with pytest.raises(CommandError, match=r"--tp 2 needs as many ranks"):
        make(tmp_path / "tiny")
        open_model(tmp_path / "tiny", None, Choices(tp=2))
    with pytest.raises(CommandError, match="leave --dtype out"):
        open_model(tmp_path / "tiny", None, Choices(dtype="fp32", quantize="int4"))
    with pytest.raises(CommandError, match=r"has no config\.json; MODEL is a folder"):
        open_model(tmp_path, None, Choices())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CommandError, match="cannot be loaded by transformers"):
        open_model(tmp_path, None, Choices())


@pytest.mark.slow
def test_what_was_trained_is_served_quantised_and_divided(tmp_path: Path) -> None:
    """A checkpoint of ds_core in place of the model's weights, in 8 bits, on one rank and on
    two."""
    import ds_core

    make(tmp_path / "tiny")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "tiny")
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine, *_ = ds_core.initialize(model=model, config=config)
    ids = torch.arange(32)[None]
    for _ in range(3):
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(tmp_path / "run")
    engine.destroy()
    model.eval()
    right = model.generate(ids[:, :4], max_new_tokens=8, do_sample=False, pad_token_id=0)[
        0, 4:
    ].tolist()
    asked = {"model": "tiny", "prompt": [0, 1, 2, 3], "max_tokens": 8, "logprobs": 0}
    words = [str(tmp_path / "tiny"), "--checkpoint", str(tmp_path / "run")]
    said = []
    for more, ranks in ((), 1), (("--tp", "2"), 2), (("--quantize", "int8"), 1):
        with served(*words, *more, ranks=ranks) as (ai, _):
            said.append(
                [
                    ai.completions.create(**asked, temperature=heat, seed=7).choices[0]
                    for heat in (0, 1)
                ]
            )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert said[0][0].text == tokenizer.decode(right) and said[0][1].text != said[0][0].text
    assert [c.text for c in said[0]] == [c.text for c in said[1]]
    quantised, plain = (
        torch.tensor(choice[0].logprobs.token_logprobs) for choice in (said[2], said[0])
    )
    assert 0 < (quantised[0] - plain[0]).abs() < 0.1


@pytest.mark.slow
def test_a_thousand_hostile_requests_leave_it_serving_and_its_memory_flat(tmp_path: Path) -> None:
    make(tmp_path / "tiny")
    with (
        served(str(tmp_path / "tiny"), "--name", "backwards", token="") as (ai, pid),
        ThreadPoolExecutor(6) as many,
    ):
        address = str(ai.base_url).removesuffix("/v1/")
        used = []
        for turn in range(10):
            said = list(many.map(lambda n: attack(address, n), range(100 * turn, 100 * turn + 100)))
            assert not any(answer.startswith(b"HTTP/1.1 500") for answer in said)
            assert (
                ai.completions.create(
                    model="backwards", prompt="abc", max_tokens=3
                ).usage.completion_tokens
                == 3
            )
            used.append(
                int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                >> 20
            )
        shown = ask(address, "/metrics")[1]
        assert (
            "\ndscore_serve_cache_blocks_used 0.0\n" in shown
            and "\ndscore_serve_requests_waiting 0.0\n" in shown
        )
        # It rests at what the first hundreds took (arenas, the cache's blocks): of 4,000, the last
        # 3,000 added none.
        assert min(used[5:]) - min(used[2:5]) <= 8, used


def test_the_name_is_that_of_the_folder_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_inference.serve.model import name_of

    (tmp_path / "3f2a").mkdir()
    (tmp_path / "Small2.5-0.5B").symlink_to(tmp_path / "3f2a")
    (tmp_path / "small.Q4.gguf").touch()
    monkeypatch.chdir(tmp_path / "3f2a")
    assert name_of(tmp_path / "Small2.5-0.5B") == "Small2.5-0.5B"
    assert name_of(Path("../small.Q4.gguf")) == "small.Q4" and name_of(Path(".")) == "3f2a"


def test_a_model_without_a_template_gets_a_plain_one(tmp_path: Path) -> None:
    from ds_inference.serve.model import Tokens

    make(tmp_path, template=None)
    tokens = Tokens(AutoTokenizer.from_pretrained(tmp_path), 258)
    asked = tokens.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é"}]
    )
    assert tokens.decode(asked) == "system: Be brief.\nuser: é\nassistant:"
    assert [tokens.piece(t) for t in tokens.encode("b é")] == ["b", " ", "\ufffd", "\ufffd"]
    assert tokens.piece(257) == "</s>" and tokens.decode([257]) == ""


def test_a_folder_whose_weights_are_missing_torn_or_of_another_shape_is_refused_by_name(
    tmp_path: Path,
) -> None:
    from ds_command_kit.show import CommandError
    from ds_inference.serve.model import Choices, open_model
    from safetensors.torch import load_file, save_file

    make(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    save_file(
        {name: t for name, t in whole.items() if "layers.1." not in name}, file, {"format": "pt"}
    )
    with pytest.raises(
        CommandError, match=r"9 of its weights are missing, .*: model\.layers\.1\.input_layernorm"
    ):
        open_model(tmp_path, None, Choices())
    save_file(whole | {"model.norm.weight": torch.ones(31)}, file, {"format": "pt"})
    with pytest.raises(CommandError, match=r"model\.norm\.weight"):
        open_model(tmp_path, None, Choices())
    file.write_bytes(file.read_bytes()[:-1_000])
    with pytest.raises(CommandError, match="cannot be loaded by transformers: SafetensorError"):
        open_model(tmp_path, None, Choices())


def test_a_folder_with_code_of_its_own_is_refused_without_advice_that_nobody_can_follow(
    tmp_path: Path,
) -> None:
    from ds_command_kit.show import CommandError
    from ds_inference.serve.model import Choices, open_model

    make(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('run')")
    with pytest.raises(
        CommandError, match="needs code from its folder, which `dscore serve` does not run"
    ):
        open_model(tmp_path, None, Choices())
