from ds_comms_guard.guard import HangGuard as HangGuard
from ds_comms_guard.watcher import EXIT_CODE as EXIT_CODE
