from ds_comms_logger.log import CommsLog as CommsLog
from ds_comms_logger.log import CommsRow as CommsRow
from ds_comms_logger.log import configure as configure
from ds_comms_logger.log import installed_log as installed_log
from ds_comms_logger.summary import log_summary as log_summary
