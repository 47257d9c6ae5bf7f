"""Make the pictures of the README from a real run: its terminal, and its report.

Needs what the tests of reports need: playwright and chromium-headless-shell.
"""

import fcntl
import io
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(TOP / "tests" / "support"))

IMAGES = TOP / "docs" / "images"
COMMAND = "hpctrain run --nproc-per-node 2 examples/mnist.py --lr 0.003 --epochs 5"
COLUMNS, LINES = 120, 40
WIDTH = 1280  # of the report, in pixels; it ends below the first figures
# In rich's pictures: fonts of another server, and a frame that nobody sees on a white page.
_FONTS = re.compile(r"@font-face \{\{.*?\}\}\n?", re.DOTALL)
_FRAME = 'stroke="rgba(255,255,255,0.35)"'


def run_in_terminal(command: str, folder: Path) -> str:
    """Return what a command writes to a terminal, without the names of folder and host.

    Args:
        command: to run, in words without quotes.
        folder: to run it in.

    Raises:
        RuntimeError: the command has failed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen(
        command.split(),
        cwd=folder,
        env={**os.environ, **env, "PATH": path},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # all processes have closed it
        pass
    os.close(ours)
    if process.wait():
        raise RuntimeError(written.decode(errors="replace"))
    text = written.decode().replace("\r\n", "\n").replace(f"{folder}/", "")
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "laptop", text)


def draw_terminal(command: str, written: str) -> None:
    """Write what a terminal shows as pictures, light and dark.

    Args:
        command: as it was typed.
        written: what it has written.
    """
    from rich.console import CONSOLE_SVG_FORMAT, Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI
    from rich.text import Text

    shown = Text.from_ansi(f"$ {command}\n{written}")
    for scheme, theme in (("light", DEFAULT_TERMINAL_THEME), ("dark", MONOKAI)):
        console = Console(record=True, width=COLUMNS, file=io.StringIO())
        console.print(shown)
        picture = console.export_svg(
            title="hpctrain",
            theme=theme,
            code_format=_FONTS.sub("", CONSOLE_SVG_FORMAT),
            unique_id="terminal",
        )
        picture = picture.replace(_FRAME, 'stroke="gray"')
        (IMAGES / f"terminal-{scheme}.svg").write_text(picture)


def draw_report(page: Path) -> None:
    """Write the top of a report as pictures, light and dark.

    Args:
        page: HTML file of the report.
    """
    from browser import browser
    from PIL import Image

    with browser() as chromium:
        for scheme in ("light", "dark"):
            shown = chromium.open(page, width=WIDTH, scheme=scheme)
            figure = shown.locator("figure").first.bounding_box()
            height = figure["y"] + figure["height"] + 16
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": height}
            png = shown.screenshot(clip=clip, full_page=True)
            image = Image.open(io.BytesIO(png)).convert("RGB").quantize(128)
            image.save(IMAGES / f"report-{scheme}.png", optimize=True)


def main() -> None:
    """Train in an empty folder, and draw."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").symlink_to(TOP / "examples")
        draw_terminal(COMMAND, run_in_terminal(COMMAND, folder))
        (run,) = (folder / "runs").iterdir()
        run_in_terminal(f"hpctrain report runs/{run.name}", folder)
        draw_report(run / "report.html")


if __name__ == "__main__":
    main()
