from ds_optimizer_adapter.measuring import Measured as Measured
from ds_optimizer_adapter.measuring import measure_grain as measure_grain
