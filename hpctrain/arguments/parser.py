"""Parser of `hpctrain.options()`, which marks the options that are hpctrain's."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from hpctrain.cluster.texts import option_meant
from hpctrain.errors import UsageError

__all__ = ["Namespace", "Parser", "marked"]


class Namespace(argparse.Namespace):
    """Command line that a parser of `hpctrain.options()` has parsed.

    It also knows which of its values are options of hpctrain. A slot has their names, so copies and
    pickles keep them, and `vars()` shows only the values.
    """

    __slots__ = ("hpctrain_names_",)
    hpctrain_names_: frozenset[str]


def marked(given: argparse.Namespace) -> frozenset[str] | None:
    """Return the names of hpctrain's options in a parsed command line.

    None if no parser of `hpctrain.options()` has made it: then all values are the script's.
    """
    return getattr(given, "hpctrain_names_", None) if isinstance(given, Namespace) else None


class Parser(argparse.ArgumentParser):
    """Parser that keeps hpctrain's options and those of the script apart.

    An argument that the script adds belongs to the script. If it stores its value under the name of
    an option of hpctrain, it replaces this option.

    Attributes:
        only_keywords: names of the options that are keywords of a Session alone.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._training: list[argparse.Action] = []
        self.only_keywords: list[str] = []
        super().__init__(*arguments, **keywords)

    def add_training_option(
        self, add: Callable[..., argparse.Action], *flags: str, **keywords: Any
    ) -> None:
        """Add an option of hpctrain, unless a parent parser has replaced it.

        Args:
            add: `add_argument` of this parser or of one of its groups.
            flags, keywords: as for `add_argument`.
        """
        taken = [flag for flag in flags if flag in self._option_string_actions]
        if not taken:
            self._training.append(add(*flags, **keywords))
        elif self.conflict_handler != "resolve":
            self._refuse_second(taken[0])

    def add_argument(self, *flags: Any, **keywords: Any) -> argparse.Action:
        """Add an option; if it exists already, exit with a message that explains what to do."""
        try:
            return super().add_argument(*flags, **keywords)
        except argparse.ArgumentError:
            self._refuse_second(next(flag for flag in flags if flag in self._option_string_actions))

    def _refuse_second(self, flag: str) -> NoReturn:
        name = self._option_string_actions[flag].dest
        self._exit_with(UsageError("HT502.duplicate-option", flag=flag, name=name))

    def _refuse_default(self, name: str, value: Any) -> NoReturn:
        self._exit_with(UsageError("HT501.keyword-default", name=name, value=value))

    def _exit_with(self, error: UsageError) -> NoReturn:
        self.exit(error.exit_code, f"hpctrain: error: {error}\n")

    def error(self, message: str) -> NoReturn:
        """Exit with code 2; among several ranks, the first one alone prints the message."""
        from hpctrain.rendezvous import shared_errors  # seldom needed

        error = self.refusal(message)
        shared_errors.report(error, sys.stderr)
        self.exit(error.exit_code)

    def refusal(self, message: str) -> UsageError:
        """Return the error for a wrong command line."""
        meant = option_meant(message, self._option_string_actions)
        if meant:
            return UsageError(
                "HT523.misspelled-option", message=message, option=meant, prog=self.prog
            )
        return UsageError("HT523.wrong-option", message=message, prog=self.prog)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and mark the values that are hpctrain's; `parse_args` calls this method.

        A plain `argparse.Namespace` gets the values, and the marked one that is returned shares
        them. An object of another class cannot be marked.
        """
        return self._marked(super().parse_known_args, args, namespace)

    def parse_known_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse in the same way, with options between positional arguments."""
        return self._marked(super().parse_known_intermixed_args, args, namespace)

    def _marked(
        self,
        parse: Callable[..., tuple[argparse.Namespace, list[str]]],
        args: Sequence[str] | None,
        namespace: argparse.Namespace | None,
    ) -> tuple[argparse.Namespace, list[str]]:
        names, own = self._withdraw_replaced(), {action.dest for action in _all_actions(self)}
        for name in self.only_keywords:
            if name not in own and self.get_default(name) is not None:
                self._refuse_default(name, self.get_default(name))
        if namespace is None or type(namespace) is argparse.Namespace:
            shared = Namespace()
            shared.__dict__ = {} if namespace is None else vars(namespace)
            namespace = shared
        result, rest = parse(args, namespace)
        if isinstance(result, Namespace):
            result.hpctrain_names_ = names
        return result, rest

    def _withdraw_replaced(self) -> frozenset[str]:
        """Remove what is left of replaced options; return the names of the others."""
        replaced = {action.dest for action in _all_actions(self) if action not in self._training}
        for action in [one for one in self._training if one.dest in replaced]:
            self._training.remove(action)
            for flag in action.option_strings:
                self._option_string_actions.pop(flag, None)
            if action in self._actions:
                action.container._remove_action(action)  # type: ignore[attr-defined]
        return frozenset(action.dest for action in self._training)


def _all_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its subparsers."""
    for action in parser._actions:
        yield action
        if isinstance(action.choices, dict):
            for child in action.choices.values():
                if isinstance(child, argparse.ArgumentParser):
                    yield from _all_actions(child)
