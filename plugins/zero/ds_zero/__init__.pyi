from ds_zero.gather.external import register_external_parameter as register_external_parameter
from ds_zero.gather.external import unregister_external_parameter as unregister_external_parameter
from ds_zero.gather.gathered_parameters import GatheredParameters as GatheredParameters
from ds_zero.gather.gathered_parameters import empty_partition_cache as empty_partition_cache
from ds_zero.gather.gathered_parameters import is_zero_param as is_zero_param
from ds_zero.gather.gathered_parameters import (
    unwrap_model_for_generation as unwrap_model_for_generation,
)
from ds_zero.gather.leaves import get_z3_leaf_modules as get_z3_leaf_modules
from ds_zero.gather.leaves import set_z3_leaf_module as set_z3_leaf_module
from ds_zero.gather.leaves import set_z3_leaf_modules as set_z3_leaf_modules
from ds_zero.gather.leaves import set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name
from ds_zero.gather.leaves import set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix
from ds_zero.gather.leaves import unset_z3_leaf_modules as unset_z3_leaf_modules
from ds_zero.gather.leaves import z3_leaf_module as z3_leaf_module
from ds_zero.gather.leaves import z3_leaf_parameter as z3_leaf_parameter
from ds_zero.init.context import Init as Init
from ds_zero.init.context import MiCS_Init as MiCS_Init
from ds_zero.init.status import ZeroParamStatus as ZeroParamStatus
from ds_zero.offload.offload_states import get_state_devices as get_state_devices
from ds_zero.offload.state_offload import OffloadDeviceEnum as OffloadDeviceEnum
from ds_zero.offload.state_offload import OffloadStateTypeEnum as OffloadStateTypeEnum
from ds_zero.tiling import TiledLinear as TiledLinear
from ds_zero.tiling import TiledLinearReturnBias as TiledLinearReturnBias
