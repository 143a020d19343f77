from ds_run_state.run_state import HasRankState as HasRankState
from ds_run_state.run_state import RunState as RunState
from ds_run_state.run_state import SavedRun as SavedRun
from ds_run_state.run_state import persistent_buffers as persistent_buffers
from ds_run_state.run_state import some as some
