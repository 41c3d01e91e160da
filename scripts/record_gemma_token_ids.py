"""Record the token ids that Google's sentencepiece gives awkward texts over Gemma 3's vocabulary, as a golden file of tests/text.

    pip install sentencepiece protobuf
    python scripts/record_gemma_token_ids.py

The texts are those of the other golden files. Left out are texts with a low line of SentencePiece's own, U+2581, in them: among
spaces it counts as one there, and here, as in llama.cpp, as itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as sentencepiece_model

from octavo.loading.gguf_header import read_header
from octavo.loading.hub import resolve
from octavo.text.sentencepiece import SPACE

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
USER_DEFINED = 4
MORE = ["a\n\nb\n\n\n\nc\t\t\td", "      six spaces", "<div><p>tags</p></div>", "[multimodal]", "<0x41> is no byte", "\U00010348 \x01\x7f"]


def processor(metadata: dict) -> sentencepiece.SentencePieceProcessor:
    """The vocabulary as its makers' library takes it. Converters write the spaces of user-defined pieces as spaces."""
    model = sentencepiece_model.ModelProto()
    columns = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    for piece, score, kind in zip(*columns, strict=True):
        model.pieces.add(piece=piece.replace(" ", SPACE) if kind == USER_DEFINED else piece, score=score, type=kind)
    unknown = metadata["tokenizer.ggml.unknown_token_id"]
    model.pieces[unknown].type = model.SentencePiece.UNKNOWN
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback, trainer.unk_id = trainer.BPE, True, unknown
    trainer.bos_id, trainer.eos_id, trainer.pad_id = (metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding"))
    normalizer.name, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = "identity", False, False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def main() -> None:
    metadata = read_header(resolve("gemma3-270m")).metadata
    encode = processor(metadata).encode
    texts = [text for text in json.loads((DATA / "token_ids_smollm2.json").read_text())["texts"] if SPACE not in text and "<|" not in text]
    texts += MORE
    result = {"names": ["gemma3"], "prefix": [metadata["tokenizer.ggml.bos_token_id"]], "ids": [encode(text) for text in texts]}
    recorded = json.dumps({"texts": texts, "results": [result]}, ensure_ascii=False)
    (DATA / "token_ids_gemma3.json").write_text(recorded + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
