"""The Chinese pages have the sections and the commands of the English ones."""

import re

import launches
import pages
import pytest
import readme

PAGES = {
    "README.md": "README.zh-CN.md",
    "docs/start.md": "docs/zh/start.md",
    "docs/migrate.md": "docs/zh/migrate.md",
}


def levels(text):
    """Return the levels of the headings, in their order."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]


def typed(text):
    """Return the commands outside of code blocks, for each section."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    sections = re.split(r"^#+ ", text, flags=re.MULTILINE)
    return [
        {
            line
            for line in re.findall(r"`([^`]+)`", section)
            if " " in line and line.removeprefix("exec ").split()[0] in readme.PROGRAMS
        }
        for section in sections
    ]


@pytest.mark.parametrize("page", PAGES)
def test_translated_page_has_the_sections_and_commands_of_the_english_one(page):
    english, translated = ((launches.TOP / name).read_text() for name in (page, PAGES[page]))
    assert levels(translated) == levels(english)
    assert pages.commands_of(PAGES[page]) == pages.commands_of(page)
    assert typed(translated) == typed(english)


def test_translated_code_is_that_of_the_english_page():
    seen = 0
    for page, name in PAGES.items():
        english, translated = (
            re.findall(r"^```(?:python|diff)\n.*?^```", text, re.MULTILINE | re.DOTALL)
            for text in ((launches.TOP / one).read_text() for one in (page, name))
        )
        seen += len(translated)
        assert set(translated) <= set(english), name
    assert seen
