"""Small pictures without a plotting library: an SVG document, and round numbers for its axes.

For plugins that show a timeline, a curve or a search in ``dscore plan`` and on pages. It needs the
standard library only, so a declaration module may import it.
"""
