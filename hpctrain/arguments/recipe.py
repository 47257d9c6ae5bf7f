"""Recipes: files with values of options, which the command line completes and overrides."""

import argparse
import sys
import tomllib
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from hpctrain.cluster.texts import nearest, option_meant
from hpctrain.errors import UsageError

__all__ = ["Parser"]

# Free text, unless the script has an option of that name.
_ABOUT = "about"
_NOT_IN_A_FILE = {"recipe", "help", "local_rank"}
# argparse's class of an option that stores its value, which has no public name.
_STORE = type(argparse.ArgumentParser().add_argument("--option"))


class Parser(argparse.ArgumentParser):
    """Parser with `--recipe FILE`, whose values are defaults for the rest of the command line.

    The file is TOML. Its keys are option names as in the namespace (`global_batch`), including
    options that the script has added. A value is what could be typed, a switch is true or false,
    and an option with several values has a list. `about` is free text. Options that add up over a
    command line (append, extend, count), and those that store a constant (store_const), work on
    the command line only. An error in the file ends the process with exit code 2, like an error on
    the command line.

    Attributes:
        only_with_recipe: names in the namespace of the training options that this parser lacks, by
            option.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.only_with_recipe: dict[str, str] = {}
        super().__init__(*arguments, **keywords)

    def add_argument(self, *flags: Any, **keywords: Any) -> argparse.Action:
        """Add an option; if it exists already, exit with a message that explains what to do."""
        try:
            return super().add_argument(*flags, **keywords)
        except argparse.ArgumentError:
            existing = next(flag for flag in flags if flag in self._option_string_actions)
            error = UsageError(
                "HT502",
                f"parser.add_argument({existing!r}), but hpctrain.options() has this option",
                "each option once",
                "leave your option out",
                f"parser.set_defaults({self._option_string_actions[existing].dest}=…) "
                "for another default",
            )
            self.exit(error.exit_code, f"hpctrain: error: {error}\n")

    def error(self, message: str) -> NoReturn:
        """Exit with code 2; among several ranks, the first one alone prints the message."""
        from hpctrain.rendezvous import shared_errors  # seldom needed

        error = self.refusal(message)
        shared_errors.report(error, sys.stderr)
        self.exit(error.exit_code)

    def refusal(self, message: str) -> UsageError:
        """Return the error for a wrong command line or recipe."""
        known = self._option_string_actions
        meant = option_meant(message, [*known, *self.only_with_recipe])
        return UsageError(
            "HT523",
            message + self._suggest(meant, known),
            "",
            f"{self.prog} --help (lists all options)",
        )

    def _suggest(self, meant: str, known: Collection[str]) -> str:
        """Return the end of a message about an unknown option."""
        if meant and meant not in known:
            return f"; hpctrain.options(recipe=True) has {meant}"
        return f"; did you mean {meant}?" if meant else ""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse with the values of the recipe as defaults, then restore the defaults.

        `parse_args` calls this method.
        """
        path = self.recipe_of(args)
        before = [(action, action.default, action.required) for action in self._actions]
        try:
            if path is not None:
                self._load_defaults(path)
            result: tuple[argparse.Namespace, list[str]] = super().parse_known_args(args, namespace)
            return result
        finally:
            for action, default, required in before:
                action.default, action.required = default, required

    def recipe_of(self, args: Sequence[str] | None) -> str | None:
        """Return the path of the recipe in a command line; None without one.

        The full parser reports a `--recipe` without a path.
        """
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--recipe", nargs="?")
        path: str | None = finder.parse_known_args(args)[0].recipe
        return path

    def _load_defaults(self, path: str) -> None:
        """Use the values of a file as defaults."""
        try:
            with open(path, "rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            self.error(f"--recipe {path}: {error.strerror or error}")
        # Also for text that is not UTF-8, integers with too many digits, and lists too deep.
        except (ValueError, RecursionError) as error:
            self.error(f"--recipe {path}: no TOML file: {error}")
        actions: dict[str, list[argparse.Action]] = {}
        for action in self._actions:
            if action.option_strings and action.dest not in _NOT_IN_A_FILE:
                actions.setdefault(action.dest, []).append(action)
        for name, value in values.items():
            if name in actions:
                try:
                    default = self._value(_accepting_option(actions[name], value), value)
                except argparse.ArgumentError as error:
                    self.error(f"--recipe {path}: {name}: {error.message}")
                for action in actions[name]:  # argparse uses the default of the first
                    action.default, action.required = default, False
            elif name != _ABOUT:
                self.refuse_unknown(path, name, actions)

    def refuse_unknown(self, path: str, name: str, known: Collection[str]) -> None:
        """Refuse a name in a recipe that is no option."""
        near = nearest(name, [*known, *self.only_with_recipe.values()])
        hint = self._suggest(near, known)
        self.error(f"--recipe {path}: {name} is no option of {self.prog}{hint}")

    def _value(self, action: argparse.Action, value: Any) -> Any:
        """Return the default that gives an option the same result as the command line would.

        Raises:
            argparse.ArgumentError: the command line does not accept the value.
        """
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise argparse.ArgumentError(action, f"{value!r} is not true or false")
            return value
        several = isinstance(value, list)
        texts = [_text(action, item) for item in (value if several else [value])]
        if several != (action.nargs not in (None, argparse.OPTIONAL)):
            expected = "a single value" if several else "a list"
            raise argparse.ArgumentError(action, f"{value!r} is not {expected}")
        if self._match_argument(action, "A" * len(texts)) < len(texts):
            raise argparse.ArgumentError(action, f"{value!r} is too long")
        converted = self._get_values(action, texts)
        # argparse converts default texts.
        return texts[0] if isinstance(converted, str) else converted


def _accepting_option(actions: list[argparse.Action], value: Any) -> argparse.Action:
    """Return the option that accepts the value, among options with the same name.

    Raises:
        argparse.ArgumentError: none of them works in a file.
    """
    accepting = [action for action in actions if _is_switch(action) or isinstance(action, _STORE)]
    if not accepting:
        options = "/".join(option for action in actions for option in action.option_strings)
        raise argparse.ArgumentError(actions[0], f"{options} is for the command line alone")
    switch = isinstance(value, bool)
    return next((action for action in accepting if (action.nargs == 0) == switch), accepting[0])


def _is_switch(action: argparse.Action) -> bool:
    return isinstance(action, argparse.BooleanOptionalAction) or isinstance(action.const, bool)


def _text(action: argparse.Action, value: Any) -> str:
    """Return a value of a file as it would be typed."""
    if isinstance(value, (bool, dict, list)):
        raise argparse.ArgumentError(action, f"{value!r} is not a number or text")
    return str(value)
