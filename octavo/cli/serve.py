"""`octavo serve`: the server, as the command line starts it."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from octavo.config import EngineConfig

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.server.app import ServerOptions


def run(model: str, revision: str | None, config: EngineConfig, options: ServerOptions, host: str, port: int, drain_seconds: float) -> None:
    """Find the model first, so that a wrong name is told at once; then serve until a signal comes."""
    from octavo.cli.terminal import progress_bar
    from octavo.loading import hub
    from octavo.server.run import serve

    path = hub.resolve(model, revision)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if options.json_log else "%(asctime)s %(message)s"))
    for name in ("octavo", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger("octavo").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

    with contextlib.ExitStack() as stack:
        show = stack.enter_context(progress_bar("Loading model"))

        def make() -> LLM:
            from octavo import LLM

            llm = LLM(path, config=config, on_tensor=show)
            llm.engine.grammars.prepare()
            return llm

        def started(llm: LLM, url: str) -> None:
            stack.close()
            typer.echo(f"{model}: {llm.capacity}", err=True)
            typer.echo(f"{', '.join(options.names)} at {url}/v1; what it does: {url}/metrics, {url}/stats", err=True)

        serve(make, options, host=host, port=port, drain_seconds=drain_seconds, started=started)


def default_name(model: str) -> str:
    """What a model is called in the API: as it was asked for, or of a file or folder its name."""
    path = Path(model)
    return path.name.removesuffix(".gguf") if path.exists() else model
