"""Hosts on one machine: each has network, host name, mount, pid and ipc namespaces of its own; a
switch joins them.

::

    with Lab("a", "b", ssh=True, shared=[tmp_path]) as lab:
        lab.head.run(["ssh", "a", "hostname"])

[Note: who holds a host] The first process of each host's pid namespace is one that waits for the
end of its stdin, a pipe to this process. Whatever ends this process ends the pipe, that one, all
processes of the host, and with them its namespaces: devices, mounts and files in memory. Nothing
has a global name, so several labs run at once.

Data flow: host's ``eth0`` - its other end in the switch's namespace - bridge. A rate is a queue
(tbf) at both ends; for latency and loss, two TAP devices and `relay` are put before the bridge. A
cut takes the end out of its bridge.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_testing.processes import clean_environment

from ds_testing_hosts.namespaces import (
    Holder,
    children,
    put_away,
)
from ds_testing_hosts.namespaces import (
    LabError as LabError,
)
from ds_testing_hosts.namespaces import (
    Process as Process,
)

if TYPE_CHECKING:
    from typing_extensions import Self

NETWORK = "10.77.0."
RELAY = str(Path(__file__).with_name("relay.py"))
PROGRAMS = ("unshare", "nsenter", "ip", "mount", "tc")


class _Entered(subprocess.Popen[Any]):
    """A process of a host. What this process started is ``nsenter``; signals go to its child."""

    def send_signal(self, sig: int) -> None:
        inner = children(self.pid)
        if self.poll() is None and inner:
            with contextlib.suppress(ProcessLookupError):
                os.kill(inner[0], sig)
        else:
            super().send_signal(sig)


@functools.cache
def unavailable() -> str:
    """Why this machine cannot have a lab, or ""."""
    if not sys.platform.startswith("linux"):
        return "hosts in namespaces need Linux"
    if os.geteuid() != 0:
        return "hosts in namespaces need root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"hosts in namespaces need {', '.join(missing)} (Debian: util-linux, iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "hosts in namespaces need /dev/net/tun"
    try:
        with Lab("a") as lab:
            lab.host("a").run(["true"])
    except LabError as exc:
        return f"hosts in namespaces do not work here: {exc}"
    return ""


class Host:
    """One host of a `Lab`.

    name: its host name.
    address: on the lab's network.
    """

    def __init__(self, lab: Lab, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.address = f"{NETWORK}{number}"
        self._lab = lab
        self._held: Holder | None = None
        self._started: list[subprocess.Popen[Any]] = []
        self._relay: subprocess.Popen[str] | None = None
        self._port = "switch"  # the bridge that this host's end belongs to while it is not cut

    @property
    def on(self) -> bool:
        """Whether it is switched on."""
        return self._held is not None

    # -- power -------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Switch it on: same name, address and ssh keys, an undisturbed link, an empty /tmp."""
        if self._held is not None:
            raise LabError(f"host {self.name!r} is already on")
        switch = self._lab.switch
        end = f"v{self.number}"
        self._held = Holder(self.name, self._lab.table, self._lab.keep)
        with contextlib.suppress(LabError):
            # of the host before it, which the kernel may still have
            switch.network(f"link delete {end}")
        switch.network(
            f"link add {end} type veth peer name eth0 address 02:00:00:00:00:{self.number:02x} "
            f"netns {self._held.pid}",
            f"link set {end} master switch addrgenmode none",
            f"link set {end} up",
        )
        self._held.network(
            "link set eth0 addrgenmode none",
            f"address add {self.address}/24 dev eth0",
            "link set eth0 up",
        )
        if self._lab.ssh:
            self._lab.ssh.install(self)
            self.start_ssh()

    def kill(self) -> None:
        """End all its processes at once; their peers see connections close.

        The host is then off.
        """
        self._on.end()
        self._held = None
        self._port = "switch"
        self._end_relay()

    def crash(self) -> None:
        """Switch the power off: nothing goes out any more, peers see only silence."""
        self.cut()
        self.kill()

    # -- what runs on it ---------------------------------------------------------------------------

    def popen(
        self,
        command: Sequence[str],
        *,
        cwd: str | Path = "",
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a process; text, stdin empty, stderr in stdout, a session of its own, unless
        `options` differ.

        env: the whole environment; `clean_environment` when left out. Signals sent by its methods
        reach it.
        """
        words = self._on.words(command, str(cwd or os.getcwd()))
        given = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        variables = clean_environment() if env is None else dict(env)
        process = _Entered(
            words, **{**given, "start_new_session": True, "env": variables, **options}
        )
        self._started.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        *,
        status: int = 0,
        timeout: float = 120,
        cwd: str | Path = "",
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Run and give back stdout and stderr together; the exit status must be `status` (-1: any
        but 0).
        """
        process = self.popen(command, cwd=cwd, env=env)
        try:
            text, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(
                f"{' '.join(command)} on {self.name} ran longer than {timeout} s:\n{_rest(process)}"
            ) from None
        right = process.returncode != 0 if status == -1 else process.returncode == status
        assert right, f"{' '.join(command)} on {self.name} ended with {process.returncode}:\n{text}"
        return str(text)

    def processes(self) -> list[Process]:
        """Everything that runs on it, but for its first process."""
        return self._on.processes()

    # -- its files ---------------------------------------------------------------------------------

    @property
    def root(self) -> Path:
        """Its files, as this process can reach them: ``host.root / "tmp/x"``."""
        return Path(f"/proc/{self._on.pid}/root")

    def disk(self, folder: str | Path, size: str | None = None) -> None:
        """Mount an empty disk of its own on a folder, which is made where it is not there.

        size: as "2m".
        """
        self.run(["mkdir", "-p", str(folder)])
        self.run(
            ["mount", "-t", "tmpfs", *(["-o", f"size={size}"] if size else []), "lab", str(folder)]
        )

    # -- its link ----------------------------------------------------------------------------------

    @property
    def sent(self) -> int:
        """Bytes that have gone out over its link."""
        return self._counters()[8]

    @property
    def received(self) -> int:
        """Bytes that have come in over its link."""
        return self._counters()[0]

    def cut(self) -> None:
        """Cut its link: packets vanish, and no device says so."""
        self._lab.switch.network(f"link set v{self.number} nomaster")

    def mend(self) -> None:
        """The link is whole again."""
        self._lab.switch.network(f"link set v{self.number} master {self._port}")

    def link(self, *, rate: float | None = None, latency: float = 0.0, loss: float = 0.0) -> None:
        """Shape its link, in each direction.

        rate: bit/s, None for no limit.
        latency: seconds.
        loss: share of packets.
        """
        for holder, device in ((self._on, "eth0"), (self._lab.switch, f"v{self.number}")):
            if rate is None:
                with contextlib.suppress(LabError):  # there was none
                    holder.network(f"qdisc delete dev {device} root", program="tc")
            else:
                burst = max(32_768, int(rate / 8 * 0.002))  # what a timer of the kernel may be late
                queue = f"tbf rate {int(rate)}bit burst {burst} latency 100ms"
                holder.network(f"qdisc replace dev {device} root {queue}", program="tc")
        if latency or loss:
            self._start_relay()
            assert self._relay and self._relay.stdin and self._relay.stdout
            self._relay.stdin.write(json.dumps({"latency": latency, "loss": loss}) + "\n")
            self._relay.stdin.flush()
            if self._relay.stdout.readline() != "set\n":
                raise LabError(f"the relay of host {self.name!r} ended")
        elif self._relay is not None:
            self._port = "switch"
            self.mend()
            self._end_relay()

    # -- ssh ---------------------------------------------------------------------------------------

    def start_ssh(self) -> None:
        """Start its OpenSSH server."""
        self.run(
            ["/usr/sbin/sshd", "-f", "/run/lab/sshd_config", "-E", "/run/lab/sshd.log"], cwd="/"
        )

    def stop_ssh(self) -> None:
        """End its OpenSSH server: connections are refused; those that are open stay."""
        end = time.monotonic() + 10.0
        while not (
            found := [p.pid for p in self.processes() if p.words and "[listener]" in p.words[0]]
        ):
            if time.monotonic() > end:  # just after its start it does not bear that name yet
                raise LabError(f"no OpenSSH server runs on {self.name}")
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _on(self) -> Holder:
        if self._held is None:
            raise LabError(f"host {self.name!r} is off")
        return self._held

    def _counters(self) -> list[int]:
        for line in Path(f"/proc/{self._on.pid}/net/dev").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name.strip() == "eth0":
                return [int(word) for word in rest.split()]
        raise LabError(f"host {self.name!r} has no eth0")

    def _start_relay(self) -> None:
        """Put two TAP devices and a process that joins them between this host's end and the
        switch."""
        if self._relay is not None:
            return
        near = f"n{self.number}"
        far = f"f{self.number}"
        bridge = f"w{self.number}"
        switch = self._lab.switch
        self._relay = subprocess.Popen(
            [
                "nsenter",
                "-t",
                str(switch.pid),
                "-n",
                "-p",
                "--",
                sys.executable,
                "-I",
                "-S",
                RELAY,
                near,
                far,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._relay.stdout
        if self._relay.stdout.readline() != "ready\n":
            raise LabError(f"the relay of host {self.name!r} did not start")
        switch.network(
            f"link add {bridge} type bridge",
            *(f"link set {name} addrgenmode none" for name in (bridge, near, far)),
            f"link set {near} master {bridge}",
            f"link set {far} master switch",
            *(f"link set {name} up" for name in (bridge, near, far)),
            f"link set v{self.number} master {bridge}",
        )
        self._port = bridge

    def _end_relay(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.communicate()  # the end of its stdin is its end; its devices go with it
            self._lab.switch.network(f"link delete w{self.number}")


class _Keys:
    """One key for the user on all hosts, one for each host, and what ssh and sshd read."""

    def __init__(self, names: Sequence[str]) -> None:
        self.user = _key()
        self.hosts = {name: _key() for name in names}
        self.known = "".join(f"{name} {public}" for name, (_, public) in self.hosts.items())

    def install(self, host: Host) -> None:
        """Write them into the memory of a host."""
        home = host.root / pwd.getpwuid(os.geteuid()).pw_dir.lstrip("/") / ".ssh"
        lab = host.root / "run/lab"
        files = {
            home / "id_ed25519": self.user[0],
            home / "id_ed25519.pub": self.user[1],
            home / "authorized_keys": self.user[1],
            home / "known_hosts": self.known,
            lab / "host_key": self.hosts[host.name][0],
            lab / "sshd_config": _SSHD,
        }
        for path, text in files.items():
            path.touch(mode=0o600)
            path.write_text(text)


class Lab:
    """Hosts with these names, and ``head``, where launchers run. Close it, or use it in ``with``.

    shared: folders that all hosts see. What lies under /tmp, /run and /dev/shm is each host's own
        otherwise; the rest of the file system is this machine's.
    ssh: with an OpenSSH server on each.
    """

    def __init__(self, *names: str, ssh: bool = False, shared: Sequence[str | Path] = ()) -> None:
        self.everyone = [
            Host(self, name, number) for number, name in enumerate(("head", *names), 1)
        ]
        self.table = "127.0.0.1 localhost\n" + "".join(
            f"{host.address} {host.name}\n" for host in self.everyone
        )
        self.keep = _kept([*shared, sys.prefix, sys.base_prefix, os.getcwd()])
        self.ssh = _Keys([host.name for host in self.everyone]) if ssh else None
        self.switch = Holder("switch", "", self.keep)
        try:
            self.switch.network(
                "link add switch type bridge",
                "link set switch addrgenmode none",
                "link set switch up",
            )
            for host in self.everyone:
                host.boot()
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> Host:
        """One more host, for launchers."""
        return self.everyone[0]

    @property
    def hosts(self) -> list[Host]:
        """All but the head."""
        return self.everyone[1:]

    def host(self, name: str) -> Host:
        """The one with this name."""
        return next(host for host in self.everyone if host.name == name)

    def close(self) -> None:
        """End everything."""
        for host in self.everyone:
            if host.on:
                host.kill()
            for process in host._started:
                put_away(process)
        self.switch.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_SSHD = """
Port 22
HostKey /run/lab/host_key
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
MaxStartups 100
"""


def _key() -> tuple[str, str]:
    """A new ed25519 key: private and public."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "key")
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", path], check=True
        )
        return path.read_text(), path.with_suffix(".pub").read_text()


def _kept(folders: Sequence[str | Path]) -> list[str]:
    """Those which the hosts' own mounts would cover, without those inside others."""
    covered = [Path(root).resolve() for root in ("/tmp", "/run", "/dev/shm")]
    paths = sorted({Path(folder).resolve() for folder in folders})
    hidden = [path for path in paths if any(path.is_relative_to(root) for root in covered)]
    return [
        str(path)
        for path in hidden
        if not any(path != other and path.is_relative_to(other) for other in hidden)
    ]


def _rest(process: subprocess.Popen[Any]) -> str:
    """What a killed process has printed; a process that it left behind may keep its stdout open."""
    try:
        return str(process.communicate(timeout=1)[0])
    except subprocess.TimeoutExpired as exc:
        return (exc.stdout or b"").decode(errors="replace")
