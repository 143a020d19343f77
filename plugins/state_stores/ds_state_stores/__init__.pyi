from ds_state_stores.host_copies import HostCopies as HostCopies
from ds_state_stores.host_copies import HostCopy as HostCopy
from ds_state_stores.stores import HostStore as HostStore
from ds_state_stores.stores import StateStore as StateStore
from ds_state_stores.stores import check_store as check_store
from ds_state_stores.stores import is_evicted as is_evicted
from ds_state_stores.stores import open_store as open_store
from ds_state_stores.stores import owns_storage as owns_storage
