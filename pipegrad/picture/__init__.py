"""Draws timelines: a page for the browser, and figures.

Pictures need only one or two `Timeline`s, and no torch.
"""

from pipegrad.picture.figure import write_figure
from pipegrad.picture.html_page import write_html

__all__ = ["write_figure", "write_html"]
