from ds_comm_autograd.functions import all_to_all as all_to_all
from ds_comm_autograd.functions import copy_to as copy_to
from ds_comm_autograd.functions import gather as gather
from ds_comm_autograd.functions import gather_to as gather_to
from ds_comm_autograd.functions import mean as mean
from ds_comm_autograd.functions import reduce_from as reduce_from
from ds_comm_autograd.functions import reduce_scatter as reduce_scatter
from ds_comm_autograd.functions import split as split
