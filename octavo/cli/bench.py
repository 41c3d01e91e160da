"""`octavo bench`: what can be measured, a sub-command each; what it does is imported when one runs."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli.flags import with_flags
from octavo.config import EngineConfig

bench = typer.Typer(no_args_is_help=True, help="Measure what goes on in memory, and how fast.")


Model = Annotated[str, typer.Argument(metavar="MODEL", help="an alias, a hub id (org/name), a folder or a .gguf file")]
Repeats = Annotated[int, typer.Option(metavar="N", help="runs of each, of which medians and spread are told")]
WarmUp = Annotated[bool, typer.Option(help="Run a little first that does not count.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="write all figures there; - prints them instead of tables")]
Out = Annotated[str | None, typer.Option(metavar="FILE", help="draw a picture there; its ending decides the format")]

DEFAULT_MODEL = "smollm2-135m"


@bench.command()
def memory(
    dataset: Annotated[str, typer.Option(metavar="NAME", help="the trace to replay; a wrong name lists them all")] = "azure-conv",
    data: Annotated[str | None, typer.Option(metavar="FOLDER", help="where the traces lie (else $OCTAVO_DATA, ../shared/data)")] = None,
    requests: Annotated[
        str | None, typer.Option(metavar="VALUE", help="how many of its requests, or all (default as many as take about a minute)")
    ] = None,
    kv_memory: Annotated[str, typer.Option(metavar="VALUE", help="KV memory, as in 512MiB")] = "4GiB",
    kv_bytes_per_token: Annotated[int | None, typer.Option(metavar="VALUE", help="KV memory of a token (default SmolLM2's)")] = None,
    context: Annotated[
        int | None, typer.Option(metavar="VALUE", help="tokens that the traditional way reserves (default what the longest request needs)")
    ] = None,
    max_batch_size: Annotated[int, typer.Option(metavar="VALUE", help="sequences in one step at most")] = 1024,
    prefill_chunk_size: Annotated[int, typer.Option(metavar="VALUE", help="prefill tokens in one step at most")] = 8192,
    block_size: Annotated[
        list[int] | None, typer.Option(metavar="VALUE", min=1, help="tokens a block holds; repeatable (default powers of two to 128)")
    ] = None,
    kernels: Annotated[bool, typer.Option(help="Time decode attention too.")] = True,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="draw a picture there; its ending decides the format")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """What becomes of KV memory under a recorded load: paged, and in the traditional ways."""
    from octavo.bench.memory import BLOCK_SIZES, SMOLLM2_BYTES_PER_TOKEN, run

    run(
        dataset=dataset,
        data=data,
        requests=requests,
        kv_memory=kv_memory,
        kv_bytes_per_token=SMOLLM2_BYTES_PER_TOKEN if kv_bytes_per_token is None else kv_bytes_per_token,
        context=context,
        max_batch_size=max_batch_size,
        prefill_chunk_size=prefill_chunk_size,
        block_sizes=block_size or BLOCK_SIZES,
        kernels=kernels,
        out=out,
        json=json,
    )


@bench.command()
@with_flags()
def throughput(
    config: EngineConfig,
    model: Model = DEFAULT_MODEL,
    dataset: Annotated[str, typer.Option(metavar="NAME", help="shared, or a trace as in bench memory; a wrong name lists them")] = "shared",
    data: Annotated[str | None, typer.Option(metavar="FOLDER", help="where the traces lie (else $OCTAVO_DATA, ../shared/data)")] = None,
    requests: Annotated[int, typer.Option(metavar="N", help="how many of its requests")] = 64,
    scale: Annotated[float, typer.Option(metavar="VALUE", help="divide all lengths by this")] = 1.0,
    repeats: Repeats = 3,
    warm_up: WarmUp = True,
    batching: Annotated[
        str, typer.Option(metavar="WAY", help="static (a group ends with its longest, then the next begins), continuous, or both")
    ] = "continuous",
    memory: Annotated[
        str, typer.Option(metavar="WAY", help="reserve (a whole context for each request), paged (blocks as needed), or both")
    ] = "paged",
    contexts: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="whole contexts that KV memory holds (default 4 where ways are compared); repeatable in a sweep"),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Compare the ways over sizes of KV memory and spreads of lengths; takes long.")
    ] = False,
    json: Json = None,
    out: Out = None,
) -> None:
    """Tokens a second with all requests at once; with --batching both --memory both, against the traditional ways.

    The rest of the engine's settings are flags too; a batch of 64 takes --max-batch-size 64.
    """
    from octavo.bench.throughput import run

    run(
        model,
        config,
        dataset=dataset,
        data=data,
        requests=requests,
        scale=scale,
        repeats=repeats,
        warm_up=warm_up,
        batching=batching,
        memory=memory,
        contexts=contexts or (),
        sweep=sweep,
        json=json,
        out=out,
    )


@bench.command()
@with_flags()
def latency(
    config: EngineConfig,
    model: Model = DEFAULT_MODEL,
    prompt_lengths: Annotated[str, typer.Option(metavar="N,N,...", help="prompts whose first token is timed")] = "128,512,2048",
    context_lengths: Annotated[str, typer.Option(metavar="N,N,...", help="contexts after which decoding is timed")] = "128,512,2048",
    output_tokens: Annotated[int, typer.Option(metavar="N", help="tokens generated after each context")] = 128,
    repeats: Repeats = 5,
    warm_up: WarmUp = True,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time of a decode step goes.")] = False,
    sequences: Annotated[int, typer.Option(metavar="N", help="profile a step of so many sequences, beside a step of one")] = 64,
    json: Json = None,
    out: Out = None,
) -> None:
    """Time to first token and decode speed of one request at a time, over lengths; empty lengths leave a part out."""
    from octavo.bench.latency import run

    run(
        model,
        config,
        prompt_lengths=prompt_lengths,
        context_lengths=context_lengths,
        output_tokens=output_tokens,
        repeats=repeats,
        warm_up=warm_up,
        profile=profile,
        sequences=sequences,
        json=json,
        out=out,
    )


@bench.command()
def serve(
    url: Annotated[str, typer.Option(metavar="URL", help="the server, of OpenAI's API")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(metavar="NAME", help="which model (default the first that the server lists)")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="OCTAVO_API_KEY", metavar="KEY", help="the server's")] = None,
    dataset: Annotated[str, typer.Option(metavar="NAME", help="shared, or a trace as in bench memory; a wrong name lists them")] = "shared",
    data: Annotated[str | None, typer.Option(metavar="FOLDER", help="where the traces lie (else $OCTAVO_DATA, ../shared/data)")] = None,
    requests: Annotated[int, typer.Option(metavar="N", help="how many of its requests")] = 64,
    scale: Annotated[float, typer.Option(metavar="VALUE", help="divide all lengths by this")] = 1.0,
    text: Annotated[bool, typer.Option("--text", help="Send words, about one a token, instead of token ids.")] = False,
    vocab_size: Annotated[int | None, typer.Option(metavar="N", help="token ids stay below this (default SmolLM2's vocabulary)")] = None,
    arrivals: Annotated[
        str | None, typer.Option(metavar="WAY", help="poisson or constant, at a rate (default poisson), or trace, as the data set has them")
    ] = None,
    rate: Annotated[list[float] | None, typer.Option(metavar="VALUE", help="requests a second; repeatable, a measurement each")] = None,
    time_stretch: Annotated[float | None, typer.Option(metavar="VALUE", help="multiply the times of a trace by this (default 1)")] = None,
    concurrency: Annotated[int | None, typer.Option(metavar="N", help="instead keep so many requests in flight")] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(metavar="VALUE", help="goodput: time to first token at most")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(metavar="VALUE", help="goodput: time per token after the first at most")] = None,
    slo_e2e_ms: Annotated[float | None, typer.Option(metavar="VALUE", help="goodput: time to the end of the answer at most")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="give a request up after this")] = 600.0,
    warmup: Annotated[int, typer.Option(metavar="N", help="short requests first that do not count")] = 1,
    seed: Annotated[int, typer.Option(metavar="N", help="of poisson arrivals")] = 0,
    json: Json = None,
    out: Out = None,
) -> None:
    """Latencies, throughput and goodput of a server under load, this one or another of OpenAI's API.

    One of --rate, --arrivals trace and --concurrency says when requests are sent.
    """
    from octavo.bench.serve import run

    run(
        url=url,
        model=model,
        api_key=api_key,
        dataset=dataset,
        data=data,
        requests=requests,
        scale=scale,
        text=text,
        vocab_size=vocab_size,
        arrivals=arrivals,
        rates=rate or (),
        time_stretch=time_stretch,
        concurrency=concurrency,
        slo_ttft_ms=slo_ttft_ms,
        slo_tpot_ms=slo_tpot_ms,
        slo_e2e_ms=slo_e2e_ms,
        timeout=timeout,
        warmup=warmup,
        seed=seed,
        json=json,
        out=out,
    )
