from ds_plan.needs import Kinds as Kinds
from ds_plan.needs import Need as Need
from ds_plan.needs import Offload as Offload
from ds_plan.needs import join as join
from ds_plan.planner import Planner as Planner
from ds_plan.run import PlannedRun as PlannedRun
from ds_plan.run import measure_states as measure_states
