"""``dscore run --launcher pdsh``: one agent per host of a hostfile, started with pdsh."""
