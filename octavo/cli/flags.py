"""Flags made of declarations: every engine setting, and what the sampler takes, written once for all commands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from octavo.config import EngineConfig, parse_flag, settings
from octavo.errors import InvalidValueError
from octavo.sampling_params import SamplingParams

SAMPLING: dict[str, tuple[Any, str]] = {
    "max_tokens": (int, "generated tokens at most"),
    "min_tokens": (int, "generated tokens before anything may end the output"),
    "temperature": (float, "0 takes the likeliest token; above, it divides the logits before drawing"),
    "top_k": (int, "draw among the k likeliest tokens; 0 is no limit"),
    "top_p": (float, "draw among the likeliest tokens whose probability reaches this"),
    "min_p": (float, "drop tokens less likely than this times the likeliest"),
    "presence_penalty": (float, "taken from the logit of every token generated so far"),
    "frequency_penalty": (float, "the same, once for each time it was generated"),
    "repetition_penalty": (float, "above 1 makes tokens of the prompt and the output less likely"),
    "stop": (list[str], "a text that ends the output and is not part of it; repeatable"),
    "stop_token_ids": (list[int], "a further token id that ends the output; repeatable"),
    "include_stop_str_in_output": (bool, "keep what ended the output"),
    "bad_words": (list[str], "a text that is kept out of the output; repeatable"),
    "ignore_eos": (bool, "go on past the model's own end of text"),
    "logit_bias": (list[str], "ID:NUMBER, added to that token's logit; repeatable"),
    "allowed_token_ids": (list[int], "a token id that may be drawn, where not all may; repeatable"),
    "logits_processors": (list[str], "module:function, called with prompt ids, output ids and logits; repeatable"),
    "n": (int, "answers to each prompt, which share its memory"),
    "logprobs": (int, "score each generated token, and name so many of the likeliest; with --json"),
    "prompt_logprobs": (int, "score each token of the prompt, and name so many of the likeliest; with --json"),
    "priority": (int, "with --policy priority lower goes first"),
    "cache_salt": (str, "prefixes are shared only among prompts of the same salt"),
}
STRUCTURED: dict[str, tuple[Any, str, str]] = {
    "json_schema": (str, "FILE", "the output is JSON that this schema admits"),
    "json_object": (bool, "", "the output is a JSON object"),
    "regex": (str, "TEXT", "the output matches this regular expression, from its first character to its last"),
    "choice": (list[str], "TEXT", "the output is one of these texts; repeatable"),
    "grammar": (str, "FILE", "the output is a sentence of this Lark grammar"),
}
SHARED = ("seed", "timeout_ms")
"""Settings that a request has too: their flag sets both."""


@dataclass(frozen=True)
class Sampling:
    """Parameters of the sampler as a command got them: its own defaults, and what was given."""

    defaults: dict[str, Any]
    given: dict[str, Any]

    def params(self, recommended: Mapping[str, Any] | None = None) -> SamplingParams:
        """With what the model recommends between the two."""
        return SamplingParams.create(**self.defaults | dict(recommended or {}) | self.given)


def with_flags(*, leave_out: Sequence[str] = (), **sampling_defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command flags in place of its parameters of type EngineConfig and Sampling.

    The command receives both validated; `sampling_defaults` are this command's own, and it has no flags for what it is to `leave_out`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = {name: parameter.replace(annotation=hints[name]) for name, parameter in inspect.signature(command).parameters.items()}
        built = {name: parameter.annotation for name, parameter in own.items() if parameter.annotation in (EngineConfig, Sampling)}
        flags = {name: parameter for name, parameter in own.items() if name not in built}
        if Sampling in built.values():
            flags |= _sampling_flags(sampling_defaults, leave_out)
        if EngineConfig in built.values():
            flags |= _engine_flags()

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {name: value for name, value in values.items() if value not in (None, [])}
            configured = {f.name: parse_flag(f.name, _as_text(given[f.name])) for _, f in settings() if f.name in given}
            sampled = {name: given[name] for name in SAMPLING if name in given} | {n: configured[n] for n in SHARED if n in configured}
            if "logit_bias" in sampled:
                sampled["logit_bias"] = _biases(sampled["logit_bias"])
            if structure := {name: given[name] for name in STRUCTURED if name in given}:
                sampled["structured_outputs"] = _structure(structure)
            arguments = {name: values[name] for name in own if name not in built}
            for name, kind in built.items():
                if kind is EngineConfig:
                    arguments[name] = EngineConfig.create(values["config_file"], **configured)
                else:
                    arguments[name] = Sampling(sampling_defaults, sampled)
                    arguments[name].params()  # what is wrong is told before a model is loaded
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
            shown = f"{about} (default {default:g})" if kind in (int, float) and default is not None else about
            option = "--" + name.replace("_", "-").removesuffix("s" if kind in (list[int], list[str]) else "")
            flags[name] = _flag(name, kind, shown, option, "Sampling")
    for name, (kind, metavar, about) in STRUCTURED.items():
        flags[name] = _flag(name, kind, about, "--" + name.replace("_", "-"), "Structured output", metavar)
    return flags


def _biases(pairs: list[str]) -> dict[str, Any]:
    """From ID:NUMBER; SamplingParams says what is wrong with either."""
    found: dict[str, Any] = {}
    for pair in pairs:
        token_id, _, bias = pair.partition(":")
        try:
            found[token_id] = float(bias)
        except ValueError:
            raise InvalidValueError(f"--logit-bias: {pair!r}; allowed: ID:NUMBER, as in 42:-5") from None
    return found


def _structure(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of StructuredOutputsParams, read from files where they are long."""
    structure = dict(given)
    for name, field in (("json_schema", "json"), ("grammar", "grammar")):
        if name in structure:
            structure[field] = _read(f"--{name.replace('_', '-')}", structure.pop(name))
    return structure


def _read(option: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidValueError(f"{option}: {file}: not a text in UTF-8") from None
    except OSError as error:
        raise InvalidValueError(f"{option}: {file}: cannot be read ({error.strerror})") from None


def _flag(name: str, kind: Any, about: str, option: str, panel: str, metavar: str = "VALUE") -> inspect.Parameter:
    annotation = Annotated[kind | None, typer.Option(option, help=about, metavar=None if kind is bool else metavar, rich_help_panel=panel)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _as_text(value: Any) -> str:
    """A value as the configuration file spells it."""
    return {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else str(value)
