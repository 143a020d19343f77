from ds_nvme.files import DiskError as DiskError
from ds_nvme.handle import aio_handle as aio_handle
from ds_nvme.store import NvmeStore as NvmeStore
