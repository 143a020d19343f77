"""What each rank will hold and send, predicted before anything runs: ``dscore plan``.

`Planner` is the contract of packages whose memory is planned (hook ``ds_planners``). It answers with
`Need`, the row of one choice, whose bytes are `Kinds`. Names load on first use.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
