"""Hosts to test launchers on, without a cluster: network namespaces of one machine."""
