"""The commands and what they take; what they do is imported when one runs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from octavo.cli.bench import bench
from octavo.cli.flags import Sampling, with_flags
from octavo.cli.terminal import open_llm, show_error
from octavo.config import EngineConfig
from octavo.errors import InvalidValueError, OctavoError


class Commands(TyperGroup):
    """All commands end alike: a mendable error in one line with exit code 2, Ctrl-C with 130, anything else with its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OctavoError as error:
            show_error(error)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="an alias, a hub id (org/name), a folder or a .gguf file")]
ModelOption = Annotated[str, typer.Option("--model", metavar="MODEL", help="an alias, a hub id (org/name), a folder or a .gguf file")]
RevisionOption = Annotated[str | None, typer.Option("--revision", metavar="NAME", help="branch, tag or commit of a hub id")]
SystemOption = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="system message; implies --chat where there is one")]

DEFAULT_MODEL = "smollm2-135m"


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"octavo {version('octavo')}")
        raise typer.Exit


def _is_terminal() -> bool:
    return sys.stdin.isatty()


@app.callback()
def octavo(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Octavo, an LLM inference engine built on PagedAttention."""


@app.command()
def pull(model: ModelArgument, revision: RevisionOption = None) -> None:
    """Fetch a model's weights, check them, and print where they are."""
    from octavo.loading import hub, open_checkpoint

    if alias := hub.ALIASES.get(model):
        print(f"{alias.about}; licence: {alias.licence}", file=sys.stderr)
    path = hub.pull(model, revision)
    if model not in hub.ALIASES:  # those are checked by their sum
        open_checkpoint(path).close()
    print(path)


@app.command("list")
def list_models() -> None:
    """List the models known by name and those in the caches."""
    from rich.filesize import decimal

    from octavo.loading import hub

    for model in hub.list_models():
        place = str(model.path) if model.present else f"not fetched; octavo pull {model.name}"
        print(f"{model.name:<32} {decimal(model.bytes):>9}  {place}" + (f"  ({model.about})" if model.about else ""))


@app.command("models")
def show_models(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List the types of model that run, natively or through transformers, and the models known by name."""
    from octavo.cli.models import run

    run(json)


@app.command()
def rm(
    model: ModelArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a model from the caches."""
    from rich.filesize import decimal

    from octavo.loading import hub

    if not yes and not _is_terminal():
        raise InvalidValueError(f"rm {model}: nobody to ask here; --yes deletes without asking")
    if not yes and not typer.confirm(f"Delete {model} from the cache?"):
        raise typer.Exit(1)
    print(f"{model}: {decimal(hub.remove(model))} freed")


@app.command()
@with_flags(max_tokens=128)
def generate(
    config: EngineConfig,
    sampling: Sampling,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="one prompt is streamed, several run together")] = None,
    file: Annotated[
        str | None, typer.Option("--file", metavar="FILE", help="prompts, one a line; .jsonl with prompt or messages; - is stdin")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt as a user message in the model's chat template.")] = False,
    system: SystemOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each prompt, and nothing else.")] = False,
    save_stats: Annotated[
        str | None, typer.Option("--save-stats", metavar="FILE", help="write the engine's figures there, for octavo advise")
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    revision: RevisionOption = None,
) -> None:
    """Complete prompts. Answers go to stdout, a line of figures to stderr."""
    from octavo.cli.generate import read_prompts, run

    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling.given and not json:
            raise InvalidValueError(f"--{name.replace('_', '-')}: they are printed as JSON only; give --json too")
    if save_stats is not None:
        from octavo.cli.advise import check_target

        check_target(save_stats)
    wanted = read_prompts(prompts or [], file)
    with open_llm(model, revision, config) as llm:
        run(llm, wanted, sampling.params(llm.recommended), chat, system, json, save_stats)


@app.command()
@with_flags(max_tokens=256, leave_out=("n", "logprobs", "prompt_logprobs", "priority", "cache_salt"))
def chat(
    config: EngineConfig,
    sampling: Sampling,
    system: SystemOption = None,
    model: ModelOption = DEFAULT_MODEL,
    revision: RevisionOption = None,
) -> None:
    """Talk to a model. /help lists what can be typed; Ctrl-C stops an answer, Ctrl-D leaves."""
    from octavo.cli.chat import run

    with open_llm(model, revision, config) as llm:
        run(llm, sampling.params(llm.recommended), system)


@app.command()
@with_flags()
def serve(
    config: EngineConfig,
    model_argument: Annotated[str | None, typer.Argument(metavar="MODEL", help="an alias, a hub id, a folder or a .gguf file")] = None,
    model: ModelOption = DEFAULT_MODEL,
    revision: RevisionOption = None,
    host: Annotated[str, typer.Option("--host", help="address to listen on; 0.0.0.0 is all of this machine's")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option("--served-model-name", metavar="NAME", help="what clients call the model; repeatable")
    ] = None,
    any_model_name: Annotated[bool, typer.Option("--any-model-name", help="Answer whatever model a client names.")] = False,
    api_key: Annotated[
        list[str] | None, typer.Option("--api-key", envvar="OCTAVO_API_KEY", metavar="KEY", help="refuse who has none of them; repeatable")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option("--cors-origin", metavar="URL", help="pages of this origin may call from a browser; * is all")
    ] = None,
    max_waiting: Annotated[int, typer.Option("--max-waiting", min=0, help="requests that may wait; beyond them 429; 0 is no limit")] = 1024,
    max_waiting_tokens: Annotated[
        int, typer.Option("--max-waiting-tokens", min=0, help="prompt tokens that may wait; beyond them 429; 0 is no limit")
    ] = 2_000_000,
    max_body_bytes: Annotated[int, typer.Option("--max-body-bytes", min=1024, help="largest body of a request")] = 16 << 20,
    request_seconds: Annotated[
        float, typer.Option("--request-seconds", min=0.1, help="within which a client must send its request")
    ] = 30.0,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", min=0, help="after SIGTERM or Ctrl-C, wait so long for what runs, then abort it")
    ] = 30.0,
    metrics_compat: Annotated[
        str | None, typer.Option("--metrics-compat", metavar="vllm", help="metrics also under the names of vLLM's")
    ] = None,
    json_log: Annotated[bool, typer.Option("--json-log", help="Log one JSON object a line.")] = False,
) -> None:
    """Serve a model over OpenAI's API."""
    from octavo.cli.serve import default_name, run
    from octavo.server.app import ServerOptions

    if metrics_compat not in (None, "vllm"):
        raise InvalidValueError(f"--metrics-compat: {metrics_compat!r}; allowed: vllm")
    chosen = model_argument or model
    options = ServerOptions(
        names=served_model_name or [default_name(chosen)],
        any_name=any_model_name,
        keys=[key for key in api_key or [] if key],
        origins=cors_origin or [],
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        max_body=max_body_bytes,
        patience=request_seconds,
        compat=metrics_compat == "vllm",
        json_log=json_log,
    )
    run(chosen, revision, config, options, host, port, drain_seconds)


@app.command()
def advise(
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="what generate --save-stats wrote; - or nothing is stdin")] = None,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="a server that runs, instead of a file")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="OCTAVO_API_KEY", metavar="KEY", help="the server's")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Advise on settings, from figures that were recorded, or a server's."""
    from octavo.cli.advise import run

    run(file, json, url, api_key)


@app.command("config")
@with_flags()
def show_config(
    config: EngineConfig,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Print the effective configuration; --config accepts it again."""
    if json:
        from json import dumps

        print(dumps(config.to_dict(), indent=2))
    else:
        import yaml

        print(yaml.safe_dump(config.to_dict(), sort_keys=False), end="")


app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the `octavo` command."""
    for stream in (sys.stdout, sys.stderr):
        # an answer may hold characters that an old terminal's encoding lacks
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app()
