from ds_checkpoint.checkpointer import FolderCheckpointer as FolderCheckpointer
from ds_checkpoint.export import clone_tensors_for_torch_save as clone_tensors_for_torch_save
from ds_checkpoint.offline import (
    convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict,
)
from ds_checkpoint.offline import export_weights as export_weights
from ds_checkpoint.offline import (
    get_fp32_state_dict_from_zero_checkpoint as get_fp32_state_dict_from_zero_checkpoint,
)
from ds_checkpoint.offline import (
    load_state_dict_from_zero_checkpoint as load_state_dict_from_zero_checkpoint,
)
from ds_checkpoint.offline import open_saved as open_saved
from ds_checkpoint.offline import verify as verify
