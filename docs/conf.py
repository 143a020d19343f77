"""How Sphinx builds the site: `make docs`.

Pages below reference/ are written anew at each build by `_site`.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from _site import navigation, write_reference  # noqa: E402
from _site.docstrings import listed  # noqa: E402

import ds_core  # noqa: E402

project = "ds_core"
author = "the authors of ds_core"
copyright = "2026, the authors of ds_core"
version = release = ds_core.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_site", "requirements.txt"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
pygments_style = "friendly"
pygments_dark_style = "monokai"

# Docstrings write code between single or double backticks.
default_role = "code"
autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries = False
# two packages may have classes of one name; which one a type hint means is not said
suppress_warnings = ["ref.python"]

html_theme = "furo"
html_title = f"ds_core {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "source_repository": "https://github.com/ds-core/ds_core/",
    "source_branch": "main",
    "source_directory": "docs/",
}


def defined_elsewhere(app, what, name, obj, skip, options):
    """A module of the core that hands names of another one on: they are described there."""
    page = app.env.docname.rpartition("/")[2]
    home = getattr(obj, "__module__", None) or ""
    return (
        True
        if page.startswith("ds_core.") and home.startswith("ds_core.") and not inside(home, page)
        else None
    )


def inside(home, page):
    """Whether `home` is the module `page`, a module below it, or one without a page of its own."""
    return (
        home == page
        or home.startswith(f"{page}.")
        or not (HERE / "reference" / "api" / f"{home}.md").exists()
    )


def list_arguments(app, what, name, obj, options, lines):
    """See `_site.docstrings`."""
    lines[:] = listed(lines)


def setup(app):
    app.connect("autodoc-process-docstring", list_arguments)
    app.connect("autodoc-skip-member", defined_elsewhere)
    app.connect("builder-inited", lambda app: write_reference(Path(app.srcdir) / "reference"))
    app.connect("source-read", navigation)
