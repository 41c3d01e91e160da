"""Causal language models of transformers that have no file here, with Octavo's attention in place of theirs.

transformers' models hand query, key and value to an attention function found by name. Before a weight is read the model is run on
tensors that have a shape and no memory, and what it hands over is noted: which layers attend, their heads, scales, caps, and who sees
whom. What paged attention cannot do is refused then, by name. Once loaded, some tokens go both ways: a state that is kept elsewhere, or
positions that are counted otherwise, show in nothing that is handed over.

Matrix products are Octavo's too, in every quantization; what is between is transformers' code and torch's operators.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from octavo import quantization
from octavo.errors import CheckpointError, described
from octavo.layers.linear import OUTER_BITS
from octavo.layers.weights import Weights
from octavo.loading.checkpoint import Checkpoint
from octavo.ops.interface import AttentionBatch, BlockShape, LayerKV, Matrix, Ops

INTERFACE = "octavo"
"""What transformers finds our attention by."""

LAYER_TYPES = {"full_attention", "sliding_attention"}

UNDERSTOOD = {"dropout", "scaling", "softcap", "sliding_window", "position_ids", "is_causal"}
"""What a model hands to attention beside query, key, value and mask: what is taken, what the mask says too, what other kernels want."""

SINKS = "s_aux"

TRIED_TOKENS, TRIED_AT_ONCE = 24, 10

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far a token's hidden state may be off when tried, as a share of it. One without its state or its place is off by much of it."""

logger = logging.getLogger("octavo")


class RefusalError(Exception):
    """Why a model cannot run here."""


@dataclass(frozen=True)
class LayerAttention:
    """scale: of scores. softcap: they are brought within it by its tanh. window: positions a token sees, its own included."""

    scale: float
    softcap: float | None
    window: int | None


@dataclass(frozen=True, kw_only=True)
class FallbackConfig:
    """hf: transformers' configuration. layers: what attends, by its module's name, in the order of the layers."""

    hf: Any
    vocab_size: int
    context: int
    num_kv_heads: int
    head_dim: int
    layers: Mapping[str, LayerAttention]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in self.layers.values())


def configure(checkpoint: Checkpoint) -> FallbackConfig:
    """Look through the model without its weights. Raises CheckpointError saying why it cannot run."""
    with _refusing(checkpoint):
        transformers = _transformers()
        hf = _read_config(transformers, checkpoint)
        vocab_size, notes = _look_through(transformers, hf)
        if len(notes.layers) < (count := getattr(hf, "num_hidden_layers", 0)):
            raise RefusalError(f"{len(notes.layers)} of its {count} layers attend; the others keep a state of their own")
        if len(notes.heads) > 1:
            kinds = " and ".join(f"{count} of {dim} features" for count, dim in sorted(notes.heads))
            raise RefusalError(f"its layers differ in their heads of keys and values: {kinds}")
        ((num_kv_heads, head_dim),) = notes.heads
        context = _context(hf)
    return FallbackConfig(hf=hf, vocab_size=vocab_size, context=context, num_kv_heads=num_kv_heads, head_dim=head_dim, layers=notes.layers)


