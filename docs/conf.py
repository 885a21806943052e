"""Configuration of Sphinx for the site, which `docs/website.py` builds."""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference
import website

project = "vitlens"
html_title = "vitlens"
root_doc = "index"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "reference"]
include_patterns = ["*.md", "data/*.md", "docs/*.md", "notebooks/[0-9A-Z]*", "reference/*"]
nb_execution_mode = "off"  # notebooks are shown as they are committed
nb_ipywidgets_js = {}  # still images stand for widgets
nb_merge_streams = True
nb_code_prompt_show = "Set-up"
nb_code_prompt_hide = "Set-up"
html_use_index = False
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 4
suppress_warnings = [
    "myst.xref_missing",
    "mystnb.unknown_mime_type",
]  # website.dead_links looks at what was written

autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
# Names of Python in the reference. The file has those lines of Python's own inventory (as in Debian's python3-doc) that
# the reference needs, so nothing is fetched. Names of PyTorch and NumPy are plain text.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", str(Path(__file__).parent / "python.inv"))
}

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_favicon = "_static/favicon.svg"
html_search_scorer = str(Path(__file__).parent / "scorer.js")
html_show_sphinx = False
html_context = {"default_mode": "auto"}  # light or dark, as the browser prefers
html_theme_options = {
    "logo": {
        "image_light": "_static/favicon.svg",
        "image_dark": "_static/favicon.svg",
        "text": "vitlens",
    },
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "search_bar_text": "Search",
    "footer_content_items": ["extra-footer.html"],
    "extra_footer": "vitlens, MIT license.",
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
if repository := website.addresses()["repository"]:
    html_theme_options |= {
        "repository_url": repository,
        "repository_branch": "main",
        "path_to_docs": "",
        "use_repository_button": True,
        "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    }
    extensions.append("sphinx.ext.linkcode")
    linkcode_resolve = partial(reference.source_link, repository)
html_baseurl = website.addresses()["site"]

mathjax_path = "mathjax/tex-svg.js"  # copied from npm, in place of a CDN
mathjax3_config = {"options": {"enableMenu": False, "enableAssistiveMml": True}}
