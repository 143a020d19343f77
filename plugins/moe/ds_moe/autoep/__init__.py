"""AutoEP: the MoE blocks of a model get this rank's share of their experts."""
