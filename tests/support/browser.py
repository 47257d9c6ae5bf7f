"""A real browser that opens a file, and records messages and requests of the page."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXECUTABLE = "chromium-headless-shell"

_OVERFLOW = """() => document.documentElement.scrollWidth - document.documentElement.clientWidth"""
_UNDECODED = """() => [...document.images].filter(image => !image.complete || !image.naturalWidth)
    .map(image => image.alt)"""


def why_not() -> str:
    """Return how to install a missing part of the browser; "" if all are installed."""
    if not shutil.which(EXECUTABLE):
        return f"apt-get install {EXECUTABLE}"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "pip install playwright"
    return ""


class Browser:
    """Chromium without a window.

    Args:
        driver: of playwright.

    Attributes:
        messages: errors and warnings of the page's console, and errors of its scripts.
        requests: the addresses requested since the last `open`, without data: ones.
        page: of playwright.
    """

    def __init__(self, driver: Any) -> None:
        # A sandbox does not work for root.
        self._chromium = driver.chromium.launch(
            executable_path=shutil.which(EXECUTABLE), args=["--no-sandbox"]
        )
        self.page = self._chromium.new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", self._dialog)
        self.page.on("request", self._request)

    def _dialog(self, dialog: Any) -> None:
        self.messages.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Any) -> None:
        if not request.url.startswith("data:"):
            self.requests.append(request.url)

    def open(
        self, path: Path, width: int = 1280, scheme: str = "light", media: str = "screen"
    ) -> Any:
        """Open a file; return the page.

        Args:
            path: of an HTML file.
            width: of the window, in pixels.
            scheme: light or dark, the preference of the user.
            media: screen or print.
        """
        self.page.emulate_media(media=media, color_scheme=scheme)
        self.goto(path.resolve().as_uri(), width)
        return self.page

    def goto(self, address: str, width: int = 1280) -> None:
        """Open an address.

        Args:
            address: of a page.
            width: of the window, in pixels.
        """
        self.requests.clear()
        self.messages.clear()
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.goto(address)

    def overflow(self) -> int:
        """Return the pixels by which the page is wider than its window."""
        return self.page.evaluate(_OVERFLOW)

    def undecoded(self) -> list[str]:
        """Return the alternative texts of images that are not shown."""
        return self.page.evaluate(_UNDECODED)

    def close(self) -> None:
        """Close the browser."""
        self._chromium.close()


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser for as long as the block lasts."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        one = Browser(driver)
        try:
            yield one
        finally:
            one.close()
