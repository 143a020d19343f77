"""``dscore run --launcher ssh``: one agent per host of a hostfile, started with OpenSSH."""
