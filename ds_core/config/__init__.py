"""The config: files and dicts in, one frozen and fully checked `RunConfig` out (torch-free).

Names are loaded on first use, so that a plugin's declaration module pays for `Section` and nothing
else. Reading order: `source` (text -> plain data), `section` (what a section is), `core` (the
core's own keys), `build` (the result, or all problems at once; `translate` and `unknown` find the
words for them).
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
