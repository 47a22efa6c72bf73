"""What does a timeline look like? A page for the browser, and figures.

Everything is made from one or two `Timeline`s alone, without torch.
"""

from pipegrad.picture.figure import write_figure
from pipegrad.picture.html_page import write_html

__all__ = ["write_figure", "write_html"]
