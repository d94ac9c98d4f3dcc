"""What MkDocs is told on the way: formulas as MathML, roles of docstrings as plain code, and nothing from elsewhere."""

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert
from mkdocs.utils import get_relative_url

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_SHIM = "https://unpkg.com/iframe-worker/shim"  # with which the theme searches in pages that were opened from a folder


def on_page_content(html: str, **_: Any) -> str:
    """Formulas that a browser draws by itself, without a script; no name of a role before its code."""
    html = _FORMULA.sub(lambda m: convert(unescape(m[2]), display="block" if m[1] == "div" else "inline"), html)
    return re.sub(r":(?:class|func|meth|attr|mod):(?=<code)", "", html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The one script that the theme would fetch stands beside the pages."""
    return output.replace(_SHIM, get_relative_url("js/iframe_worker.js", page.url))
