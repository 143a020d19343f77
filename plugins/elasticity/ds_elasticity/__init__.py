"""Elastic runs: batch sizes that many numbers of ranks divide."""

from ds_elasticity.batches import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)

__all__ = [
    "compute_elastic_config",
    "elasticity_enabled",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "ensure_immutable_elastic_config",
]