@contextmanager
def _refusing(checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except RefusalError as reason:
        kind = checkpoint.config["model_type"]
        raise CheckpointError(f"model_type: {kind!r} cannot run through transformers here: {reason}") from None


def _transformers() -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise RefusalError("it is not installed; pip install 'octavo[transformers]'") from None
    transformers.AttentionInterface.register(INTERFACE, _attend)
    transformers.AttentionMaskInterface.register(INTERFACE, _mask)
    return transformers


def _read_config(transformers: Any, checkpoint: Checkpoint) -> Any:
    if checkpoint.metadata is not None:
        raise RefusalError("a GGUF file runs natively or not at all; needed: a folder with config.json and *.safetensors")
    version = transformers.__version__
    try:
        hf = transformers.AutoConfig.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, all about the file
        raise RefusalError(f"transformers {version} does not read its configuration ({described(error)})") from None
    if type(hf) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RefusalError(f"transformers {version} has no causal language model of this type")
    if getattr(hf, "is_encoder_decoder", False):
        raise RefusalError("it is an encoder with a decoder")
    if hf.get_text_config() is not hf:
        raise RefusalError("it is a model of more than text")
    if strange := set(getattr(hf, "layer_types", None) or ()) - LAYER_TYPES:
        raise RefusalError(f"layer_types: {', '.join(sorted(strange))}; allowed: {', '.join(sorted(LAYER_TYPES))}")
    return hf


def _context(hf: Any) -> int:
    """Where longrope stretches, transformers rotates a whole batch by its longest sequence, so that none may become so long."""
    context = getattr(hf, "max_position_embeddings", None)
    if not isinstance(context, int) or context < 1:
        raise RefusalError("its configuration lacks max_position_embeddings")
    given = getattr(hf, "rope_parameters", None) or {}
    for rope in [given, *(part for part in given.values() if isinstance(part, Mapping))]:
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings") or getattr(hf, "original_max_position_embeddings", None)
            context = min(context, original or context)
    return context


def _look_through(transformers: Any, hf: Any) -> tuple[int, _Notes]:
    """Run the model on tensors without memory -> its logits' number, and what its layers hand to attention."""
    hf = copy.deepcopy(hf)
    hf._experts_implementation = "batched_mm"  # the one whose shapes depend on no number
    its_own = "its attention does not go through transformers' attention interface, as where ALiBi or other biases enter it"
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation=INTERFACE).eval()
    except Exception as error:  # whatever its code raises
        raise RefusalError(its_own if error.args == (INTERFACE,) else f"it cannot be built ({described(error)})") from None
    if model._is_stateful:
        raise RefusalError("it keeps a state outside attention")
    notes = _Notes({module: name for name, module in model.named_modules()})
    for module in model.modules():
        module.octavo = notes
        if kind := getattr(module, "rope_type", None):  # some stretch by the numbers of positions, which there are none of
            module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
    split = _Split(model)
    ones = torch.ones(8, dtype=torch.int64, device="meta")
    try:
        logits = split.logits(split.hidden(ones, attention_mask=ones[None]))
    except RefusalError:
        raise
    except Exception as error:
        raise RefusalError(f"it cannot be looked through before its weights are read ({described(error)})") from None
    if not notes.layers:
        raise RefusalError(its_own)
    if "position_ids" not in inspect.signature(split.decoder.forward).parameters:
        raise RefusalError("its code takes no positions, and counts them itself")
    return logits.shape[1], notes


class _Split:
    """A causal language model in two: its decoder, which gives hidden states, and what makes logits of these."""

    def __init__(self, model: Any) -> None:
        found = model.get_decoder()  # by name, so that it may be a layer that some call so
        self.model, self.decoder = model, found if hasattr(found, "get_decoder") else model.base_model
        if self.decoder is model:
            raise RefusalError("its code does not tell the decoder from the head")
        self._given = _Given()
        model.set_submodule(next(name for name, module in model.named_modules() if module is self.decoder), self._given)

    def hidden(self, token_ids: Tensor, **given: Any) -> Tensor:
        """[T] ids -> [T, hidden_size]."""
        outputs = self._given.outputs = self.decoder(input_ids=token_ids[None], use_cache=False, **given)
        found: Tensor = outputs.last_hidden_state[0]
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size], float32; `hidden` has run before."""
        self._given.outputs.last_hidden_state = hidden[None]
        found: Tensor = self.model(input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.int64), use_cache=False).logits[0]
        return found.float()


class _Given(nn.Module):
    """Stands where the decoder stood. outputs: what that returned, in the form that its model reads."""

    outputs: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.outputs


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **given: Any) -> tuple[Tensor, None]:
    """transformers' attention function: [1, heads, T, D] each -> [1, T, heads, D]."""
    return module.octavo(module, query, key, value, attention_mask, given), None


def _mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], local_size: int | None = None, **given: Any) -> Any:
    """transformers' mask function: none is needed, save while a model is looked through, when it tells who sees whom."""
    if torch.device(given["device"]).type != "meta":
        return None
    reach = local_size or 0
    queries = torch.tensor(sorted({0, 1, reach, reach + 1, 2 * reach + 7}))[:, None]
    keys = torch.arange(2 * reach + 8)[None]
    seen = mask_function(torch.tensor(0), torch.tensor(0), queries, keys)
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    causal = keys <= queries
    if torch.equal(seen, causal):
        mask.octavo_window = None  # type: ignore[attr-defined]
    elif torch.equal(seen, causal & (keys > queries - reach)):
        mask.octavo_window = reach  # type: ignore[attr-defined]
    return mask


