"""Ends a job whose ranks wait for different collectives, with a message that says where each rank
is.

`HangGuard` (`guard`) is called around every collective and numbers it in the `ledger`. A thread
(`watcher`) sees when somebody waits too long. It publishes this rank's position on the `board`,
which is the job's store, and one of the ranks that wait is the `judge` of all positions. `verdict`
works out what positions prove, without processes.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
