"""What can be known to be wrong with the data of a run, before any process starts."""

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.trainer import Trainer

from titan_async.data import DocumentEncoder, TokenBatches, TokenFiles, open_documents
from titan_async.errors import UserError
from titan_async.training.data import TextDataLoader

__all__ = ["check_data"]

_ANEW = "make the files anew with tools/prepare_data.py"


def check_data(config: Trainer.Config) -> None:
    """Refuse data that a run could not read, or that do not fit its tokenizer or model.

    Raises:
        UserError: one sentence that names the cause and the mend.
    """
    loaders = [("dataloader", config.dataloader)]
    if config.validator.enable:
        loaders.append(("validator.dataloader", config.validator.dataloader))
    for name, loader in loaders:
        if not isinstance(loader, TextDataLoader.Config):
            continue
        if loader.dataset == "tokens":
            _check_token_files(name, loader, config)
        elif next(iter(open_documents(loader.text_source())), None) is None:
            raise UserError(f"{name} reads no document: its {loader.split} split is empty; give more text")
    if len(loaders) == 2:
        _check_split(config.dataloader, config.validator.dataloader)


def _check_token_files(name: str, loader: TextDataLoader.Config, config: Trainer.Config) -> None:
    source = loader.text_source()
    index = TokenFiles(source.dataset_path or "").index
    encoder = DocumentEncoder(config.hf_assets_path)
    which = f"the token files of {name}, {source.dataset_path},"
    if index.tokenizer_sha256 != encoder.sha256:
        raise UserError(
            f"{which} were made with another tokenizer than the one in hf_assets_path, "
            f"{config.hf_assets_path}: set it to the folder of that tokenizer, or {_ANEW}"
        )
    marks = (index.bos_id, index.eos_id)
    if marks != (encoder.bos_id, encoder.eos_id):
        raise UserError(
            f"{which} mark beginning and end of documents with the tokens {marks[0]} and {marks[1]}, but the "
            f"tokenizer_config.json in {config.hf_assets_path} names {encoder.bos_id} and {encoder.eos_id}: "
            f"set hf_assets_path to the folder that they were made with, or {_ANEW}"
        )
    room = getattr(config.model_spec.model, "vocab_size", index.vocab_size)
    if index.vocab_size > room:
        raise UserError(
            f"{which} are of a vocabulary of {index.vocab_size} entries but the model has room for {room}: "
            f"choose a recipe of that vocabulary, or {_ANEW}"
        )
    # Raises what there is to say of a split that is empty.
    next(iter(TokenBatches(source, seq_len=config.training.seq_len, batch_size=1, infinite=True)))


def _check_split(train: BaseDataLoader.Config, validation: BaseDataLoader.Config) -> None:
    if not (isinstance(train, TextDataLoader.Config) and isinstance(validation, TextDataLoader.Config)):
        return
    same_text = (train.dataset, train.dataset_path, train.dataset_config) == (
        validation.dataset,
        validation.dataset_path,
        validation.dataset_config,
    )
    fractions = train.validation_fraction, validation.validation_fraction
    if same_text and train.split != validation.split and fractions[0] != fractions[1]:
        raise UserError(
            f"dataloader.validation_fraction is {fractions[0]} but validator.dataloader.validation_fraction "
            f"is {fractions[1]}, so that training reads what it validates on: set both to the same"
        )
