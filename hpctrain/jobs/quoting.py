"""Quoting of text for a line of bash and for a line of #SBATCH. Pure."""

import re
import shlex

__all__ = ["PLAIN", "directive", "quote"]

#: A value that every parser of directives takes as it is.
PLAIN = re.compile(r"[\w@%+=:,./-]+\Z", re.ASCII)
_ESCAPES = {"\\": r"\\", "'": r"\'", "\n": r"\n", "\r": r"\r", "\t": r"\t"}


def quote(text: str) -> str:
    r"""Return one word of bash that stands for any text; on one line, readable.

    Control characters and bytes that are not UTF-8 (as `os.fsdecode` returns them) are written as
    $'\n' or $'\377', as sbatch refuses a script with \r, and a new line might begin with #SBATCH.

    Source: QUOTING of bash(1).
    """
    if all(character.isprintable() for character in text):
        return shlex.quote(text)
    return "$'" + "".join(_escaped(character) for character in text) + "'"


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    # In octal, which has at most three digits; \x might also take the next characters.
    return "".join(f"\\{byte:03o}" for byte in character.encode(errors="surrogateescape"))


def directive(name: str, value: str | None) -> str:
    r"""Return one #SBATCH line; None is for an option without a value.

    sbatch's parser is not a shell: a backslash quotes the next character, also inside of quotes,
    and white space and # end a value.

    Source: src/sbatch/opt.c of Slurm 22.05, `_get_argument`.

    Raises:
        ValueError: the value would end the line, or has characters that are not printable.
    """
    if value is None:
        return f"#SBATCH --{name}"
    if not all(character.isprintable() for character in value):
        raise ValueError(f"{name} = {value!r}", "one line of printable characters")
    if PLAIN.match(value):
        return f"#SBATCH --{name}={value}"
    quoted = re.sub(r'(["\\])', r"\\\1", value)
    return f'#SBATCH --{name}="{quoted}"'
