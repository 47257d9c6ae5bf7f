"""The site of the documentation: what is on it, its build, and its pages in a browser."""

import ast
import functools
import http.server
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
NAV = re.findall(r"^ +- (\S+\.md)$", (TOP / "mkdocs.yml").read_text(), re.MULTILINE)
API = [Path(page).stem for page in NAV if page.startswith("reference/api/")]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
HTML = [page.replace(".md", ".html").replace("README", "index") for page in NAV]


def public_names(module):
    path = TOP.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = next(
        ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    return {f"{module}.{name}" for name in names}


def imported(source):
    """Yield what a script imports from hpctrain, by full names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hpctrain"):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_site_has_every_page_of_docs_once():
    pages = {path.name for path in (TOP / "docs").glob("*.md")}
    assert {page for page in NAV if "/" not in page} == pages
    assert len(NAV) == len(set(NAV))


def test_site_describes_what_docs_and_examples_import():
    sources = [path.read_text() for path in (TOP / "examples").glob("*.py")]
    for path in (TOP / "examples").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        sources += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for page in (*(TOP / "docs").glob("*.md"), TOP / "README.md"):
        sources += [block for block in PYTHON.findall(page.read_text()) if "import" in block]
    names = {name for source in sources for name in imported(source)}
    assert "hpctrain.data.digits" in names
    assert names - set(API) - set().union(*map(public_names, API)) == set()


def test_environment_page_has_every_variable_of_the_package():
    source = "".join(path.read_text() for path in (TOP / "hpctrain").rglob("*.py"))
    used = set(re.findall(r"\bHPCTRAIN_[A-Z][A-Z_]+\b", source))
    page = (TOP / "docs" / "environment.md").read_text()
    assert used == set(re.findall(r"\bHPCTRAIN_[A-Z][A-Z_]+\b", page))


@pytest.fixture(scope="module")
def site(lacking, tmp_path_factory):
    """Build the site; return its folder."""
    if not all(map(importlib.util.find_spec, ("material", "mkdocstrings"))):
        lacking("mkdocs", "no module named material or mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder],
        cwd=TOP,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    """Serve the site; return its address."""
    handler = functools.partial(QuietHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_site_has_an_entry_for_every_public_name(site):
    # An inventory of Sphinx: four lines, then compressed ones that begin with a name.
    *_, packed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    entries = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}
    names = set().union(*map(public_names, API))
    assert "hpctrain.Session" in names
    assert names - entries == set()
    # What a class has is there, too, also by its base classes.
    assert {"hpctrain.Session.prepare", "hpctrain.Session.all_reduce"} <= entries


@pytest.mark.slow
def test_site_search_index_has_the_text_of_pages(site):
    documents = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    text = {document["location"]: document["text"] for document in documents}
    assert set(HTML) <= set(text)
    assert "ranks" in text["reference/command-line.html#hpctrain-run"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_site_pages_fit_the_window_and_ask_no_other_host(width, browser, address):
    wide = {}
    for page in HTML:
        browser.goto(address + page, width)
        browser.page.wait_for_load_state("networkidle")
        assert browser.messages == [], page
        assert all(request.startswith(address) for request in browser.requests), page
        wide[page] = browser.overflow()
    assert {page for page, pixels in wide.items() if pixels > 0} == set()


@pytest.mark.slow
def test_site_search_finds_a_page(browser, address):
    browser.goto(address)
    browser.page.locator("[data-md-component=search-query]").fill("preemption")
    browser.page.locator(".md-search-result__link[href*='preemption.html']").first.click()
    browser.page.wait_for_url(re.compile(r"preemption\.html"))
