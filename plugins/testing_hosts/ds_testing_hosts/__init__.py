"""Hosts to test launchers on, without a cluster: network namespaces of this machine, or real programs'
clusters in them.
"""
