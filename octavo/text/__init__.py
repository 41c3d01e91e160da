"""Text to token ids and back: tokenizers, chat templates, the incremental detokenizer."""
