from ds_verify.comparing import Difference as Difference
from ds_verify.comparing import Report as Report
from ds_verify.comparing import compare_folders as compare_folders
from ds_verify.engines import compare as compare
