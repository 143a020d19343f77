from ds_comm_gloo.hosts import host_key as host_key
from ds_comm_gloo.provider import GlooCollectives as GlooCollectives
from ds_comm_gloo.transports import Members as Members
from ds_comm_gloo.transports import Opener as Opener
from ds_comm_gloo.transports import Transport as Transport