@dataclass
class _Notes:
    """What layers hand to attention. heads: how many of keys and values a layer has, and their features."""

    names: Mapping[Any, str]
    layers: dict[str, LayerAttention] = field(default_factory=dict)
    heads: set[tuple[int, int]] = field(default_factory=set)

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, given: dict[str, Any]) -> Tensor:
        name = self.names[module]
        if name in self.layers:
            raise RefusalError(f"{name} attends more than once for a token")
        if given.get(SINKS) is not None:
            raise RefusalError(f"{name} has attention sinks")
        if strange := [key for key in given.keys() - UNDERSTOOD if given[key] is not None and given[key] is not False]:
            raise RefusalError(f"{name} hands {', '.join(sorted(strange))} to attention, and paged attention takes no such thing")
        if not hasattr(mask, "octavo_window"):
            raise RefusalError(f"{name} has a mask that is neither causal nor a sliding window")
        head_dim = max(query.shape[3], value.shape[3])
        scale = given.get("scaling") or query.shape[3] ** -0.5
        self.layers[name] = LayerAttention(scale, given.get("softcap"), mask.octavo_window)
        self.heads.add((key.shape[1], head_dim))
        return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


class FallbackModel:
    """What `octavo.models.llama.Decoder` is, of a model of transformers."""

    step: _Step

    def __init__(self, ops: Ops, weights: Weights, config: FallbackConfig, length: int) -> None:
        self.config = config
        self._ops = ops
        with _refusing(weights.checkpoint):
            transformers = _transformers()
            model = _load(transformers, weights, config, ops.device)
            matrices = _take_products(transformers, ops, weights.quantization, model)
            for number, (name, attention) in enumerate(config.layers.items()):
                model.get_submodule(name).octavo = _PagedAttention(self, number, attention, config.head_dim)
            rest = [*model.parameters(), *model.buffers()]
            self._split = _Split(model)
            self._try(weights.dtype, min(TRIED_TOKENS, length))
        weights.take_rest(sum(one.nbytes for one in [*matrices, *rest] if not getattr(one, "is_meta", False)))
        logger.warning(
            "model_type %r runs through transformers %s (model_impl), slower than models that octavo has code of its own for",
            config.hf.model_type,
            transformers.__version__,
        )

    def forward(self, token_ids: Tensor, positions: Tensor, kv: list[LayerKV], batch: AttentionBatch) -> Tensor:
        """[T] ids at [T] positions -> hidden states [T, hidden_size], normalised for the head."""
        angles = torch.empty(len(token_ids), 0, device=self._ops.device)
        self.step = _Step(self._ops, kv, batch, (angles, angles))
        return self._split.hidden(token_ids, position_ids=positions[None])

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size], float32."""
        return self._split.logits(hidden)

    def _try(self, dtype: torch.dtype, count: int) -> None:
        """Compute some tokens as transformers does, and in two pieces over blocks."""
        config, device = self.config, self._ops.device
        own = self._split.model.config
        token_ids = torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).to(device)
        try:
            own._attn_implementation = "eager"
            expected = self._split.hidden(token_ids)
        except Exception as error:  # whatever its code raises
            raise RefusalError(f"it does not run ({described(error)})") from None
        finally:
            own._attn_implementation = INTERFACE
        shape = BlockShape(
            num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, block_size=32, head_dim=config.head_dim, dtype=dtype
        )
        region = torch.zeros(1, shape.num_bytes, dtype=torch.uint8, device=device)
        kv = [LayerKV(region, shape, layer) for layer in range(config.num_layers)]
        parts = []
        for at in torch.arange(count, device=device).split(TRIED_AT_ONCE):
            batch = AttentionBatch([len(at)], [int(at[0])], [[np.zeros(1, dtype=np.int64)]], at[None], shape.block_size, {})
            parts.append(self.forward(token_ids[at], at, kv, batch))
        off = ((torch.cat(parts) - expected).norm(dim=1) / expected.norm(dim=1)).median().item()
        if not off <= TOLERANCE[dtype]:
            elsewhere = "it keeps a state elsewhere, or counts positions otherwise"
            raise RefusalError(f"with attention in blocks its hidden states are off by {off:.1%}, so {elsewhere}")


@dataclass
class _Step:
    """What the layers of one step share. unrotated: angles of no feature, as the model rotates by itself."""

    ops: Ops
    kv: list[LayerKV]
    batch: AttentionBatch
    unrotated: tuple[Tensor, Tensor]


@dataclass
class _PagedAttention:
    """One layer's attention. Heads are filled up to head_dim features with zeros, which change no score."""

    model: FallbackModel
    layer: int
    attention: LayerAttention
    head_dim: int

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, given: dict[str, Any]) -> Tensor:
        step, attention = self.model.step, self.attention
        query, key, wide = (F.pad(part[0].transpose(0, 1), (0, self.head_dim - part.shape[3])) for part in (query, key, value))
        out = step.ops.paged_attention(
            query, key, wide, step.unrotated, step.kv[self.layer], step.batch, attention.scale, attention.window, attention.softcap
        )
        return out[None, ..., : value.shape[3]]


