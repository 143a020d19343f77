"""``dscore doctor``: examine this host, the installation and the hosts of a hostfile."""
