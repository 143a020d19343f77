"""Several hosts: which (`hostfile`), what they are given (`settings`), how one is served
(`agent`), and the local programs that reach them (`tools`). A launcher needs only what is named
here (torch-free).

A launcher starts one agent per host, with `agent_command`, and ends when they have ended;
`run_tool` runs the program that does so. The agent is `dscore run` on its host: it starts processes
again, keeps logs and checks the other hosts, the same with every launcher.
"""

from __future__ import annotations

from ds_command_kit.hosts.choice import named_hosts as named_hosts
from ds_command_kit.hosts.hostfile import Host as Host
from ds_command_kit.hosts.settings import FromVariable as FromVariable
from ds_command_kit.hosts.settings import agent_command as agent_command
from ds_command_kit.hosts.settings import settings_line as settings_line
from ds_command_kit.hosts.settings import settings_variable as settings_variable
from ds_command_kit.hosts.tools import run_tool as run_tool
from ds_command_kit.hosts.tools import run_tools as run_tools
