"""``dscore run``: check the words, then hand a `LaunchRequest` to a launcher."""

from __future__ import annotations

import logging

import typer

from ds_cli.run import options
from ds_cli.run.launchers import find_launcher
from ds_cli.run.placement import choose_launcher, divide
from ds_cli.run.plugin_options import RunCommand
from ds_cli.run.request import apply_settings, read_request


# Typer reads the options from this signature; their values are in the context by these names.
def run(
    ctx: typer.Context,
    script: options.Script,
    arguments: options.Arguments = None,
    settings: options.Settings = None,
    nproc: options.Nproc = "auto",
    world: options.World = None,
    max_restarts: options.MaxRestarts = 0,
    module: options.Module = False,
    hostfile: options.Hostfile = "",
    include: options.Include = "",
    exclude: options.Exclude = "",
    launcher: options.LauncherName = "",
    launcher_args: options.LauncherArgs = "",
    ssh_port: options.SshPort = None,
    show: options.Show = False,
    nnodes: options.Nnodes = "",
    elastic_training: options.ElasticTraining = False,
    min_elastic_nodes: options.MinElasticNodes = -1,
    max_elastic_nodes: options.MaxElasticNodes = -1,
    node_rank: options.NodeRank = None,
    no_ssh: options.NoSsh = False,
    rdzv_endpoint: options.RdzvEndpoint = "",
    rdzv_id: options.RdzvId = "dscore",
    master_addr: options.MasterAddr = "",
    master_port: options.MasterPort = None,
    tag: options.Tag = False,
    grace: options.Grace = 5.0,
    notice: options.Notice = 30.0,
    local_rank: options.LocalRank = False,
    no_python: options.NoPython = False,
    each_rank_log: options.EachRankLog = "",
    bind_cores: options.BindCores = False,
    core_list: options.CoreList = "",
    venv_script: options.VenvScript = "",
    log_level: options.LogLevel = options.Level.WARNING,
    quiet: options.Quiet = False,
    force_multi: options.ForceMulti = False,
    no_ssh_check: options.NoSshCheck = False,
    save_pid: options.SavePid = False,
) -> None:
    """Run a script on all accelerators of this host, or on several hosts.

    Exit codes:
      0: every process ended well
      1: the config, a plugin or a launcher failed
      2: wrong usage; nothing was started
      else: that of the first process that failed; 128 + the signal where one ended it

    Examples:
      dscore run --world 4 train.py --deepspeed_config ds_config.json
      dscore run --hostfile hosts --nproc 8 --tag train.py
    """
    request = read_request(ctx.params)
    if settings:
        apply_settings(settings, quiet=request.level > logging.WARNING or bool(node_rank))
    name, request = choose_launcher(request, ctx.params)
    request = divide(request, world, name)
    raise typer.Exit(find_launcher(name)(request))


class _Run(RunCommand):
    function = staticmethod(run)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
# Options may be spelt with underscores too, as in the documents.
app.command(
    cls=_Run,
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)(run)
