"""Flags made of declarations: every engine setting, and what the sampler takes, written once for all commands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_type_hints

import typer

from octavo.config import EngineConfig, parse_flag, settings
from octavo.sampling_params import SamplingParams

SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "generated tokens at most"),
    "temperature": (float, "0 takes the likeliest token; above, it divides the logits before drawing"),
    "top_k": (int, "draw among the k likeliest tokens; 0 is no limit"),
    "top_p": (float, "draw among the likeliest tokens whose probability reaches this"),
    "min_p": (float, "drop tokens less likely than this times the likeliest"),
    "ignore_eos": (bool, "go on past the model's own end of text"),
    "stop_token_ids": (list[int], "a further token id that ends the output; repeatable"),
    "n": (int, "answers to each prompt, which share its memory"),
    "prompt_logprobs": (int, "score each token of the prompt, and name so many of the likeliest; with --json"),
    "priority": (int, "with --policy priority lower goes first"),
    "cache_salt": (str, "prefixes are shared only among prompts of the same salt"),
}
SHARED = ("seed", "timeout_ms")
"""Settings that a request has too: their flag sets both."""


def with_flags(*, leave_out: Sequence[str] = (), **sampling_defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command flags in place of its parameters of type EngineConfig and SamplingParams.

    The command receives both validated; `sampling_defaults` are this command's own, and it has no flags for what it is to `leave_out`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = {name: parameter.replace(annotation=hints[name]) for name, parameter in inspect.signature(command).parameters.items()}
        built = {name: parameter.annotation for name, parameter in own.items() if parameter.annotation in (EngineConfig, SamplingParams)}
        flags = {name: parameter for name, parameter in own.items() if name not in built}
        if SamplingParams in built.values():
            flags |= _sampling_flags(sampling_defaults, leave_out)
        if EngineConfig in built.values():
            flags |= _engine_flags()

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {name: value for name, value in values.items() if value not in (None, [])}
            configured = {f.name: parse_flag(f.name, _as_text(given[f.name])) for _, f in settings() if f.name in given}
            sampled = {name: given[name] for name in SAMPLING if name in given} | {n: configured[n] for n in SHARED if n in configured}
            arguments = {name: values[name] for name in own if name not in built}
            for name, kind in built.items():
                if kind is EngineConfig:
                    arguments[name] = EngineConfig.create(values["config_file"], **configured)
                else:
                    arguments[name] = SamplingParams.create(**sampling_defaults | sampled)
            command(**arguments)

        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in flags.values()]
        )
        run.__annotations__ = {name: parameter.annotation for name, parameter in flags.items()}
        return run

    return decorate


def _engine_flags() -> dict[str, inspect.Parameter]:
    flags = [_flag("config_file", str, "YAML file of settings; flags win over it", "--config", "Engine")]
    for _, f in settings():
        option = "--" + f.name.replace("_", "-")
        kind = bool if isinstance(f.default, bool) else str
        about = f"{f.metadata['help']} ({f.metadata['kind'].allowed}; default {_as_text(f.default)})"
        flags.append(_flag(f.name, kind, about, f"{option}/--no-{option[2:]}" if kind is bool else option, "Engine"))
    return {flag.name: flag for flag in flags}


def _sampling_flags(defaults: dict[str, Any], leave_out: Sequence[str]) -> dict[str, inspect.Parameter]:
    usual = SamplingParams.create(**defaults)
    flags = {}
    for name, (kind, about) in SAMPLING.items():
        if name not in leave_out:
            default = getattr(usual, name)
            shown = about if kind in (bool, list[int]) or default is None else f"{about} (default {default:g})"
            option = "--" + name.replace("_", "-").removesuffix("s" if kind == list[int] else "")
            flags[name] = _flag(name, kind, shown, option, "Sampling")
    return flags


def _flag(name: str, kind: Any, about: str, option: str, panel: str) -> inspect.Parameter:
    metavar = None if kind is bool else "VALUE"
    annotation = Annotated[kind | None, typer.Option(option, help=about, metavar=metavar, rich_help_panel=panel)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _as_text(value: Any) -> str:
    """A value as the configuration file spells it."""
    return {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else str(value)
