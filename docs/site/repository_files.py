"""Hook of mkdocs: pages of files outside of docs/ to which a page links, and the links to them."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

TOP = Path(__file__).resolve().parents[2]
FOLDER = "repository"
# A fence with more backticks than any file has in a row.
FENCE = "`" * 6
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json", ".ipynb": "json"}
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
NAMED = re.compile(r"\[[\w/-]+\.md\]\(([\w/.-]+\.md)")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each linked file, and for the files to which these link."""
    pages = [
        (f"docs/{file.src_uri}", Path(file.abs_src_path).read_text())
        for file in files.documentation_pages()
        if file.abs_src_path
    ]
    while pages:
        source, text = pages.pop()
        for path in sorted({joined(source, link) for link in LINK.findall(text)}):
            page = page_of(path)
            if page is None or page in files.src_uris:
                continue
            content = read(path)
            files.append(
                File.generated(config, page, content=content, inclusion=InclusionLevel.NOT_IN_NAV)
            )
            pages.append((page.removeprefix(f"{FOLDER}/"), content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to their pages, named by their titles."""
    here = page.file.src_uri
    inside = here.startswith(f"{FOLDER}/")
    source = here.removeprefix(f"{FOLDER}/") if inside else f"docs/{here}"

    def target(link: re.Match[str]) -> str:
        path = joined(source, link[1])
        uri = page_of(path) or (path.removeprefix("docs/") if inside else "")
        return posixpath.relpath(uri, posixpath.dirname(here) or ".") if uri else link[1]

    def titled(link: re.Match[str]) -> str:
        path = TOP / joined(source, link[1])
        title = TITLE.search(path.read_text()) if path.is_file() else None
        return f"[{title[1]}]({link[1]}" if title else link[0]

    return LINK.sub(target, NAMED.sub(titled, markdown))


def joined(source: str, link: str) -> str:
    """Return the path of a link's target in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def page_of(path: str) -> str | None:
    """Return the page that shows a file or folder; None for pages of docs/, and what is no file."""
    place = TOP / path
    if (
        path.startswith("..")
        or not place.exists()
        or (path.startswith("docs/") and path.endswith(".md"))
    ):
        return None
    return f"{FOLDER}/{path}" + (
        "" if path.endswith(".md") else "/index.md" if place.is_dir() else ".md"
    )


def read(path: str) -> str:
    """Return the Markdown of a file's or folder's page."""
    place = TOP / path
    if path.endswith(".md"):
        return place.read_text()
    if place.is_dir():
        names = sorted(item.name for item in place.iterdir() if item.is_file())
        return "\n".join([f"# {path}", "", *(f"- [{name}]({name})" for name in names)])
    return (
        f"# {path}\n\n{FENCE}{LANGUAGES.get(place.suffix, 'text')}\n{place.read_text()}\n{FENCE}\n"
    )
