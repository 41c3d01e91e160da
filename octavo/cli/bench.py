"""`octavo bench`: what can be measured, a sub-command each; what it does is imported when one runs."""

from __future__ import annotations

from typing import Annotated

import typer

bench = typer.Typer(no_args_is_help=True, help="Measure what goes on in memory, and how fast.")


@bench.callback()
def keep_sub_commands() -> None:
    pass


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
