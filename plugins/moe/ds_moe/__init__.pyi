from ds_moe.experts import Experts as Experts
from ds_moe.gating import Routing as Routing
from ds_moe.gating import TopKGate as TopKGate
from ds_moe.kernels.grouped import Groups as Groups
from ds_moe.kernels.grouped import grouped_linear as grouped_linear
from ds_moe.layer import MoE as MoE
