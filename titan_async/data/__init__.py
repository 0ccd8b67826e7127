"""Text for pretraining: documents, tokenizers, token files, and packing into sequences.

This layer does not need torchtitan. It needs a network for hub datasets only.
"""

from titan_async.data.document_stream import DocumentStream, open_documents
from titan_async.data.encoder import DocumentEncoder
from titan_async.data.packing import PackedDataset, Sample
from titan_async.data.prepare import prepare_tokens
from titan_async.data.readers import DocumentReader
from titan_async.data.text_source import TextSource
from titan_async.data.token_batches import TokenBatches
from titan_async.data.token_files import TokenFiles
from titan_async.data.tokenizer import (
    load_tokenizer,
    save_tokenizer,
    shakespeare_tokenizer_folder,
    train_tokenizer,
    unigram_entropy,
)

__all__ = [
    "DocumentEncoder",
    "DocumentReader",
    "DocumentStream",
    "PackedDataset",
    "Sample",
    "TextSource",
    "TokenBatches",
    "TokenFiles",
    "load_tokenizer",
    "open_documents",
    "prepare_tokens",
    "save_tokenizer",
    "shakespeare_tokenizer_folder",
    "train_tokenizer",
    "unigram_entropy",
]
