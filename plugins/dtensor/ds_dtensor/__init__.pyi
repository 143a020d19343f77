from ds_dtensor.loading import load_state_dict as load_state_dict
from ds_dtensor.optimizer import EngineOptimizer as EngineOptimizer
from ds_dtensor.tensor import Pieces as Pieces
from ds_dtensor.tensor import PieceTensor as PieceTensor
from ds_dtensor.weights import parameters as parameters
from ds_dtensor.weights import state_dict as state_dict