def _load(transformers: Any, weights: Weights, config: FallbackConfig, device: torch.device) -> Any:
    """Raises CheckpointError naming tensors that are missing, too many, or of another shape."""
    path, bars = weights.checkpoint.path, transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            config=copy.deepcopy(config.hf),
            dtype=weights.dtype,
            attn_implementation=INTERFACE,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # of many kinds, all about the files
        raise CheckpointError(f"{path}: transformers cannot read these weights ({described(error)})") from None
    finally:
        if shown:
            bars.enable_progress_bar()
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"{path}: the model needs the tensors {', '.join(missing[:5])}, which are not there")
    if strange := sorted(info["unexpected_keys"]):
        raise CheckpointError(f"{path}: holds tensors that this model does not use: {', '.join(strange[:5])}")
    return model.to(device)


def _take_products(transformers: Any, ops: Ops, wanted: str, model: Any) -> list[Matrix]:
    """Have `ops` compute the model's matrix products, and look an embedding up that is the head too."""
    turned = transformers.pytorch_utils.Conv1D
    head = model.get_output_embeddings()
    users: dict[Tensor, list[Any]] = {}
    for module in model.modules():
        if type(module) in (nn.Linear, turned, nn.Embedding):
            users.setdefault(module.weight, []).append(module)
    matrices = []
    while users:  # a weight goes as soon as it is taken over
        weight, modules = users.popitem()
        if all(type(module) is nn.Embedding for module in modules):
            continue
        is_turned = type(modules[0]) is turned
        matrix = _matrix(ops, weight.detach().t() if is_turned else weight.detach(), wanted, OUTER_BITS if head in modules else 4)
        matrices.append(matrix)
        for module in modules:
            if type(module) is nn.Embedding:
                forward: Callable[[Tensor], Tensor] = _Lookup(ops, matrix, weight.dtype)
            else:
                bias = None if module.bias is None else module.bias.float()
                forward = _Product(ops, matrix, bias, torch.float32 if module is head else None)
            module.forward = forward
            module.weight = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
    return matrices


def _matrix(ops: Ops, weight: Tensor, wanted: str, least_bits: int) -> Matrix:
    if wanted in ("auto", "none"):
        return ops.matrix(weight)
    grouped = quantization.quantize(weight.cpu(), max(int(wanted.removeprefix("int")), least_bits))
    return ops.matrix(weight if grouped is None else grouped)


@dataclass
class _Product:
    """A linear layer's `forward`, on [..., K]."""

    ops: Ops
    matrix: Matrix
    bias: Tensor | None
    dtype: torch.dtype | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.linear(x.flatten(0, -2), self.matrix, self.bias, self.dtype).unflatten(0, x.shape[:-1])


@dataclass
class _Lookup:
    """An embedding's `forward`, on [1, T]."""

    ops: Ops
    matrix: Matrix
    dtype: torch.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        return self.ops.embedding(ids[0], self.matrix, self.dtype)[None]
