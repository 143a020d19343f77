"""The HTTP server, driven by the released client of OpenAI and by strangers, with a generator that
is no model.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ds_command_kit.show import CommandError  # noqa: E402
from ds_inference.serve.http.server import Server, listen, token_from  # noqa: E402
from ds_inference.serve.requests import Limits  # noqa: E402
from ds_inference.serve.text import Text  # noqa: E402
from hostility import attack  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from serving import Backwards, Bytes, ask, post, raw, serving, slow_reader  # noqa: E402

USER = [{"role": "user", "content": "abc"}]
Connect = Callable[..., openai.OpenAI]


@pytest.fixture
def client() -> Iterator[Connect]:
    """Clients of an address, closed after the test."""
    with contextlib.ExitStack() as stack:

        def connect(address: str, key: str = "none") -> openai.OpenAI:
            made = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=30)
            return stack.enter_context(made)

        yield connect


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Backwards]]:
    generator = Backwards()
    with serving(generator) as (address, _):
        yield address, generator


@pytest.fixture
def ai(server: tuple[str, Backwards], client: Connect) -> openai.OpenAI:
    return client(server[0])


def test_completions(ai: openai.OpenAI) -> None:
    said = ai.completions.create(
        model="backwards", prompt=["abc", "$xyz"], max_tokens=5, n=2, logprobs=2, seed=3
    )
    assert [(c.index, c.text, c.finish_reason) for c in said.choices] == [
        (0, "cbacb", "length"),
        (1, "cbacb", "length"),
        (2, "zyx", "stop"),
        (3, "zyx", "stop"),
    ]
    assert (said.usage.prompt_tokens, said.usage.completion_tokens, said.usage.total_tokens) == (
        7,
        18,
        25,
    )
    named = said.choices[2].logprobs
    assert (named.tokens, named.text_offset, named.token_logprobs) == (
        ["z", "y", "x"],
        [0, 1, 2],
        [-0.5] * 3,
    )
    assert named.top_logprobs[1] == {"y": -0.5, "z": -1.5}
    assert (
        ai.completions.create(model="backwards", prompt=[65, 66], max_tokens=1, echo=True)
        .choices[0]
        .text
        == "ABB"
    )
    assert len(ai.completions.create(model="backwards", prompt="ab").choices[0].text) == 16
    assert [m.id for m in ai.models.list()] == ["backwards"] and ai.models.retrieve(
        "backwards"
    ).id == "backwards"


def test_a_chat_whole_and_as_a_stream(ai: openai.OpenAI) -> None:
    asked = {
        "model": "backwards",
        "messages": [{"role": "developer", "content": "$"}, *USER],
        "logprobs": True,
    }
    asked |= {"top_logprobs": 1, "max_completion_tokens": 50}
    said = ai.chat.completions.create(**asked)
    message = said.choices[0].message
    named = said.choices[0].logprobs.content
    assert (message.role, message.content, said.choices[0].finish_reason) == (
        "assistant",
        "cba:u\n",
        "stop",
    )
    assert "".join(t.token for t in named) == message.content and named[0].bytes == [99]
    assert named[0].top_logprobs[0].logprob == -0.5 and said.usage.completion_tokens == 7
    chunks = list(
        ai.chat.completions.create(
            **asked, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    assert (
        chunks[-1].choices == []
        and chunks[-1].usage.completion_tokens == 14
        and chunks[0].usage is None
    )
    for index in (0, 1):
        rows = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert rows[0].delta.role == "assistant" and rows[-1].finish_reason == "stop"
        assert "".join(row.delta.content or "" for row in rows) == message.content
        assert [t.token for row in rows if row.logprobs for t in row.logprobs.content] == [
            t.token for t in named
        ]
    assert len({c.id for c in chunks}) == 1


def test_stop_strings_end_an_answer_before_them(
    server: tuple[str, Backwards], ai: openai.OpenAI
) -> None:
    before = server[1].cancelled
    asked = {"model": "backwards", "prompt": "edcba!", "max_tokens": 400, "logprobs": 0}
    said = ai.completions.create(**asked, stop=["xx", "cd", "bcdef"])
    assert (said.choices[0].text, said.choices[0].finish_reason) == ("!ab", "stop")
    assert said.choices[0].logprobs.tokens == ["!", "a", "b"]
    streamed = list(ai.completions.create(**asked, stop="e!", stream=True))
    assert (
        "".join(c.choices[0].text for c in streamed) == "!abcd"
        and streamed[-1].choices[0].finish_reason == "stop"
    )
    until(lambda: server[1].cancelled == before + 2)
    text = Text(Bytes().decode, ["stop"])
    assert (
        "".join(map(text.add, b"a sto sto")) == "a sto "
        and text.end() == "sto"
        and not text.stopped
    )
    assert "".join(map(Text(Bytes().decode).add, "añ€𝄞b".encode())) == "añ€𝄞b"


WRONG = [
    ({"prompt": "a", "temperature": 3}, 400, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "a", "n": 65}, 400, "n"),
    ({"prompt": "a", "max_tokens": 501}, 400, "max_tokens"),
    ({"prompt": "a" * 500, "max_tokens": 101}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [256]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [0]}, 400, None),  # refused by the generator
    ({"prompt": "a", "best_of": 2}, 400, "best_of"),
    ({"prompt": "a", "stop": [""]}, 400, "stop.0"),
    ({"prompt": "a", "colour": "red"}, 400, "colour"),
    ({"prompt": "a", "n": 50}, 400, "n"),  # more than may wait
    ({"prompt": "a", "model": "other"}, 404, "model"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, 400, "messages"),
    ({"messages": [{"role": "king", "content": "a"}]}, 400, "messages.0"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    ({"messages": [], "tools": []}, 400, "messages"),
    ({"messages": USER, "tools": [{"type": "function"}]}, 400, "tools"),
    ({"messages": USER, "response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"messages": USER, "top_logprobs": 2}, 400, "top_logprobs"),
]


def test_errors_have_their_status_and_name_the_field(
    server: tuple[str, Backwards], ai: openai.OpenAI
) -> None:
    for body, status, param in WRONG:
        path = "chat/completions" if "messages" in body else "completions"
        for extra in ({}, {"stream": True}):
            got, said = ask(server[0], f"/v1/{path}", {"model": "backwards", **body, **extra})
            error = said["error"]
            assert got == status and error["type"] == "invalid_request_error", body
            assert (
                param is None
                or (error["param"] or "").startswith(param)
                or param in error["message"]
            ), (body, error)
    with pytest.raises(openai.NotFoundError, match="it has 'backwards'"):
        ai.chat.completions.create(model="gpt-4", messages=USER)
    with pytest.raises(openai.BadRequestError, match="600 tokens at most"):
        ai.chat.completions.create(
            model="backwards", messages=[{"role": "user", "content": "a" * 700}]
        )
    assert ask(server[0], "/v2")[1]["error"]["message"] == "there is nothing at this address"
    assert ask(server[0], "/v1/completions")[0] == 405


def test_who_may_ask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: tuple[str, Backwards], client: Connect
) -> None:
    body = b'{"model": "backwards", "prompt": "a"}'
    assert b" 403 " in raw(server[0], post(body, host=b"evil.example"))[:20]
    assert b" 415 " in raw(server[0], post(body, kind=b"text/plain"))[:20]
    token = "0123456789-secret"
    with serving(token=token) as (address, _):
        with pytest.raises(openai.AuthenticationError):
            client(address).models.list()
        assert client(address, token).completions.create(model="backwards", prompt="a").choices
        assert b" 200 " in raw(address, post(body, b"Authorization: bearer " + token.encode()))[:20]
        assert [ask(address, path)[0] for path in ("/health", "/metrics")] == [200, 401]
    with pytest.raises(CommandError, match="needs a token"):
        listen("0.0.0.0", 0, None)
    file = tmp_path / "token"
    file.write_text("short\n")
    with pytest.raises(CommandError, match="16 ASCII characters") as caught:
        token_from(file)
    assert "short" not in str(caught.value)
    with pytest.raises(CommandError, match="none: No such file"):
        token_from(tmp_path / "none")
    monkeypatch.setenv("DSCORE_SERVE_TOKEN", token)
    assert token_from(None) == token


def until(condition: object) -> None:
    end = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_full_queue_time_limits_and_clients_that_leave(client: Connect) -> None:
    generator = Backwards(most_running=1, pace=0.02)
    with serving(generator, max_queue=2) as (address, server):
        ai = client(address)
        asked = {"model": "backwards", "prompt": "abc", "max_tokens": 500}
        first = ai.completions.create(**asked, stream=True)
        next(iter(first))

        def wait() -> None:
            with pytest.raises(openai.APIError):
                ai.completions.create(**asked)

        waiting = [threading.Thread(target=wait) for _ in range(2)]
        for thread in waiting:
            thread.start()
        until(lambda: len(generator.open) == 3)
        with pytest.raises(openai.RateLimitError) as caught:
            ai.completions.create(**asked)
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        first.close()  # the client leaves: its answer is cancelled and the next begins
        until(lambda: generator.cancelled == 1 and len(generator.open) == 2)
        shown = ask(address, "/metrics")[1]
        assert 'dscore_serve_requests_total{path="/v1/completions",status="429"} 1.0' in shown
        assert "dscore_serve_cancelled_total 1.0" in shown
        until(lambda: "\ndscore_serve_requests_waiting 1.0\n" in ask(address, "/metrics")[1])
        # what any failure of the server's own looks like
        server._worker.fail_all(openai.OpenAIError())
        for thread in waiting:
            thread.join(20)
        until(lambda: generator.open == [])


def test_what_prometheus_reads(client: Connect) -> None:
    # two registries in one process
    with serving(Backwards()) as (address, _), serving(Backwards()) as (other, _):
        client(address).completions.create(model="backwards", prompt="abc", max_tokens=2)
        until(lambda: samples(address)["dscore_serve_request_seconds_count"] == 1)
        found = samples(address)
        assert (
            found["dscore_serve_prompt_tokens_total"] == 3
            and found["dscore_serve_completion_tokens_total"] == 2
        )
        assert (
            found["dscore_serve_first_token_seconds_bucket", "+Inf"]
            == found["dscore_serve_requests_total"]
            == 1
        )
        assert found["dscore_serve_cache_blocks"] > found["dscore_serve_cache_blocks_used"] == 0
        assert samples(other)["dscore_serve_completion_tokens_total"] == 0
        head = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\naccept: "
        newer = raw(address, head + b"application/openmetrics-text; version=1.0.0\r\n\r\n")
        assert b"openmetrics-text; version=1.0.0" in newer and newer.endswith(b"# EOF\n")
        assert b" 200 " in raw(address, head + b"a/b; =;;q=\xff, text/plain; version\r\n\r\n")[:20]


def samples(address: str) -> dict[str | tuple[str, str], float]:
    """What /metrics says, as Prometheus understands it.

    By name, buckets by name and bound; of answers only.
    """
    families = text_string_to_metric_families(ask(address, "/metrics")[1])
    return {
        (s.name, s.labels["le"]) if "le" in s.labels else s.name: s.value
        for family in families
        for s in family.samples
        if s.labels.get("path") in (None, "/v1/completions")
    }


def test_answers_that_take_too_long_end(client: Connect) -> None:
    generator = Backwards(pace=0.02)
    limits = Limits(body=2_000, body_seconds=0.2, seconds=0.3, tokens=None)
    with serving(generator, limits=limits, patience=0.3) as (address, _):
        asked = {"model": "backwards", "prompt": "abc", "max_tokens": 500}
        with pytest.raises(openai.InternalServerError) as caught:
            client(address).completions.create(**asked)
        assert caught.value.status_code == 504
        chunks = client(address).completions.create(**asked, stream=True)
        with pytest.raises(openai.APIError, match="took too long"):
            list(chunks)
        until(lambda: generator.open == [])
        head = post(b"x" * 50)
        assert b" 408 " in raw(address, head[:-10])[:20]  # the body does not come
        assert raw(address, head[:30]) == b""  # nor does the head
        assert b" 413 " in raw(address, post(b" " * 3_000))[:20]
        chunked = head.replace(b"content-length: 50", b"transfer-encoding: chunked")[:-50]
        assert b" 413 " in raw(address, chunked, b"1000\r\n" + b" " * 0x1000 + b"\r\n")[:20]


def test_a_client_that_does_not_read_loses_its_connection() -> None:
    generator = Backwards(most_running=40)
    asked = {
        "model": "backwards",
        "prompt": "abc",
        "max_tokens": 500,
        "n": 39,
        "logprobs": 20,
        "stream": True,
    }
    with serving(generator, patience=0.3) as (address, server):
        with slow_reader(address, post(json.dumps(asked).encode())):
            until(lambda: len(generator.open) == 39)
            until(lambda: not generator.open and not server.server_state.connections)
        # The count comes after the connection is gone.
        until(lambda: "dscore_serve_cancelled_total 1.0" in ask(address, "/metrics")[1])


def test_stopping_lets_answers_end_and_cuts_off_what_takes_longer(client: Connect) -> None:
    generator = Backwards(pace=0.01)
    with serving(generator, grace=1.0) as (address, server):
        ai = client(address)
        short = ai.completions.create(model="backwards", prompt="abc", max_tokens=5, stream=True)
        long = ai.completions.create(model="backwards", prompt="abc", max_tokens=500, stream=True)
        next(iter(short)), next(iter(long))
        server.should_exit = True
        assert [c.choices[0].finish_reason for c in short][-1] == "length"
        with pytest.raises(openai.APIError, match="the server stopped"):
            list(long)
    assert generator.open == []


def test_a_generator_that_fails_ends_the_server_and_tells_nothing_of_prompts(
    caplog: pytest.LogCaptureFixture, client: Connect
) -> None:
    generator = Backwards()
    caplog.set_level(logging.INFO)
    with serving(generator) as (address, _):
        client(address).completions.create(
            model="backwards", prompt="a private matter", user="someone"
        )
        generator.broken = True
        with pytest.raises(openai.InternalServerError, match="see the server's log"):
            client(address).completions.create(model="backwards", prompt="a private matter")
    shown = "\n".join(
        record.getMessage()
        for record in caplog.records
        if record.name.startswith(("ds_", "uvicorn"))
    )
    assert "127.0.0.1 POST /v1/completions 200" in shown and "16+16 tokens" in shown
    assert "the generator failed: RuntimeError" in shown and "in step" in shown
    assert not re.search("private|someone", shown)


def unfinished(server: Server) -> int:
    """Connections that are not merely kept for another request."""
    return sum(
        c.cycle is None or not c.cycle.response_complete for c in server.server_state.connections
    )


def test_hostile_requests_change_nothing(client: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """A hundred, several at a time; the server goes on, and keeps nothing of them."""
    caplog.set_level(logging.CRITICAL)
    generator = Backwards(most_running=8)
    limits = Limits(body=1 << 20, body_seconds=0.5, seconds=30.0, tokens=500)
    with (
        serving(generator, patience=0.3, limits=limits) as (address, server),
        ThreadPoolExecutor(6) as strangers,
    ):
        said = list(strangers.map(lambda n: attack(address, n), range(100)))
        assert not any(answer.startswith(b"HTTP/1.1 500") for answer in said)
        until(lambda: not generator.open and server._worker.active == 0 == unfinished(server))
        answer = client(address).completions.create(model="backwards", prompt="abc", max_tokens=3)
        assert answer.choices[0].text == "cba" and ask(address, "/health") == (
            200,
            {"status": "ok"},
        )
        assert not server._worker.waiting and not server._worker._tickets
