from ds_core.entries import LauncherEntry


def ds_launchers():
    return {"alone": LauncherEntry("my_launch.alone:start", help="One process, without a process group.")}
