"""What is served, and text to tokens and back."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.server import errors
from octavo.server.errors import ApiError
from octavo.server.protocol import MAX_ID, Detokenized, DetokenizeRequest, ModelCard, ModelList, Tokenized, TokenizeRequest
from octavo.server.routes.chat import templated
from octavo.server.serving import Serving

router = APIRouter()


def _card(serving: Serving, name: str) -> dict[str, Any]:
    longest = serving.engine.llm.capacity.longest
    return {"id": name, "object": "model", "created": serving.created, "owned_by": "octavo", "max_model_len": longest}


@router.get("/v1/models", response_model=ModelList, responses=errors.documented(503))
async def list_models(request: Request) -> Response:
    """The names that the model is served under."""
    serving: Serving = request.app.state.serving
    content = {"object": "list", "data": [_card(serving, name) for name in serving.names]}
    return Response(msgspec.json.encode(content), media_type="application/json")


@router.get("/v1/models/{model:path}", response_model=ModelCard, responses=errors.documented(404, 503))
async def retrieve_model(model: str, request: Request) -> Response:
    """One of them."""
    serving: Serving = request.app.state.serving
    return Response(msgspec.json.encode(_card(serving, serving.model_name(model))), media_type="application/json")


@router.post("/tokenize", response_model=Tokenized, response_model_exclude_none=True, responses=errors.documented(404, 503))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Tokens of a prompt, or of a conversation."""
    serving: Serving = request.app.state.serving
    serving.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: allowed: either it or messages", param="prompt")
    engine = serving.engine.llm.engine

    def encode() -> bytes:
        if body.prompt is not None:
            ids = engine.tokenizer.encode(body.prompt, body.add_special_tokens)
        else:
            ids = engine.tokenizer.encode_templated(templated(engine, body))
        content: dict[str, Any] = {"count": len(ids), "max_model_len": engine.capacity.longest, "tokens": ids}
        if body.return_token_strs:
            content["token_strs"] = [engine.tokenizer.decode([token_id], False, True) for token_id in ids]
        return msgspec.json.encode(content)

    return Response(await serving.work(encode), media_type="application/json")


@router.post("/detokenize", response_model=Detokenized, responses=errors.documented(404, 503))
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text that tokens stand for."""
    serving: Serving = request.app.state.serving
    serving.model_name(body.model)
    tokenizer = serving.engine.llm.tokenizer
    for token_id in body.tokens:
        if not 0 <= token_id <= MAX_ID:
            raise ApiError(400, f"tokens: {token_id}; allowed: 0 to {MAX_ID}", param="tokens")
    text = await serving.work(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
