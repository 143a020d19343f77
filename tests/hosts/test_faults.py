"""What goes wrong on one host ends the run within 30 s: one message with host and ranks, and no
process left behind.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ds_testing.processes import disposed
from ds_testing_hosts.lab import Host, Lab, Process
from sites import ENDLESS, Site, left

pytestmark = pytest.mark.hosts
WITHIN = 30.0
START = 40.0


@pytest.fixture
def own(lab: Callable[..., Lab], tmp_path: Path) -> Site:
    """Hosts a and b, which this test may break."""
    return Site(lab("a", "b", ssh=True, shared=[tmp_path]), tmp_path)


def endless_run(site: Site, *words: str) -> subprocess.Popen[str]:
    """An endless run on a and b, once it has made some steps."""
    with disposed(ignored=False):  # Ctrl-C is sent
        process = site.start("ab", *words)
    assert process.stdout
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 3"):
            return process
    raise AssertionError("".join(seen))


def rank(host: Host, number: int) -> Process:
    return next(
        p
        for p in host.processes()
        if p.environ.get("RANK") == str(number) and "sshd" not in p.words[0]
    )


def end(site: Site, process: subprocess.Popen[str], starting: float = 0.0) -> tuple[int, str]:
    """The run's exit code and what it said, without steps; it must end in time, everywhere.

    starting: seconds that may pass until the fault shows.
    """
    began = time.monotonic() + starting
    try:
        text, _ = process.communicate(timeout=WITHIN + starting)
    except subprocess.TimeoutExpired as exc:
        raise AssertionError(f"did not end:\n{(exc.stdout or b'').decode()}") from None
    while remains := [(host.name, p.words) for host in site.lab.hosts for p in left(host)]:
        assert time.monotonic() < began + WITHIN, remains
        time.sleep(0.1)
    return process.returncode, "".join(
        line for line in text.splitlines(True) if not line.startswith("step ")
    )


def said_once(text: str, pattern: str) -> None:
    """One line of ours says what the matter is, and at most one traceback is shown."""
    about = [line for line in text.splitlines() if re.search(pattern, line)]
    assert len(about) == 1, text
    assert len(re.findall(r'(?m)^  File ".*", line \d+, in <module>', text)) <= 1, text


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("fault", [Host.cut, Host.crash, Host.kill])
def test_a_host_is_lost(own: Site, name: str, fault: Callable[[Host], None]) -> None:
    """a has the run's store."""
    process = endless_run(own, ENDLESS)
    fault(own.lab.host(name))
    code, text = end(own, process)
    assert code == 1
    said_once(text, rf"^dscore: .*lost host {name}\b")


OTHERS = {
    "pdsh": ("pdsh", []),
    "openmpi": ("mpirun.openmpi", ["--launcher-args=--allow-run-as-root"]),
    "mpich": ("mpiexec.hydra", []),
}


@pytest.mark.parametrize("launcher", OTHERS)
def test_a_host_crashes_under_other_launchers(own: Site, launcher: str) -> None:
    """Whatever the tool that started the agents makes of it."""
    program, options = OTHERS[launcher]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed; make test-hosts does so on Debian")
    process = endless_run(own, "--launcher", launcher, *options, ENDLESS)
    own.lab.host("b").crash()
    code, text = end(own, process)
    assert code == 1
    said_once(text, r"^dscore: .*lost host b\b")


@pytest.mark.parametrize(
    ("number", "code", "pattern"),
    [
        (signal.SIGKILL, 137, r"rank 3 of 4 .*SIGKILL.* on b\b"),
        (signal.SIGSTOP, None, r"rank 3 of 4 .*(stopped|still).* on b\b"),
    ],
)
def test_a_rank(own: Site, number: int, code: int | None, pattern: str) -> None:
    process = endless_run(own, ENDLESS)
    os.kill(rank(own.lab.host("b"), 3).pid, number)
    found, text = end(own, process)
    assert found == code or (code is None and found > 0)
    said_once(text, pattern)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_launcher(own: Site, number: int) -> None:
    process = endless_run(own, ENDLESS)
    process.send_signal(number)
    code, _ = end(own, process)
    assert code == (-9 if number == signal.SIGKILL else 128 + number)


def test_a_failing_rank_keeps_its_exit_code(own: Site) -> None:
    script = own.shared / "fails.py"
    script.write_text(
        "import os, sys, time\nos.environ['RANK'] == '2' and sys.exit(7)\ntime.sleep(1000)\n"
    )
    code, text = end(own, own.start("ab", str(script)), START)
    assert code == 7
    said_once(text, r"rank 2 of 4 failed with exit code 7 .*on b\b")


def test_ssh_is_refused(own: Site) -> None:
    own.lab.host("b").stop_ssh()
    code, text = end(own, own.start("ab", ENDLESS), START)
    assert code == 1 and "Connection refused" in text
    said_once(text, r"^dscore: .*host b\b")


def test_the_key_of_a_host_is_unknown(own: Site) -> None:
    known = own.lab.head.root / "root/.ssh/known_hosts"
    known.write_text(
        "".join(line for line in known.read_text().splitlines(True) if not line.startswith("b "))
    )
    code, text = end(own, own.start("ab", ENDLESS), START)
    assert code == 1 and "Host key verification failed" in text
    said_once(text, r"^dscore: .*host b\b")


@pytest.mark.parametrize("dist", ["dscore-zero", "torch"])
def test_versions_differ(own: Site, dist: str) -> None:
    meta = next(
        file for file in importlib.metadata.files(dist) or () if file.name == "METADATA"
    ).locate()
    changed = own.shared / "METADATA"
    changed.write_text(
        re.sub(r"(?m)^Version: .*", "Version: 9.9.9", Path(str(meta)).read_text(), count=1)
    )
    own.lab.host("b").run(["mount", "--bind", str(changed), str(meta)])
    code, text = end(own, own.start("ab", ENDLESS), START)
    assert code > 0
    said_once(text, rf"{dist}.*9\.9\.9")
    assert re.search(r"(host b\b|on b\b|b: )", text), text


def test_hostfiles(own: Site) -> None:
    for names, words, pattern in (
        ("ax", (), r"host x\b"),  # there is no host x
        ("aa", (), r"line 2.*'a' is there twice"),
        ("a", ("--include", "b"), r"host 'b' in 'b' is not known"),
    ):
        code, text = end(own, own.start(names, "--force-multi", *words, ENDLESS), START)
        assert code in (1, 2)
        said_once(text, rf"dscore: .*{pattern}")


@pytest.mark.parametrize("what", ["logs", "not shared"])
def test_the_disk_of_one_host(own: Site, what: str) -> None:
    """Full of ranks' logs, or not the one that all need for checkpoints."""
    b = own.lab.host("b")
    words = [ENDLESS]
    if what == "logs":
        b.disk("/tmp/logs", size="64k")
        script = own.shared / "talks.py"
        script.write_text("while True:\n    print('x' * 1000, flush=True)\n")
        words = ["--enable-each-rank-log", "/tmp/logs", str(script)]
        pattern = r"^dscore: rank [23] of 4 failed .*on b\b.*No space left"
    else:
        b.disk(own.shared / "checkpoints")
        words = [ENDLESS, "{}", str(own.shared / "checkpoints")]
        pattern = (
            r"^dscore: rank ([01] of 4 .* on a\b.* rank 2 on b: |[23] of 4 .* on b\b.* "
            r"rank 2: "
            r").*rank 0, is not"
        )
    code, text = end(own, own.start("ab", *words), START)
    assert code > 0
    said_once(text, pattern)
